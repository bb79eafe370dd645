"""What an even run would do: every rank and step the same work, every transfer the usual time.

Even work of a phase is the mean over all ranks and steps that have any. Its distribution inside the
phase is the mean over the steps in which ranks communicate in the same order (`work_parts`). Even
transfers are the median of those of one kind, axis and size.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.group_axis import OTHER
from meshscope.core.operations import Kind
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit, Replay
from meshscope.simulate.work_parts import WorkParts, cut_work
from meshscope.store.read.arrays import Bools, Floats, Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvenShares:
    """Even durations of everything in a timeline."""

    timeline: Timeline
    work_ns: Int64s
    """[piece]."""
    transfer_ns: Int64s | None
    """[row]; None without communication."""
    row_types: tuple[str, ...]
    """Names of the types of transfers: `dp all_reduce`."""
    row_type: Int64s
    """[row]: index into `row_types`."""

    def edit(self, name: str, is_even: Bools, is_even_row: Bools) -> Edit:
        """These pieces and rows become even, all others stay as measured."""
        work = np.where(is_even, self.work_ns, measured_work(self.timeline))
        communication = self.timeline.communication
        if communication is None or self.transfer_ns is None:
            return Edit(name=name, work_ns=work)
        measured = communication.row_times.transfer_ns
        transfer = np.where(is_even_row, self.transfer_ns, measured)
        return Edit(name=name, work_ns=work, transfer_ns=transfer)


def find_even_shares(replay: Replay) -> EvenShares:
    parts = cut_work(replay.timeline)
    transfer, names, types = find_even_transfers(replay)
    return EvenShares(
        timeline=replay.timeline,
        work_ns=parts.join(replay.timeline, _find_even_work(replay.timeline, parts)),
        transfer_ns=transfer,
        row_types=names,
        row_type=types,
    )


def _find_even_work(timeline: Timeline, parts: WorkParts) -> Floats:
    """[part]: the mean of its segment among alike steps, scaled to the mean of its phase."""
    shape = (len(timeline.ranks), len(timeline.steps), len(timeline.phases))
    cell = np.ravel_multi_index((parts.rank_index, parts.step, parts.phase), shape)
    work = np.bincount(cell, weights=parts.work_ns, minlength=int(np.prod(shape)))
    table = work.reshape(shape)
    has_work = table > 0
    phase_mean = table.sum(axis=(0, 1)) / np.maximum(has_work.sum(axis=(0, 1)), 1)
    _, alike = np.unique(parts.signature, return_inverse=True)
    alike = alike.reshape(parts.signature.shape)
    if alike.max(initial=0) >= 4 * len(timeline.ranks):
        # Every step is different: nothing to average segments over.
        whole: Floats = parts.work_ns * (phase_mean[parts.phase] / np.maximum(work[cell], 1))
        return whole
    group = alike[parts.rank_index, parts.step].astype(np.int64)
    num_in_group = np.bincount(alike.reshape(-1))
    keys = np.stack([group, parts.phase.astype(np.int64), parts.segment])
    _, slot = np.unique(keys, axis=1, return_inverse=True)
    slot = slot.reshape(-1)
    segment_sum = np.bincount(slot, weights=parts.work_ns)
    slot_group = np.zeros(len(segment_sum), dtype=np.int64)
    slot_group[slot] = group
    segment_mean = segment_sum / num_in_group[slot_group]
    cell_segment = _sum_once(parts, slot)
    group_phase = np.zeros((len(num_in_group), shape[2]))
    np.add.at(group_phase, (group, parts.phase), parts.work_ns)
    count = np.zeros((len(num_in_group), shape[2]))
    np.add.at(count, (np.repeat(alike[..., None], shape[2], axis=2), np.arange(shape[2])), has_work)
    group_mean = group_phase / np.maximum(count, 1)
    scale = phase_mean[parts.phase] / np.maximum(group_mean[group, parts.phase], 1)
    even: Floats = parts.work_ns / np.maximum(cell_segment, 1) * segment_mean[slot] * scale
    return even


def _sum_once(parts: WorkParts, slot: Int64s) -> Floats:
    """[part]: the work of its rank and step in the same phase and segment."""
    keys = np.stack([parts.rank_index.astype(np.int64), parts.step.astype(np.int64), slot])
    _, own = np.unique(keys, axis=1, return_inverse=True)
    own = own.reshape(-1)
    total = np.bincount(own, weights=parts.work_ns).astype(np.float64)
    found: Floats = total[own]
    return found


def find_even_transfers(replay: Replay) -> tuple[Int64s | None, tuple[str, ...], Int64s]:
    communication, times = replay.timeline.communication, replay.recorded.operations
    if communication is None or times is None:
        return None, (), np.empty(0, dtype=np.int64)
    rows, groups = communication.operations.rows, communication.operations.groups
    axes = [group.axis for group in groups] + [OTHER]
    labels = np.array([f"{axis} {kind.label}" for axis in axes for kind in Kind])
    label = (rows.group % len(axes)).astype(np.int64) * len(Kind) + rows.kind
    names, types = np.unique(labels[label], return_inverse=True)
    types = types.reshape(-1).astype(np.int64)
    sizes, size = np.unique(rows.size_bytes, return_inverse=True)
    _, cell = np.unique(types * max(1, len(sizes)) + size, return_inverse=True)
    middle = _find_medians(times.own_ns, cell, times.is_modelled)
    measured = communication.row_times.transfer_ns
    # Edits scale: a row without a transfer cannot be given one.
    can_scale = times.is_modelled & (times.own_ns > 0)
    scaled = np.rint(measured * (middle[cell] / np.maximum(times.own_ns, 1)))
    even = np.where(can_scale, scaled, measured).astype(np.int64)
    return even, tuple(names.tolist()), types.astype(np.int64)


def _find_medians(values: Int64s, cell: Int64s, is_counted: Bools) -> Floats:
    """[cell]: the median of its counted values; 0 if there are none."""
    middle = np.zeros(int(cell.max(initial=-1)) + 1)
    picked = np.flatnonzero(is_counted)
    order = picked[np.lexsort((values[picked], cell[picked]))]
    if len(order):
        found, first, count = np.unique(cell[order], return_index=True, return_counts=True)
        low, high = values[order[first + (count - 1) // 2]], values[order[first + count // 2]]
        middle[found] = (low + high) / 2
    return middle
