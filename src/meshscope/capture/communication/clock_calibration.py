"""Measures how far this host's clock is from that of rank 0, through the job's own store.

A ping and its answer bracket rank 0's reading of its clock; the shortest round trip of several is
kept, and half of it bounds the error. All ranks must call it at the same point of the program.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NUM_ROUNDS = 12
_REFERENCE_RANK = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """This clock minus the reference rank's, at one moment."""

    reference_rank: int
    offset_ns: int
    uncertainty_ns: int
    at_host_mono_ns: int


def measure_offset(
    store: Any, rank: int, world_size: int, clock: Callable[[], int], prefix: str
) -> ClockOffset:
    """Answers the others on the reference rank, asks it on every other."""
    if rank == _REFERENCE_RANK:
        _answer_all(store, world_size, clock, prefix)
        return ClockOffset(
            reference_rank=rank, offset_ns=0, uncertainty_ns=0, at_host_mono_ns=clock()
        )
    best: ClockOffset | None = None
    for turn in range(NUM_ROUNDS):
        sent_ns = clock()
        store.set(f"{prefix}/{rank}/{turn}/ask", "1")
        there_ns = int(store.get(f"{prefix}/{rank}/{turn}/answer"))
        back_ns = clock()
        middle_ns = (sent_ns + back_ns) // 2
        uncertainty_ns = (back_ns - sent_ns + 1) // 2
        if best is None or uncertainty_ns < best.uncertainty_ns:
            best = ClockOffset(
                reference_rank=_REFERENCE_RANK,
                offset_ns=middle_ns - there_ns,
                uncertainty_ns=uncertainty_ns,
                at_host_mono_ns=middle_ns,
            )
    assert best is not None
    return best


def _answer_all(store: Any, world_size: int, clock: Callable[[], int], prefix: str) -> None:
    for rank in range(world_size):
        if rank == _REFERENCE_RANK:
            continue
        for turn in range(NUM_ROUNDS):
            store.get(f"{prefix}/{rank}/{turn}/ask")
            store.set(f"{prefix}/{rank}/{turn}/answer", str(clock()))
