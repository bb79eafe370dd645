"""Doubt about findings that ranks which waited for their cores would show as well.

On a machine that other programs use, or with more threads than cores, steps drift, ranks pause and
work is uneven without any fault of the job. If the training threads waited for a core for about as
long as such a finding costs, the finding is LOW and says so. Of ranks that take longer than others
only what they waited more than these counts.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from meshscope.analyze.device.core_queue import read_core_queue
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Finding
from meshscope.diagnose.wording import ratio

_NOISE_CODES = frozenset({"TI001", "PA002", "PP004", "ST004", "ST005", "LT001", "LK001"})
"""Findings about patterns that a busy machine has too."""
_SLOWED_CODES = frozenset({"IN002"})
"""Findings about what all ranks do, which takes longer where threads wait: all of it is asked."""
_MAX_SLOWED_RATIO = 0.2
"""Of the step: what takes more of it is no mere effect of waiting, which slows the rest, too."""
_MIN_QUEUED_RATIO = 0.02
_MIN_SHARE = 0.5
"""Of what a finding costs that threads must have waited for cores."""


def _read_queues(study: Study) -> dict[int, float]:
    found = {
        rank: known(read_core_queue(study.attempt.ranks[rank])) for rank in study.attempt.ranks
    }
    return {rank: one.queued_ratio for rank, one in found.items() if one is not None}


def doubt_noise(findings: Sequence[Finding], context: Context) -> list[Finding]:
    queued = context.study.get(_read_queues)
    if isinstance(queued, Unavailable) or not queued:
        return list(findings)
    return [
        _doubt(one, queued, 1.0 if one.code in _SLOWED_CODES else _MIN_SHARE)
        if one.code in _NOISE_CODES | _SLOWED_CODES
        else one
        for one in findings
    ]


def may_be_queueing(context: Context, ranks: Sequence[int], cost_ratio: float) -> bool:
    """Whether waiting for cores may explain that these ranks take longer by a share of the step."""
    queued = context.study.get(_read_queues)
    if isinstance(queued, Unavailable) or not queued:
        return True
    return _measure_share(ranks, queued)[0] >= max(_MIN_QUEUED_RATIO, _MIN_SHARE * cost_ratio)


def is_queueing(context: Context, ranks: Sequence[int], cost_ratio: float) -> bool:
    """Whether these ranks waited for cores longer than others by all that they take longer."""
    queued = context.study.get(_read_queues)
    if isinstance(queued, Unavailable) or not queued:
        return False
    share, is_beyond = _measure_share(ranks, queued)
    return is_beyond and share >= max(_MIN_QUEUED_RATIO, cost_ratio)


def _measure_share(ranks: Sequence[int], queued: dict[int, float]) -> tuple[float, bool]:
    """Of the time, the most that one of the ranks waited; and whether it is beyond the others'."""
    chosen = [rank for rank in ranks if rank in queued] or list(queued)
    share = max(queued[rank] for rank in chosen)
    others = [one for rank, one in queued.items() if rank not in chosen]
    return (share - median(others), True) if others else (share, False)


def _doubt(finding: Finding, queued: dict[int, float], least_share: float) -> Finding:
    share, is_beyond = _measure_share(finding.ranks, queued)
    gain = finding.gain
    cost = 0.0 if isinstance(gain, Unavailable) else gain.saved_ratio
    if finding.severity is Severity.LOW or share < max(_MIN_QUEUED_RATIO, least_share * cost):
        return finding
    if finding.code in _SLOWED_CODES and cost >= _MAX_SLOWED_RATIO:
        return finding
    text = (
        f"its threads waited {ratio(share)} of the time for a core"
        f"{', more than others,' if is_beyond else ','} which other programs, or more threads than "
        "cores, explain as well"
    )
    confidence = Confidence(level=ConfidenceLevel.LOW, text=text)
    return replace(finding, severity=Severity.LOW, confidence=confidence)
