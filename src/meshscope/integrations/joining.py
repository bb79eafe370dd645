"""The one recording of a process, and what a framework says about it.

Whoever comes first starts it; the others join. Two members of one framework that hear the same
event write it once. Nothing here raises into a framework, and nothing of the recorder is kept in a
framework's objects: they are pickled into other processes, which then join by themselves.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshscope.capture.default import find_recorder, start
from meshscope.capture.frameworks.arguments import Group
from meshscope.capture.identity import RUN_DIR_VARIABLE
from meshscope.capture.recorder import Recorder

RunDir = str | os.PathLike[str] | None

_said: dict[tuple[object, ...], object] = {}
"""By framework and kind of event: what was written last, and in which recording."""
_VALIDATION = ("validation",)


def is_recording_wanted() -> bool:
    """Whether this process was asked to record, by `meshscope run` or by the variable it sets."""
    return bool(os.environ.get(RUN_DIR_VARIABLE))


class Member:
    """A framework's part in the recording."""

    def __init__(self, framework: str, run_dir: RunDir, config: Any) -> None:
        self._framework = framework
        self._run_dir = None if run_dir is None else os.fspath(run_dir)
        self._join(config)

    def _join(self, config: Any = None) -> Recorder:
        """Attached to all training, unless the program attached the recorder itself."""
        joined = start(self._run_dir, config=config)
        if joined.watching.automatic is None:
            joined.watch_everything()
        return joined

    @property
    def recorder(self) -> Recorder:
        """The process's recorder."""
        return find_recorder() or self._join()

    def tell(self, function: Callable[..., None], *args: Any) -> None:
        """Calls `function(self, …)`; an error is the recorder's, not the framework's."""
        self.recorder.guard.run(self._framework, function, self, *args)

    def store_settings(self, groups: Iterable[Group]) -> None:
        """Settings, under the same names as without a callback."""
        for value, name, known_by in groups:
            self.recorder.set_config(value, name, known_by)

    def say_epoch(self, epoch: int) -> None:
        """The epoch that the current step belongs to, once per epoch."""
        if self._has_begun() and self._is_new(epoch, "epoch"):
            self.recorder.log(epoch=epoch)

    def log(self, values: Mapping[str, Any], step: object) -> None:
        """Numbers, under the framework's own names; once for each of its steps."""
        if not self._has_begun():
            return
        for name, value in values.items():
            if _is_number(value) and self._is_new(step, "log", name):
                self.recorder.log(**{f"{name} (logged by {self._framework})": value})

    def begin_validation(self) -> None:
        """A detail span over what the framework calls so; phases stay what they are."""
        joined = self.recorder
        if self._has_begun() and _said.get(_VALIDATION) != id(joined):
            _said[_VALIDATION] = id(joined)
            joined.span("validation").__enter__()

    def end_validation(self) -> None:
        """Ends it, if it has begun."""
        joined = self.recorder
        if _said.pop(_VALIDATION, None) == id(joined):
            joined.span("validation").__exit__(None, None, None)

    def _has_begun(self) -> bool:
        """Whether a step has: a process that only evaluates is not recorded."""
        joined = self.recorder
        return joined.is_recording or bool(joined.timeline.step_start_ns)

    def _is_new(self, value: object, *event: str) -> bool:
        key, said = (self._framework, *event), (id(self.recorder), value)
        if _said.get(key) == said:
            return False
        _said[key] = said
        return True


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, str)):
        return False
    return isinstance(value, (int, float)) or (
        hasattr(value, "is_cuda") and type(value).__name__ != "DTensor" and value.numel() == 1
    )
