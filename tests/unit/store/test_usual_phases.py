"""Packed phases as rows of `spans`: against records made by hand, one by one."""

from itertools import product

import numpy as np
import pytest

from meshscope.store.read.columns import Columns, decode_words
from meshscope.store.read.usual_phases import expand_phases, is_recorded, open_phase_rows
from meshscope.store.schema import SPANS, TABLES
from meshscope.store.write.open_step import PHASE_IDS, PHASE_ORDER, OpenPhase

T0 = 5_000_000_000_000
TIMES = {"data": (1, 40), "forward": (50, 90), "backward": (100, 175), "optimizer": (180, 260)}
"""Begin and end after T0."""


def pack(present: dict[str, bool]) -> tuple[int, ...]:
    """The seven payload words of a step that has these phases, from docs/columns.md."""
    words: list[int] = []
    for name in PHASE_ORDER[:3]:
        words += [T0 + TIMES[name][0], T0 + TIMES[name][1]] if present[name] else [0, 0]
    begin, end = TIMES["optimizer"]
    gap = begin - TIMES["backward"][1]
    words.append(gap << 32 | end - begin if present["optimizer"] else 0)
    return tuple(words)


def decode(records: list[tuple[int, ...]]) -> Columns:
    words = np.array([(0, *record) for record in records], dtype=np.int64).reshape(-1, 8)
    return decode_words(TABLES["phases"], words)


def rows(columns: Columns) -> list[tuple[int, int, int]]:
    return [
        (int(name), int(start), int(duration))
        for name, start, duration in zip(
            columns["name_id"], columns["start_host_mono_ns"], columns["duration_ns"], strict=True
        )
    ]


def expected_rows(present: dict[str, bool]) -> list[tuple[int, int, int]]:
    return [
        (PHASE_IDS[place], T0 + TIMES[name][0], TIMES[name][1] - TIMES[name][0])
        for place, name in enumerate(PHASE_ORDER)
        if present[name]
    ]


COMBINATIONS = [
    dict(zip(PHASE_ORDER, present, strict=True)) for present in product((True, False), repeat=4)
]


@pytest.mark.parametrize(
    "present",
    [c for c in COMBINATIONS if c["backward"] or not c["optimizer"]],
    ids=lambda c: "-".join(name for name in c if c[name]) or "none",
)
def test_phases_that_occurred_become_rows(present: dict[str, bool]) -> None:
    assert rows(expand_phases(decode([pack(present)]))) == expected_rows(present)


@pytest.mark.parametrize(
    "present",
    [c for c in COMBINATIONS if c["optimizer"] and not c["backward"]],
    ids=lambda c: "-".join(name for name in c if c[name]),
)
def test_an_optimizer_that_no_backward_places_is_left_out(present: dict[str, bool]) -> None:
    """Its begin is told from the end of backward: a writer gives it a row in `spans` instead."""
    expected = expected_rows({**present, "optimizer": False})
    assert rows(expand_phases(decode([pack(present)]))) == expected


def test_all_combinations_in_one_table() -> None:
    found = rows(expand_phases(decode([pack(present) for present in COMBINATIONS])))
    placed = [{**c, "optimizer": c["optimizer"] and c["backward"]} for c in COMBINATIONS]
    assert sorted(found) == sorted(row for present in placed for row in expected_rows(present))


def test_no_record_no_rows() -> None:
    columns = expand_phases(decode([]))
    assert rows(columns) == []
    assert list(columns) == [column.name for column in SPANS.columns]


def test_rows_are_outermost_phases_of_the_training_thread() -> None:
    columns = expand_phases(decode([pack(COMBINATIONS[0])]))
    for name in ("depth", "flags", "thread", "microbatch"):
        assert columns[name].tolist() == [0] * 4
    assert columns["self_ns"].tolist() == columns["duration_ns"].tolist()
    stored = decode_words(SPANS, np.zeros((1, 8), dtype=np.int64))
    assert {name: a.dtype for name, a in columns.items()} == {n: a.dtype for n, a in stored.items()}


@pytest.mark.parametrize(
    ("gap", "duration"),
    [(0x7FFFFFFF, 0xFFFFFFFF), (0, 1), (1, 0), (0x7FFFFFFF, 0), (0, 0xFFFFFFFF)],
)
def test_the_longest_and_shortest_optimizer(gap: int, duration: int) -> None:
    record = (0, 0, 0, 0, T0, T0 + 5, gap << 32 | duration)
    backward, optimizer = rows(expand_phases(decode([record])))
    assert backward == (PHASE_IDS[2], T0, 5)
    assert optimizer == (PHASE_IDS[3], T0 + 5 + gap, duration)


def test_phases_without_length_are_kept() -> None:
    record = (T0, T0, T0, T0, T0, T0, 0)
    assert rows(expand_phases(decode([record]))) == [(i, T0, 0) for i in PHASE_IDS[:3]]


def phase(name_id: int, start: int, end: int | None) -> OpenPhase:
    return OpenPhase(name_id=name_id, start_host_mono_ns=start, end_host_mono_ns=end)


def test_only_finished_phases_of_an_unfinished_step_become_rows() -> None:
    phases = [phase(1, T0, T0 + 5), phase(2, T0 + 6, T0 + 6), phase(3, T0 + 7, None)]
    assert rows(open_phase_rows(phases)) == [(1, T0, 5), (2, T0 + 6, 0)]
    assert rows(open_phase_rows([])) == []


def test_a_phase_is_recorded_when_a_row_has_its_name_and_start() -> None:
    spans = expand_phases(decode([pack(COMBINATIONS[0])]))
    assert is_recorded(phase(PHASE_IDS[1], T0 + 50, None), spans)
    assert not is_recorded(phase(PHASE_IDS[1], T0 + 51, None), spans)
    assert not is_recorded(phase(PHASE_IDS[2], T0 + 50, None), spans)
