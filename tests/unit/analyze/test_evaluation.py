"""What feeds an evaluation is part of it."""

import numpy as np

from meshscope.analyze.rank.phases import assign_phases, order_steps, tabulate_phases
from meshscope.store.schema import BUILTIN_NAMES

NAMES = {name_id: name for name, name_id in BUILTIN_NAMES.items()}


def tabulate(
    steps: list[tuple[int, int]], spans: list[tuple[str, int, int]]
) -> list[dict[str, int]]:
    """Self time by phase of every interval: before, step, gap, step, …"""
    table = {
        "step": np.arange(len(steps)),
        "start_host_mono_ns": np.array([start for start, _ in steps]),
        "end_host_mono_ns": np.array([end for _, end in steps]),
    }
    length = np.array([end - start for _, start, end in spans])
    columns = {
        "name_id": np.array([BUILTIN_NAMES[name] for name, _, _ in spans], dtype=np.uint16),
        "depth": np.zeros(len(spans), dtype=np.uint8),
        "flags": np.zeros(len(spans), dtype=np.uint8),
        "thread": np.zeros(len(spans), dtype=np.uint16),
        "start_host_mono_ns": np.array([start for _, start, _ in spans]),
        "duration_ns": length,
        "self_ns": length,
    }
    placed, _ = assign_phases(order_steps(table), columns)
    found = tabulate_phases(placed, NAMES, num_steps=len(steps))
    return [
        {name: int(total) for name, total in zip(found.phases, row, strict=True) if total}
        for row in found.total_ns
    ]


def test_fetches_and_pauses_of_an_evaluation_are_evaluation():
    spans = [
        ("data", 0, 10),
        ("forward", 10, 50),
        # the gap: two batches, a metric after each, the loader's end; then a pause of the program
        ("data", 105, 125),
        ("eval", 130, 140),
        ("data", 145, 165),
        ("eval", 165, 180),
        ("data", 182, 185),
        ("data", 300, 330),
        ("forward", 330, 390),
    ]
    before, first, gap, second, after = tabulate([(0, 100), (300, 400)], spans)
    assert (before, after) == ({}, {})
    assert first == {"data": 10, "forward": 40}
    assert gap == {"eval": 80}  # 105 to 185
    assert second == {"data": 30, "forward": 60}


def test_a_fetch_of_training_after_an_evaluation_in_the_same_gap_stays_one():
    """A program that marks its steps itself fetches between them."""
    spans = [
        ("data", 110, 120),
        ("eval", 120, 140),
        ("data", 141, 142),
        ("data", 150, 190),
        ("forward", 200, 290),
    ]
    assert tabulate([(0, 100), (200, 300)], spans)[2] == {"eval": 32, "data": 40}


def test_without_an_evaluation_a_fetch_between_steps_is_data():
    spans = [("data", 110, 120), ("checkpoint", 120, 140)]
    assert tabulate([(0, 100), (200, 300)], spans)[2] == {"data": 10, "checkpoint": 20}


def test_a_checkpoint_inside_an_evaluation_keeps_its_time():
    spans = [("eval", 110, 120), ("checkpoint", 130, 160), ("eval", 170, 180)]
    assert tabulate([(0, 100), (200, 300)], spans)[2] == {"eval": 20, "checkpoint": 30}
