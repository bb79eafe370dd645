import numpy as np
import pytest

from builders import MS, SECOND, START_MONO_NS, make_writer
from communication_builders import Job, operation_words
from meshscope.analyze.job.group_axes import merge_groups
from meshscope.analyze.job.operations import (
    NO_PHASE,
    load_failures,
    load_operations,
    load_waits,
    number_values,
    slice_runs,
)
from meshscope.core.group_axis import OTHER, WORLD, AxisSource, name_axis
from meshscope.core.layout import Layout
from meshscope.core.operations import EndSource, Kind, Outcome
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from meshscope.store.write.groups import GROUP_KIND

NO_LAYOUT = None
LAYOUT_3D = Layout(dp=2, tp=2, pp=2)


@pytest.mark.parametrize(
    ("ranks", "description", "layout", "expected"),
    [
        ((0, 2), "mesh_dp", NO_LAYOUT, ("dp", AxisSource.DESCRIPTION)),
        ((0, 2), "mesh_dp_cp", NO_LAYOUT, ("dp+cp", AxisSource.DESCRIPTION)),
        ((0, 2), "mesh_dp_shard_cp", NO_LAYOUT, ("dp_shard+cp", AxisSource.DESCRIPTION)),
        ((0, 2), "mesh_dp_replicate", NO_LAYOUT, ("dp_replicate", AxisSource.DESCRIPTION)),
        ((0, 2), "mesh_batch", NO_LAYOUT, ("batch", AxisSource.DESCRIPTION)),
        ((0, 1), "", LAYOUT_3D, ("tp", AxisSource.LAYOUT)),
        ((1, 3), "undefined", LAYOUT_3D, ("dp", AxisSource.LAYOUT)),
        ((2, 6), "mesh_dim_0", LAYOUT_3D, ("pp", AxisSource.LAYOUT)),
        ((0, 1, 2, 3), "", LAYOUT_3D, ("dp+tp", AxisSource.LAYOUT)),
        (tuple(range(8)), "default_pg", LAYOUT_3D, (WORLD, AxisSource.WORLD)),
        (tuple(range(8)), "mesh_default", Layout(dp=8), ("dp", AxisSource.LAYOUT)),
        (tuple(range(8)), "default_pg", NO_LAYOUT, (WORLD, AxisSource.WORLD)),
        ((0, 3), "", LAYOUT_3D, (OTHER, AxisSource.NONE)),
        ((0, 1, 2), "", LAYOUT_3D, (OTHER, AxisSource.NONE)),
        ((0, 2), "", Layout(dp=8), (OTHER, AxisSource.NONE)),
        ((0, 99), "", LAYOUT_3D, (OTHER, AxisSource.NONE)),
        ((0, 1), "", NO_LAYOUT, (OTHER, AxisSource.NONE)),
    ],
)
def test_an_axis_is_looked_up_and_says_where_it_comes_from(ranks, description, layout, expected):
    assert name_axis(ranks, description, layout=layout, world_size=8) == expected


def write_groups(path, groups):
    """`groups` gives per rank a list of id, name and members."""
    for rank, own in enumerate(groups):
        writer = make_writer(path, rank, len(groups))
        for group_id, name, ranks in own:
            writer.journal.write(
                GROUP_KIND, id=group_id, name=name, description="", backend="gloo", ranks=ranks
            )
        writer.close()
    return open_run(path).last_attempt


def test_groups_with_the_same_members_are_told_apart_by_name(tmp_path):
    """Rank 1 uses the second group first, so that it has number 0 there."""
    attempt = write_groups(
        tmp_path,
        [[(0, "a", [0, 1]), (1, "b", [0, 1])], [(0, "b", [1, 0]), (1, "a", [1, 0])]],
    )
    groups, indices = merge_groups(attempt)
    assert [(group.name, group.ranks) for group in groups] == [("a", (0, 1)), ("b", (0, 1))]
    assert indices == {0: {0: 0, 1: 1}, 1: {0: 1, 1: 0}}


def test_groups_without_common_names_go_by_the_order_of_their_making(tmp_path):
    attempt = write_groups(
        tmp_path,
        [[(0, "x1", [0, 1]), (1, "x2", [0, 1])], [(0, "y1", [0, 1]), (1, "", [0, 1])]],
    )
    groups, indices = merge_groups(attempt)
    assert len(groups) == 2
    assert indices == {0: {0: 0, 1: 1}, 1: {0: 0, 1: 1}}


def test_groups_that_cannot_be_have_no_place(tmp_path):
    attempt = write_groups(
        tmp_path, [[(0, "a", []), (1, "b", [1, 2]), (2, "c", [0, 1])], [(0, "c", [0, 1])]]
    )
    groups, indices = merge_groups(attempt)
    assert [group.name for group in groups] == ["c"]
    assert indices == {0: {2: 0}, 1: {0: 0}}
    assert groups[0].recorded_ranks == (0, 1)


def test_a_group_knows_its_hosts_and_who_is_missing(tmp_path):
    job = Job(tmp_path, num_ranks=4, host=lambda rank: f"node{rank // 2}", missing=[3])
    job.group([0, 1])
    job.group([0, 2])
    job.group([2, 3])
    groups, _ = merge_groups(job.close())
    assert [group.num_hosts for group in groups[:2]] == [1, 2]
    assert [group.is_across_hosts for group in groups] == [False, True, False]
    assert groups[2].missing_ranks == (3,)
    assert isinstance(groups[2].num_hosts, Unavailable)


def test_rows_of_all_ranks_are_in_order_with_phases_by_name(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group([0, 1])
    job.writers[1].name_id("warm")  # so that ids of the ranks differ
    job.collective(group, {0: 5 * MS, 1: 6 * MS}, phase="mine", step=3)
    job.collective(group, {0: 15 * MS, 1: 16 * MS}, phase="forward")
    job.collective(group, {0: 25 * MS, 1: 26 * MS})
    operations = load_operations(job.close())
    rows = operations.rows
    assert rows.rank.tolist() == [0, 0, 0, 1, 1, 1]
    assert rows.sequence.tolist() == [0, 1, 2, 0, 1, 2]
    names = [operations.phases[phase] for phase in rows.phase]
    assert names == ["mine", "forward", NO_PHASE] * 2
    assert rows.step.tolist() == [3, -1, -1] * 2
    assert rows.group.tolist() == [0] * 6
    assert rows.start_ns[0] == START_MONO_NS + 5 * MS
    assert rows.end_ns[0] == START_MONO_NS + 7 * MS


def test_operations_behind_a_first_optimizer_belong_to_the_step_that_another_one_extended(tmp_path):
    """A GAN's second backward was numbered as of the next step, which seemed to begin there."""
    job = Job(tmp_path, num_ranks=1)
    group = job.group([0])
    job.step(3, 0, 50 * MS)
    job.step(4, 60 * MS, 110 * MS)
    keys = [
        job.collective(group, {0: begin * MS}, step=step)[0]
        for begin, step in ((10, 3), (40, 4), (70, 4), (100, 5), (115, 4))
    ]
    job.wait(0, keys[1], 41 * MS, 2 * MS, step=4)
    attempt = job.close()
    operations = load_operations(attempt)
    assert operations.rows.step.tolist() == [3, 3, 4, 4, 4]
    assert operations.rows.microbatch.tolist() == [0, 1, 0, 1, 0]
    assert load_waits(attempt, operations).step.tolist() == [3]


def test_impossible_values_are_settled_and_counted(tmp_path):
    job = Job(tmp_path, num_ranks=1)
    job.group([0])
    table = job.writers[0].table("collectives")
    good_ns = START_MONO_NS
    for words in (
        operation_words(enqueue_ns=-5, end_ns=good_ns),
        operation_words(enqueue_ns=1 << 62, end_ns=good_ns),
        operation_words(enqueue_ns=good_ns, end_ns=good_ns - 1),
        operation_words(enqueue_ns=good_ns + 1, end_ns=(1 << 63) - 1),
        operation_words(enqueue_ns=good_ns + 2, start_ns=-1, end_ns=good_ns + 5),
        operation_words(enqueue_ns=good_ns + 3, end_ns=good_ns + 5, kind=200, size_bytes=-7),
        operation_words(enqueue_ns=good_ns + 4, group_id=60_000),
    ):
        table.put(*words)
    operations = load_operations(job.close())
    rows = operations.rows
    assert (len(rows), operations.num_damaged, operations.num_bad_ends) == (5, 2, 2)
    assert rows.end_ns.tolist() == [-1, -1, good_ns + 5, good_ns + 5, -1]
    assert rows.start_ns[2] == good_ns + 2
    assert rows.kind[3] == Kind.CUSTOM
    assert rows.size_bytes[3] == -1
    assert rows.group[4] == -1


def test_only_ends_that_are_the_operations_own_are_exact(tmp_path):
    job = Job(tmp_path, num_ranks=1)
    group = job.group([0])
    for source in EndSource:
        job.collective(group, {0: int(source) * MS}, end_source=source)
    job.collective(group, {0: SECOND}, overrides={0: {"outcome": Outcome.ERROR}})
    rows = load_operations(job.close()).rows
    exact = [EndSource(int(source)) for source in rows.end_source[rows.has_exact_end]]
    assert exact == [EndSource.WAIT, EndSource.FUTURE, EndSource.DEVICE, EndSource.CALL]
    assert len(rows) == len(EndSource) + 1


def test_waits_find_their_operations(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group([0, 1])
    job.collective(group, {0: 0, 1: 0})
    keys = job.collective(group, {0: 10 * MS, 1: 10 * MS})
    job.wait(1, keys[1], 11 * MS, 2 * MS, step=4)
    job.wait(1, keys[1] + 1, 12 * MS, 3 * MS)
    job.wait(1, -1, 13 * MS, 4 * MS)
    job.wait(0, keys[0], 13 * MS, -4 * MS)
    attempt = job.close()
    operations = load_operations(attempt)
    waits = load_waits(attempt, operations)
    assert waits.row.tolist() == [3, -1, -1]
    assert waits.duration_ns.tolist() == [2 * MS, 3 * MS, 4 * MS]
    assert waits.step.tolist() == [4, -1, -1]
    assert waits.num_damaged == 1


def test_a_failure_comes_with_its_message(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group([0, 1])
    keys = job.collective(
        group,
        {0: 0, 1: 0},
        step=2,
        phase="backward",
        overrides={1: {"outcome": Outcome.TIMEOUT}},
    )
    job.note_error(1, keys[1], "RuntimeError: timed out")
    attempt = job.close()
    operations = load_operations(attempt)
    (failure,) = load_failures(attempt, operations, limit=10)
    assert (failure.rank, failure.kind, failure.outcome) == (1, Kind.ALL_REDUCE, Outcome.TIMEOUT)
    assert (failure.step, failure.phase) == (2, "backward")
    assert failure.message == "RuntimeError: timed out"
    assert failure.group == operations.groups[0]


def test_values_are_numbered_like_numpy_does():
    random = np.random.default_rng(1)
    for values in (
        random.integers(-3, 20, 500),
        random.integers(-(1 << 60), 1 << 60, 500),
        np.empty(0, dtype=np.int64),
    ):
        found, index = number_values(values)
        assert found.tolist() == np.unique(values).tolist()
        assert found[index].tolist() == values.tolist()


def test_runs_of_equal_values_are_sliced():
    assert slice_runs(np.array([], dtype=np.int32)) == []
    found = slice_runs(np.array([0, 0, 2, 5, 5], dtype=np.int32))
    assert found == [(0, slice(0, 2)), (2, slice(2, 3)), (5, slice(3, 5))]
