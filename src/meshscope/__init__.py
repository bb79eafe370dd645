"""meshscope: records, explains and diagnoses distributed training runs.

`start` begins recording in this process; `study` explains what was recorded, and `open_run` reads
it as it is. Importing this package imports neither torch nor anything else heavy: names are loaded
when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshscope.capture.communication import (
        CommunicationConfig,
        CommunicationProfiler,
        communication,
        init_communication,
    )
    from meshscope.capture.default import recorder, start
    from meshscope.capture.recorder import Recorder, RecorderConfig
    from meshscope.core.layout import Layout
    from meshscope.core.mesh_layout import layout_from_mesh
    from meshscope.errors import MeshscopeError
    from meshscope.report.run_study import study
    from meshscope.store.read.run import open_run

__version__ = "0.1.0"

_HOMES = {
    "CommunicationConfig": "meshscope.capture.communication",
    "CommunicationProfiler": "meshscope.capture.communication",
    "Layout": "meshscope.core.layout",
    "MeshscopeError": "meshscope.errors",
    "Recorder": "meshscope.capture.recorder",
    "RecorderConfig": "meshscope.capture.recorder",
    "communication": "meshscope.capture.communication",
    "init_communication": "meshscope.capture.communication",
    "layout_from_mesh": "meshscope.core.mesh_layout",
    "open_run": "meshscope.store.read.run",
    "recorder": "meshscope.capture.default",
    "start": "meshscope.capture.default",
    "study": "meshscope.report.run_study",
}

__all__ = [
    "CommunicationConfig",
    "CommunicationProfiler",
    "Layout",
    "MeshscopeError",
    "Recorder",
    "RecorderConfig",
    "__version__",
    "communication",
    "init_communication",
    "layout_from_mesh",
    "open_run",
    "recorder",
    "start",
    "study",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'meshscope' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
