import json
from xml.etree import ElementTree

import numpy as np
import pytest

from builders import MS
from command_line import invoke
from signal_builders import make_signal_run

NOISE = np.random.default_rng(0).normal(size=(2, 200))
HOSTILE = "x|y <script>alert(1)</script>\x00\x1b[31m`]](http://bad) \ud800 & \"'"


def make(path, side=0, factor=1.0, **options):
    def step_ns(rank, step):
        return 50 * MS * factor * (1 + 0.02 * NOISE[side, step])

    scalars = {"loss": lambda rank, step: 2.0 / (1 + step) * factor}
    facts = {"argv": ["train.py", str(factor)]}
    return make_signal_run(
        path, num_steps=50, step_ns=step_ns, scalars=scalars, provenance=facts, **options
    )


@pytest.fixture
def runs(tmp_path):
    return make(tmp_path / "a"), make(tmp_path / "b", 1, 1.1)


def test_a_slower_run_is_told_and_exits_with_7_beyond_the_limit(runs):
    assert invoke("compare", *runs).exit_code == 0
    result = invoke("compare", *runs, "--fail-on", 5)
    assert result.exit_code == 7, result.output
    assert "beyond the limit of 5.0 %" in result.stdout
    assert invoke("compare", *runs, "--fail-on", 20).exit_code == 0


def test_the_text_has_all_sections(runs):
    text = invoke("compare", *runs).stdout
    for words in ("B is 9.3 % slower than A", "What it took", "step period", "compute", "argv"):
        assert words in text
    assert "First different" in text


def test_values_that_differ_late_show_where_they_do(tmp_path):
    name = "/data/" + "checkpoints/" * 12
    a, b = (
        make_signal_run(tmp_path / end, provenance={"argv": ["train.py", f"--load={name}{end}"]})
        for end in ("step100", "step200")
    )
    (row,) = [line for line in invoke("compare", a, b).stdout.splitlines() if "--load" in line]
    assert "step100" in row
    assert "step200" in row


def test_a_run_against_itself_is_no_change(runs):
    result = invoke("compare", runs[0], runs[0], "--fail-on", 1, "--exact", "--fail-on-loss")
    assert result.exit_code == 0, result.output
    assert "No difference in the step period is certain" in result.stdout
    assert "The same bit by bit" in result.stdout
    assert "Nothing that was recorded" in result.stdout


def test_inconclusive_is_said_and_is_no_failure(tmp_path, runs):
    slightly = make(tmp_path / "c", 1, 1.05)
    result = invoke("compare", runs[0], slightly, "--fail-on", 5)
    assert result.exit_code == 0
    assert "inconclusive" in result.stdout


def test_losses_that_part_fail_only_when_asked(runs):
    assert invoke("compare", *runs).exit_code == 0
    assert invoke("compare", *runs, "--fail-on-loss").exit_code == 7
    assert invoke("compare", *runs, "--fail-on-loss", "--rtol", 0.2).exit_code == 0


def test_the_json_document_has_numbers_and_reasons(runs):
    document = json.loads(invoke("compare", *runs, "--json", "--fail-on", 5).stdout)
    assert (document["document_version"], document["verdict"]) == (2, "slower")
    assert document["has_failed"] is True
    period = document["metrics"][0]
    assert period["change_ratio"] == pytest.approx(0.1, abs=0.02)
    assert period["interval_ratio"][0] < 0.1 < period["interval_ratio"][1]
    assert document["metrics"][2]["a"] == {
        "unavailable": document["metrics"][2]["a"]["unavailable"]
    }
    assert document["loss"]["first_divergence"]["step"] == 0
    changes = sum(line["change_ns"] for line in document["budget"]["lines"])
    assert changes == pytest.approx(document["budget"]["period"]["change_ns"])


def test_junit_is_read_back_as_tests(tmp_path, runs):
    path = tmp_path / "compare.xml"
    invoke("compare", *runs, "--fail-on", 5, "--junit", path)
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "1", "0")
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    assert "beyond the limit" in cases["step period"].find("failure").get("message")
    assert cases["loss"].find("failure") is None


def test_inconclusive_is_a_skipped_test(tmp_path, runs):
    path = tmp_path / "compare.xml"
    invoke("compare", runs[0], make(tmp_path / "c", 1, 1.05), "--fail-on", 5, "--junit", path)
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")


def test_hostile_text_breaks_no_format(tmp_path):
    a = make_signal_run(tmp_path / "a <b>&'|", num_steps=20, provenance={"argv": [HOSTILE]})
    b = make_signal_run(tmp_path / "b", num_steps=20, provenance={"argv": [HOSTILE + "2"]})
    junit, markdown = tmp_path / "o.xml", tmp_path / "o.md"
    result = invoke("compare", a, b, "--junit", junit, "--markdown", markdown)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    ElementTree.parse(junit)
    page = markdown.read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "](http" not in page.replace("\\]", "")
    rows = [line for line in page.splitlines() if "argv" in line]
    assert rows
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
    json.loads(invoke("compare", a, b, "--json").stdout)


def test_markdown_tells_the_same(tmp_path, runs):
    path = tmp_path / "compare.md"
    invoke("compare", *runs, "--fail-on", 5, "--markdown", path)
    page = path.read_text(encoding="utf-8")
    assert page.startswith("### ❌ B is 9.3 % slower than A")
    assert "| step period |" in page


def test_what_cannot_be_written_or_read_is_one_line(tmp_path, runs):
    result = invoke("compare", *runs, "--markdown", tmp_path / "no" / "such.md")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert invoke("compare", runs[0], tmp_path / "none").exit_code == 3
    result = invoke("compare", *runs, "--attempt-b", 4)
    assert result.exit_code == 2
    assert "only attempt 0" in result.stderr
