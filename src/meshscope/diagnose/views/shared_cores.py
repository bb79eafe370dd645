"""Doubt about findings that ranks which waited for their cores would show as well.

On a machine that other programs use, or with more threads than cores, steps drift, ranks pause and
work is uneven without any fault of the job. If the training threads waited for a core for about as
long as such a finding costs, the finding is LOW and says so.
"""

from collections.abc import Sequence
from dataclasses import replace

from meshscope.analyze.device.core_queue import read_core_queue
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Finding
from meshscope.diagnose.wording import ratio

_NOISE_CODES = frozenset({"TI001", "PA002", "ST004", "ST005", "LT001"})
"""Findings about patterns that a busy machine has too."""
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
    return [_doubt(one, queued) if one.code in _NOISE_CODES else one for one in findings]


def _doubt(finding: Finding, queued: dict[int, float]) -> Finding:
    ranks = [rank for rank in finding.ranks if rank in queued] or list(queued)
    share = max(queued[rank] for rank in ranks)
    gain = finding.gain
    cost = 0.0 if isinstance(gain, Unavailable) else gain.saved_ratio
    if finding.severity is Severity.LOW or share < max(_MIN_QUEUED_RATIO, _MIN_SHARE * cost):
        return finding
    text = (
        f"its threads waited {ratio(share)} of the time for a core, which other programs, or more "
        "threads than cores, explain as well"
    )
    confidence = Confidence(level=ConfidenceLevel.LOW, text=text)
    return replace(finding, severity=Severity.LOW, confidence=confidence)
