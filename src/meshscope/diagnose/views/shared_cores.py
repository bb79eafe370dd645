"""Doubt about findings that ranks which waited for their cores would show as well.

On a machine that other programs use, or with more threads than cores, steps drift, ranks pause and
work is uneven without any fault of the job. If the training threads waited for a core for about as
long as such a finding costs, the finding is LOW and says so. Of ranks that take longer than others
only what they waited more than these counts; of ranks that pause now and then, all of it: others
that wait as long pause at other times. Where ranks outnumber cores a short wait for data is one for
a core: the loader's workers and other ranks have them.

Ranks that compute on cores are as fast as these, and two cores of one machine differ by some per
cent with nothing done to either: a rank that is slow by less is LOW there.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from meshscope.analyze.device.core_queue import CoreQueue, read_core_queue
from meshscope.analyze.job.job import Job
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Estimate, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.wording import duration, ratio
from meshscope.simulate.what_if import Edit, Gain
from meshscope.store.schema import OperationFlag

_NOISE_CODES = frozenset({"TI001", "PA002", "PP004", "ST003", "ST004", "ST005", "LT001", "LK001"})
"""Findings about patterns that a busy machine has too."""
_SLOWED_CODES = frozenset({"IN002"})
"""Findings about what all ranks do, which takes longer where threads wait: all of it is asked."""
_CORE_CODES = frozenset({"ST001", "ST002", "LT001"})
"""Findings about ranks that take longer than others, which a slower core shows as well."""
_MAX_CORE_RATIO = 0.05
"""Of the step: what a core may be slower than another one."""
_MIN_RUN_RATIO = 0.5
"""Of the time that a thread has a core from which it is what computes."""
_PAUSE_CODES = frozenset({"PA002"})
_MAX_CROWDED_RATIO = 0.1
"""Of the step: waits for data up to here are not told where ranks outnumber cores."""
_MAX_SLOWED_RATIO = 0.2
"""Of the step: what takes more of it is no mere effect of waiting, which slows the rest, too."""
_MIN_QUEUED_RATIO = 0.02
_MAX_FREED_RATIO = 3.0
"""Of what a replay saves: the most that cores which are left to training add to it."""
_MIN_SHARE = 0.5
"""Of what a finding costs that threads must have waited for cores."""


def _read_cores(study: Study) -> dict[int, CoreQueue]:
    found = {
        rank: known(read_core_queue(study.attempt.ranks[rank])) for rank in study.attempt.ranks
    }
    return {rank: one for rank, one in found.items() if one is not None}


def _read_queues(study: Study) -> dict[int, float]:
    return {rank: one.queued_ratio for rank, one in need(study.get(_read_cores)).items()}


def _computes_on_cores(study: Study) -> bool:
    """Whether what ranks compute runs in the threads that train."""
    ratios = [one.run_ns / one.elapsed_ns for one in need(study.get(_read_cores)).values()]
    return not study.has_accelerators and bool(ratios) and median(ratios) >= _MIN_RUN_RATIO


def doubt_noise(findings: Sequence[Finding], context: Context) -> list[Finding]:
    queued = context.study.get(_read_queues)
    if isinstance(queued, Unavailable) or not queued:
        return list(findings)
    is_crowded = context.study.get(_is_crowded) is True
    on_cores = context.study.get(_computes_on_cores) is True
    findings = [_doubt_core(one) if on_cores else one for one in findings]
    return [
        _doubt_slowed(one, queued, is_crowded=is_crowded)
        if one.code in _SLOWED_CODES
        else _doubt(one, queued, _MIN_SHARE)
        if one.code in _NOISE_CODES
        else one
        for one in findings
    ]


def _is_crowded(study: Study) -> bool:
    """Whether some host has more ranks than cores that they may run on."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, queue in need(study.get(_read_cores)).items():
        cores = known(queue.num_cores)
        if cores is not None and queue.cores:
            key = (str(study.attempt.ranks[rank].header.get("host")), queue.cores)
            found.setdefault(key, []).append(cores)
    return any(len(cores) > min(cores) for cores in found.values())


def _doubt_slowed(finding: Finding, queued: dict[int, float], *, is_crowded: bool) -> Finding:
    cost = _find_cost(finding)
    if cost >= _MAX_SLOWED_RATIO:
        return finding
    if is_crowded and cost < _MAX_CROWDED_RATIO and finding.severity is not Severity.LOW:
        text = "ranks outnumber the cores, so short waits for data are waits for a core as well"
        return _lower(finding, text)
    return _doubt(finding, queued, 1.0)


def _doubt_core(finding: Finding) -> Finding:
    is_small = 0.0 < _find_cost(finding) < _MAX_CORE_RATIO
    if finding.code not in _CORE_CODES or not finding.ranks or not is_small:
        return finding
    return _lower(finding, f"{finding.confidence.text}; but cores of one machine differ as much")


def _find_cost(finding: Finding) -> float:
    gain = finding.gain
    return 0.0 if isinstance(gain, Unavailable) else gain.saved_ratio


def _lower(finding: Finding, text: str) -> Finding:
    confidence = Confidence(level=ConfidenceLevel.LOW, text=text)
    return replace(finding, severity=Severity.LOW, confidence=confidence)


def add_freed_cores(
    context: Context, communication: Job, edit: Edit, gain: Gain | Estimate | Unavailable
) -> tuple[Gain | Estimate | Unavailable, Confidence]:
    """The gain of fewer transfers with the cores that they leave to training, and how sure it is.

    Threads of the host that move data beside a backward take cores from the thread that trains. A
    replay does not know cores: without a share of the transfers that thread waits so much less.
    """
    sure = Confidence(level=ConfidenceLevel.HIGH, text="counted, not estimated")
    rows, measured = communication.operations.rows, communication.row_times.transfer_ns
    is_beside = rows.has_flag(OperationFlag.ENGINE | OperationFlag.ASYNC)
    is_beside &= ~rows.has_flag(OperationFlag.DEVICE)
    total_ns = float(measured[is_beside].sum())
    queued = context.study.get(_read_queues)
    is_known = not isinstance(queued, Unavailable) and queued
    if isinstance(gain, Unavailable) or edit.transfer_ns is None or not is_known or total_ns <= 0:
        return gain, sure
    if severity_of(gain) is Severity.LOW:  # what saves nothing by itself has no cores to give
        return gain, sure
    share = max(0.0, float((measured - edit.transfer_ns)[is_beside].sum()) / total_ns)
    waited = median(queued.values()) if not isinstance(queued, Unavailable) else 0.0
    freed_ns = min(share * waited * gain.step_ns, _MAX_FREED_RATIO * gain.saved_ns)
    if waited < _MIN_QUEUED_RATIO or freed_ns <= 0:
        return gain, sure
    more = Estimate(
        saved_ns=gain.saved_ns + freed_ns,
        step_ns=gain.step_ns,
        basis=f"{duration(gain.saved_ns)} replayed, and {duration(freed_ns)} in which training "
        "waited for cores that these transfers used",
    )
    text = "operations are counted; other programs on the cores add to what training waited"
    return more, Confidence(level=ConfidenceLevel.MEDIUM, text=text)


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
    if finding.code in _PAUSE_CODES:
        share, is_beyond = max(queued.get(rank, 0.0) for rank in finding.ranks or queued), False
    cost = _find_cost(finding)
    if finding.severity is Severity.LOW or share < max(_MIN_QUEUED_RATIO, least_share * cost):
        return finding
    return _lower(
        finding,
        f"its threads waited {ratio(share)} of the time for a core"
        f"{', more than others,' if is_beyond else ','} which other programs, or more threads than "
        "cores, explain as well",
    )
