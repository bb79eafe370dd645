import json

import pytest

pytest.importorskip("torch", reason="the engine trains with torch")

from meshscope.engine.data_parallel.allreduce import (
    HierarchicalAllReduce,
    NodeGroups,
    StrategyTable,
    StrategyTimes,
)
from meshscope.errors import UsageError


def make_table() -> StrategyTable:
    rows = [
        StrategyTimes(size_bytes=1_000, duration_ns={"flat": 9, "tree": 2, "ring": 30}),
        StrategyTimes(size_bytes=1_000_000, duration_ns={"flat": 70, "tree": 90, "ring": 80}),
        StrategyTimes(size_bytes=16_000_000, duration_ns={"flat": 900, "tree": 1900, "ring": 800}),
    ]
    return StrategyTable(num_ranks=4, rows=tuple(rows))


@pytest.mark.parametrize(
    ("size_bytes", "name"),
    [(0, "tree"), (1, "tree"), (30_000, "tree"), (32_000, "flat"), (3_900_000, "flat"),
     (4_100_000, "ring"), (1 << 40, "ring")],
)  # fmt: skip
def test_the_nearest_measured_size_decides(size_bytes: int, name: str) -> None:
    assert make_table().choose(size_bytes) == name


def test_only_what_is_available_is_chosen() -> None:
    assert make_table().choose(100, ("flat", "ring")) == "flat"
    with pytest.raises(UsageError, match="none of what is available here: hierarchical"):
        make_table().choose(100, ("hierarchical",))


def test_a_table_is_the_same_after_json() -> None:
    document = json.loads(json.dumps(make_table().to_document()))
    assert StrategyTable.from_document(document) == make_table()


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one size"):
        StrategyTable(num_ranks=4, rows=())


def test_uneven_nodes_cannot_be_reduced_by_parts() -> None:
    nodes = NodeGroups(inside=None, across=None, is_even=False)
    with pytest.raises(UsageError, match="equally many ranks on every node"):
        HierarchicalAllReduce(nodes=nodes, by_parts=True)
