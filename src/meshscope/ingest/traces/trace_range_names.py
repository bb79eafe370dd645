"""What the names of ranges that a program opened itself (`record_function`, NVTX) say of phases.

A phase is a word of the name (`forward`, `fwd`, `backward pass`, `optimizer.step`), or the letter
in brackets that pipelines write behind the part of a layer: `attn(F)`, `mlp(B)`, `mlp(W)`. Ranges
that libraries open say nothing of the program's phases: DDP's forward leaves the loss out, FSDP's
hooks run inside of backward.
"""

import re
from enum import StrEnum


class RangePhase(StrEnum):
    """What a range is named for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weight gradient"
    """The part of a backward that makes gradients of weights, where it is split off."""
    OPTIMIZER = "optimizer"


_PATTERNS = tuple(
    (phase, re.compile(pattern))
    for phase, pattern in (
        (
            RangePhase.WEIGHTS,
            r"\(W\)\s*$|(?:^|[^a-z])(?:wgrad|weight[ _-]?grad(?:ient)?s?)(?:[^a-z]|$)",
        ),
        (RangePhase.BACKWARD, r"\(B\)\s*$|(?:^|[^a-z])(?:backward|bwd|bprop|backprop)(?:[^a-z]|$)"),
        (RangePhase.FORWARD, r"\(F\)\s*$|(?:^|[^a-z])(?:forward|fwd|fprop)(?:[^a-z]|$)"),
        (
            RangePhase.OPTIMIZER,
            r"(?:^|[^a-z])(?:optimi[sz]er|optim|opt)[ _.-]?(?:step)?(?:[^a-z]|$)"
            r"|^(?:parameter|weight)s?[ _-]update$",
        ),
    )
)
_LIBRARY = re.compile(
    r"::|^Optimizer\.|^ProfilerStep#|^DistributedDataParallel\.|^FullyShardedDataParallel"
    r"|^enumerate\(DataLoader\)|^DataParallel\.|^(?:nccl|gloo|rccl|xccl|hccl|mpi|ucc):"
    r"|^Torch-Compiled Region|^CompiledFunction|^## Call CompiledFxGraph|\(dynamo_timed\)|^PyTorch "
    r"|^\s*$|^Pregraph bytecode|^TorchDynamo|^Inductor"
)


def is_librarys(name: str) -> bool:
    """Whether a library opens ranges of that name."""
    return bool(_LIBRARY.search(name))


def name_phase(name: str) -> RangePhase | None:
    """The phase that a user's range is named for; None for any other name."""
    if is_librarys(name) or "zero" in name.lower():  # zero_grad belongs to no phase
        return None
    # The letters in brackets are capitals; words may be written in any way.
    for phase, pattern in _PATTERNS:
        if pattern.search(name) or pattern.search(name.lower()):
            return phase
    return None
