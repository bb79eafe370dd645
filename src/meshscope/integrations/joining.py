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

_VALIDATION = "validation"


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
        logged = self.recorder.watching.logged
        if logged.has_begun and logged.is_new(epoch, self._framework, "epoch"):
            self.recorder.log(epoch=epoch)

    def log(self, values: Mapping[str, Any], step: object) -> None:
        """Numbers, under the framework's own names; once for each of its steps."""
        self.recorder.watching.logged.log(self._framework, values, step)

    def begin_validation(self) -> None:
        """A detail span over what the framework calls so; phases stay what they are."""
        logged = self.recorder.watching.logged
        if logged.has_begun and logged.switch(_VALIDATION, is_on=True):
            self.recorder.span(_VALIDATION).__enter__()

    def end_validation(self) -> None:
        """Ends it, if it has begun."""
        logged = self.recorder.watching.logged
        if logged.switch(_VALIDATION, is_on=False):
            self.recorder.span(_VALIDATION).__exit__(None, None, None)
