"""Edits as people write them."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshscope.errors import UsageError
from meshscope.simulate.edit_text import EditKind, WantedEdit, parse_edit


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("rank=5:ideal", {"kind": EditKind.RANKS, "numbers": (5,)}),
        ("rank=7,5:0.5x", {"kind": EditKind.RANKS, "numbers": (5, 7), "factor": 0.5}),
        ("stage=2:ideal", {"kind": EditKind.AXIS, "name": "pp", "numbers": (2,)}),
        ("tp=1:2x", {"kind": EditKind.AXIS, "name": "tp", "numbers": (1,), "factor": 2.0}),
        ("phase=data:0", {"kind": EditKind.PHASE, "name": "data", "factor": 0.0}),
        ("phase=a:b:ideal", {"kind": EditKind.PHASE, "name": "a:b"}),
        ("compute=0.5x", {"kind": EditKind.COMPUTE, "factor": 0.5}),
        ("bandwidth.dp=2x", {"kind": EditKind.BANDWIDTH, "name": "dp", "factor": 2.0}),
        ("bandwidth=2", {"kind": EditKind.BANDWIDTH, "factor": 2.0}),
        ("microbatches=16", {"kind": EditKind.MICROBATCHES, "numbers": (16,)}),
        ("schedule=ZB_H1", {"kind": EditKind.SCHEDULE, "name": "zb_h1"}),
        ("move=2@1->3", {"kind": EditKind.MOVE, "numbers": (2, 1, 3)}),
    ],
)
def test_edits_that_are_understood(text, wanted):
    assert parse_edit(text) == WantedEdit(text=text, **wanted)


@pytest.mark.parametrize(
    "text",
    ["", "rank", "rank=", "rank=5", "rank=x:ideal", "rank=5:fast", "phase=data", "compute=-1x",
     "compute=nan", "compute=1e9x", "bandwidth.dp=0x", "microbatches=0", "microbatches=1,2",
     "schedule=../x", "move=2@1", "colour=red", "rank=" + "9" * 50 + ":ideal", "=5"],
)  # fmt: skip
def test_bad_text_is_one_clear_message(text):
    with pytest.raises(UsageError, match="forms: rank=5:ideal") as caught:
        parse_edit(text)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=80))
def test_any_text_is_an_edit_or_a_message(text):
    with contextlib.suppress(UsageError):
        assert parse_edit(text).text == text
