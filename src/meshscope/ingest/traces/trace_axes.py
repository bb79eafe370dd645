"""The mesh behind traces: coordinates from their folders' names, a layout that follows, axes.

`rank{g}_dp{d}_tp{t}_pp{p}` says where one rank sits. A layout follows from several of these when
exactly one mesh over the axes they name has the job's world size and puts every rank where its name
says. Where several do, which one it is would be a guess, and there is none.

The axis of a collective is that of its group (`core.group_axis`): members as the event lists them,
else as the header's table of groups does (events cut long lists short); for a message between two
known ranks the axis on which these differ, where a layout is known.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from meshscope.core.group_axis import OTHER, AxisSource, name_axis
from meshscope.core.layout import Axis, Layout
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.trace_columns import Trace, TraceGroup

MAX_TRIED = 100_000
"""Partial meshes looked at; enough for any mesh that a few names pin down."""
UNKNOWN = "unknown"
"""The axis of a collective whose group the trace does not tell."""
MIN_STAGES = 3
MAX_RANKS = 1 << 24
MAX_LISTED = 1 << 17
"""Larger jobs' members are not written out: a header can claim any number."""
_NAMED_RANK = re.compile(r"rank(\d{1,9})((?:_(?:dp|tp|pp|cp|ep)\d{1,9})+)(?![A-Za-z0-9])")
_INDEX = re.compile(r"_([a-z]+)(\d+)")
_HOST_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]{0,200})_(\d{1,9})\.\d{10,20}\.pt\.trace\.json")
"""`HOST_PID.NANOSECONDS.pt.trace.json`."""

Coordinates = Mapping[str, int]


def coordinates_of(source: str) -> tuple[int, dict[str, int]] | None:
    """The rank and its index along each axis that a path names; None when it names none."""
    found = None
    for part in re.split(r"[/\\]", source):
        found = _NAMED_RANK.match(part) or found  # the innermost folder knows best
    if found is None:
        return None
    indices = [(axis, int(index)) for axis, index in _INDEX.findall(found[2])]
    if len(dict(indices)) != len(indices):
        return None
    return int(found[1]), dict(indices)


def find_rank(trace: Trace) -> int | Unavailable:
    """As the trace says, else as its folder's name does."""
    named = coordinates_of(trace.source)
    if isinstance(trace.rank, Unavailable) and named is not None:
        return named[0]
    return trace.rank


def find_host(trace: Trace) -> str:
    """The host that a trace's name tells, as torch's `tensorboard_trace_handler` names traces, if
    the process it names is the trace's own; otherwise ""."""
    found = _HOST_NAME.match(re.split(r"[/\\]", trace.source)[-1])
    if found is None or not any(track.process == int(found[2]) for track in trace.tracks):
        return ""
    return found[1]


def infer_layout(
    coordinates: Mapping[int, Mapping[str, int]], world_size: int | Unavailable
) -> Layout | Unavailable:
    """The one mesh of `world_size` ranks in which each rank has these coordinates."""
    if isinstance(world_size, Unavailable):
        return Unavailable(f"the degrees of the mesh do not follow: {world_size.reason}")
    if not coordinates:
        return Unavailable("no folder names coordinates, such as rank0_dp0_tp0_pp0")
    axes = {frozenset(own) for own in coordinates.values()}
    if len(axes) != 1:
        return Unavailable("the folders' names do not name the same axes")
    named = tuple(axis for axis in Axis if axis in next(iter(axes)))
    beyond = [rank for rank in coordinates if not 0 <= rank < world_size]
    if beyond:
        return Unavailable(f"rank {beyond[0]} is not one of {world_size} ranks")
    found: list[Layout] = []
    for place, layout in enumerate(_fit_meshes(coordinates, named, world_size)):
        if layout is not None and layout not in found:
            found.append(layout)
        if len(found) > 1:
            return Unavailable(
                f"several meshes fit the folders' names, such as {found[0].describe()} and "
                f"{found[1].describe()}; give the layout"
            )
        if place >= MAX_TRIED:
            return Unavailable("too many meshes may fit the folders' names; give the layout")
    if not found:
        return Unavailable(
            f"no mesh of {world_size} ranks puts every rank where its folder's name says"
        )
    return found[0]


def infer_pipeline(
    messages: AbstractSet[tuple[int, int]], groups: AbstractSet[tuple[int, ...]], world_size: int
) -> Layout | Unavailable:
    """A pipeline of all ranks, told by who sends to whom, and who else communicates.

    Its ranks pass messages along one line, both ways: activations there, gradients back. A ring,
    which exchanges parts of a sequence, closes; two ranks tell neither from the other. A pipeline
    beside other axes is left open: which axis the others are would be a guess.
    """
    if world_size < MIN_STAGES:
        return Unavailable("messages show a pipeline only with three ranks or more")
    line = {(rank, rank + 1) for rank in range(world_size - 1)}
    if messages != line | {(after, before) for before, after in line}:
        return Unavailable("ranks do not pass messages along one line, both ways")
    if any(2 < len(ranks) < world_size for ranks in groups):
        return Unavailable("some groups of ranks communicate, which a pipeline alone does not do")
    return Layout(pp=world_size)


def _fit_meshes(
    coordinates: Mapping[int, Coordinates], axes: tuple[Axis, ...], world_size: int
) -> Iterator[Layout | None]:
    """Meshes axis by axis, fastest first; None for each step that is not yet a whole one."""
    smallest = {axis: max(own[axis] for own in coordinates.values()) + 1 for axis in axes}
    open_meshes: list[tuple[tuple[tuple[Axis, int], ...], int]] = [((), 1)]
    while open_meshes:
        chosen, stride = open_meshes.pop()
        left = [axis for axis in axes if all(axis != used for used, _ in chosen)]
        if stride == world_size:
            is_whole = all(smallest[axis] == 1 for axis in left)
            yield _make_layout(chosen) if is_whole else None
            continue
        yield None
        for axis in left:
            open_meshes += [
                ((*chosen, (axis, degree)), stride * degree)
                for degree in _divisors(world_size // stride, max(smallest[axis], 2))
                if all(rank // stride % degree == own[axis] for rank, own in coordinates.items())
            ]


def _divisors(number: int, smallest: int) -> list[int]:
    low = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return [one for one in sorted({*low, *(number // one for one in low)}) if one >= smallest]


def _make_layout(fastest_first: tuple[tuple[Axis, int], ...]) -> Layout:
    order = tuple(str(axis) for axis, _ in reversed(fastest_first))
    degrees: dict[str, int] = {str(axis): degree for axis, degree in fastest_first}
    unused = tuple(str(axis) for axis in Axis if str(axis) not in degrees)
    return Layout(**degrees, order=(*unused, *order))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedGroup:
    """A process group with what is known about it."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """Ascending; empty when the trace does not list them."""
    axis: str
    axis_source: AxisSource


NO_GROUP = NamedGroup(name="", description="", ranks=(), axis=UNKNOWN, axis_source=AxisSource.NONE)


class AxisNamer:
    """Names groups of one trace; each is looked up once."""

    def __init__(
        self,
        groups: Sequence[TraceGroup],
        *,
        world_size: int | Unavailable,
        layout: Layout | None = None,
    ) -> None:
        self._groups = {group.name: group for group in groups}
        self._world_size = -1 if isinstance(world_size, Unavailable) else world_size
        self._layout = layout
        self._seen: dict[tuple[str, str, str, int], NamedGroup] = {}

    def name(self, name: str, description: str, ranks: str, size: int) -> NamedGroup:
        """The group of an event with these arguments; "" and -1 for what it does not say."""
        key = (name, description, ranks, size)
        if key not in self._seen:
            is_said = name or description or ranks or size > 0
            self._seen[key] = self._look_up(*key) if is_said else self.only_group()
        return self._seen[key]

    def _look_up(self, name: str, description: str, ranks: str, size: int) -> NamedGroup:
        listed = self._groups.get(name)
        members = parse_ranks(ranks)
        if listed is not None:
            members = members or tuple(sorted(set(listed.ranks)))
            description = description or listed.description
        if not members and 0 < size == self._world_size <= MAX_LISTED:
            members = tuple(range(size))  # as many as there are: all of them
        if not members and not description:
            return NamedGroup(
                name=name, description="", ranks=(), axis=UNKNOWN, axis_source=AxisSource.NONE
            )
        axis, source = name_axis(
            members, description, layout=self._layout, world_size=self._world_size
        )
        if not members and source is AxisSource.NONE:
            axis = UNKNOWN
        return NamedGroup(
            name=name, description=description, ranks=members, axis=axis, axis_source=source
        )

    def only_group(self) -> NamedGroup:
        """The group of events that name none, where there is but one set of several ranks."""
        if self._world_size == 2 and not self._groups:
            return self.name("", "", "[0, 1]", -1)
        several = [group for group in self._groups.values() if len(set(group.ranks)) > 1]
        members = {tuple(sorted(set(group.ranks))) for group in several}
        if len(members) != 1:
            return NO_GROUP
        if len(several) == 1:
            return self.name(several[0].name, several[0].description, "", -1)
        return self.name("", "", json.dumps(next(iter(members))), -1)

    def name_pair(self, group: NamedGroup, source: int, target: int) -> tuple[str, AxisSource]:
        """The axis of a message: that of its group, or on which the two ranks differ."""
        layout = self._layout
        known = group.axis_source in (AxisSource.DESCRIPTION, AxisSource.LAYOUT)
        if (known and "+" not in group.axis) or layout is None:
            return group.axis, group.axis_source
        if not (0 <= source < layout.world_size and 0 <= target < layout.world_size):
            return group.axis, group.axis_source
        here, there = layout.coordinates(source), layout.coordinates(target)
        differing = [axis for axis in Axis if here.along(axis) != there.along(axis)]
        if len(differing) != 1:
            return (OTHER, AxisSource.NONE) if not known else (group.axis, group.axis_source)
        return str(differing[0]), AxisSource.LAYOUT


def parse_ranks(text: str) -> tuple[int, ...]:
    """`[0, 1, 2]` in ascending order; with `...`, as in long groups, nothing is known."""
    try:
        found = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return ()
    if not isinstance(found, list):
        return ()
    is_known = all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in found)
    return tuple(sorted(set(found))) if is_known else ()
