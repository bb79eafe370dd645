"""What a communication operation is: its kinds, its outcomes, its size and its bandwidth.

The size of an operation is that of nccl-tests: the whole array, counted once.

| kind | size |
|---|---|
| all_reduce, reduce, broadcast, send, recv | the tensor |
| all_gather, gather | what is gathered: the shards of all ranks together |
| reduce_scatter, scatter | what is scattered: the shards of all ranks together |
| all_to_all | what this rank hands in for all ranks together |
| barrier | 0 |

Algorithm bandwidth is size over transfer time; bus bandwidth is that times `bus_factor`, so that
it can be compared with the speed of a link for any kind and number of ranks.
"""

from enum import IntEnum

STEP_SHIFT = 14
"""Bits of a sequence number that count within a step, where it says the step, too."""


class Kind(IntEnum):
    """Kinds of operations. The numbers are written into runs: never change one."""

    CUSTOM = 0
    """Timed by the program, or an operation of torch that this version has no name for."""
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    REDUCE = 5
    SCATTER = 6
    GATHER = 7
    SEND = 8
    RECV = 9
    BARRIER = 10
    ALL_TO_ALL = 11

    @property
    def label(self) -> str:
        """`all_reduce`."""
        return self.name.lower()


POINT_TO_POINT = frozenset((Kind.SEND, Kind.RECV))

SYMMETRIC = frozenset((Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.BARRIER))
"""No rank can leave before every rank has entered, and all leave at about the same time. An
all-to-all is not among them: with uneven splits a rank may have nothing to wait for."""

ROOTED = frozenset((Kind.BROADCAST, Kind.REDUCE, Kind.SCATTER, Kind.GATHER))


def kind_from_label(label: str) -> Kind:
    """`all_reduce`, `AllReduce`, `all-reduce` → Kind.ALL_REDUCE; ValueError for anything else."""
    plain = label.replace("_", "").replace("-", "").lower()
    for kind in Kind:
        if kind.name.replace("_", "").lower() == plain:
            return kind
    known = ", ".join(kind.label for kind in Kind)
    raise ValueError(f"{label!r} is no kind of operation; kinds: {known}")


class Outcome(IntEnum):
    """How an operation ended. The numbers are written into runs: never change one."""

    UNFINISHED = 0
    """Entered, and no end was seen."""
    OK = 1
    ERROR = 2
    TIMEOUT = 3
    UNSEEN = 4
    """Not seen: the program dropped its handle without waiting."""

    @property
    def label(self) -> str:
        """`ok`."""
        return self.name.lower()


class EndSource(IntEnum):
    """What the end time of an operation was read from."""

    NONE = 0
    WAIT = 1
    """The host's wait returned; it had begun before the operation was complete: exact."""
    WAIT_LATE = 2
    """The host's wait returned, or a handle was asked, when it was complete already: a bound."""
    FUTURE = 3
    """torch called back at completion; late by the time the interpreter was busy."""
    DEVICE = 4
    """An event on the accelerator's stream."""
    DEVICE_LATE = 5
    """An event that other work on the stream may have held up: a bound."""
    CALL = 6
    """The call itself returned when everything was over, or it was timed by the program."""


IS_EXACT_END = frozenset((EndSource.WAIT, EndSource.FUTURE, EndSource.DEVICE, EndSource.CALL))


DTYPES = (
    "", "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
    "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "uint16", "uint32", "uint64", "(mixed)", "(other)",
)  # fmt: skip
"""A number format is written as its index in this list: only ever append."""


def bus_factor(kind: Kind, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth; 0 where nothing has to move."""
    if kind is Kind.BARRIER or num_ranks < 1:
        return 0.0
    if kind is Kind.ALL_REDUCE:
        return 2 * (num_ranks - 1) / num_ranks
    if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL):
        return (num_ranks - 1) / num_ranks
    return 1.0


def size_bucket(size_bytes: int) -> int:
    """Lower end of the power-of-four bucket that holds a size: 0, 1, 4, 16, … 4 MiB, 16 MiB."""
    if size_bytes <= 0:
        return 0
    return 1 << ((size_bytes.bit_length() - 1) & ~1)
