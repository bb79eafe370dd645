"""What an allocation was for, by the stack it was made in.

Rules of thumb over the frames, the first that fits: torch/optim → optimizer state; running backward
→ gradients (of parameters and of activations: a stack does not tell them apart);
torch/distributed → communication; a module's forward → activations (and temporaries of forward);
a module's construction or move → parameters. Wrong where a program names its files like torch's,
and blind where snapshots were made without stacks. The site is the innermost frame outside of
torch; the module the innermost `forward` outside of torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshscope.store.snapshot_columns import Frame

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
_MOVING_NAMES = frozenset({"_apply", "to", "cuda", "half", "bfloat16", "float", "to_empty"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an allocation was made."""

    category: str
    place: str
    """`gpt.py:10 forward`; empty without a stack."""
    module: str
    """`gpt.py:10`, of a `forward`; empty outside of all."""


def find_site(frames: Sequence[Frame]) -> Site:
    """Of one stack, innermost frame first."""
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
    has_forward = is_moved = False
    for frame in frames:
        path = frame.filename
        if "torch/optim/" in path:
            return "optimizer state"
        if "torch/distributed/" in path:
            return "communication"
        if "torch/autograd/" in path and frame.name in _BACKWARD_NAMES:
            return "gradients"
        in_modules = "torch/nn/modules/" in path
        has_forward |= frame.name == "forward" or (in_modules and frame.name == "_call_impl")
        is_moved |= in_modules and (frame.name in _MOVING_NAMES or frame.name == "__init__")
        # Backward calls C++ without a Python frame of torch's own between.
        if "::evaluate_function" in frame.name or "Engine::thread_main" in frame.name:
            return "gradients"
    if has_forward:
        return "activations"
    return "parameters" if is_moved else OTHER


def _is_library(frame: Frame) -> bool:
    path = frame.filename
    return "/torch/" in path or "site-packages/" in path or path in ("", "??")


def _base(frame: Frame) -> str:
    return frame.filename.replace("\\", "/").rsplit("/", 1)[-1] or "?"
