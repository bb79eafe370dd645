import json

import pytest

from command_line import invoke
from meshscope.core.schedule_builders import build_schedule

TIMES = ["--forward", "10,12", "--input-grad", "10", "--weight-grad", "5"]


def run(*arguments):
    return invoke("schedule", *arguments)


def test_the_found_schedule_stands_beside_the_eight_and_can_be_run(tmp_path):
    path = tmp_path / "auto.txt"
    result = run("--pp", "2", "--microbatches", "6", *TIMES, "-o", str(path), "--json")
    document = json.loads(result.stdout)
    assert len(document["built_in"]) == 8
    assert document["found"]["span_ns"] <= min(
        one["span_ns"] for one in document["built_in"] if one["fits"]
    )
    assert build_schedule(path.read_text(encoding="utf-8"), 2, 6).to_text() == document["text"]


def test_the_screen_has_a_row_for_each():
    text = run("--pp", "2", "--microbatches", "6", *TIMES).stdout
    assert "zb_h2" in text
    assert "1f1b" in text


def test_of_equal_bubbles_the_one_that_holds_less_is_named():
    times = ["--forward", "10", "--input-grad", "10", "--weight-grad", "10"]
    head = run("--pp", "2", "--microbatches", "6", *times).stdout.splitlines()[0]
    assert head == (
        "Of those that fit zb_v has the smallest bubble, 0 %; zb_h2 has the same and holds more."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--pp, --microbatches, --forward, --input-grad, --weight-grad are missing"),
        (
            ["--pp", "3", "--microbatches", "6", *TIMES],
            "--forward has 2 times for 3 pipeline ranks",
        ),
        (["--pp", "2", "--microbatches", "6", *TIMES[:-1], "x"], "no number"),
    ],
)
def test_what_is_missing_or_wrong_is_said(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
