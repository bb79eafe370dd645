"""Makes chosen things go wrong at chosen ranks and steps: a test tool, off by default.

What injects needs torch and is loaded when it is used; reading and checking faults does not.
"""

from typing import TYPE_CHECKING, Any

from meshscope.engine.faults.kinds import Fault, FaultKind
from meshscope.engine.faults.text import (
    fault_from_mapping,
    find_fault_problems,
    parse_fault,
    write_fault,
)

if TYPE_CHECKING:
    from meshscope.engine.faults.injector import (
        FaultInjector,
        FaultLog,
        FaultRecorder,
        FaultSpan,
        InjectedFault,
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from meshscope.engine.faults import injector

    return getattr(injector, name)
