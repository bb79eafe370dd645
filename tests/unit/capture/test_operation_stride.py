"""Operations of some steps only: which steps, their flags, and numbers on which ranks agree."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from meshscope.capture.operations import operation_stride, process_groups
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.store.read.run import open_run
from meshscope.store.schema import StepFlag
from meshscope.store.write.in_flight import read_in_flight
from meshscope.store.write.now_file import NOW_NAME, OPEN_STEP_BYTES

WANTED = 22
"""A step of a kernel sample."""


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(process_groups, "_HOST_BACKENDS", frozenset())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(path, num_steps, look=lambda step, recorder: None):
    """Two operations in a step; what the end of a step on a CUDA device does, on the host."""
    recorder = Recorder(path, config=RecorderConfig(provenance=False))
    recorder.watch_communication()
    tap, timeline = recorder.watching.collectives, recorder.session.timeline

    def visit(step, end_ns):
        timeline.next_visit_ns = 0
        tap.end_step(step, timeline.step_start_ns, end_ns, is_wanted=step + 1 == WANTED)

    timeline.on_visit = visit
    for step in range(num_steps):
        with recorder.step():
            dist.all_reduce(torch.ones(2))
            look(step, recorder)
            dist.all_reduce(torch.ones(3), async_op=True).wait()
    recorder.close()
    assert recorder.guard.counts == {}
    return open_run(path).last_attempt.ranks[0]


def test_beyond_the_limit_every_fourth_step_is_recorded_and_the_others_say_so(
    tmp_path, alone, monkeypatch
):
    monkeypatch.setattr(operation_stride, "MAX_STRIDE", 4)
    monkeypatch.setattr(operation_stride, "MAX_SHARE", 1e-9)
    monkeypatch.setattr(operation_stride, "SPARSE_SHARE", 1e-9)
    monkeypatch.setattr(operation_stride, "EARLY_SHARE", 1e-9)
    resting = {}

    def look(step, recorder):
        data = (recorder.session.writer.directory / NOW_NAME).read_bytes()[OPEN_STEP_BYTES:]
        resting[step] = read_in_flight(data).resting_since_step

    rank = train(tmp_path / "run", 26, look)
    recorded = [0, 1, 3, 7, 8, 15, 18, 20, WANTED]
    operations = rank.read("collectives")
    assert operations["step"].tolist() == [step for step in recorded for _ in range(2)]
    # step × 2^14 + ordinal in the step, as the column says.
    assert operations["sequence"].tolist() == [
        step * 16384 + ordinal for step in recorded for ordinal in range(2)
    ]
    flags = rank.read("steps")["flags"]
    unwatched = rank.read("steps")["step"][(flags & StepFlag.UNWATCHED) != 0]
    assert unwatched.tolist() == [step for step in range(26) if step not in recorded]
    assert resting[9] == resting[14] == 9
    assert resting[8] is resting[15] is resting[WANTED] is None


@pytest.mark.parametrize("is_compiled", [False, True])
def test_torch_has_its_own_functions_in_steps_that_are_not_recorded(
    tmp_path, alone, monkeypatch, is_compiled
):
    """But not once something was compiled: its guards would see them come and go."""
    monkeypatch.setattr(operation_stride, "MAX_STRIDE", 4)
    monkeypatch.setattr(operation_stride, "MAX_SHARE", 1e-9)
    monkeypatch.setattr(operation_stride, "SPARSE_SHARE", 1e-9)
    monkeypatch.setattr(operation_stride, "EARLY_SHARE", 1e-9)
    functional = torch.ops._c10d_functional.all_reduce
    places = [(dist.ProcessGroup, "allreduce"), (dist.Work, "wait"), (functional, "_op")]
    own = [vars(owner).get(name) for owner, name in places]
    has_own = {}

    def look(step, recorder):
        recorder.watching.collectives.is_compiled = lambda: is_compiled
        now = [vars(owner).get(name) for owner, name in places]
        has_own[step] = [one is before for one, before in zip(now, own, strict=True)]

    rank = train(tmp_path / "run", 12, look)
    recorded = [0, 1, 3, 7, 8]
    assert sorted(set(rank.read("collectives")["step"].tolist())) == recorded
    assert has_own == {
        step: [step not in recorded and not is_compiled] * len(places) for step in range(12)
    }
    assert [vars(owner).get(name) for owner, name in places] == own


def test_cheap_operations_are_recorded_in_every_step(tmp_path, alone, monkeypatch):
    monkeypatch.setattr(operation_stride, "PYTHON_COST_NS", 0)
    rank = train(tmp_path / "run", 12)
    assert rank.count_rows("collectives") == 24
    assert not rank.read("steps")["flags"].astype(int).max() & StepFlag.UNWATCHED


@pytest.mark.parametrize(
    ("num_operations", "num_events", "step_ms", "early", "steady"),
    [
        (11, 0, 54, 1, 1),  # 11 × 15 µs of 54 ms
        (11, 33, 54, 8, 16),  # with three events each: 1.8 %; 0.4, then 0.15 % are allowed
        (32, 128, 57, 16, 64),  # messages of a pipeline: 6.5 %
        (10_000, 0, 54, 16, 64),
    ],
)
def test_up_to_a_hundredth_of_a_step_may_be_spent_in_all_of_them_and_less_in_some(
    num_operations, num_events, step_ms, early, steady
):
    class Log:
        is_on, is_resting, num_calls = True, False, 0
        groups = None

    class Follower:
        sees_all = False
        device = SimpleNamespace(num_events=0)

    stride = operation_stride.OperationStride(Log, Follower)
    for step in range(8):
        Log.num_calls += num_operations
        Follower.device.num_events += num_events
        stride._count(step, step_ms * 1_000_000)
    stride._choose()
    assert stride.stride == early
    stride._num_steps = operation_stride.EARLY_STEPS
    assert stride.stride == steady


def test_groups_of_the_host_are_recorded_in_every_step_with_plain_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(operation_stride, "MAX_SHARE", 1e-9)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rank = train(tmp_path / "run", 12)
    finally:
        dist.destroy_process_group()
    assert rank.read("collectives")["sequence"].tolist() == list(range(24))
