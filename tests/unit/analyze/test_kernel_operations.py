"""Which kernel is which operation, how long it was exposed, and what it says about clocks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_builders import T0, US, SampleBuilder, open_real
from meshscope.analyze.job.arrivals import AlignedTimes
from meshscope.analyze.job.exposed import find_blocking, find_engine_intervals
from meshscope.analyze.job.kernel_operations import (
    doubt_ends,
    match_kernels,
    measure_clock_shifts,
    measure_operations,
)
from meshscope.analyze.job.operations import load_operations
from meshscope.analyze.rank.kernel_sample import read_samples
from meshscope.analyze.rank.kernel_steps import read_host_phases, split_sample
from meshscope.analyze.rank.phases import order_steps
from meshscope.core.operations import EndSource, Kind
from meshscope.store.kernel_table import KernelKind
from meshscope.store.read.run import open_run
from meshscope.store.schema import OperationFlag

COMMUNICATION, COPY = KernelKind.COMMUNICATION, KernelKind.COPY
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def make(path, num_groups=1):
    made = SampleBuilder(path, world_size=2)
    for number in range(num_groups):
        made.group(number, range(2 - number))
    return made


def match(made):
    recording = made.close(2, 900)
    (sample,) = read_samples(recording)
    rows = load_operations(open_run(made.path).last_attempt).rows
    return sample, rows, match_kernels(sample, rows, recording.names)


def communicate(made, start, end, launch=None, name=ALL_REDUCE, **options):
    made.work(start, end, launch, kind=COMMUNICATION, name=name, **options)


def test_exposure_goes_to_the_kernel_that_began_first(tmp_path):
    made = make(tmp_path)
    made.operation(10)
    made.operation(20)
    made.work(100, 150, 5)
    communicate(made, 140, 200, 11)
    communicate(made, 160, 260, 21, stream=17)
    made.work(180, 190, 30)
    made.work(220, 225, 30, kind=COPY, stream=9)
    sample, _, found = match(made)
    whole = measure_operations(sample, found, T0, T0 + 900 * US)
    assert whole.row.tolist() == [0, 1]
    assert ((whole.start_ns - T0) / US).tolist() == [140, 160]
    assert ((whole.end_ns - T0) / US).tolist() == [200, 260]
    assert (whole.exposed_ns / US).tolist() == [40, 60]
    assert (whole.hidden_ns / US).tolist() == [20, 0]
    assert (whole.beside_copy_ns / US).tolist() == [0, 5]
    part = measure_operations(sample, found, T0 + 145 * US, T0 + 195 * US)
    assert (part.exposed_ns / US).tolist() == [35, 0]
    assert (part.hidden_ns / US).tolist() == [15, 0]


def test_kernels_without_a_launch_are_counted_back_over_all_streams_of_a_group(tmp_path):
    """As FSDP2 does it: gathers on one stream, other operations of the group on another. What is
    counted back ends where a name says something else."""
    made = make(tmp_path)
    kinds = (Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.ALL_GATHER)
    for index, kind in enumerate((*kinds, Kind.ALL_REDUCE, Kind.ALL_GATHER)):
        made.operation(10 * index, kind=kind)
    communicate(made, 90, 95)  # operation 0 is no all-reduce
    communicate(made, 100, 110, name=ALL_GATHER, stream=17)
    communicate(made, 110, 120)
    communicate(made, 120, 130, name=ALL_GATHER, stream=17)
    communicate(made, 130, 140, 41)
    communicate(made, 140, 150, 51, name=ALL_GATHER, stream=17)
    assert match(made)[2].row.tolist() == [-1, 1, 2, 3, 4, 5]


def test_a_batch_is_launched_behind_its_last_message(tmp_path):
    made = make(tmp_path)
    made.operation(1, kind=Kind.SEND, flags=OperationFlag.COALESCED)  # before the first launch
    made.operation(5, kind=Kind.ALL_REDUCE)
    for enqueue in (10, 12, 30, 32):
        made.operation(enqueue, kind=Kind.SEND, flags=OperationFlag.COALESCED)
    made.operation(40, kind=Kind.RECV)
    made.work(3, 4, 2)
    communicate(made, 100, 110, 15, name=SEND_RECV)
    communicate(made, 120, 130, 35, name=SEND_RECV)
    _, _, found = match(made)
    assert found.row.tolist() == [3, 5]
    assert found.batch_row.tolist() == [2, 4]
    assert found.batch_leader.tolist() == [3, 5]


@pytest.mark.parametrize(
    ("kind", "name", "launch", "expected"),
    [
        (Kind.ALL_REDUCE, ALL_REDUCE, 11, 0),
        (Kind.BARRIER, ALL_REDUCE, 11, 0),
        (Kind.ALL_REDUCE, ALL_GATHER, 11, -1),
        (Kind.ALL_REDUCE, "ncclDevKernel_Generic", 11, 0),
        (Kind.CUSTOM, ALL_GATHER, 11, 0),
        (Kind.ALL_REDUCE, ALL_REDUCE, 9, -1),
        (Kind.ALL_REDUCE, ALL_REDUCE, None, -1),
        (Kind.ALL_REDUCE, ALL_REDUCE, 100_011, -1),
    ],
)
def test_kernels_of_other_operations_are_not_matched(tmp_path, kind, name, launch, expected):
    made = make(tmp_path)
    made.operation(10, kind=kind)
    communicate(made, 200, 210, launch, name=name)
    sample, _, found = match(made)
    assert found.row.tolist() == [expected]
    whole = measure_operations(sample, found, T0, T0 + 900 * US)
    assert (whole.row.tolist(), whole.exposed_ns.tolist()) == ([expected], [10 * US])


def test_a_rank_without_operations_has_kernels_of_none(tmp_path):
    made = make(tmp_path)
    communicate(made, 200, 210, 11)
    sample, rows, found = match(made)
    assert found.row.tolist() == [-1]
    assert measure_clock_shifts(sample, found, rows) == ()


def test_shifts_are_those_on_which_operations_agree(tmp_path):
    """Events say 300 less than kernels, later 100 less; in between two are held up."""
    made = make(tmp_path)
    ends = {10: 300, 20: 301, 30: 250, 40: 299, 50: 251, 60: 300, 70: 180, 80: 100, 90: 101, 95: 99}
    for index, (launch, shift) in enumerate(ends.items()):
        end = 320 + 30 * index
        made.operation(launch, end - shift)
        communicate(made, end - 20, end, launch + 1)
    sample, rows, found = match(made)
    shifts = measure_clock_shifts(sample, found, rows)
    assert [one.shift_ns for one in shifts] == [300 * US, 100 * US]
    assert [one.num_operations for one in shifts] == [4, 3]
    assert [one.spread_ns for one in shifts] == [1 * US, 1 * US]
    assert [(one.first_host_ns - T0) // US for one in shifts] == [320, 530]
    assert [(one.last_host_ns - T0) // US for one in shifts] == [470, 590]


def test_an_end_behind_its_kernel_is_a_bound_in_all_steps_and_holds_nobody_up(tmp_path):
    """Two buckets a step; the event of the first is reached when the second begins."""
    made = make(tmp_path)
    flags = OperationFlag.ENGINE | OperationFlag.ASYNC | OperationFlag.DEVICE
    for step in (1, 2, 3):
        since = 1_000 * (step - 1)
        made.operation(since + 10, since + 900, step=step, flags=flags)
        made.operation(
            since + 20, since + 950, step=step, flags=flags, start_ns=T0 + (since + 500) * US
        )
    for since in (0, 1_000):
        communicate(made, since + 100, since + 300, since + 11)
        communicate(made, since + 900, since + 949, since + 21)
    made.close(2, 2_000)
    attempt = open_run(made.path).last_attempt
    rows = doubt_ends(attempt, load_operations(attempt)).rows
    assert rows.end_source.tolist() == [EndSource.DEVICE_LATE, EndSource.DEVICE] * 3
    times = AlignedTimes(enqueue_ns=rows.enqueue_ns, arrival_ns=rows.start_ns, end_ns=rows.end_ns)
    held = find_engine_intervals(rows, times)
    assert held.row.tolist() == [1, 3, 5]
    assert ((held.end_ns - held.start_ns) // US).tolist() == [450] * 3


def test_a_bound_of_an_operation_holds_up_no_stream(tmp_path):
    """Buffers that DDP broadcasts before a forward pass, whose end was seen after backward: all of
    the step counted as transfer."""
    made = make(tmp_path)
    for step, source in ((1, EndSource.DEVICE_LATE), (2, EndSource.DEVICE)):
        since = 1_000 * (step - 1)
        made.operation(since, since + 900, step=step, flags=OperationFlag.DEVICE, end_source=source)
    made.close(2, 2_000)
    rows = load_operations(open_run(made.path).last_attempt).rows
    times = AlignedTimes(enqueue_ns=rows.enqueue_ns, arrival_ns=rows.start_ns, end_ns=rows.end_ns)
    assert find_blocking(rows, times).row.tolist() == [1]


@pytest.mark.parametrize(("name", "rank", "per_step"), [("ddp", 2, 5), ("fsdp2", 1, 26)])
def test_real_kernels_are_the_operations_of_their_steps(tmp_path, name, rank, per_step):
    """Steps of the device are cut where its compute stream reaches the next one: each has all
    operations of that step of the host, and no others."""
    attempt = open_real(tmp_path, name)
    recording, rows = attempt.ranks[rank], load_operations(attempt).rows
    (sample,) = read_samples(recording)
    found = match_kernels(sample, rows, recording.names)
    assert (np.diff(found.row) == 1).all()
    assert (found.row >= 0).all()
    steps = order_steps(recording.read("steps"))
    for one in split_sample(sample, steps, read_host_phases(recording, steps)):
        part = measure_operations(sample, found, one.start_ns, one.end_ns)
        assert rows.step[part.row].tolist() == [one.step] * per_step
        assert part.exposed_ns.sum() == one.exposed_ns + one.exposed_beside_copy_ns
        assert part.beside_copy_ns.sum() == one.exposed_beside_copy_ns
        assert (part.exposed_ns + part.hidden_ns).sum() == one.communication_ns
    shifts = measure_clock_shifts(sample, found, rows)
    assert max(shift.spread_ns for shift in shifts) < 15 * US


kernels = st.lists(
    st.tuples(
        st.sampled_from([KernelKind.COMPUTE, COMMUNICATION, COPY, KernelKind.FILL]),
        st.integers(0, 200), st.integers(0, 60), st.none() | st.integers(0, 200),
        st.integers(7, 9), st.sampled_from([ALL_REDUCE, ALL_GATHER, SEND_RECV]),
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip
operations = st.lists(
    st.tuples(st.integers(0, 200), st.sampled_from(list(Kind)), st.sampled_from([0, 8])),
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(kernels, operations, st.integers(0, 200), st.integers(1, 100))
def test_exposures_sum_to_what_ran_without_compute(tmp_path_factory, kernels, made_of, low, length):
    made = make(tmp_path_factory.mktemp("run"))
    for enqueue, kind, flags in made_of:
        made.operation(enqueue, kind=kind, flags=flags)
    moments = set()
    computing, covered = set(), set()
    for kind, start, duration, launch, stream, name in kernels:
        made.work(start, start + duration, launch, kind=kind, stream=stream, name=name)
        inside = set(range(start, start + duration)) & set(range(low, low + length))
        if kind is COMMUNICATION:
            moments |= inside
        elif kind is KernelKind.COMPUTE:
            computing |= inside
        else:
            covered |= inside
    sample, rows, found = match(made)
    part = measure_operations(sample, found, T0 + low * US, T0 + (low + length) * US)
    assert part.exposed_ns.sum() == len(moments - computing) * US
    assert part.hidden_ns.sum() == len(moments & computing) * US
    assert part.beside_copy_ns.sum() == len((moments & covered) - computing) * US
    assert (found.row < len(rows)).all()
    own, batch = set(found.row.tolist()), found.batch_row.tolist()
    assert set(found.batch_leader.tolist()) <= own
    assert not own & set(batch)
