"""How the ranks of a run are arranged: degrees of parallelism ↔ rank coordinates.

A layout is a plain mesh. Every axis (dp, tp, pp, cp, ep) multiplies the world size, and a rank is
its coordinates written as a mixed-radix number in `order`, slowest axis first. Frameworks that fold
expert parallelism into data parallelism (Megatron, torchtitan) have ep = 1 here: their expert
groups re-cut ranks that dp and cp already count.

Wrong when ranks are not numbered row-major over the mesh; `core.mesh_layout` refuses such a mesh.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from meshscope.errors import LayoutError


class Axis(StrEnum):
    """The axes a mesh can have, in the order in which names and labels list them."""

    DP = "dp"
    TP = "tp"
    PP = "pp"
    CP = "cp"
    EP = "ep"


DEFAULT_ORDER: tuple[str, ...] = ("pp", "dp", "ep", "cp", "tp")
"""pp-dp-tp with tp fastest, as Megatron and torchtitan number ranks, ep and cp placed as there."""

PEER_AXES = (Axis.DP, Axis.CP, Axis.EP)
"""Ranks along these have the same layers and other tokens: whole batches, parts of sequences, or
batches of a rank with other experts."""
_ALWAYS_NAMED = (Axis.DP, Axis.TP, Axis.PP)
_KNOWN_AXES = ", ".join(Axis)
# An x separates parts only after a digit, so that a misspelt name is reported whole.
_PART_BREAK = re.compile(r"[,×]|(?<=[0-9])\s*x\s*(?=[a-z])")
_PART = re.compile(r"(?P<key>[a-z_]+)(?:\s*=\s*|(?=[0-9]))(?P<value>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where one rank sits: its index along each axis, 0 on axes the layout does not use."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    cp: int = 0
    ep: int = 0

    def along(self, axis: str) -> int:
        index: int = getattr(self, _known_axis(axis))
        return index


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Degrees of parallelism and the order in which they number ranks.

    `Layout(dp=2, tp=2, pp=2)` puts tp neighbours on consecutive ranks. With
    `order=("dp", "tp", "pp")` pipeline neighbours are consecutive instead.
    """

    dp: int = 1
    """Data-parallel degree (replicas and shards of one model), at least 1."""
    tp: int = 1
    """Tensor-parallel degree, at least 1."""
    pp: int = 1
    """Pipeline-parallel degree, the number of stages, at least 1."""
    cp: int = 1
    """Context-parallel degree, at least 1."""
    ep: int = 1
    """Expert-parallel degree where experts have a separate mesh axis, at least 1."""
    order: tuple[str, ...] = DEFAULT_ORDER
    """Axis names from slowest to fastest varying; axes of degree 1 may be left out."""

    def __post_init__(self) -> None:
        degrees = {str(axis): getattr(self, axis) for axis in Axis}
        _raise_if_any(_find_value_problems({**degrees, "order": self.order}))

    # Two layouts are the same when they place every rank alike, so where an axis of degree 1
    # stands in the order makes no difference.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self._placing_order == other._placing_order

    def __hash__(self) -> int:
        return hash(self._placing_order)

    @property
    def _placing_order(self) -> tuple[tuple[str, int], ...]:
        return tuple((str(axis), self.degree(axis)) for axis in self.order if self.degree(axis) > 1)

    @property
    def world_size(self) -> int:
        return math.prod(self.degree(axis) for axis in Axis)

    @property
    def named_axes(self) -> tuple[Axis, ...]:
        """The axes that names and labels show: dp, tp and pp always, cp and ep when in use."""
        return tuple(axis for axis in Axis if axis in _ALWAYS_NAMED or self.degree(axis) > 1)

    def degree(self, axis: str) -> int:
        degree: int = getattr(self, _known_axis(axis))
        return degree

    def stride(self, axis: str) -> int:
        """How far apart in rank two neighbours along `axis` are."""
        axis = _known_axis(axis)
        if axis not in self.order:
            # Degree 1 by construction: there is no neighbour, any stride places the ranks alike.
            return 1
        faster = self.order[self.order.index(axis) + 1 :]
        return math.prod(self.degree(other) for other in faster)

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` sits on the mesh."""
        self._check_rank(rank)
        return Coordinates(
            **{str(axis): rank // self.stride(axis) % self.degree(axis) for axis in self.order}
        )

    def rank_of(self, coordinates: Coordinates | None = None, /, **overrides: int) -> int:
        """The rank at `coordinates`, with single indices replaced: `rank_of(here, pp=1)`.

        Axes not given at all are at index 0.
        """
        position = replace(coordinates or Coordinates(), **overrides)
        _raise_if_any(
            f"{axis} index {position.along(axis)!r} is outside 0..{self.degree(axis) - 1} "
            f"of {self.describe()}; pass an index below the {axis} degree"
            for axis in Axis
            if not _is_index(position.along(axis), self.degree(axis))
        )
        return sum(position.along(axis) * self.stride(axis) for axis in self.order)

    def group_ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that share every other coordinate with `rank`, ordered along `axis`."""
        stride = self.stride(axis)
        first = rank - self.coordinates(rank).along(axis) * stride
        return tuple(first + index * stride for index in range(self.degree(axis)))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Every group along `axis`, ordered by first rank; together they hold each rank once."""
        heads = (rank for rank in range(self.world_size) if self.is_head(axis, rank))
        return tuple(self.group_ranks(axis, rank) for rank in heads)

    def joint_groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Every group along several axes at once, ordered by first rank: all other coordinates
        are shared."""
        groups: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            here = self.coordinates(rank)
            head = rank - sum(here.along(axis) * self.stride(axis) for axis in axes)
            groups.setdefault(head, []).append(rank)
        return tuple(map(tuple, groups.values()))

    def groups_of(self, axis: str, ranks: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """The groups along `axis` that hold any of `ranks`, ordered by first rank.

        For readers of a recording: a header can claim a million ranks, and few be there.
        """
        stride, degree = self.stride(axis), self.degree(axis)
        heads = sorted({rank - rank // stride % degree * stride for rank in ranks})
        return tuple(tuple(range(head, head + degree * stride, stride)) for head in heads)

    def group_name(self, axis: str, rank: int) -> str:
        """The name of the group of `rank` along `axis`, such as `dp_group_tp0_pp1`."""
        axis = _known_axis(axis)
        position = self.coordinates(rank)
        fixed = (f"{other}{position.along(other)}" for other in self.named_axes if other != axis)
        return f"{axis}_group_{'_'.join(fixed)}"

    def is_head(self, axis: str, rank: int) -> bool:
        """Whether `rank` is the first of its group along `axis`."""
        return self.coordinates(rank).along(axis) == 0

    def is_tail(self, axis: str, rank: int) -> bool:
        """Whether `rank` is the last of its group along `axis`."""
        return self.coordinates(rank).along(axis) == self.degree(axis) - 1

    def next_stage(self, rank: int) -> int | None:
        """The rank that receives this rank's activations; None on the last stage."""
        return None if self.is_tail(Axis.PP, rank) else rank + self.stride(Axis.PP)

    def previous_stage(self, rank: int) -> int | None:
        """The rank whose activations this rank receives; None on the first stage."""
        return None if self.is_head(Axis.PP, rank) else rank - self.stride(Axis.PP)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks doing the same work on other data, `rank` included: those that differ along
        dp, cp and ep alone.

        Only these are fair to compare for speed: other stages hold other layers.
        """
        self._check_rank(rank)
        found = [self.peer_head(rank)]
        for axis in PEER_AXES:
            stride, degree = self.stride(axis), self.degree(axis)
            found = [head + index * stride for head in found for index in range(degree)]
        return tuple(sorted(found))

    def peer_head(self, rank: int) -> int:
        """The lowest of the peers of `rank`, without a look at the others: a header can claim a
        million ranks."""
        return rank - sum(
            rank // self.stride(axis) % self.degree(axis) * self.stride(axis) for axis in PEER_AXES
        )

    def label(self, rank: int) -> str:
        """The coordinates of `rank` as text, such as `dp0.tp1.pp0`."""
        position = self.coordinates(rank)
        return ".".join(f"{axis}{position.along(axis)}" for axis in self.named_axes)

    def describe(self) -> str:
        """One line for people, such as `dp2×tp2×pp2 (pp-dp-tp, tp fastest)`."""
        degrees = "×".join(f"{axis}{self.degree(axis)}" for axis in self.named_axes)
        used = [axis for axis, _ in self._placing_order]
        # With fewer than two axes in use, order has no effect and would only puzzle.
        return f"{degrees} ({'-'.join(used)}, {used[-1]} fastest)" if len(used) > 1 else degrees

    def to_dict(self) -> dict[str, int | list[str]]:
        """Plain values for JSON; `from_dict` reads them back."""
        degrees: dict[str, int | list[str]] = {str(axis): self.degree(axis) for axis in Axis}
        return degrees | {"order": [str(axis) for axis in self.order]}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """A layout from `to_dict`'s form; degrees and order left out take their defaults."""
        # JSON has no tuples.
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        _raise_if_any(_find_value_problems(fields))
        return cls(**fields)  # type: ignore[arg-type]  # every key and value was checked just above

    @classmethod
    def parse(cls, text: str) -> Self:
        """A layout from `dp=2,tp=2,pp=2` or `dp2xtp2xpp2`, either with `,order=dp-tp-pp`."""
        parts = [_parse_part(part) for part in _PART_BREAK.split(text.lower()) if part.strip()]
        if not parts:
            raise LayoutError(f"{text!r} names no axis; expected a layout such as dp=2,tp=2,pp=2")
        keys = [key for key, _ in parts]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        _raise_if_any(
            [f"{text!r} gives {key} more than once; keep one" for key in repeated]
            + _find_value_problems(dict(parts))
        )
        return cls.from_dict(dict(parts))

    def _check_rank(self, rank: int) -> None:
        if not _is_index(rank, self.world_size):
            raise LayoutError(
                f"rank {rank!r} is outside 0..{self.world_size - 1} of {self.describe()}; "
                f"pass a rank below the world size or correct the degrees"
            )


def read_layout(given: "Layout | str") -> Layout:
    """A layout that a program gives as one, or as text: `dp=4,tp=2`."""
    if isinstance(given, str):
        return Layout.parse(given)
    if not isinstance(given, Layout):
        raise LayoutError(f"{given!r} is no layout; give a Layout, or text such as 'dp=4,tp=2'")
    return given


def find_layout_problems(
    layout: Layout,
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    num_layers: int | None = None,
    stage_split: Sequence[int] | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> list[str]:
    """Every reason why `layout` cannot run on these ranks with this model; empty when it can.

    What is not given is not checked. `stage_split` is the number of layers of each stage.
    """
    counts = {
        "world_size": world_size,
        "local_world_size": local_world_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
    }
    given = {name: count for name, count in counts.items() if count is not None}
    problems = _find_count_problems(given)
    usable = {name: count for name, count in given.items() if _is_count(count)}
    problems += _find_world_problems(layout, usable)
    problems += _find_stage_problems(layout, usable.get("num_layers"), stage_split)
    problems += _find_head_problems(layout, usable)
    return problems


def check_layout(
    layout: Layout,
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    num_layers: int | None = None,
    stage_split: Sequence[int] | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> None:
    """Raise one LayoutError that lists everything `find_layout_problems` finds."""
    _raise_if_any(
        find_layout_problems(
            layout,
            world_size=world_size,
            local_world_size=local_world_size,
            num_layers=num_layers,
            stage_split=stage_split,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )
    )


def find_groups_across_nodes(layout: Layout, axis: str, nodes: Sequence[int]) -> list[str]:
    """The names of the groups along `axis` whose ranks sit on more than one node.

    `nodes` is the node index of each rank. Such a layout runs; for tp it is usually slow.
    """
    if len(nodes) != layout.world_size:
        raise LayoutError(
            f"got the nodes of {len(nodes)} ranks, but {layout.describe()} has "
            f"{layout.world_size} ranks; pass one node index per rank"
        )
    return [
        layout.group_name(axis, ranks[0])
        for ranks in layout.groups(axis)
        if len({nodes[rank] for rank in ranks}) > 1
    ]


def _find_value_problems(values: Mapping[str, object]) -> list[str]:
    """What is wrong with a layout's own values, before there is a layout."""
    problems = [
        f"{key!r} is not part of a layout; expected {_KNOWN_AXES} or order, each with a value; "
        f"remove or correct it"
        for key in values
        if key not in (*Axis, "order")
    ]
    degrees = {str(axis): values.get(axis, 1) for axis in Axis}
    problems += [
        f"{axis} is {degree!r}, but a degree is a whole number of at least 1; "
        f"set {axis}=1 to leave the axis unused"
        for axis, degree in degrees.items()
        if not _is_count(degree)
    ]
    return problems + _find_order_problems(values.get("order", DEFAULT_ORDER), degrees)


def _find_order_problems(order: object, degrees: Mapping[str, object]) -> list[str]:
    if not isinstance(order, tuple):
        return [
            f"order is {order!r}, but a tuple of axis names, slowest first, is expected; "
            f"pass for example order=('dp', 'tp', 'pp')"
        ]
    problems = [
        f"order names {axis!r}, which is not an axis; use {_KNOWN_AXES}"
        for axis in order
        if axis not in list(Axis)
    ]
    repeated = sorted({str(axis) for axis in order if order.count(axis) > 1})
    problems += [f"order names {axis} more than once; name each axis once" for axis in repeated]
    problems += [
        f"{axis} has degree {degree} but is not in order {'-'.join(map(str, order))}; "
        f"add it to the order, or set {axis}=1"
        for axis, degree in degrees.items()
        if axis not in order and _is_count(degree) and degree != 1
    ]
    return problems


def _find_count_problems(counts: Mapping[str, object]) -> list[str]:
    return [
        f"{name} is {count!r}, but a whole number of at least 1 is expected; correct it"
        for name, count in counts.items()
        if not _is_count(count)
    ]


def _find_world_problems(layout: Layout, counts: Mapping[str, int]) -> list[str]:
    problems = []
    product = " * ".join(f"{axis}({layout.degree(axis)})" for axis in layout.named_axes)
    world_size = counts.get("world_size", layout.world_size)
    if world_size != layout.world_size:
        problems.append(
            f"{product} = {layout.world_size}, but the world size is {world_size}; "
            f"change a degree or launch {layout.world_size} ranks"
        )
    local_world_size = counts.get("local_world_size", world_size)
    if world_size % local_world_size != 0:
        problems.append(
            f"the world size is {world_size}, but nodes of {local_world_size} ranks were expected "
            f"to divide it; launch the same number of ranks on every node"
        )
    return problems


def _find_stage_problems(
    layout: Layout, num_layers: int | None, stage_split: Sequence[int] | None
) -> list[str]:
    if stage_split is not None:
        return _find_split_problems(layout, num_layers, list(stage_split))
    if num_layers is not None and num_layers % layout.pp != 0:
        return [
            f"{num_layers} layers do not divide into pp({layout.pp}) equal stages; "
            f"change pp or give the layers of each stage as a stage split"
        ]
    return []


def _find_split_problems(layout: Layout, num_layers: int | None, split: list[int]) -> list[str]:
    problems = []
    if len(split) != layout.pp:
        problems.append(
            f"stage split {split} has {len(split)} entries, but pp is {layout.pp}; "
            f"give one entry for each stage"
        )
    if not all(_is_count(entry) for entry in split):
        problems.append(
            f"stage split {split} has an entry that is not a whole number of at least 1; "
            f"give every stage a layer or lower pp"
        )
    elif num_layers is not None and sum(split) != num_layers:
        problems.append(
            f"stage split {split} sums to {sum(split)}, but the model has {num_layers} layers; "
            f"correct the split or the number of layers"
        )
    return problems


def _find_head_problems(layout: Layout, counts: Mapping[str, int]) -> list[str]:
    heads = {"num_heads": "attention heads", "num_kv_heads": "key-value heads"}
    return [
        f"{counts[name]} {meaning} do not divide over tp({layout.tp}); "
        f"set tp to a divisor of {counts[name]}"
        for name, meaning in heads.items()
        if name in counts and counts[name] % layout.tp != 0
    ]


def _parse_part(part: str) -> tuple[str, object]:
    match = _PART.fullmatch(part.strip())
    if match is None:
        return part.strip(), None
    key, value = match["key"], match["value"]
    if key == "order":
        return key, tuple(axis.strip() for axis in value.split("-"))
    return key, int(value) if re.fullmatch(r"-?[0-9]+", value) else value


def _known_axis(axis: str) -> Axis:
    try:
        return Axis(axis)
    except ValueError:
        raise LayoutError(f"{axis!r} is not an axis of a layout; use {_KNOWN_AXES}") from None


def _is_count(value: object) -> bool:
    # bool is an int to Python; True as a degree is a mistake.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_index(value: object, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def _raise_if_any(problems: Iterable[str]) -> None:
    listed = list(problems)
    if listed:
        raise LayoutError("\n".join(listed))
