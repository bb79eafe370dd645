"""Where layouts are looked for, on made-up groups; `tests/distributed` has the real programs."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from meshscope.capture.guard import Guard
from meshscope.capture.model.group_traffic import GroupTraffic
from meshscope.capture.model.layout_search import LayoutSearch
from meshscope.core.layout import Layout
from meshscope.core.operations import Kind
from meshscope.store.schema import BUILTIN_NAMES

FORWARD, BACKWARD = BUILTIN_NAMES["forward"], BUILTIN_NAMES["backward"]


class Group:
    """A process group of torch, as far as it is read."""

    def __init__(self, ranks, description="undefined"):
        self.ranks = list(ranks)
        self.group_desc = description


class Dist:
    def __init__(self, rank, world_size, groups=()):
        self._rank, self._size = rank, world_size
        world = SimpleNamespace(pg_group_ranks={g: dict.fromkeys(g.ranks) for g in groups})
        self.distributed_c10d = SimpleNamespace(_world=world)

    def get_rank(self):
        return self._rank

    def get_world_size(self):
        return self._size

    def get_process_group_ranks(self, group):
        return group.ranks


def search(dist, models=(), log=None, notes=None):
    said = [] if notes is None else notes
    found = LayoutSearch(Guard(), lambda *words: said.append(words))
    return found.visit(dist, models, log or make_log([]))


def make_log(operations, groups=()):
    """`operations` are group, kind and phase."""
    words = [(kind | group << 32 | phase << 48,) for group, kind, phase in operations]
    entries = {
        str(index): SimpleNamespace(group_id=index, ranks=tuple(ranks))
        for index, ranks in enumerate(groups)
    }
    return SimpleNamespace(observed=words, groups=SimpleNamespace(entries=entries))


@pytest.mark.parametrize(
    "order", [("pp", "dp", "cp", "tp"), ("dp", "pp", "tp", "cp")], ids="-".join
)
def test_groups_described_by_megatron(order):
    layout = Layout(dp=2, tp=2, pp=2, cp=2, order=order)
    names = {
        "dp": "DATA_PARALLEL_GROUP",
        "tp": "TENSOR_MODEL_PARALLEL_GROUP",
        "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
        "cp": "CONTEXT_PARALLEL_GROUP",
    }
    for rank in range(16):
        groups = [Group(layout.group_ranks(axis, rank), name) for axis, name in names.items()]
        groups.append(Group(range(16), "default_pg"))
        found = search(Dist(rank, 16, groups))
        assert found.layout == layout
        assert found.source == f"groups of {', '.join(names.values())}"


def test_groups_in_global_variables_of_megatron(monkeypatch):
    """Versions before descriptions."""
    module = ModuleType("megatron.core.parallel_state")
    module._DATA_PARALLEL_GROUP = Group([1, 3])
    module._TENSOR_MODEL_PARALLEL_GROUP = Group([0, 1])
    module._PIPELINE_MODEL_PARALLEL_GROUP = Group([1])
    module._EXPERT_MODEL_PARALLEL_GROUP = Group([1, 3])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert search(Dist(1, 4)).layout == Layout(dp=2, tp=2)


def test_deepspeed_without_and_with_an_mpu(monkeypatch):
    module = ModuleType("deepspeed.utils.groups")
    module.mpu, module._WORLD_GROUP = None, Group(range(4))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert search(Dist(2, 4)).layout == Layout(dp=4)

    def has_none():
        raise AssertionError("sequence parallel group is not initialized")

    module.mpu = SimpleNamespace(
        get_data_parallel_group=lambda: Group([2, 3]),
        get_slice_parallel_group=lambda: Group([2]),
        get_model_parallel_group=lambda: Group([0, 2]),
        get_pipe_parallel_group=lambda: Group([0, 2]),
        get_sequence_parallel_group=has_none,
    )
    assert search(Dist(2, 4)).layout == Layout(dp=2, pp=2)


def test_a_mesh_that_is_no_layout_is_noted_once():
    notes = []
    found = LayoutSearch(Guard(), lambda *words: notes.append(words))
    dist = Dist(0, 8, [Group([0, 1, 2], "mesh_tp"), Group([0, 3], "mesh_dp")])
    for _ in range(100):
        assert found.visit(dist, [], make_log([])) is None
    assert [where for where, _ in notes] == ["layout"]
    assert "do not fill 8 ranks" in notes[0][1]


def guess(operations, groups, rank=0):
    world_size = 1 + max(max(ranks) for ranks in groups)
    traffic = GroupTraffic()
    assert traffic.guess(make_log(operations, groups), rank, world_size) is None  # one look only
    return traffic.guess(make_log(operations, groups), rank, world_size)


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.REDUCE_SCATTER])
def test_sums_outside_of_forward_are_dp(kind):
    gathers = [(0, Kind.ALL_GATHER, FORWARD), (0, Kind.BROADCAST, 0)]
    layout, source = guess([*gathers, (0, kind, BACKWARD)], [range(4)])
    assert layout == Layout(dp=4)
    assert source.startswith("guessed")


def test_sums_inside_forward_are_tp_beside_groups_of_dp():
    sums = [(1, Kind.ALL_REDUCE, FORWARD), (1, Kind.ALL_REDUCE, BACKWARD)]
    groups = [range(4), (0, 1), (0, 2)]
    operations = [*sums, (2, Kind.ALL_REDUCE, BACKWARD), (0, Kind.ALL_REDUCE, 0)]
    assert guess(operations, groups)[0] == Layout(dp=2, tp=2)
    assert guess(sums, groups) is None


def test_traffic_that_can_mean_several_things_means_nothing():
    assert guess([(0, Kind.ALL_REDUCE, FORWARD)], [range(4)]) is None
    assert guess([(0, Kind.ALL_GATHER, BACKWARD)], [range(4)]) is None
    messages = [(0, Kind.SEND, FORWARD), (0, Kind.ALL_REDUCE, BACKWARD)]
    assert guess(messages, [range(4)]) is None


def test_one_rank_and_a_program_without_groups_have_nothing_to_find():
    assert search(None) is None
    assert search(Dist(0, 1)) is None
    assert search(Dist(0, 2)) is None


def test_classes_derived_from_a_wrapper_count_as_it():
    class DistributedDataParallel(SimpleNamespace):
        def modules(self):
            return [self]

        def parameters(self):
            return []

    class Users(DistributedDataParallel):
        pass

    found = search(Dist(0, 2), [Users(process_group=Group([0, 1]))])
    assert found.layout == Layout(dp=2)
    assert found.source == "groups of DistributedDataParallel"
