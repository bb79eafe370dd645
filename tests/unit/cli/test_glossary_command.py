import pytest
from click.testing import CliRunner

from meshscope.cli import main
from meshscope.report.glossary import GLOSSARY


def invoke(*arguments):
    return CliRunner().invoke(main, ["glossary", *arguments])


def test_every_word_is_listed_under_its_subject():
    text = invoke().stdout
    for title, entries in GLOSSARY.items():
        assert f"\n{title}\n" in text
        assert all(f"  {entry.word} " in text for entry in entries)


def test_a_word_may_be_asked_for():
    text = invoke("EXPOSED").stdout
    assert "Communication that held the rank up" in text
    assert "Pipeline" not in text


def test_a_word_that_is_not_there_is_a_usage_error():
    result = invoke("sheep")
    assert result.exit_code == 2
    assert "not in the glossary" in result.stderr


@pytest.mark.parametrize("entry", [one for entries in GLOSSARY.values() for one in entries])
def test_an_entry_fits_into_a_table_of_markdown(entry):
    assert "|" not in entry.word + entry.meaning + entry.unit
    assert entry.meaning.endswith(".")
