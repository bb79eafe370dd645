"""What ranks' memory was used for, from the points of `Recorder.profile_memory`.

Every point has bytes by category, the allocator's bytes in use, and the residual between the two,
also as a ratio of the largest amount in use at any point of that rank. Categories are sums over
storages, each counted once. The peak is the point with most in use. Points are sampled after each
operator, so the allocator's own peak may be higher by what an operator needs internally; it is
reported too (unless an earlier, higher one hides it).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshscope.core.memory_point import COUNTERS, MemoryPoint
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.store.read.memory_points import MemoryRecording

_NAMED_AFTER_PARAMETERS = {
    "parameters": 1,
    "gathered_parameters": 1,
    "buffers": 1,
    "gradients": 1,
    "master_parameters": 1,
    "optimizer_state": 2,
}
"""Number of trailing path parts that are not the module's, for categories whose paths end with the
parameter's name (and that of its state)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointSummary:
    name: str
    step: int
    microbatch: int
    seconds: float
    during: str
    """What ran at a peak; else empty."""
    categories_bytes: Mapping[str, int]
    elsewhere_bytes: Mapping[str, int]
    attributed_bytes: int
    allocated_bytes: int | Unavailable
    residual_bytes: int | Unavailable
    """Allocated minus attributed; negative if storages are not the allocator's."""
    residual_ratio: float | Unavailable
    """Relative to the most allocated at any point of this rank."""
    reserved_bytes: int | Unavailable
    peak_allocated_bytes: int | Unavailable
    sampled_peak_bytes: int | Unavailable
    inactive_split_bytes: int | Unavailable
    """Free parts of split blocks; only requests that fit can use them."""
    num_retries: int | Unavailable
    """Times the allocator released its cache to continue, since the process began."""
    num_ooms: int | Unavailable
    rss_bytes: int | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """What one module holds at the peak, without its children."""

    path: str
    total_bytes: int
    categories_bytes: Mapping[str, int]


_ESTIMATED_TOGETHER = {
    "parameters": ("gathered_parameters",),
    "activations": ("outputs", "activation_gradients", "temporaries"),
}
"""Other categories that an estimate covers, unless they have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateLine:
    """A category when the rank was fullest, and its estimate for then."""

    category: str
    covers: tuple[str, ...]
    """The categories that were summed."""
    estimated_bytes: int
    found_bytes: int
    """At the peak; where it was not seen, the most at any point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    rank: int
    place: str | Unavailable
    stage: int | Unavailable
    device: str
    allocator: str
    points: tuple[PointSummary, ...]
    peak: PointSummary | Unavailable
    modules: tuple[ModuleMemory, ...]
    """At the peak, largest first."""
    estimate: tuple[EstimateLine, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The ranks of one pipeline stage at their peaks."""

    stage: int
    ranks: tuple[int, ...]
    largest_rank: int
    largest_bytes: int
    smallest_bytes: int
    largest_by_category_bytes: Mapping[str, int]
    """By category: the most that any of these ranks held at its own peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverview:
    """All ranks that have a profile."""

    ranks: tuple[RankMemory, ...]
    stages: tuple[StageMemory, ...]


def summarize_memory(recordings: Sequence[MemoryRecording]) -> MemoryOverview:
    """Per rank and per stage."""
    ranks = tuple(_summarize_rank(recording) for recording in recordings)
    return MemoryOverview(ranks=ranks, stages=_summarize_stages(ranks))


def _summarize_rank(recording: MemoryRecording) -> RankMemory:
    layout = recording.layout
    place: str | Unavailable = Unavailable("the mesh is not known")
    stage: int | Unavailable = Unavailable("the mesh is not known")
    if not isinstance(layout, Unavailable) and 0 <= recording.rank < layout.world_size:
        place = layout.label(recording.rank)
        stage = layout.coordinates(recording.rank).pp
    most = max((in_use(point) for point in recording.points), default=0)
    peak = find_peak(recording.points)
    return RankMemory(
        rank=recording.rank,
        place=place,
        stage=stage,
        device=recording.device,
        allocator=recording.allocator,
        points=tuple(_summarize_point(point, most) for point in recording.points),
        peak=peak if isinstance(peak, Unavailable) else _summarize_point(peak, most),
        modules=() if isinstance(peak, Unavailable) else _sum_modules(peak.modules_bytes),
        estimate=_compare_estimate(recording),
        problems=recording.problems,
    )


def in_use(point: MemoryPoint) -> int:
    """Allocated bytes; attributed ones if the allocator is not read."""
    allocated = point.allocated_bytes
    return point.attributed_bytes if isinstance(allocated, Unavailable) else allocated


def find_peak(points: Iterable[MemoryPoint]) -> MemoryPoint | Unavailable:
    """The point with most in use."""
    found = max(points, key=in_use, default=None)
    return Unavailable("the profile has no point") if found is None else found


def _summarize_point(point: MemoryPoint, most_bytes: int) -> PointSummary:
    residual, ratio = point.residual_bytes, _measure_residual(point, most_bytes)
    return PointSummary(
        name=point.name,
        step=point.step,
        microbatch=point.microbatch,
        seconds=point.seconds,
        during=point.during,
        categories_bytes=point.categories_bytes,
        elsewhere_bytes=point.elsewhere_bytes,
        attributed_bytes=point.attributed_bytes,
        residual_bytes=residual,
        residual_ratio=ratio,
        **{name: getattr(point, name) for name in COUNTERS},
    )


@or_unavailable
def _measure_residual(point: MemoryPoint, most_bytes: int) -> float:
    residual = need(point.residual_bytes)
    if not most_bytes:
        raise Missing("nothing was in use")
    return residual / most_bytes


def module_of(category: str, path: str) -> str:
    """The module a path of a category belongs to."""
    parts = path.split(".")
    return ".".join(parts[: len(parts) - _NAMED_AFTER_PARAMETERS.get(category, 0)])


def _sum_modules(modules_bytes: Mapping[str, Mapping[str, int]]) -> tuple[ModuleMemory, ...]:
    """Bytes by module over all categories, largest first."""
    found: dict[str, dict[str, int]] = {}
    for category, paths in modules_bytes.items():
        for path, num_bytes in paths.items():
            own = found.setdefault(module_of(category, path), {})
            own[category] = own.get(category, 0) + num_bytes
    modules = [
        ModuleMemory(path=path, total_bytes=sum(own.values()), categories_bytes=own)
        for path, own in found.items()
    ]
    return tuple(sorted(modules, key=lambda module: (-module.total_bytes, module.path)))


def _compare_estimate(recording: MemoryRecording) -> tuple[EstimateLine, ...]:
    """An estimate is of a rank's fullest moment, which need not be each category's own."""
    if not recording.points:
        return ()
    points = [point for point in recording.points if point.name == "at_peak"] or recording.points
    estimates = recording.estimate_bytes
    lines = []
    for category, num_bytes in estimates.items():
        more = (name for name in _ESTIMATED_TOGETHER.get(category, ()) if name not in estimates)
        covers = (category, *more)
        found = max(_sum_categories(point, covers) for point in points)
        lines.append(
            EstimateLine(
                category=category, covers=covers, estimated_bytes=num_bytes, found_bytes=found
            )
        )
    return tuple(lines)


def _sum_categories(point: MemoryPoint, names: Iterable[str]) -> int:
    return sum(sum(point.modules_bytes.get(name, {}).values()) for name in names)


def _summarize_stages(ranks: Sequence[RankMemory]) -> tuple[StageMemory, ...]:
    by_stage: dict[int, list[tuple[RankMemory, PointSummary]]] = {}
    for rank in ranks:
        if not isinstance(rank.stage, Unavailable) and not isinstance(rank.peak, Unavailable):
            by_stage.setdefault(rank.stage, []).append((rank, rank.peak))
    return tuple(_summarize_stage(stage, held) for stage, held in sorted(by_stage.items()))


def _summarize_stage(stage: int, held: Sequence[tuple[RankMemory, PointSummary]]) -> StageMemory:
    sizes = {rank.rank: _peak_bytes(peak) for rank, peak in held}
    largest = max(sizes, key=lambda rank: sizes[rank])
    categories: dict[str, int] = {}
    for _, peak in held:
        for category, num_bytes in peak.categories_bytes.items():
            categories[category] = max(categories.get(category, 0), num_bytes)
    return StageMemory(
        stage=stage,
        ranks=tuple(sizes),
        largest_rank=largest,
        largest_bytes=sizes[largest],
        smallest_bytes=min(sizes.values()),
        largest_by_category_bytes=categories,
    )


def _peak_bytes(peak: PointSummary) -> int:
    allocated = peak.allocated_bytes
    return peak.attributed_bytes if isinstance(allocated, Unavailable) else allocated
