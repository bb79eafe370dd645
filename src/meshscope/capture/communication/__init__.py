"""The communication profiler: every operation of this process, counted and timed.

    from meshscope.capture.communication import communication
    with communication().timed("all_reduce", size_bytes=n, group="dp", group_size=8):
        …
    print(communication().summary())

`profiler` is the public face, `blocks` time, `ledger` keeps statistics (`stats`) and events
(`events`), `groups` numbers operations and draws the sample, `default` is the process's own.
"""

from meshscope.capture.communication.config import CommunicationConfig
from meshscope.capture.communication.default import (
    communication,
    init_communication,
    reset_communication,
)
from meshscope.capture.communication.events import CommunicationEvent
from meshscope.capture.communication.groups import GroupInfo
from meshscope.capture.communication.profiler import CommunicationProfiler
from meshscope.capture.communication.stats import OperationStats

__all__ = [
    "CommunicationConfig",
    "CommunicationEvent",
    "CommunicationProfiler",
    "GroupInfo",
    "OperationStats",
    "communication",
    "init_communication",
    "reset_communication",
]
