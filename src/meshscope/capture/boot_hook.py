"""Starts the recorder in a process below `meshscope run`, once it has imported torch.

Called by `boot/sitecustomize.py`. Nothing is opened until the first record, so torchrun's agent,
loader workers and helper processes leave no trace.
"""

import logging
import os
from typing import Any

from meshscope.capture.config import OFF_VARIABLE, read_off
from meshscope.capture.default import start
from meshscope.capture.identity import LAYOUT_VARIABLE, PROFILING_VARIABLE
from meshscope.core.layout import Layout
from meshscope.errors import LayoutError, UsageError

logger = logging.getLogger(__name__)


def begin_recording() -> None:
    """Starts the process's recorder and attaches it to the training."""
    recorder = start(layout=_read_layout(os.environ.get(LAYOUT_VARIABLE, "")), **_read_settings())
    recorder.watch_everything()
    profiling = os.environ.get(PROFILING_VARIABLE, "")
    if profiling:
        try:
            recorder.profile(profiling)
            recorder.profile_memory_soon()
        except UsageError as error:
            logger.warning("meshscope: %s is ignored: %s", PROFILING_VARIABLE, error)


def _read_settings() -> dict[str, Any]:
    try:
        return {**read_off(os.environ.get(OFF_VARIABLE, ""))}
    except UsageError as error:
        logger.warning("meshscope: %s is ignored: %s", OFF_VARIABLE, error)
        return {}


def _read_layout(text: str) -> Layout | None:
    if not text:
        return None
    try:
        return Layout.parse(text)
    except LayoutError as error:
        logger.warning("meshscope: %s is ignored: %s", LAYOUT_VARIABLE, error)
        return None
