"""What an operation of a straggler trace waits for, in a step of a Megatron-like trainer.

All steps and dp ranks share one pattern, read from the first kept step of the first dp rank:

- compute of a rank runs in the order in which it began; so do the sends and recvs of each type, and
  parameter all-gathers with gradient reduce-scatters;
- the i-th recv of a direction comes after compute i-1 of that direction and before compute i, the
  i-th send after compute i; the first of backward is posted two computes before backward begins;
- the last all-gather of a chunk comes before its first forward;
- last compute → gc → layer-norm gradients → embedding gradients (first and last stage) → gradient
  reduce-scatters → clip → optimizer. With `separate-grads-all-reduce` in the trace, reduce-scatters
  overlap with backward: the first of a chunk waits for the chunk's last backward.

Groups end together: a send with its recv, embedding gradients of first and last stage, clip of all
stages; and across dp ranks: all-gather, reduce-scatter, separate all-reduce and clip.

Wrong for a trainer with other dependencies; `fidelity` shows that.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshscope.core.dependency_order import sort_by_needs
from meshscope.ingest.straggler.straggler_trace import StragglerTrace, TraceOperation

FORWARD, BACKWARD = "forward", "backward"
COMPUTE = {FORWARD: "forward-compute", BACKWARD: "backward-compute"}
PARAMETERS, GRADIENTS = "params-all-gather", "grads-reduce-scatter"
LAYER_NORM, EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
SEPARATE, CLIP = "separate-grads-all-reduce", "optimizer-clip-main-grad"
OPTIMIZER, PAUSE = "optimizer", "gc"
MESSAGES = tuple(f"{way}-{side}" for way in (FORWARD, BACKWARD) for side in ("send", "recv"))
_ACROSS_DP = frozenset((PARAMETERS, GRADIENTS, SEPARATE, CLIP))
COMMUNICATION = frozenset((*MESSAGES, PARAMETERS, GRADIENTS, LAYER_NORM, EMBEDDING, SEPARATE, CLIP))
"""Types whose ideal is the median; that of all others is the mean."""
AXIS_OF_TYPE = {
    **dict.fromkeys(MESSAGES, "pp"),
    **dict.fromkeys((PARAMETERS, GRADIENTS, SEPARATE), "dp"),
    LAYER_NORM: "tp",
    EMBEDDING: "pp",
    CLIP: "world",
}
_PEER = {
    "forward-send": ("forward-recv", 1),
    "forward-recv": ("forward-send", -1),
    "backward-send": ("backward-recv", -1),
    "backward-recv": ("backward-send", 1),
}
_TOLERANCE_S = 5e-5
"""Clock tolerance when deciding whether a message was posted before or after all compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The pattern of a step; operations by their index in `StragglerTrace.operations`."""

    before: tuple[tuple[int, ...], ...]
    """For each operation, the operations that must have ended."""
    groups: tuple[tuple[int, ...], ...]
    """Operations that begin to transfer when the last of them has begun."""
    is_across_dp: tuple[bool, ...]
    """For each group: the dp ranks wait for each other too."""
    order: tuple[int, ...]
    """Groups and single operations in an order in which they can run: indices into `units`."""
    units: tuple[tuple[int, ...], ...]
    """Each group, and each operation that is in none."""


@dataclass(slots=True)
class _Book:
    trace: StragglerTrace
    by_name: dict[tuple[str, int, int], int]
    """Type, sequence and stage to the operation."""
    begin: list[float]
    end: list[float]
    before: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    partner: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """Messages with a peer: type, stage and index among those that have one."""

    def find(self, optype: str, sequence: int, stage: int) -> list[int]:
        operation = self.by_name.get((optype, sequence, stage))
        return [] if operation is None else [operation]

    def list_operations(self, stage: int, *optypes: str) -> list[int]:
        """A stage's operations of these types, as they began."""
        operations = self.trace.operations
        found = [
            operation
            for operation, one in enumerate(operations)
            if one.stage == stage and one.optype in optypes
        ]
        return sorted(
            found, key=lambda p: (self.begin[p], operations[p].sequence, operations[p].optype)
        )

    def chain(self, operations: Sequence[int], after: Sequence[int] = ()) -> None:
        last = list(after)
        for operation in operations:
            self.before[operation].extend(last)
            last = [operation]


def find_dependencies(trace: StragglerTrace) -> Dependencies | str:
    """The pattern of a step, or what is wrong with the trace."""
    operations = trace.operations
    book = _Book(
        trace=trace,
        by_name={(one.optype, one.sequence, one.stage): p for p, one in enumerate(operations)},
        begin=trace.begin_s[:, 0, 0].tolist(),
        end=trace.end_s[:, 0, 0].tolist(),
    )
    is_overlapped = any(one.optype == SEPARATE for one in operations)
    has_dp = len(trace.dp_ranks) > 1 or any(one.optype == GRADIENTS for one in operations)
    for stage in range(trace.num_stages):
        compute = book.list_operations(stage, *COMPUTE.values())
        if not compute:
            return f"stage {stage} has neither forward-compute nor backward-compute"
        problem = _chain_messages(book, stage, compute)
        if problem:
            return problem
        if has_dp:
            _chain_dp(book, stage, compute, is_overlapped=is_overlapped)
        _chain_end(book, stage, compute, has_dp=has_dp, is_overlapped=is_overlapped)
    return _arrange(book)


def _chain_messages(book: _Book, stage: int, compute: list[int]) -> str:
    book.chain(compute)
    for optype in MESSAGES:
        book.chain(book.list_operations(stage, optype))
        problem = _match_compute(book, stage, optype)
        if problem:
            return problem
    kinds = [book.trace.operations[operation].optype for operation in compute]
    first = kinds.index(COMPUTE[BACKWARD]) if COMPUTE[BACKWARD] in kinds else 0
    if first >= 2:
        for optype in ("backward-recv", "backward-send"):
            for operation in book.find(optype, 0, stage):
                book.before[operation].append(compute[first - 2])
    return ""


def _match_compute(book: _Book, stage: int, optype: str) -> str:
    """Puts the messages of a type between the computes that make and need them."""
    way, _, side = optype.partition("-")
    own = book.list_operations(stage, COMPUTE[way])
    messages = book.list_operations(stage, optype)
    if not own or not messages:
        return ""
    last_begin, first_end = max(book.begin[p] for p in own), min(book.end[p] for p in own)
    real = [
        operation
        for operation in messages
        if (side == "recv" and book.begin[operation] <= last_begin + _TOLERANCE_S)
        or (side == "send" and book.end[operation] >= first_end - _TOLERANCE_S)
    ]
    if real and len(real) not in (len(own), len(own) - 1):
        return f"stage {stage} has {len(own)} {COMPUTE[way]} but {len(real)} {optype} in a step"
    # A first recv that would have no sender is sometimes not recorded.
    skipped = 1 if side == "recv" and len(real) == len(own) - 1 else 0
    count = 0
    for index, operation in enumerate(real, start=skipped):
        found = book.find(COMPUTE[way], index, stage)
        if not found:
            return f"stage {stage} has no {COMPUTE[way]} with seq_id {index}"
        if side == "send":
            book.before[operation].extend(found)
        else:
            book.before[found[0]].append(operation)
            book.before[operation].extend(book.find(COMPUTE[way], index - 1, stage))
        if _has_peer(book.trace, optype, book.trace.operations[found[0]]):
            book.partner[operation] = (optype, stage, count)
            count += 1
    return ""


def _has_peer(trace: StragglerTrace, optype: str, compute: TraceOperation) -> bool:
    """Whether the chunk next to the compute's exists: the model's ends have no peer there."""
    chunk = compute.global_chunk if compute.global_chunk >= 0 else compute.stage
    return 0 <= chunk + _PEER[optype][1] < trace.num_chunks * trace.num_stages


def _chain_dp(book: _Book, stage: int, compute: list[int], *, is_overlapped: bool) -> None:
    operations = book.trace.operations
    book.chain(book.list_operations(stage, PARAMETERS, GRADIENTS))
    last_gather = {operations[p].chunk: p for p in sorted(book.list_operations(stage, PARAMETERS))}
    for chunk, gather in last_gather.items():
        forward = [
            operation
            for operation in compute
            if operations[operation].chunk == chunk
            and operations[operation].optype == COMPUTE[FORWARD]
        ]
        if forward:
            book.before[min(forward, key=book.begin.__getitem__)].append(gather)
    if not is_overlapped:
        return
    first_scatter: dict[int, int] = {}
    for operation in book.list_operations(stage, GRADIENTS):
        first_scatter.setdefault(operations[operation].chunk, operation)
    for chunk, scatter in first_scatter.items():
        backward = [
            operation
            for operation in compute
            if operations[operation].chunk == chunk
            and operations[operation].optype == COMPUTE[BACKWARD]
        ]
        if backward:
            book.before[scatter].append(max(backward, key=book.end.__getitem__))


def _chain_end(
    book: _Book, stage: int, compute: list[int], *, has_dp: bool, is_overlapped: bool
) -> None:
    last = [max(compute, key=book.end.__getitem__)]
    pauses = book.find(PAUSE, 0, stage)
    for operation in pauses:
        book.before[operation].extend(last)
    last = pauses or last
    scatters = book.list_operations(stage, GRADIENTS) if has_dp else []
    if is_overlapped:
        last = [*scatters[-1:], *last]
        scatters = book.find(SEPARATE, 0, stage)
    is_end = stage in (0, book.trace.num_stages - 1)
    embedding = book.find(EMBEDDING, 0, stage) if is_end else []
    end = [*book.find(CLIP, 0, stage), *book.find(OPTIMIZER, 0, stage)]
    book.chain([*book.find(LAYER_NORM, 0, stage), *embedding, *scatters, *end], after=last)


def _arrange(book: _Book) -> Dependencies | str:
    groups = _find_groups(book)
    inside = {operation for group in groups for operation in group}
    operations = book.trace.operations
    units = [
        *groups,
        *((operation,) for operation in range(len(operations)) if operation not in inside),
    ]
    unit_of = {operation: index for index, unit in enumerate(units) for operation in unit}
    order = sort_by_needs(
        [{unit_of[b] for operation in unit for b in book.before[operation]} for unit in units]
    )
    if order is None:
        return "its operations wait for each other in a circle"
    return Dependencies(
        before=tuple(
            tuple(dict.fromkeys(book.before[operation])) for operation in range(len(operations))
        ),
        groups=tuple(groups),
        is_across_dp=tuple(operations[group[0]].optype in _ACROSS_DP for group in groups),
        order=tuple(order),
        units=tuple(units),
    )


def _find_groups(book: _Book) -> list[tuple[int, ...]]:
    operations, num_stages = book.trace.operations, book.trace.num_stages
    by_partner = {key: operation for operation, key in book.partner.items()}
    groups: list[tuple[int, ...]] = []
    for operation, (optype, stage, count) in sorted(book.partner.items()):
        peer, shift = _PEER[optype]
        other = by_partner.get((peer, (stage + shift) % num_stages, count))
        if other is None:
            groups.append((operation,))
        elif operation < other:
            groups.append((operation, other))
    for operation, one in enumerate(operations):
        is_alone = one.optype in MESSAGES and operation not in book.partner
        if is_alone or one.optype in (PARAMETERS, GRADIENTS, SEPARATE):
            groups.append((operation,))
    for optype, stages in ((EMBEDDING, {0, num_stages - 1}), (CLIP, set(range(num_stages)))):
        whole = [p for stage in sorted(stages) for p in book.find(optype, 0, stage)]
        if whole:
            groups.append(tuple(whole))
    return groups
