"""Starts the recorder in a process below `meshscope run`, once it has imported torch.

Called by `boot/sitecustomize.py`. Nothing is opened until the first record, so torchrun's agent,
loader workers and helper processes leave no trace.
"""

import atexit
import logging
import os
import sys

from meshscope.capture.default import start
from meshscope.capture.recorder import Recorder
from meshscope.core.layout import Layout
from meshscope.errors import LayoutError

logger = logging.getLogger(__name__)

LAYOUT_VARIABLE = "MESHSCOPE_LAYOUT"
EXIT_LINE = "exit"
"""Kind of the journal line that says with which exception a rank's program ended."""
MAX_EXCEPTION_CHARACTERS = 500


def begin_recording() -> None:
    """Starts the process's recorder and has it watch whatever trains."""
    recorder = start(layout=_read_layout(os.environ.get(LAYOUT_VARIABLE, "")))
    recorder.watch_everything()
    # Registered after the recorder's own exit function, so it runs before the files are closed.
    atexit.register(_write_exception, recorder)


def _read_layout(text: str) -> Layout | None:
    if not text:
        return None
    try:
        return Layout.parse(text)
    except LayoutError as error:
        logger.warning("meshscope: %s is ignored: %s", LAYOUT_VARIABLE, error)
        return None


def _write_exception(recorder: Recorder) -> None:
    """The uncaught exception the interpreter is about to end with, if there is one.

    It is read where the interpreter leaves it for debuggers, so that no hook needs replacing.
    """
    error = getattr(sys, "last_value", None)
    if not isinstance(error, BaseException):
        return

    def write() -> None:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        recorder._journal(EXIT_LINE, exception=text[:MAX_EXCEPTION_CHARACTERS])

    recorder.guard.run("exit", write)  # even an error's text may raise
