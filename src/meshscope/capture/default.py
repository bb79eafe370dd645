"""The process's own recorder: one, started on first use."""

import atexit
import logging
import os
import sys
from typing import Any

from meshscope.capture.config import RecorderConfig, check_names
from meshscope.capture.identity import RUN_DIR_VARIABLE
from meshscope.capture.recorder import Recorder
from meshscope.core.layout import Layout
from meshscope.store.write.journal import EXIT_LINE

logger = logging.getLogger(__name__)

_MAX_EXCEPTION_CHARACTERS = 500

_default: Recorder | None = None


def start(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    layout: Layout | None = None,
    attempt: int | None = None,
    **settings: Any,
) -> Recorder:
    """Starts the process's recorder, or returns it if it is running (as under `meshscope run`).

    `settings` are those of `RecorderConfig`. Nothing is written until the first step or phase.
    `attempt` numbers this launch of the job on all ranks alike, where the launcher does not.
    Below `meshscope run` its directory is used instead of `run_dir`: the user looks there.
    """
    global _default
    check_names(RecorderConfig, settings)
    launched_dir = os.environ.get(RUN_DIR_VARIABLE)
    if run_dir is not None and launched_dir:
        logger.warning("meshscope run records into %s, not into %s", launched_dir, run_dir)
        run_dir = None
    if _default is not None and not _default.is_closed:
        if layout is not None:
            _default.set_layout(layout)
        if settings:
            _default.configure(**settings)
        return _default
    config = RecorderConfig(**settings)
    _default = Recorder(run_dir, layout=layout, config=config, attempt=attempt)
    _default.watch_communication()
    # Registered after the recorder's own exit function, so it runs before the files are closed.
    atexit.register(_write_exception, _default)
    return _default


def recorder() -> Recorder:
    """The process's recorder; one is started with the defaults if there is none."""
    return start() if _default is None or _default.is_closed else _default


def _write_exception(recorder: Recorder) -> None:
    """The uncaught exception the interpreter is about to end with, if there is one.

    It is read where the interpreter leaves it for debuggers, so that no hook needs replacing.
    """
    error = getattr(sys, "last_value", None)
    if not isinstance(error, BaseException):
        return

    def write() -> None:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        recorder.session.journal(EXIT_LINE, exception=text[:_MAX_EXCEPTION_CHARACTERS])

    recorder.guard.run("exit", write)  # even an error's text may raise
