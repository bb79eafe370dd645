"""Ranks that stopped without a closing line, with an error, or before the others; and evidence.

A rank that ends normally writes a closing line. A rank without it is dead if its process is gone,
or if others finished or wrote records more than `_SILENT_NS` later; it is alive if its process is.
If no rank has the line and nothing is known about the processes, nothing is claimed: the run may
still be going on. One dead rank takes others with it. `hang` decides which was first, from who
waited for whom and whose error came first.
"""

from dataclasses import dataclass

from meshscope.analyze.rank.caught_errors import as_int
from meshscope.analyze.rank.rank_summary import RankState, RankSummary
from meshscope.analyze.study import Study
from meshscope.core.unavailable import known
from meshscope.diagnose.finding import ConfidenceLevel, Evidence
from meshscope.diagnose.wording import name_ranks
from meshscope.hang.hang import diagnose_hang
from meshscope.hang.hang_rules import Reason, VerdictKind
from meshscope.hang.processes import Life, look_at_process, this_machine
from meshscope.hang.rank_look import read_exception

_SILENT_NS = 60_000_000_000
"""A rank this long behind the last record of any rank no longer writes."""
_ON_PURPOSE = ("KeyboardInterrupt", "SystemExit")
"""Exceptions of programs that were ended on purpose."""
_ENDS = (Reason.KILLED, Reason.LOST, Reason.RAISED, Reason.LEFT)
"""Reasons in a verdict that are ends of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedRanks:
    """Ranks that stopped too early."""

    ranks: tuple[int, ...]
    """Those that stopped first; empty: none is known to have stopped."""
    is_whole_job: bool
    """Every rank stopped without an end, at the same step."""
    how: str
    """`without an end`, `20 steps before the others`."""
    where: str
    """` after step 39, in backward`."""
    last_step: int | None
    num_job_steps: int
    num_unknown: int
    """Ranks without a closing line about which nothing more is known."""
    level: ConfidenceLevel
    reason: str
    evidence: tuple[Evidence, ...]


def find_stopped_ranks(study: Study) -> StoppedRanks:
    is_open = [rank for rank in study.ranks if rank.state is RankState.OPEN]
    dead, num_unknown, is_sure = _find_dead(study, is_open)
    raised = _find_raised(study)
    culprits = _find_first(study, dead, raised)
    is_whole_job = bool(dead) and len(culprits) == len(study.ranks) > 1
    last_step = _common_step(culprits)
    texts = [raised[rank.rank] for rank in culprits if rank.rank in raised]
    return StoppedRanks(
        ranks=tuple(rank.rank for rank in culprits),
        is_whole_job=is_whole_job,
        how=_describe_end(texts, is_dead=bool(dead)),
        where=_describe_moment(culprits, last_step),
        last_step=last_step,
        num_job_steps=study.steps.num_steps,
        num_unknown=num_unknown,
        level=ConfidenceLevel.HIGH if is_sure or texts else ConfidenceLevel.MEDIUM,
        reason=_explain(dead, texts, is_sure=is_sure),
        evidence=(
            *(Evidence(name="exception", value=text) for text in texts[:2]),
            *(
                Evidence(name=f"steps of rank {rank.rank}", value=rank.num_steps, unit="steps")
                for rank in culprits[:8]
            ),
        ),
    )


def _find_raised(study: Study) -> dict[int, str]:
    """Rank to the exception its program ended with, unless it was ended on purpose."""
    texts = {recording.rank: read_exception(recording) for recording in study.attempt}
    return {rank: text for rank, text in texts.items() if text and not text.startswith(_ON_PURPOSE)}


def _find_first(study: Study, dead: list[RankSummary], raised: dict[int, str]) -> list[RankSummary]:
    """The ranks that stopped first: by the verdict on the job, else by the number of steps."""
    short = set(study.health.short_ranks) - _find_cut(study)
    if not dead and not raised and not short:
        return []
    hang = diagnose_hang(study.attempt, this_machine(), asks_stacks=False)
    named = {culprit.rank for culprit in hang.culprits if culprit.reason in _ENDS}
    gone = {rank.rank for rank in dead}
    ends = gone | set(raised) | short
    chosen = named & ends if hang.kind is VerdictKind.DEAD else set()
    # One that ended in order is the first, too, where the others failed for want of it.
    chosen |= {culprit.rank for culprit in hang.culprits if culprit.reason is Reason.LEFT}
    first = [rank for rank in study.ranks if rank.rank in (chosen or gone or ends)]
    return [rank for rank in first if rank.rank in short] or first


def _find_cut(study: Study) -> set[int]:
    """Ranks that made more steps than there are records of, by their closing lines."""
    found = set()
    for rank in study.ranks:
        last_step = as_int((study.attempt.ranks[rank.rank].closing or {}).get("last_step"))
        recorded = known(rank.last_step)
        if last_step is not None and last_step > (-1 if recorded is None else recorded):
            found.add(rank.rank)
    return found


def _find_dead(study: Study, is_open: list[RankSummary]) -> tuple[list[RankSummary], int, bool]:
    """The dead ranks, the number of unknown ones, and whether death is known from the process."""
    here = this_machine()
    lives = {
        rank.rank: look_at_process(study.attempt.ranks[rank.rank].header, here) for rank in is_open
    }
    gone = [rank for rank in is_open if lives[rank.rank].is_gone]
    unknown = [rank for rank in is_open if lives[rank.rank].life is Life.UNKNOWN]
    has_finished = len(is_open) < len(study.ranks)
    newest = max(map(_last_record_ns, study.ranks), default=0)
    silent = [
        rank for rank in unknown if has_finished or newest - _last_record_ns(rank) > _SILENT_NS
    ]
    dead = sorted([*gone, *silent], key=lambda rank: rank.rank)
    return dead, len(unknown) - len(silent), bool(gone) and not silent


def _last_record_ns(rank: RankSummary) -> int:
    return known(rank.last_record_unix_ns) or 0


def _common_step(ranks: list[RankSummary]) -> int | None:
    steps = [step for rank in ranks if (step := known(rank.last_step)) is not None]
    return min(steps, default=None)


def _describe_moment(ranks: list[RankSummary], last_step: int | None) -> str:
    phases = {rank.open_phase for rank in ranks if rank.open_phase}
    where = "" if last_step is None else f" after step {last_step}"
    return f"{where}, in {phases.pop()}" if len(phases) == 1 else where


def _describe_end(texts: list[str], *, is_dead: bool) -> str:
    if texts:
        return f"with {texts[0].partition(':')[0]}"
    return "without an end" if is_dead else "before the others"


def _explain(dead: list[RankSummary], texts: list[str], *, is_sure: bool) -> str:
    if texts:
        return "the exception was recorded; it came before the others'"
    if not dead:
        return "counted; it wrote its closing line"
    who = name_ranks([rank.rank for rank in dead])
    return f"{who}: the process is gone" if is_sure else f"{who}: silent while others wrote"
