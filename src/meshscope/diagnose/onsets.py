"""Since when a finding's cause is there: dated once, for every screen and document.

A rule that knows its first step says so. Of the others, the edit that a finding is priced with says
what of each step is the cause's: removed time by step has a beginning, or none (`numerics.onset`).
Where that is between two windows of a long run, lengths of steps date it (`change_date`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from meshscope.analyze.rank.rank_summary import to_unix
from meshscope.analyze.stragglers.change_date import date_change
from meshscope.analyze.study import catch_failure
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Course, Finding, Onset, StepLoss
from meshscope.numerics.onset import find_occurrence
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit
from meshscope.store.read.arrays import Floats, Int32s, Int64s
from meshscope.store.read.columns import int64_column

_UNCLEAR = Unavailable("it comes and goes too unevenly in these steps to say when it began")


def date_findings(findings: Sequence[Finding], context: Context) -> list[Finding]:
    """Each with its onset; with its first and last step, where these are found here."""
    dates = _Dates(context)
    dated = []
    for one in findings:
        found = catch_failure(f"onset of {one.code}", partial(dates.date, one))
        if not isinstance(found, Finding):
            context.study.failures.append(found)
        dated.append(found if isinstance(found, Finding) else one)
    return dated


class _Dates:
    def __init__(self, context: Context) -> None:
        self._study = context.study
        self._timeline = known(context.study.timeline)

    def date(self, finding: Finding) -> Finding:
        if finding.first_step is not None:
            course = self._place(finding.first_step, finding)
            return replace(finding, onset=self._make(finding, finding.first_step, course))
        lost = finding.lost_steps or self._measure_removed(finding.edit)
        if lost is None:
            return finding
        timeline_steps = None if self._timeline is None else self._timeline.steps
        found = find_occurrence(lost.lost_ns)
        if found is None:
            return replace(finding, onset=_UNCLEAR)
        first = int(lost.step[found.onset])
        last = int(lost.step[found.recovery - 1]) if found.recovery < len(lost.step) else None
        if found.is_at_times:
            return replace(finding, onset=self._make(finding, first, Course.AT_TIMES))
        if found.onset == 0 and last is None:
            return replace(finding, onset=self._make(finding, first, Course.ALWAYS))
        if lost.step is timeline_steps:
            first = self._date_between(finding, found.onset)
        dated = replace(finding, first_step=first, last_step=last)
        return replace(dated, onset=self._make(dated, first, Course.SINCE))

    def _date_between(self, finding: Finding, index: int) -> int:
        """The step of a change in the timeline, whose steps are windows of a long run."""
        timeline, ranks = need(self._study.timeline), self._study.attempt.ranks
        rank = next((one for one in finding.ranks if one in ranks), next(iter(ranks)))
        return date_change(ranks[rank], timeline, index).step

    def _place(self, first: int, finding: Finding) -> Course:
        """Of a first step that the rule gave."""
        lost, last = finding.lost_steps, finding.last_step
        if lost is not None:
            inside = lost.lost_ns[(lost.step >= first) & (lost.step <= (last or lost.step[-1]))]
            if 2 * int(np.count_nonzero(inside)) < len(inside):
                return Course.AT_TIMES
        steps = self._study.steps.step
        is_first = last is None and bool(len(steps)) and first <= int(steps[0])
        return Course.ALWAYS if is_first else Course.SINCE

    def _make(self, finding: Finding, step: int, course: Course) -> Onset:
        steps, last = self._study.steps.step, finding.last_step
        return Onset(
            step=step,
            start_unix_ns=self._find_moment(finding, step),
            course=course,
            is_over=last is not None and bool(len(steps)) and last < int(steps[-1]),
        )

    def _find_moment(self, finding: Finding, step: int) -> int | Unavailable:
        """By the first of its ranks that recorded the step."""
        ranks = self._study.attempt.ranks
        for rank in (*finding.ranks, *list(ranks)[:1]):
            if rank in ranks:
                starts = int64_column(ranks[rank].read_steps([(step, step)]), "start_host_mono_ns")
                if len(starts):
                    return to_unix(ranks[rank], int(starts[0]))
        return Unavailable("the step was not finished, or not recorded")

    @cached_property
    def _work_ns(self) -> Int64s | None:
        return None if self._timeline is None else measured_work(self._timeline)

    def _measure_removed(self, edit: Edit | None) -> StepLoss | None:
        timeline = self._timeline
        if edit is None or timeline is None or not len(timeline.steps):
            return None
        removed = np.zeros(len(timeline.steps))
        if edit.work_ns is not None and self._work_ns is not None:
            pieces = timeline.pieces
            less = np.where(pieces.kind == PieceKind.WORK, self._work_ns - edit.work_ns, 0)
            removed += _sum_steps(pieces.step, less, len(removed))
        if edit.transfer_ns is not None and timeline.communication is not None:
            job = timeline.communication
            step = job.operations.rows.step
            index = np.minimum(np.searchsorted(timeline.steps, step), len(removed) - 1)
            is_kept = timeline.steps[index] == step
            less = job.row_times.transfer_ns - edit.transfer_ns
            removed += _sum_steps(index[is_kept], less[is_kept], len(removed))
        return StepLoss(step=timeline.steps, lost_ns=removed)


def _sum_steps(index: Int64s | Int32s, values: Int64s, num_steps: int) -> Floats:
    sums = np.bincount(index, values, minlength=num_steps)
    return np.asarray(sums, dtype=np.float64)
