"""The page about schedules says what the schedules do."""

import re
from pathlib import Path

import pytest

from meshscope.core.schedule import count_peak_activations
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.core.schedule_replay import ActionCosts, replay_schedule

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| `(\w+)` \| ([^|]*) \| `([^`]*)` \| ([^|]*) \| `([^`]*)` \| ([^|]*) \|$", re.M
)
ROWS = {name: cells for name, *cells in ROW.findall(PAGE)}


def compute(form: str, **values: float) -> float:
    """A closed form as it is printed."""
    result: float = eval(form.replace("−", "-").replace("·", "*"), {}, values)
    return result


def replay(name: str, p: int, m: int, costs: tuple[int, int, int]) -> tuple[float, float, int]:
    """Bubble, rank 0's peak in microbatches, and chunks."""
    schedule = build_schedule(name, p, m)
    # Twice everything: two chunks then have whole numbers.
    forward, input_grad, weight_grad = (2 * cost for cost in costs)
    replayed = replay_schedule(
        schedule,
        ActionCosts.uniform(
            schedule, forward_ns=forward, input_grad_ns=input_grad, weight_grad_ns=weight_grad
        ),
    )
    chunks = len(schedule.stages_of(0))
    return replayed.bubble_of_total_ratio, count_peak_activations(schedule)[0] / chunks, chunks


def test_every_schedule_has_a_row():
    assert set(ROWS) == set(BUILDERS)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_closed_forms_are_those_of_the_replay(name):
    _, bubble_form, _, peak_form, _ = ROWS[name]
    # Only zb_v's needs equal times; p divides m, and m is at least 2p−1.
    for costs in [(1, 1, 1)] if name == "zb_v" else [(1, 1, 1), (3, 4, 2)]:
        for p, m in ((2, 4), (4, 8), (4, 12), (3, 9)):
            bubble, peak, chunks = replay(name, p, m, costs)
            values = dict(zip("FIW", costs, strict=True)) | {"p": p, "m": m, "v": chunks}
            assert compute(bubble_form, **values) == pytest.approx(bubble, abs=1e-12)
            assert compute(peak_form, **values) == peak


@pytest.mark.parametrize("name", BUILDERS)
def test_the_worked_example_is_right(name):
    chunks, _, _, _, example = ROWS[name]
    bubble, peak, num_chunks = replay(name, 4, 8, (1, 1, 1))
    assert example == f"{100 * bubble:.1f} %, {peak:g}"
    assert chunks.endswith(str(num_chunks))
    assert chunks.startswith("v") == BUILDERS[name].is_chunked
