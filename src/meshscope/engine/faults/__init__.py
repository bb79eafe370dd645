"""Makes chosen things go wrong at chosen ranks and steps: a test tool, off by default."""

from meshscope.engine.faults.injector import (
    FaultInjector,
    FaultLog,
    FaultRecorder,
    FaultSpan,
    InjectedFault,
)
from meshscope.engine.faults.kinds import Fault, FaultKind
from meshscope.engine.faults.text import (
    fault_from_mapping,
    find_fault_problems,
    parse_fault,
    write_fault,
)

__all__ = [
    "Fault",
    "FaultInjector",
    "FaultKind",
    "FaultLog",
    "FaultRecorder",
    "FaultSpan",
    "InjectedFault",
    "fault_from_mapping",
    "find_fault_problems",
    "parse_fault",
    "write_fault",
]
