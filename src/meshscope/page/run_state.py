"""Whether a run goes on, ended, failed or is stuck, in one word and one line."""

from dataclasses import dataclass
from enum import StrEnum

from meshscope.analyze.rank.not_in_traces import NO_END
from meshscope.analyze.rank.rank_summary import ON_PURPOSE
from meshscope.hang.hang import Hang
from meshscope.report import format as form
from meshscope.report.sections.hang_words import make_sentence
from meshscope.store.read.run import Attempt


class StateKind(StrEnum):
    """How a run is."""

    FINISHED = "finished"
    FAILED = "failed"
    STUCK = "stuck"
    LIVE = "live"
    OPEN = "open"
    """No end was written: still going on, or killed; nobody looked."""
    TRACES = "traces"
    """Made of a profiler's traces, which do not say how the job ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state, in words."""

    kind: StateKind
    text: str
    """`Finished`, `Stuck for 15.0 s`."""
    note: str


def describe_state(attempt: Attempt, hang: Hang | None) -> RunState:
    """By what ranks wrote, and by `hang` where somebody looked. A trace says nothing of the end."""
    if attempt.is_from_traces:
        return RunState(kind=StateKind.TRACES, text="Traces", note=NO_END)
    num_ranks, world = len(attempt.ranks), attempt.world_size
    ended = [rank for rank in attempt if rank.closing is not None]
    raised = {rank.rank: rank.exception for rank in attempt if rank.exception is not None}
    note = f"{len(ended)} of {max(num_ranks, world)} ranks finished"
    if hang is not None and hang.is_stuck:
        age = "" if hang.age_ns is None else f" for {form.duration(hang.age_ns)}"
        age = " until it ended" if hang.has_ended else age
        return RunState(kind=StateKind.STUCK, text=f"Stuck{age}", note=make_sentence(hang))
    if raised:
        rank, text = next(
            ((r, t) for r, t in raised.items() if t and not t.startswith(ON_PURPOSE)),
            next(iter(raised.items())),
        )
        kind = StateKind.FINISHED if (text or "").startswith(ON_PURPOSE) else StateKind.FAILED
        word = "Interrupted" if kind is StateKind.FINISHED else "Failed"
        return RunState(
            kind=kind, text=word, note=f"rank {rank}: {form.clean_text(text or '', 120)}"
        )
    if len(ended) == num_ranks:
        return RunState(kind=StateKind.FINISHED, text="Finished", note=note)
    if hang is not None:
        return RunState(kind=StateKind.LIVE, text="Moving", note=note)
    return RunState(kind=StateKind.OPEN, text="No end written", note=f"{note}: running or killed")
