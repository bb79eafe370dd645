"""The one line of the budget that each piece of a timeline belongs to.

Held-up time belongs to the axis of the operation's group. Waiting for another pipeline stage is the
pipeline's bubble, whatever it waits in: an action's input, a message, or a group that spans stages,
such as the last all-reduce of a gradient norm, where finished stages wait for draining ones. Work
belongs to its phase; outside all phases it is `other` on a host. On a device a phase's span is not
compute: `timeline.device_parts` says what it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshscope.analyze.job.group_axes import JobGroup
from meshscope.analyze.timeline.device_parts import (
    BETWEEN,
    COMPUTE,
    COPY,
    EXPOSED,
    FIRST_RUN,
    SPAN,
    DeviceParts,
)
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.group_axis import OTHER
from meshscope.core.layout import Axis, Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Bools, Int64s


class Share(StrEnum):
    """The names of the budget's lines."""

    USEFUL = "useful compute"
    """FLOPs of the model at the device's peak."""
    INEFFICIENCY = "kernel inefficiency"
    """Computing beyond that."""
    COMPUTE = "compute"
    """Both together, if they cannot be separated. On a device: kernels that compute ran."""
    SPAN = "in phases, not split"
    """A device's stream was in a phase, and nothing says what it did: a bound on compute."""
    BETWEEN = "between phases, not split"
    """It was in none, and nothing says what it did."""
    TRANSFER = "exposed transfer"
    WAIT = "exposed wait"
    UNSPLIT = "exposed communication"
    """Waiting or transfer; which is not known."""
    UNQUEUED = "exposed, not waited for"
    """Communication with nothing beside it that no queued work waited for; only profiler traces
    show it."""
    BUBBLE = "pipeline bubble"
    COPY = "exposed copies"
    """Copies between memories with no kernel beside them."""
    IDLE_HOST = "idle, host-bound"
    """A device had nothing to do: its host was at something else, or the launch on its way."""
    IDLE_SYNCHRONISING = "idle, synchronising"
    """Its host had waited for it, and launched more only after that."""
    IDLE_STREAM = "idle, other stream"
    """Work was launched, and waited for other work."""
    IDLE_RANK = "idle, other rank"
    """Its host was inside a collective's call."""
    IDLE_UNKNOWN = "idle, cause not known"
    INPUT = "input stall"
    COMPILE = "compile"
    """torch.compile making code; forward and backward wait for it. On a device also the first run
    of that code, as far as it takes longer than the usual."""
    CHECKPOINT = "checkpoint"
    EVAL = "eval"
    LOGGING = "logging"
    OTHER = "other"


SHARE_OF_PHASE = {
    "": Share.OTHER,
    "data": Share.INPUT,
    "compile": Share.COMPILE,
    "checkpoint": Share.CHECKPOINT,
    "eval": Share.EVAL,
    "logging": Share.LOGGING,
    "copy": Share.COPY,
}
"""Work in any other phase is compute."""
SHARE_OF_PART = {
    COMPUTE: Share.COMPUTE,
    COPY: Share.COPY,
    EXPOSED: Share.UNSPLIT,
    FIRST_RUN: Share.COMPILE,
    "host": Share.IDLE_HOST,
    "launch": Share.IDLE_HOST,
    "synchronising": Share.IDLE_SYNCHRONISING,
    "communicating": Share.IDLE_RANK,
    "dependency": Share.IDLE_STREAM,
    "unknown": Share.IDLE_UNKNOWN,
    SPAN: Share.SPAN,
    BETWEEN: Share.BETWEEN,
}
"""Of the parts of a device's time."""
_SHARE_OF_KIND = {
    PieceKind.TRANSFER: Share.TRANSFER,
    PieceKind.WAIT: Share.WAIT,
    PieceKind.UNSPLIT: Share.UNSPLIT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a budget."""

    share: Share
    axis: str = ""
    """For exposed communication: `dp`, `tp`, `pp`, `world`, `other`, …"""
    reason: str = ""
    """Why compute is not split."""

    @property
    def name(self) -> str:
        """`exposed wait dp`."""
        return f"{self.share} {self.axis}" if self.axis else str(self.share)


def sort_pieces(timeline: Timeline) -> tuple[list[Line], Int64s]:
    """The lines that occur, in a fixed order, and the line index of every piece."""
    pieces = timeline.pieces
    axes, axis, spans_stages = _find_axes(timeline)
    shares = list(Share)
    share = _find_work_shares(timeline, shares)
    for kind, held in _SHARE_OF_KIND.items():
        share[pieces.kind == kind] = shares.index(held)
    share[(pieces.kind == PieceKind.WORK) & (pieces.row >= 0)] = shares.index(Share.UNQUEUED)
    is_bubble = (pieces.kind == PieceKind.WAIT) & spans_stages
    share[is_bubble] = shares.index(Share.BUBBLE)
    by_axis = (*_SHARE_OF_KIND.values(), Share.UNQUEUED)
    is_by_axis = np.isin(share, [shares.index(one) for one in by_axis])
    code = share * (len(axes) + 1) + np.where(is_by_axis, axis + 1, 0)
    # Compute is always there: it is split into useful and inefficient later.
    found = np.unique(np.append(code, shares.index(Share.COMPUTE) * (len(axes) + 1)))
    lines = [
        Line(
            share=shares[one // (len(axes) + 1)],
            axis=axes[index - 1] if (index := one % (len(axes) + 1)) else "",
        )
        for one in found.tolist()
    ]
    return lines, np.searchsorted(found, code)


def sort_bound_pieces(timeline: Timeline, parts: DeviceParts | None) -> tuple[list[Line], Int64s]:
    """Likewise; a piece of a device's time that is divided by rank and step, not by piece, has the
    line of its bound."""
    lines, line = sort_pieces(timeline)
    if parts is None or not parts.is_divided.any():
        return lines, line
    span = len(lines)
    lines = [*lines, Line(share=Share.SPAN), Line(share=Share.BETWEEN)]
    bound = np.where(timeline.pieces.phase > 0, span, span + 1)
    return lines, np.where(parts.is_divided, bound, line)


def _find_work_shares(timeline: Timeline, shares: Sequence[Share]) -> Int64s:
    """Per piece its line if it is work."""
    pieces = timeline.pieces
    of_phase = [SHARE_OF_PHASE.get(name, Share.COMPUTE) for name in timeline.phases]
    share: Int64s = np.array([shares.index(one) for one in of_phase])[pieces.phase]
    return share


def _find_axes(timeline: Timeline) -> tuple[tuple[str, ...], Int64s, Bools]:
    """Names of axes; per piece its axis index, and whether it waits for another stage."""
    pieces, communication = timeline.pieces, timeline.communication
    groups = communication.operations.groups if communication is not None else ()
    axes = tuple(dict.fromkeys([*(group.axis for group in groups), str(Axis.PP), OTHER]))
    # A wait without an operation is for the input of a pipeline action.
    index_of_group = np.array(
        [axes.index(group.axis) for group in groups] + [axes.index(OTHER), axes.index(Axis.PP)]
    )
    has_stages = _has_stages(timeline)
    spans = np.array(
        [has_stages and _spans_stages(group, timeline.layout) for group in groups]
        + [False, has_stages]
    )
    group = np.full(len(pieces), len(groups) + 1, dtype=np.int64)
    if communication is not None:
        is_held = pieces.row >= 0
        own = communication.operations.rows.group[pieces.row[is_held]]
        group[is_held] = np.where(own >= 0, own, len(groups))
    is_unsplit = (pieces.row < 0) & (pieces.kind == PieceKind.UNSPLIT)
    group[is_unsplit] = len(groups)
    return axes, index_of_group[group], spans[group]


def _has_stages(timeline: Timeline) -> bool:
    if not isinstance(timeline.layout, Unavailable):
        return timeline.layout.degree(Axis.PP) > 1
    return timeline.actions is not None and len(np.unique(timeline.actions.stage)) > 1


def _spans_stages(group: JobGroup, layout: Layout | Unavailable) -> bool:
    """Whether a group has members on several pipeline stages; by its name if there is no layout."""
    if isinstance(layout, Unavailable):
        return group.axis == Axis.PP
    stride, degree = layout.stride(Axis.PP), layout.degree(Axis.PP)
    return len({rank // stride % degree for rank in group.ranks}) > 1
