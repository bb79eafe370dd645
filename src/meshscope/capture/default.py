"""The process's own recorder: one, started on first use."""

import logging
import os
import sys
from dataclasses import fields
from typing import Any

from meshscope.capture.config import RecorderConfig, check_names
from meshscope.capture.identity import RUN_DIR_VARIABLE
from meshscope.capture.lifetime import call_before_close
from meshscope.capture.recorder import Recorder
from meshscope.core.layout import Layout
from meshscope.store.write.journal import EXIT_LINE

logger = logging.getLogger(__name__)

_MAX_EXCEPTION_CHARACTERS = 500

_default: Recorder | None = None


def start(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    layout: Layout | str | None = None,
    attempt: int | None = None,
    config: Any = None,
    **settings: Any,
) -> Recorder:
    """Starts the process's recorder, or returns it if it is running (as under `meshscope run`).

    `config` are the run's hyper-parameters: a mapping, dataclass, namespace or object with
    `to_dict`; `layout` is the mesh, also as text (`dp=4,tp=2`). `settings` are those of
    `RecorderConfig`. Nothing is written until the first step or phase.
    `attempt` numbers this launch of the job on all ranks alike, where the launcher does not.
    Below `meshscope run` its directory is used instead of `run_dir`: the user looks there.
    """
    global _default
    check_names(RecorderConfig, settings)
    if isinstance(config, RecorderConfig):
        settings, config = {**_read_fields(config), **settings}, None
    launched_dir = os.environ.get(RUN_DIR_VARIABLE)
    if run_dir is not None and launched_dir:
        logger.warning("meshscope run records into %s, not into %s", launched_dir, run_dir)
        run_dir = None
    if _default is not None and not _default.is_closed:
        if layout is not None:
            _default.set_layout(layout)
        if settings:
            _default.configure(**settings)
    else:
        own = RecorderConfig(**settings)
        _default = Recorder(run_dir, layout=layout, config=own, attempt=attempt)
        _default.watch_communication()
        call_before_close(_write_exception)
    if config is not None:
        _default.set_config(config)
    return _default


def _read_fields(config: RecorderConfig) -> dict[str, Any]:
    return {one.name: getattr(config, one.name) for one in fields(config)}


def recorder() -> Recorder:
    """The process's recorder; one is started with the defaults if there is none."""
    return find_recorder() or start()


def find_recorder() -> Recorder | None:
    """The process's recorder, if it is running."""
    return None if _default is None or _default.is_closed else _default


def _write_exception() -> None:
    """The uncaught exception the process is about to end with, if there is one."""
    recorder = _default

    def write() -> None:
        error = _find_exception()
        if error is not None and recorder is not None:
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            recorder.session.journal(EXIT_LINE, exception=text[:_MAX_EXCEPTION_CHARACTERS])

    if recorder is not None:
        recorder.guard.run("exit", write)  # even an error's text may raise


def _find_exception() -> BaseException | None:
    """Read where the interpreter leaves it for debuggers, so that no hook needs replacing.

    A child of multiprocessing comes here while it is still under way; torch's has caught it there
    and exits with a code.
    """
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = (error.__context__ or error) if error.code else None
    return error if isinstance(error, BaseException) else None
