"""What a search may choose from, and everything in it that makes no sense."""

from dataclasses import dataclass, fields

import numpy as np

from meshscope.plan.candidate import is_recompute
from meshscope.plan.timing.pricing import Job

MAX_COMBINATIONS = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What may be chosen; each field is the list to choose from."""

    global_batch_size: int
    tp: tuple[int, ...]
    pp: tuple[int, ...]
    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    microbatch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    schedules: tuple[str, ...] = ("1f1b",)
    chunks: tuple[int, ...] = (1, 2, 4)
    zero_stages: tuple[int, ...] = (0, 1)
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    sequence_parallel: tuple[bool, ...] = (False, True)
    memory_ratio: float = 1.0
    """Of the device's memory that may be used."""
    top: int = 10

    @property
    def num_combinations(self) -> int:
        sizes = [len(getattr(self, one.name)) for one in fields(self) if one.type is not None
                 and isinstance(getattr(self, one.name), tuple)]  # fmt: skip
        return int(np.prod(sizes))


def make_request(job: Job, global_batch_size: int, **given: tuple[object, ...]) -> Request:
    """Everything sensible for a job; `given` lists take the place of the defaults."""
    cluster, model, stack = job.cluster, job.model, job.recipe.stack
    powers = [2**k for k in range(16)]
    experts = model.experts
    defaults: dict[str, object] = {
        "tp": tuple(t for t in powers if t <= cluster.per_node and cluster.num_devices % t == 0),
        "pp": tuple(
            p for p in range(1, min(model.num_layers, cluster.num_devices, 64) + 1)
            if cluster.num_devices % p == 0
        ),
        "cp": (1,) if model.sequence_length < 16_384 else (1, 2, 4, 8),
        "ep": (1,) if experts is None else tuple(e for e in powers if e <= experts.count),
        "microbatch_sizes": tuple(b for b in (1, 2, 4, 8, 16) if b <= global_batch_size),
        "schedules": stack.schedules,
        "zero_stages": stack.zero_stages,
        "recomputes": stack.recomputes,
    }  # fmt: skip
    chosen = {**defaults, **{name: value for name, value in given.items() if value}}
    return Request(global_batch_size=global_batch_size, **chosen)  # type: ignore[arg-type]


def find_request_problems(request: Request) -> list[str]:
    """Everything in a request that makes no sense."""
    from meshscope.core.schedule_builders import BUILDERS

    problems = []
    if request.global_batch_size < 1:
        problems.append(f"the global batch is {request.global_batch_size}, expected at least 1")
    if not 0 < request.memory_ratio <= 1:
        problems.append(f"the memory ratio is {request.memory_ratio:g}, expected above 0 and to 1")
    if request.top < 1:
        problems.append(f"top is {request.top}, expected at least 1")
    for name in ("tp", "pp", "cp", "ep", "microbatch_sizes", "chunks"):
        wrong = [value for value in getattr(request, name) if value < 1]
        problems += [f"{name} has {value}, expected at least 1" for value in wrong]
    problems += [
        f"there is no schedule {name!r}; use one of {', '.join(BUILDERS)}"
        for name in request.schedules
        if name not in BUILDERS
    ]
    problems += [
        f"zero has {stage}, expected 0 to 3"
        for stage in request.zero_stages
        if stage not in range(4)
    ]
    problems += [
        f"there is no recompute {name!r}; use none, selective, full, every-K or offload"
        for name in request.recomputes
        if not is_recompute(name)
    ]
    if request.num_combinations > MAX_COMBINATIONS:
        problems.append(
            f"the request has {request.num_combinations:,} combinations, at most "
            f"{MAX_COMBINATIONS:,} are searched; give fewer to choose from"
        )
    return problems
