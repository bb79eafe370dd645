"""The process's own communication profiler: one, made on first use."""

from meshscope.capture.communication.config import CommunicationConfig
from meshscope.capture.communication.profiler import CommunicationProfiler, Listener
from meshscope.errors import UsageError

_made: dict[str, CommunicationProfiler] = {}
"""At most one entry. `setdefault` is atomic, so two threads get the same one without a lock."""
_OURS = "default"
_listeners: dict[str, Listener] = {}
"""At most one entry: the recorder, which may come before the profiler is made."""


def communication() -> CommunicationProfiler:
    """The process's profiler; one is made with the defaults if there is none."""
    found = _made.get(_OURS)
    return _keep(CommunicationProfiler()) if found is None else found


def init_communication(config: CommunicationConfig | None = None) -> CommunicationProfiler:
    """Makes the process's profiler; a UsageError when there is one already."""
    made = CommunicationProfiler(config)
    if _keep(made) is not made:
        raise UsageError(
            "init_communication was called, but this process has a communication profiler already; "
            "call it before anything else uses communication(), or change settings with "
            "communication().configure(…)"
        )
    return made


def _keep(made: CommunicationProfiler) -> CommunicationProfiler:
    kept = _made.setdefault(_OURS, made)
    kept.on_event = _listeners.get(_OURS)
    return kept


def listen(listener: Listener | None) -> None:
    """Calls `listener` with every operation that the program times, from now on."""
    if listener is None:
        _listeners.pop(_OURS, None)
    else:
        _listeners[_OURS] = listener
    found = _made.get(_OURS)
    if found is not None:
        found.on_event = listener


def reset_communication() -> None:
    """Forgets the process's profiler, so that the next use makes a new one. For tests."""
    _made.clear()
