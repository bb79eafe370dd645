"""The executor's actions in a run: the schedule's own order, and the answer unchanged."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")
from torch import Tensor, nn  # noqa: E402

from meshscope.capture.recorder import Recorder, RecorderConfig  # noqa: E402
from meshscope.core.schedule import Action, ActionKind  # noqa: E402
from meshscope.core.schedule_builders import BUILDERS, build_schedule  # noqa: E402
from meshscope.engine.pipeline.action_recording import RecordedActions  # noqa: E402
from meshscope.engine.pipeline.pipeline import PipelineExecutor  # noqa: E402
from meshscope.errors import UsageError  # noqa: E402
from meshscope.store.read.recording import Recording  # noqa: E402
from meshscope.store.read.run import open_run  # noqa: E402
from meshscope.store.schema import ACTION_KINDS  # noqa: E402

NUM_MICROBATCHES = 4
NUM_STEPS = 2
WIDTH = 4


class LossStage(nn.Linear):
    """The last stage: the mean square of its output's distance to the targets."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        out = super().forward(x)
        return out if targets is None else (out - targets).square().mean()


def make_stages(num_stages: int) -> dict[int, nn.Module]:
    torch.manual_seed(1)
    stages: dict[int, nn.Module] = {s: nn.Linear(WIDTH, WIDTH) for s in range(num_stages - 1)}
    return {**stages, num_stages - 1: LossStage(WIDTH, WIDTH)}


def recorded_actions(rank: Recording) -> list[tuple[int, int, Action]]:
    """Step, chunk and action of each row."""
    columns = rank.read("actions")
    names = ("step", "chunk", "kind", "stage", "microbatch")
    return [
        (step, chunk, Action(ActionKind(ACTION_KINDS[kind]), stage, microbatch))
        for step, chunk, kind, stage, microbatch in zip(
            *(columns[name].tolist() for name in names), strict=True
        )
    ]


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_the_rows_are_the_schedule(tmp_path: Path, name: str) -> None:
    schedule = build_schedule(name, num_ranks=1, num_microbatches=NUM_MICROBATCHES)
    stages = schedule.stages_of(0)
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    executor = PipelineExecutor(
        schedule, make_stages(schedule.num_stages), record=RecordedActions(recorder, stages)
    )
    torch.manual_seed(2)
    batch = [(torch.randn(2, WIDTH), torch.randn(2, WIDTH)) for _ in range(NUM_MICROBATCHES)]
    for step in range(7, 7 + NUM_STEPS):
        with recorder.step(step):
            executor.run_step(batch)
    with torch.no_grad():
        executor.evaluate(batch)
    path = recorder.run_dir
    recorder.close()
    assert recorder.guard.counts == {}
    assert path is not None
    rank = open_run(path).last_attempt.ranks[0]
    training = [
        (step, stages.index(action.stage), action)
        for step in range(7, 7 + NUM_STEPS)
        for action in schedule.actions[0]
    ]
    found = recorded_actions(rank)
    assert found[: len(training)] == training
    evaluated = found[len(training) :]
    assert len(evaluated) == NUM_MICROBATCHES * schedule.num_stages
    assert {(step, action.kind) for step, _, action in evaluated} == {(-1, ActionKind.FORWARD)}
    assert (rank.read("actions")["wait_ns"] == -1).all()  # one rank waits for no one
    assert rank.read("steps")["num_microbatches"].tolist() == [NUM_MICROBATCHES] * NUM_STEPS


def test_a_wait_of_the_executor_stands_with_its_action(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorded = RecordedActions(recorder, (1, 3))
    action = Action(ActionKind.INPUT_GRAD, 3, 2)
    with recorder.step(0):
        with recorded.wait(action):
            pass
        with recorded.run(action):
            pass
    path = recorder.run_dir
    recorder.close()
    assert path is not None
    rank = open_run(path).last_attempt.ranks[0]
    assert recorded_actions(rank) == [(0, 1, action)]
    (row,) = zip(
        *(rank.read("actions")[f"{name}_ns"] for name in ("wait_begin_host_mono", "wait")),
        strict=True,
    )
    waits = rank.read("spans")
    is_wait = waits["name_id"] == 11
    assert row == (waits["start_host_mono_ns"][is_wait][0], waits["duration_ns"][is_wait][0])


def test_a_stage_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"stages \[1, 1\] name one of them twice"):
        RecordedActions(Recorder(tmp_path / "run"), (1, 1))
