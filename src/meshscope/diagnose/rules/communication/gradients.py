"""Rules about gradients that are reduced too often, or for nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.communication.replicas import Replica, read_replicas
from meshscope.analyze.job.job import Job
from meshscope.analyze.job.operations import OperationRows
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.layout import Axis
from meshscope.core.operations import DTYPES, Kind
from meshscope.core.unavailable import Unavailable, need
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Estimate, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.rules.communication.transfers import LAYERED_AXES, rows_along
from meshscope.diagnose.views.shared_cores import add_freed_cores
from meshscope.diagnose.wording import memory, plural, ratio
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit, Gain
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.schema import OperationFlag

_MIN_REPEATED_RATIO = Threshold(
    name="repeated_reductions_min_ratio",
    default=0.8,
    meaning="share of steps in which every microbatch reduces as many bytes of gradients",
)
_FORWARD, _BACKWARD = "forward", "backward"
_MIN_GRADIENT_BYTES = 1 << 16
"""Sums of fewer bytes may be numbers for a log."""
_MIN_PARAMETER_RATIO = 0.4
"""Of the parameters' bytes that gradients have at least: they may be sent in half precision."""
_MAX_DIFFERENCE_RATIO = 0.02
"""Between the bytes of two microbatches: numbers for a log may come with the last one."""
_MAP_BYTES = 4
"""Per parameter, of the map in which DistributedDataParallel's ranks say what they used."""
_LEAST_BYTES_PER_NS = 0.01
"""10 MB/s: bytes take no longer than on a link as slow as this."""


def _read_replicas(study: Study) -> tuple[Replica, ...]:
    """Those of the first rank that has any: ranks of data parallelism have the same."""
    found = (read_replicas(recording) for recording in study.attempt.ranks.values())
    return next((one for one in found if one), ())


def _find_reductions(timeline: Timeline, communication: Job, axis: str) -> Bools:
    """Sums along an axis that may be of gradients: in kept steps, and not in forward."""
    operations = communication.operations
    rows = operations.rows
    is_forward = np.array([name == _FORWARD for name in operations.phases] + [False])
    found = (rows.kind == int(Kind.ALL_REDUCE)) & rows_along(communication, axis)
    return np.asarray(found & ~is_forward[rows.phase] & np.isin(rows.step, timeline.steps))


def _tell_rest(
    gain: Gain | Estimate | Unavailable, communication: Job
) -> Gain | Estimate | Unavailable:
    """A price on hosts says what it leaves out: no record tells how long the training thread copies
    what is to be reduced. It is no bound: transfers beside compute may hide more of it."""
    is_on_device = communication.operations.rows.has_flag(OperationFlag.DEVICE).any()
    if is_on_device or isinstance(gain, Unavailable) or gain.saved_ns <= 0:
        return gain
    basis = f"{gain.basis}; copying them to where they are summed is work of backward and not in it"
    return Estimate(saved_ns=gain.saved_ns, step_ns=gain.step_ns, basis=basis)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Repeats:
    """Reductions of all microbatches of a step."""

    num_times: int
    """Per step, median over ranks and steps."""
    size_bytes: float
    """Of one time, likewise."""
    ratio: float
    """Of all ranks' steps with a reduction that have several of the same size."""
    is_early: Bools
    """Rows of all microbatches but the last one of their step."""


def _find_repeats(rows: OperationRows, chosen: Bools, least_bytes: float) -> _Repeats | None:
    index = np.flatnonzero(chosen & (rows.microbatch >= 0) & (rows.size_bytes >= 0))
    if not len(index):
        return None
    step_key = rows.rank[index].astype(np.int64) << 32 | rows.step[index].astype(np.int64)
    _, step_of_row = np.unique(step_key, return_inverse=True)
    cells, cell_of_row = np.unique(
        np.stack((step_of_row, rows.microbatch[index].astype(np.int64))),
        axis=1,
        return_inverse=True,
    )
    cell_of_row = cell_of_row.ravel()
    size = np.bincount(cell_of_row, rows.size_bytes[index].astype(np.float64))
    is_large = size >= least_bytes
    if not is_large.any():
        return None
    step_of_cell, microbatch = cells[0], cells[1]
    num_steps = int(step_of_cell.max()) + 1
    count = np.bincount(step_of_cell[is_large], minlength=num_steps)
    largest, smallest = np.zeros(num_steps), np.full(num_steps, np.inf)
    np.maximum.at(largest, step_of_cell[is_large], size[is_large])
    np.minimum.at(smallest, step_of_cell[is_large], size[is_large])
    is_repeated = (count > 1) & (largest - smallest <= _MAX_DIFFERENCE_RATIO * largest)
    last: Int64s = np.full(num_steps, -1, np.int64)
    np.maximum.at(last, step_of_cell[is_large], microbatch[is_large])
    is_early_cell = is_large & is_repeated[step_of_cell] & (microbatch < last[step_of_cell])
    is_early = np.zeros(len(chosen), np.bool_)
    is_early[index] = is_early_cell[cell_of_row]
    if not is_repeated.any():
        return None
    return _Repeats(
        num_times=int(np.median(count[is_repeated])),
        size_bytes=float(np.median(largest[is_repeated])),
        ratio=float(np.count_nonzero(is_repeated)) / float(np.count_nonzero(count)),
        is_early=is_early,
    )


def _leave_out_copies(timeline: Timeline, communication: Job, is_early: Bools) -> Int64s:
    """[piece]: work without what a backward does once it has waited for these reductions: it copies
    sums back to gradients. What takes longer than a reduction is something else."""
    pieces, work = timeline.pieces, measured_work(timeline)
    is_new = np.append(True, (np.diff(pieces.rank) != 0) | (np.diff(pieces.phase) != 0))
    span = np.cumsum(is_new)
    is_held = (pieces.row >= 0) & (pieces.kind != PieceKind.WORK)
    held = np.maximum.accumulate(np.where(is_held, np.arange(len(pieces)), 0))
    is_copied = is_held[held] & (span[held] == span) & is_early[pieces.row[held]]
    is_copied &= work < communication.row_times.transfer_ns[pieces.row[held]]
    is_backward = np.array([name == _BACKWARD for name in timeline.phases])
    return np.where(is_copied & is_backward[pieces.phase], 0, work)


class ReducedTooOften(Rule):
    """Gradients are reduced in every microbatch, and not once in a step.

    What it finds: steps of several microbatches, each of which sums as many bytes of gradients over
    the replicas, in `repeated_reductions_min_ratio` of the steps or more.

    Why it matters: only the sum over all microbatches is needed, so all reductions but the last one
    are for nothing, and ranks wait for each other at each of them.

    How it is measured: all-reduces along dp outside of forward, added up by microbatch. Sums of
    less than 64 KiB, or of less than two fifths of what DistributedDataParallel says its
    parameters take, do not count. The gain is a replay in which all but the last microbatch's take
    no time, nor what a backward does after it has waited for them (it copies sums back), and on
    hosts what the training thread waited for cores that they used. On hosts the price says what it
    leaves out: copying gradients to where they are summed is work of backward, too.

    What to change: put all microbatches but the last one inside `model.no_sync()`; let Accelerate
    do it (`accelerator.accumulate(model)`).

    When it is wrong: if gradients are reduced early to save their memory, as FSDP does: its
    reduce-scatters are not looked at.
    """

    code = "CO004"
    name = "reduced-every-microbatch"
    thresholds = (_MIN_REPEATED_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        """One per axis."""
        timeline = need(context.study.timeline)
        communication = timeline.communication
        if communication is None:
            return
        replicas = need(context.study.get(_read_replicas))
        parameter_bytes = min((one.parameter_bytes for one in replicas), default=0)
        least_bytes = max(_MIN_GRADIENT_BYTES, _MIN_PARAMETER_RATIO * parameter_bytes)
        for axis in dict.fromkeys(group.axis for group in communication.operations.groups):
            if axis in LAYERED_AXES or axis == Axis.EP:
                continue
            chosen = _find_reductions(timeline, communication, axis)
            found = _find_repeats(communication.operations.rows, chosen, least_bytes)
            if found is not None and found.ratio >= context.thresholds[_MIN_REPEATED_RATIO]:
                yield self._report(context, communication, axis, found)

    def _report(self, context: Context, communication: Job, axis: str, found: _Repeats) -> Finding:
        timeline = need(context.study.timeline)
        edit = Edit(
            name="gradients reduced once in a step",
            work_ns=_leave_out_copies(timeline, communication, found.is_early),
            transfer_ns=np.where(found.is_early, 0, communication.row_times.transfer_ns),
        )
        gain, sure = add_freed_cores(context, communication, edit, context.price_edit(edit))
        gain = _tell_rest(gain, communication)
        times, size = plural(found.num_times, "time"), memory(found.size_bytes)
        return Finding(
            code=self.code,
            title=f"gradients are reduced {times} in a step",
            severity=severity_of(gain),
            summary=f"each of {found.num_times} microbatches reduces {size} of gradients along "
            f"{axis}; once in a step is enough.",
            evidence=(
                Evidence(name="axis", value=axis),
                Evidence(name="reductions of all gradients per step", value=found.num_times),
                Evidence(name="bytes of one", value=found.size_bytes, unit="bytes"),
                Evidence(name="share of the steps", value=found.ratio, unit="ratio"),
            ),
            confidence=sure,
            change="Put all microbatches but the last one of a step inside model.no_sync().",
            gain=gain,
            edit=edit,
        )


class UnusedParameters(Rule):
    """DistributedDataParallel searches for unused parameters in every step.

    What it finds: models that were wrapped with `find_unused_parameters=True`, and how much of
    their parameters got no gradient.

    Why it matters: the whole graph is searched after each forward, and ranks tell each other what
    they used; parameters without a gradient are reduced all the same.

    How it is measured: by what the wrapper says about itself, and by the operations it adds. The
    gain is a replay without these operations and without the unused parameters' share of all
    reductions, as far as their bytes can take so long. It leaves out the search, a part of forward,
    and on hosts, as it says, copying and scaling what is reduced, a part of backward.

    What to change: without unused parameters leave the option out. Otherwise freeze or remove what
    is not used (`requires_grad_(False)` before the model is wrapped), or say `static_graph=True`
    if it is the same in every step.

    When it is wrong: if other steps use other parameters, as with branches or experts: the option
    is needed then. What is unused is known of one step.
    """

    code = "CO005"
    name = "unused-parameters"

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one, for all wrapped models together."""
        timeline = need(context.study.timeline)
        communication = timeline.communication
        replicas = need(context.study.get(_read_replicas))
        searching = [one for one in replicas if one.finds_unused and one.parameter_bytes]
        if communication is None or not searching:
            return
        unused_bytes = sum(one.unused_bytes for one in searching)
        total_bytes = sum(one.parameter_bytes for one in searching)
        share = unused_bytes / total_bytes
        edit = _drop_unused(timeline, communication, searching, share)
        gain, sure = add_freed_cores(context, communication, edit, context.price_edit(edit))
        gain = _tell_rest(gain, communication)
        used = f"{memory(unused_bytes)} of {memory(total_bytes)} got no gradient ({ratio(share)})"
        title = (
            "parameters without a gradient are reduced"
            if share
            else ("unused parameters are searched for, and there are none")
        )
        yield Finding(
            code=self.code,
            title=title,
            severity=severity_of(gain),
            summary="find_unused_parameters=True lets DistributedDataParallel search the graph in "
            f"every step; {used if share else 'every parameter got a gradient'}.",
            evidence=(
                Evidence(name="parameters", value=total_bytes, unit="bytes"),
                Evidence(name="without a gradient", value=unused_bytes, unit="bytes"),
            ),
            confidence=sure,
            change="Freeze or remove the parameters that are not used, before the model is "
            "wrapped; then leave find_unused_parameters out."
            if share
            else "Leave find_unused_parameters out.",
            gain=gain,
            edit=edit,
        )


def _drop_unused(
    timeline: Timeline, communication: Job, replicas: Iterable[Replica], share: float
) -> Edit:
    """Without the maps of what was used, and with the used part of all gradients."""
    rows = communication.operations.rows
    measured = communication.row_times.transfer_ns
    is_reduced = np.zeros(len(rows), np.bool_)
    for axis in dict.fromkeys(group.axis for group in communication.operations.groups):
        if axis not in LAYERED_AXES:
            is_reduced |= _find_reductions(timeline, communication, axis)
    sizes = [_MAP_BYTES * one.num_parameters for one in replicas]
    is_map = is_reduced & np.isin(rows.size_bytes, sizes) & (rows.dtype == DTYPES.index("int32"))
    # Of an operation of few bytes most is not for bytes.
    most = rows.size_bytes / _LEAST_BYTES_PER_NS
    kept = np.rint(measured - share * np.minimum(measured, most)).astype(np.int64)
    kept = np.where(is_reduced, kept, measured)
    return Edit(name="without unused parameters", transfer_ns=np.where(is_map, 0, kept))
