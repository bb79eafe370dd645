"""Rules about exposed communication: transfers that nothing hides.

Waits do not count here: they belong to the rank that is waited for. Inside one host without an
accelerator a transfer is work of the same cores as everything else, so nothing can hide it:
findings about that are always LOW there. What need not be sent at all is graded everywhere.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.budget.budget_lines import Share
from meshscope.analyze.job.job import Job
from meshscope.analyze.job.operations import OperationRows
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.layout import Axis
from meshscope.core.operations import POINT_TO_POINT, Kind
from meshscope.core.unavailable import Unavailable, need
from meshscope.core.verdict.advice import KEEP_TP_INSIDE, MIN_DATA_PARALLEL_RATIO, OVERLAP_TRANSFERS
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.views.shared_cores import add_freed_cores
from meshscope.diagnose.wording import count, duration, memory, ratio
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.schema import OperationFlag

_MIN_TENSOR_PARALLEL_RATIO = Threshold(
    name="exposed_tp_min_ratio",
    default=0.20,
    meaning="share of the wall clock in transfers along tp that nothing hides",
)
_MIN_SMALL_OPERATIONS = Threshold(
    name="small_operations_min_count",
    default=16,
    meaning="collectives of less than 64 KiB that a rank must run per step along one axis",
)
_MIN_SMALL_RATIO = Threshold(
    name="small_operations_min_ratio",
    default=0.05,
    meaning="share of the wall clock that small collectives must hold ranks up",
)
_SMALL_BYTES = 1 << 16
_SUMS = (int(Kind.ALL_REDUCE), int(Kind.REDUCE))
_MIN_SUMS_RATIO = 0.9
"""Of the small operations: a wrapper also sends a few others when it is made."""
LAYERED_AXES = (Axis.TP, Axis.PP)
"""Along which results go from one layer to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exposed:
    axis: str
    ratio: float
    """Of the wall clock."""
    mean_ns: float
    """Per rank and step."""
    is_hideable: bool
    """It goes over a network, or beside an accelerator."""
    is_messages: bool
    """Nothing but messages between two ranks, as of a pipeline whose layout is not known."""


def rows_along(communication: Job, axis: str) -> Bools:
    """Which operations ran along an axis."""
    groups, rows = communication.operations.groups, communication.operations.rows
    is_along = np.array([group.axis == axis for group in groups] + [False])
    found: Bools = is_along[rows.group]
    return found


def _is_hideable(timeline: Timeline, communication: Job, row: Bools) -> bool:
    rows, groups = communication.operations.rows, communication.operations.groups
    if bool((rows.flags[row] & OperationFlag.DEVICE).any()) or bool(timeline.on_device.any()):
        return True
    used = np.unique(rows.group[row])
    return any(groups[group].is_across_hosts for group in used.tolist() if group >= 0)


def _is_messages(communication: Job, row: Bools) -> bool:
    kinds = set(communication.operations.rows.kind[row].tolist())
    # What a trace does not tell the sides of is custom.
    return bool(kinds & POINT_TO_POINT) and kinds <= POINT_TO_POINT | {Kind.CUSTOM}


def _measure_transfers(study: Study) -> list[_Exposed] | Unavailable:
    """Exposed transfers of every axis, the largest first."""
    timeline, budget = need(study.timeline), need(study.budget)
    communication = timeline.communication
    if communication is None:
        return Unavailable("no communication was recorded")
    found = []
    for line, total in zip(budget.lines, budget.total_ns().tolist(), strict=True):
        if line.share is not Share.TRANSFER or not budget.total_wall_ns:
            continue
        row = rows_along(communication, line.axis)
        found.append(
            _Exposed(
                axis=line.axis,
                ratio=total / budget.total_wall_ns,
                mean_ns=total / budget.num_rank_steps,
                is_hideable=_is_hideable(timeline, communication, row),
                is_messages=_is_messages(communication, row),
            )
        )
    return sorted(found, key=lambda one: -one.ratio)


def _hide(communication: Job, axis: str) -> Edit:
    transfer = communication.row_times.transfer_ns
    hidden = np.where(rows_along(communication, axis), 0, transfer)
    return Edit(name=f"transfers along {axis} hidden", transfer_ns=hidden)


def _report(rule: Rule, context: Context, exposed: _Exposed, *, change: str) -> Iterable[Finding]:
    timeline = need(context.study.timeline)
    if timeline.communication is None:
        return
    edit = _hide(timeline.communication, exposed.axis)
    gain = context.price_edit(edit)
    severity = severity_of(gain, otherwise=exposed.ratio)
    yield Finding(
        code=rule.code,
        title=f"transfers along {exposed.axis} are not hidden",
        severity=severity if exposed.is_hideable else Severity.LOW,
        summary=f"a rank is held up {duration(exposed.mean_ns)} per step by transfers along "
        f"{exposed.axis} that nothing hides, {ratio(exposed.ratio)} of the wall clock; this "
        "excludes waits for late ranks.",
        evidence=(
            Evidence(name="axis", value=exposed.axis),
            Evidence(name="exposed transfer per rank and step", value=exposed.mean_ns, unit="ns"),
            Evidence(name="share of the wall clock", value=exposed.ratio, unit="ratio"),
        ),
        change=change,
        gain=gain,
        edit=edit,
    )


def _pick(context: Context, *, axes: Collection[str] | None, limit: float) -> list[_Exposed]:
    """Axes over a limit; without `axes` all but tp, pp and what is like pp."""
    found = need(context.study.get(_measure_transfers))
    return [
        one
        for one in found
        if one.ratio >= limit and (one.axis in axes if axes is not None else not _is_layered(one))
    ]


def _is_layered(exposed: _Exposed) -> bool:
    """Between the layers of one replica: no gradients that could wait for backward's end."""
    return exposed.axis in LAYERED_AXES or exposed.is_messages


class ExposedDataParallel(Rule):
    """Transfers of gradients or parameters are not hidden behind computing.

    What it finds: transfers along dp, or in groups that are neither tp nor pp, that hold ranks up
    for `exposed_dp_min_ratio` of the wall clock or more.

    Why it matters: these transfers can run beside backward; exposed time is lost.

    How it is measured: it is the budget's line: time in which a rank could do nothing else, after
    every rank had arrived. The gain is a replay in which these transfers take no time. It is an
    upper bound of what overlapping saves.

    What to change: overlap them: larger or fewer buckets, issue in the order in which gradients are
    made, prefetch parameters (FSDP), reduce in bf16, accumulate over more microbatches.

    When it is wrong: inside one host without accelerators nothing can be hidden; the finding is LOW
    there.
    """

    code = "CO001"
    name = "exposed-data-parallel"
    thresholds = (MIN_DATA_PARALLEL_RATIO,)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        """One per axis."""
        limit = context.thresholds[MIN_DATA_PARALLEL_RATIO]
        for one in _pick(context, axes=None, limit=limit):
            yield from _report(
                self,
                context,
                one,
                change=OVERLAP_TRANSFERS,
            )


class ExposedTensorParallel(Rule):
    """Tensor parallelism spends much of the step in transfers.

    What it finds: transfers along tp that hold ranks up for `exposed_tp_min_ratio` of the wall
    clock or more.

    Why it matters: they lie between two matrix products and are hard to hide. A smaller tp degree,
    or ranks of a group on one host, costs only memory.

    How it is measured: as for CO001, along tp.

    What to change: keep tp inside a host; lower the degree; use sequence parallelism or
    asynchronous tp.

    When it is wrong: if the model does not fit with a smaller degree. It is LOW inside one host
    without accelerators.
    """

    code = "CO002"
    name = "exposed-tensor-parallel"
    thresholds = (_MIN_TENSOR_PARALLEL_RATIO,)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        limit = context.thresholds[_MIN_TENSOR_PARALLEL_RATIO]
        for one in _pick(context, axes=(Axis.TP,), limit=limit):
            yield from _report(
                self,
                context,
                one,
                change=KEEP_TP_INSIDE,
            )


def _choose_sums(context: Context, timeline: Timeline, rows: OperationRows, row: Bools) -> Bools:
    """Of small operations of several kinds only the sums, if they are many by themselves: these can
    be combined, whatever else is sent beside them (a sharded optimizer's parameters)."""
    sums = row & np.isin(rows.kind, _SUMS)
    least = context.thresholds[_MIN_SMALL_OPERATIONS] * len(timeline.ranks) * len(timeline.steps)
    return sums if np.count_nonzero(sums) >= least else row


def _keep_longest(communication: Job, row: Bools) -> Int64s:
    """Transfers of all rows; of those chosen only the longest of each rank and step takes time.

    Not a mean one: the first of several waits until all ranks are awake, the others do not.
    """
    rows = communication.operations.rows
    transfer = communication.row_times.transfer_ns.copy()
    chosen = np.flatnonzero(row)
    order = chosen[np.lexsort((transfer[chosen], rows.rank[chosen], rows.step[chosen]))]
    is_same = (np.diff(rows.step[order]) == 0) & (np.diff(rows.rank[order]) == 0)
    transfer[order[np.flatnonzero(is_same)]] = 0
    return transfer


def _leave_out_calls(timeline: Timeline, is_held: Bools, usual_ns: float) -> Int64s:
    """[piece]: work without what a rank does between two of these operations, if it is shorter than
    they are: to call the next one. Where ranks meet less often they wait for less jitter, too."""
    pieces, work = timeline.pieces, measured_work(timeline)
    is_work = (pieces.kind == PieceKind.WORK) & (pieces.row < 0) & (work < usual_ns)
    is_same = (np.diff(pieces.rank) == 0) & (np.diff(pieces.step) == 0)
    follows, leads = (
        np.append(False, is_held[:-1] & is_same),
        np.append(is_held[1:] & is_same, False),
    )
    return np.where(is_work & follows & leads, 0, work)


class SmallOperations(Rule):
    """Many small collectives, each of which costs its latency.

    What it finds: `small_operations_min_count` or more collectives of less than 64 KiB per rank and
    step along one axis that together hold ranks up for `small_operations_min_ratio` of the wall
    clock.

    Why it matters: a small operation takes as long as its latency; a few large ones take less.

    How it is measured: operations are grouped by size and axis, and their exposed transfer is added
    up; of several kinds only sums, if they are as many by themselves. The gain is a replay in which
    all of a step take as long as the longest of them, without what a rank does between two of them
    if that is shorter than they are (it calls the next one); beside backward on hosts it takes in
    what the training thread waited for cores that they used.

    What to change: combine them: larger buckets (`bucket_cap_mb`), flattened tensors, coalescing;
    larger FSDP units.

    When it is wrong: if each operation depends on the one before, as along tp. Inside one host
    without accelerators only sums along dp are graded; others are LOW there.
    """

    code = "CO003"
    name = "small-operations"
    thresholds = (_MIN_SMALL_OPERATIONS, _MIN_SMALL_RATIO)

    def find(self, context: Context) -> Iterable[Finding]:
        """One per axis."""
        timeline = need(context.study.timeline)
        if timeline.communication is None:
            return
        communication = timeline.communication
        rows = communication.operations.rows
        is_pair = np.isin(rows.kind, [int(kind) for kind in POINT_TO_POINT])
        is_small = ~is_pair & (rows.size_bytes >= 0) & (rows.size_bytes < _SMALL_BYTES)
        is_small &= np.isin(rows.step, timeline.steps)
        for axis in dict.fromkeys(group.axis for group in communication.operations.groups):
            row = _choose_sums(context, timeline, rows, is_small & rows_along(communication, axis))
            yield from self._judge(context, timeline, communication, axis, row)

    def _judge(
        self,
        context: Context,
        timeline: Timeline,
        communication: Job,
        axis: str,
        row: Bools,
    ) -> Iterable[Finding]:
        pieces = timeline.pieces
        num_rank_steps = len(timeline.ranks) * len(timeline.steps)
        num_per_step = float(np.count_nonzero(row)) / num_rank_steps
        if num_per_step < context.thresholds[_MIN_SMALL_OPERATIONS]:
            return
        is_held = (pieces.row >= 0) & (pieces.kind != PieceKind.WORK)
        is_held[is_held] = row[pieces.row[is_held]]
        total = int(pieces.duration_ns[is_held & (pieces.kind != PieceKind.WAIT)].sum())
        share = total / max(int(pieces.duration_ns.sum()), 1)
        if share < context.thresholds[_MIN_SMALL_RATIO]:
            return
        usual_ns = float(np.median(communication.row_times.transfer_ns[row]))
        edit = Edit(
            name=f"small operations along {axis} combined",
            work_ns=_leave_out_calls(timeline, is_held, usual_ns),
            transfer_ns=_keep_longest(communication, row),
        )
        gain, sure = add_freed_cores(context, communication, edit, context.price_edit(edit))
        size = float(np.median(communication.operations.rows.size_bytes[row]))
        ranks = tuple(np.unique(communication.operations.rows.rank[row]).tolist())
        # What is summed along dp depends on nothing of the same step: it can always be combined.
        sums_ratio = float(np.isin(communication.operations.rows.kind[row], _SUMS).mean())
        is_combinable = sums_ratio >= _MIN_SUMS_RATIO and axis not in LAYERED_AXES
        is_graded = is_combinable or _is_hideable(timeline, communication, row)
        yield Finding(
            code=self.code,
            title=f"many small operations along {axis}",
            severity=severity_of(gain, otherwise=share) if is_graded else Severity.LOW,
            summary=f"a rank runs {count(round(num_per_step))} collectives of {memory(size)} "
            f"(median) along {axis} per step; they hold it up {duration(total / num_rank_steps)}, "
            f"{ratio(share)} of the wall clock.",
            ranks=() if len(ranks) == len(timeline.ranks) else ranks,
            evidence=(
                Evidence(name="axis", value=axis),
                Evidence(name="small collectives per rank and step", value=num_per_step),
                Evidence(name="median size", value=size, unit="bytes"),
                Evidence(name="share of the wall clock", value=share, unit="ratio"),
            ),
            confidence=sure,
            change="Combine small tensors before communicating: buckets, coalescing.",
            gain=gain,
            edit=edit,
        )
