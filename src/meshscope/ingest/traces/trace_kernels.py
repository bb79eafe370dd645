"""What a kernel of a trace does, by its name and by what the profiler says of it.

Communication is told by the libraries' own names, or because the event carries a collective's
name. What is not recognised counts as compute; how many of each were recognised is always said, and
a distributed trace in which no collective was found is a warning.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.trace_columns import Category, Trace, ValueKind
from meshscope.ingest.traces.trace_spans import find_named, match_names
from meshscope.store.read.arrays import Bools, Int64s, Uint8s, find_true


class Work(IntEnum):
    """What the time of a device event counts as."""

    NONE = 0
    """Not on a device."""
    COMPUTE = 1
    COMMUNICATION = 2
    COPY = 3
    """Copies between memories. Filling memory is compute."""


COMMUNICATION_NAME = re.compile(
    r"""
      (?<![a-z])[nr]ccl | \bmsccl
    | \ballreduce(?:Packet|AllPairs|Nvls|RsAg|Fullmesh) | \ballgatherFullmesh
    | \boneccl | \bccl_ | \boneapi::ccl
    | \b(?:allreduce|reduce_?scatter|allgatherv?)_?(?:small|medium|large)
    | \b\w*(?:distribute_to_remote_ranks|gather_from_remote_and_dist_to_rank_pair)
    | \bdeep_ep::(?!(?:legacy::)?layout::) | \bintranode:: | \binternode(?:_ll)?:: | \bhybrid_ep::
    | \bnvshmem | \brocshmem | \bmori(?:::|_shmem) | \bEp(?:Dispatch|Combine)
    | \bmoe_?A(?:ll)?_?(?:2|To)_?A(?:ll)?
    | \b(?:cross_device_reduce|custom_all_reduce|allreduce_prototype|userbuffers_)
    | \breduce_scatter_(?:cross_device|split_\w*dim) | \ballgather_(?:vec|naive|lastdim)\b
    | \bhccl | ^hcom_ | ^(?:Reduce_Inline|RDMA_?Send)
    | \bmtia.*(?:allreduce|all_gather|reduce_scatter)
    | ^(?:all-(?:reduce|gather|to-all)|reduce-scatter|collective-(?:permute|broadcast))
    | \bgloo:
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""NCCL, RCCL, MSCCL and MSCCL++; oneCCL; DeepEP, NVSHMEM, MORI and TensorRT-LLM's exchange of
tokens; all-reduces of vLLM, SGLang, AITER, QuickReduce and Transformer Engine; HCCL; XLA. Laying
out what DeepEP sends moves nothing between devices."""

SYMMETRIC_NAME = re.compile(
    r"multimem_(?:all_reduce|one_shot|two_shot|all_gather|reduce)|(?:one|two)_?shot_?all_?reduce"
    r"|allreduce_fusion_kernel|all_reduce_two_shot|symm_mem",
    re.IGNORECASE,
)
"""Kernels that move data between devices by loads and stores of their own. They occupy the device
as compute does and count as it; how long they took is said beside it."""

COPY_NAME = re.compile(
    r"^(?:_*amd_rocclr_copy|MEMORY_COPY_|dma_request$|Memcpy|MEMCPY_)", re.IGNORECASE
)
"""Kernels with which ROCm copies, and copies where the profiler does not tell them apart."""

WAIT_NAME = re.compile(
    r"^(?:(?:event|notify|capture)_?(?:wait|record|reset)|stream_?wait\w*)$", re.IGNORECASE
)
"""Lines of MTIA and Ascend on which a stream waits for another, or says that it came so far: the
device does no work there."""

KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("reduce_scatter", r"reduce[-_]?scatter"),
        ("all_reduce", r"all[-_]?reduce|cross_device_reduce|one_shot|two_shot"),
        ("all_gather", r"all[-_]?gather"),
        ("all_to_all", r"all[-_]?(?:to|2)[-_]?all|moe_?a2a|dispatch|combine|cached_notify"),
        ("broadcast", r"broadcast|bcast"),
        ("barrier", r"barrier"),
        ("send_recv", r"send_?recv|\bsend|\brecv|_send|_recv|p2p|coalesced|permute"),
        ("gather", r"gather"),
        ("scatter", r"scatter"),
        ("reduce", r"reduce"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognition:
    """How much of a trace's device work was recognised."""

    num_device_events: int
    num_kernels: int
    """With those that communicate; neither fills nor kernels that copy."""
    num_collectives: int
    num_named_collectives: int
    """Of those, with the collective's arguments."""
    num_symmetric: int
    """Kernels that communicate over symmetric memory; counted as compute."""
    num_unseen: int
    """Calls that launched device work in a trace that has none: the profiler was not asked for
    it."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelClasses:
    """One entry per event of the trace."""

    work: Uint8s
    kind: npt.NDArray[np.int8]
    """Place in `kinds` for communication; -1 for everything else."""
    kinds: tuple[str, ...]
    is_symmetric: npt.NDArray[np.bool_]
    """Compute that communicates over symmetric memory."""
    recognition: Recognition


UNKNOWN_KIND = "unknown"
LAUNCHING = ("launch",)
"""Parts of the names of calls that put work onto a device."""


def classify_kernels(trace: Trace) -> KernelClasses:
    """Tells communication, copies and compute apart."""
    events = trace.events
    work = np.zeros(len(events), dtype=np.uint8)
    rows = find_true(events.category == int(Category.KERNEL))
    rows = rows[~_match_names(trace, rows, WAIT_NAME)]
    is_copy = _match_names(trace, rows, COPY_NAME)
    collective = _find_collectives(trace, rows)
    is_named = collective >= 0
    is_communication = _match_names(trace, rows, COMMUNICATION_NAME) | is_named
    is_symmetric = _match_names(trace, rows, SYMMETRIC_NAME) & ~is_communication
    work[rows] = np.where(is_communication, Work.COMMUNICATION, Work.COMPUTE)
    work[rows[is_copy]] = Work.COPY
    work[events.category == int(Category.MEMSET)] = Work.COMPUTE
    work[events.category == int(Category.MEMCPY)] = Work.COPY
    source = np.where(is_named, collective, events.name[rows])
    kind, kinds = _find_kinds(trace, rows[is_communication], source[is_communication])
    is_symmetric_event = np.zeros(len(events), dtype=np.bool_)
    is_symmetric_event[rows[is_symmetric]] = True
    return KernelClasses(
        work=work,
        kind=kind,
        kinds=kinds,
        is_symmetric=is_symmetric_event,
        recognition=_recognise(trace, work, ~is_copy, is_named, is_symmetric),
    )


def name_kind(text: str) -> str:
    """The kind of collective a name speaks of."""
    return next((kind for kind, pattern in KINDS if pattern.search(text)), UNKNOWN_KIND)


def _match_names(trace: Trace, rows: Int64s, pattern: re.Pattern[str]) -> Bools:
    """Which of the events have such a name."""
    return match_names(trace, trace.events.name[rows], pattern.search)


def _find_collectives(trace: Trace, rows: Int64s) -> Int64s:
    """The place in `Trace.strings` of each event's `Collective name`; -1 without one."""
    found = np.full(len(rows), -1, dtype=np.int64)
    said = trace.argument_rows("Collective name")
    said = said[trace.arguments.kind[said] >= int(ValueKind.STRING)]
    if len(rows) and len(said):
        event = trace.arguments.event[said]
        place = np.minimum(np.searchsorted(rows, event), len(rows) - 1)
        is_there = rows[place] == event
        found[place[is_there]] = trace.arguments.value[said[is_there]]
    return found


def _find_kinds(
    trace: Trace, rows: Int64s, source: Int64s
) -> tuple[npt.NDArray[np.int8], tuple[str, ...]]:
    """Of events that communicate, by the texts that say what they do."""
    kinds = (*(kind for kind, _ in KINDS), UNKNOWN_KIND)
    kind = np.full(len(trace.events), -1, dtype=np.int8)
    texts, inverse = np.unique(source, return_inverse=True)
    found = [kinds.index(name_kind(_text(trace.strings, place))) for place in texts.tolist()]
    kind[rows] = np.array(found, dtype=np.int8)[inverse] if len(rows) else 0
    return kind, kinds


def _text(strings: Sequence[str], place: int) -> str:
    # Behind the first bracket stand the types of arguments, which name other things.
    return strings[place].split("(")[0][:400] if place >= 0 else ""


def _recognise(
    trace: Trace,
    work: Uint8s,
    is_kernel: Bools,
    is_named: Bools,
    is_symmetric: Bools,
) -> Recognition:
    num_collectives = int(np.count_nonzero(work == int(Work.COMMUNICATION)))
    num_kernels = int(np.count_nonzero(is_kernel))
    warnings = []
    world_size = 1 if isinstance(trace.world_size, Unavailable) else trace.world_size
    num_unseen = 0 if work.any() else len(find_launching(trace))
    if num_unseen:
        warnings.append(
            f"{num_unseen:,} calls launched device work, and none of it is in the trace: what the "
            "host shows below is not what the device did; record its activity "
            "(ProfilerActivity.CUDA), too"
        )
    elif not num_kernels:
        warnings.append("no kernel in the trace: nothing can be said about a device")
    elif world_size > 1 and not num_collectives and not is_symmetric.any():
        warnings.append(
            f"no communication kernel recognised among {num_kernels:,}, in a trace of "
            f"{world_size:,} ranks: communication times are not known"
        )
    return Recognition(
        num_device_events=int(np.count_nonzero(work)),
        num_kernels=num_kernels,
        num_collectives=num_collectives,
        num_named_collectives=int(np.count_nonzero(is_named)),
        num_symmetric=int(np.count_nonzero(is_symmetric)),
        num_unseen=num_unseen,
        warnings=tuple(warnings),
    )


def find_launching(trace: Trace) -> Int64s:
    """Calls that put work onto a device."""
    return find_named(trace, has_any(*LAUNCHING), Category.RUNTIME)


def has_any(*parts: str) -> Callable[[str], bool]:
    """Whether a name has one of the parts, whatever the case."""

    def has_part(text: str) -> bool:
        lowered = text.lower()
        return any(part in lowered for part in parts)

    return has_part


def name_has(trace: Trace, rows: Int64s, *parts: str) -> Bools:
    """Which events have one of the parts in their name, whatever the case."""
    return match_names(trace, trace.events.name[rows], has_any(*parts))
