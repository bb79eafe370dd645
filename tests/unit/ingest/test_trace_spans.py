"""A few events looked up as the whole columns say; rows numbered as numpy's own would be."""

import numpy as np
import pytest

from made_traces import host, nccl, read
from meshscope.ingest.kineto.trace_columns import Category
from meshscope.ingest.traces import trace_host, trace_spans
from meshscope.ingest.traces.trace_spans import (
    find_named,
    number_rows,
    read_arguments,
    unite_events,
)
from meshscope.ingest.traces.trace_view import TraceView
from meshscope.numerics.intervals import unite


def test_arguments_of_some_events_are_those_of_the_columns(tmp_path) -> None:
    events = [
        nccl("allreduce", 5 * at, 1, group=str(at % 3), num_elements=at)
        if at % 2
        else host("cpu_op", f"op{at}", 5 * at, 1)
        for at in range(20)
    ]
    trace = read(tmp_path / "t.json", events)
    rows = np.array([7, 0, 7, 19, 3], dtype=np.int64)
    found = read_arguments(trace, rows, ("Process Group Name", "dtype"), ("In msg nelems", "Seq"))
    for name, values in found.text.items():
        assert values.tolist() == trace.text_argument(name)[rows].tolist()
    for name, values in found.number.items():
        own = trace.argument_rows(name)
        by_event = dict(zip(trace.arguments.event[own], trace.arguments.value[own], strict=True))
        assert values.tolist() == [by_event.get(row, -1) for row in rows.tolist()]
    absent = read_arguments(trace, np.array([-1], dtype=np.int64), ("dtype",), ("Seq",))
    assert (absent.text["dtype"].tolist(), absent.number["Seq"].tolist()) == ([-1], [-1])


def test_equal_rows_get_one_number_in_order() -> None:
    random = np.random.default_rng(3)
    columns = random.integers(-1, 4, (3, 200)).astype(np.int32)
    number, first = number_rows(*columns)
    keys, inverse = np.unique(columns, axis=1, return_inverse=True)
    assert number.tolist() == inverse.ravel().tolist()
    assert columns[:, first].tolist() == keys.tolist()
    empty = np.empty(0, dtype=np.int64)
    assert [len(one) for one in number_rows(empty, empty)] == [0, 0]


@pytest.mark.parametrize("length", [1 << 10, 1 << 40])
def test_many_events_are_united_as_few_are(tmp_path, length) -> None:
    random = np.random.default_rng(5)
    begins = np.sort(random.integers(0, 4000, 600))
    lengths = np.where(random.random(600) < 0.2, 0, random.integers(0, 12, 600))
    lengths[-1] = length  # in eight bytes where it does not fit four
    events = [
        host("cpu_op", "op", int(begin), int(lasts))
        for begin, lasts in zip(begins, lengths, strict=True)
    ]
    trace = read(tmp_path / "t.json", events)
    every = np.arange(600)
    for rows in (every, every[::3], every[::-1].copy(), random.permutation(600)):
        found = unite_events(trace, rows)
        expected = unite(trace.events.begin_ns[rows], trace.events.ends(rows))
        assert found.start_ns.tolist() == expected.start_ns.tolist()
        assert found.end_ns.tolist() == expected.end_ns.tolist()
        assert len(found) > 1


@pytest.mark.parametrize("num_wanted", [0, 2, 9])
def test_long_traces_are_looked_through_in_parts_with_the_same_result(
    tmp_path, monkeypatch, num_wanted
) -> None:
    random = np.random.default_rng(7)
    categories = ("cpu_op", "user_annotation", "cuda_runtime")
    events = [
        host(categories[random.integers(3)], f"op{random.integers(12)}", 3 * at, 20)
        for at in range(100)
    ]
    events += [host("cpu_op", "c10d::allreduce_", 40, 2), host("cpu_op", "outer", 39, 30)]
    trace = read(tmp_path / "t.json", events)
    wanted = {f"op{number}" for number in range(num_wanted)}

    def ask() -> tuple[list[int], object]:
        rows = find_named(trace, wanted.__contains__, Category.CPU_OP, Category.ANNOTATION)
        return rows.tolist(), TraceView(trace).host

    whole = ask()
    for module in (trace_spans, trace_host):
        monkeypatch.setattr(module, "AT_ONCE", 7)
    assert ask() == whole
    kinds = (int(Category.CPU_OP), int(Category.ANNOTATION))
    assert whole[0] == [
        row
        for row, (name, kind) in enumerate(
            zip(trace.events.name.tolist(), trace.events.category.tolist(), strict=True)
        )
        if kind in kinds and trace.strings[name] in wanted
    ]
