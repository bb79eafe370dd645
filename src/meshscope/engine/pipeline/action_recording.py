"""Pipeline actions into a meshscope recording.

    recorded = RecordedActions(recorder, schedule.stages_of(pp_rank))
    PipelineExecutor(schedule, stages, pp_group, record=recorded)
    with recorder.step(number): executor.run_step(…)

Each action becomes a row of the table `actions` and a phase of the step (`forward`, `backward`,
`pipeline wait`). Errors of recording stay in the recorder. One recorded action with
its wait costs some microseconds (see `docs/recorder.md`).

Steps are the caller's: actions outside of one are recorded without a step, forwards as evaluation.
What `finish` waits for at a step's end belongs to no action.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from meshscope.capture.recorder import Recorder
from meshscope.core.schedule import Action
from meshscope.errors import UsageError


class RecordedActions:
    """An `ActionRecorder` of `engine.pipeline` that writes into a run."""

    def __init__(self, recorder: Recorder, stages: Sequence[int]) -> None:
        """`stages`: those of this rank, in forward order; their indices are the chunks."""
        if len(set(stages)) != len(stages):
            raise UsageError(
                f"stages {list(stages)} name one of them twice; give each stage of this rank "
                f"once, in forward order"
            )
        self._recorder = recorder
        self._chunks = {stage: chunk for chunk, stage in enumerate(stages)}

    def run(self, action: Action) -> AbstractContextManager[None]:
        stage = action.stage
        # A stage that is not of this rank is the executor's to refuse, not ours.
        chunk = self._chunks.get(stage, 0)
        return self._recorder.action(action.kind, stage, action.microbatch, chunk)

    def wait(self, action: Action) -> AbstractContextManager[None]:
        return self._recorder.action_wait(action.kind, action.stage, action.microbatch)
