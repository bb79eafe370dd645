"""What an allocation was for, by the stack it was made in.

Rules of thumb over the frames, the first that fits: torch/optim → optimizer state; running backward
→ gradients (of parameters or of activations: a stack does not show which);
torch/distributed → communication; a module's forward → activations (and temporaries of forward);
a module's construction or move → parameters. Wrong where a program names its files like torch's,
and blind where snapshots were made without stacks. The site is the innermost frame outside of
torch; the module the innermost `forward` outside of torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.ingest.snapshot.snapshot_columns import Frame, Snapshot
from meshscope.store.read.arrays import Int8s, Int64s

UNKNOWN = "no stack"
OTHER = "other"
CATEGORIES = (
    UNKNOWN,
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "communication",
    OTHER,
)
_BACKWARD_NAMES = frozenset({"_engine_run_backward", "backward"})
_DECISIVE = ("optimizer state", "communication", "gradients")
_MOVING_NAMES = frozenset({"_apply", "to", "cuda", "half", "bfloat16", "float", "to_empty"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an allocation was made."""

    category: str
    place: str
    """`gpt.py:10 forward`; empty without a stack."""
    module: str
    """`gpt.py:10` of a `forward`; empty outside of all."""


def find_site(frames: Sequence[Frame]) -> Site:
    """The site of one stack, innermost frame first."""
    if not frames:
        return Site(category=UNKNOWN, place="", module="")
    own = [frame for frame in frames if not _is_library(frame)]
    shown = own[0] if own else frames[0]
    module = next((f"{_base(f)}:{f.line}" for f in own if f.name == "forward"), "")
    return Site(
        category=_categorize(frames),
        place=f"{_base(shown)}:{shown.line} {shown.name}",
        module=module,
    )


def _categorize(frames: Sequence[Frame]) -> str:
    hints = [_hint(frame) for frame in frames]
    decided = next((hint for hint in hints if hint in _DECISIVE), None)
    if decided is not None:
        return decided
    return next((hint for hint in ("activations", "parameters") if hint in hints), OTHER)


def _hint(frame: Frame) -> str:
    """A frame's category: decisive, or used if no other frame decides."""
    path, name = frame.filename, frame.name
    if "torch/optim/" in path:
        return "optimizer state"
    if "torch/distributed/" in path:
        return "communication"
    # Backward calls C++ without a Python frame of torch's own between.
    is_engine = "::evaluate_function" in name or "Engine::thread_main" in name
    if is_engine or ("torch/autograd/" in path and name in _BACKWARD_NAMES):
        return "gradients"
    in_modules = "torch/nn/modules/" in path
    if name == "forward" or (in_modules and name == "_call_impl"):
        return "activations"
    if in_modules and (name in _MOVING_NAMES or name == "__init__"):
        return "parameters"
    return OTHER


def categorize_stacks(snapshot: Snapshot) -> Int8s:
    """Index in CATEGORIES of every stack, as `find_site` decides."""
    hints = np.array(
        [CATEGORIES.index(_hint(frame)) for frame in snapshot.frames] or [0], dtype=np.int8
    )
    said = hints[snapshot.stack_frames]
    owner_of = snapshot.stack_begin
    found = np.full(snapshot.num_stacks, CATEGORIES.index(OTHER), dtype=np.int8)
    for name in ("parameters", "activations"):
        found[_find_owners(owner_of, np.flatnonzero(said == CATEGORIES.index(name)))] = (
            CATEGORIES.index(name)
        )
    decisive = np.flatnonzero(np.isin(said, [CATEGORIES.index(name) for name in _DECISIVE]))
    # From the last to the first, so that the innermost decides.
    decisive = decisive[::-1]
    found[_find_owners(owner_of, decisive)] = said[decisive]
    found[np.diff(owner_of) == 0] = CATEGORIES.index(UNKNOWN)
    return found


def _find_owners(stack_begin: Int64s, indices: Int64s) -> Int64s:
    return np.searchsorted(stack_begin, indices, side="right") - 1


def _is_library(frame: Frame) -> bool:
    path = frame.filename
    return "/torch/" in path or "site-packages/" in path or path in ("", "??")


def _base(frame: Frame) -> str:
    return frame.filename.replace("\\", "/").rsplit("/", 1)[-1] or "?"
