"""What happens around every pipeline action of a training step.

Before it, data parallelism learns whether this backward is the last of its stage: gradients are
sent while the others still run. Around it, the action is recorded and faults are injected.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from meshscope.core.schedule import Action, ActionKind, Schedule
from meshscope.engine.data_parallel.torch_ddp import DataParallel
from meshscope.engine.pipeline.pipeline import ActionRecorder, NoRecorder


class StepActions:
    """The engine's `ActionRecorder`."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        data_parallel: DataParallel,
        *,
        record: ActionRecorder | None = None,
    ) -> None:
        self._stages = stages
        self._data_parallel = data_parallel
        self._record = record or NoRecorder()
        self._num_microbatches = schedule.num_microbatches
        self._num_done: dict[int, int] = {}

    def begin_step(self) -> None:
        self._num_done = dict.fromkeys(self._stages, 0)
        self._data_parallel.start_accumulating()

    @contextmanager
    def run(self, action: Action) -> Iterator[None]:
        # No hook sees the weight gradients of a W action: `finish` sends those.
        if action.kind is ActionKind.BACKWARD and self._is_last(action):
            self._data_parallel.start_last_backward(action.stage)
        with self._record.run(action):
            yield

    def wait(self, action: Action) -> AbstractContextManager[object]:
        """Around waiting for what it needs."""
        return self._record.wait(action)

    def _is_last(self, action: Action) -> bool:
        self._num_done[action.stage] += 1
        return self._num_done[action.stage] == self._num_microbatches
