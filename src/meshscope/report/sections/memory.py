"""What ranks' memory was used for: ranks and stages first, then the fullest rank."""

from collections.abc import Iterator, Mapping
from functools import partial

from meshscope.analyze.memory.memory_attribution import MemoryOverview, PointSummary, RankMemory
from meshscope.core.unavailable import Unavailable, known
from meshscope.report import format as form
from meshscope.report.section import (
    Blank,
    Headline,
    Line,
    Part,
    Section,
    Table,
    Tone,
    make_column,
)

DOCUMENT = ("meshscope-memory", 1)
"""Name and version of the JSON document: a `MemoryOverview`."""
MAX_RANKS = 32
_PATH_WIDTH = 60
_CATEGORIES = ("parameters", "gradients", "optimizer_state", "activations")


def make_memory_section(
    overview: MemoryOverview, *, num_rows: int, rank: int | None = None
) -> Section:
    """All ranks in brief; then `rank` in full, or the rank with most in use."""
    return Section(key="memory", title="", parts=tuple(_list_parts(overview, num_rows, rank)))


def _list_parts(overview: MemoryOverview, num_rows: int, rank: int | None) -> Iterator[Part]:
    if len(overview.ranks) > 1:
        yield from _list_ranks(overview)
        yield Blank()
    chosen = [one for one in overview.ranks if known(one.peak) and rank in (None, one.rank)]
    if chosen:
        yield from _list_rank(max(chosen, key=_peak_bytes), num_rows)
    else:
        yield Line("n/a: the profile has no point; did a profiled step finish?", Tone.QUIET)
    for one in overview.ranks:
        for problem in one.problems:
            yield Line(f"problem: rank {one.rank}: {form.clean_text(problem)}", Tone.NOTICE)


def _peak_bytes(one: RankMemory) -> int:
    peak = known(one.peak)
    if peak is None:
        return 0
    allocated = known(peak.allocated_bytes)
    return peak.attributed_bytes if allocated is None else allocated


def _list_ranks(overview: MemoryOverview) -> Iterator[Part]:
    yield Headline(f"Memory of {form.plural(len(overview.ranks), 'rank')} at their peaks")
    stages = overview.stages
    if len(stages) > 1:
        yield Table(
            (
                make_column("stage", stages, lambda row: str(row.stage), 9),
                make_column("ranks", stages, lambda row: str(len(row.ranks)), 5),
                make_column("most", stages, lambda row: form.memory(row.largest_bytes), 9),
                make_column("on rank", stages, lambda row: str(row.largest_rank), 6),
                make_column("least", stages, lambda row: form.memory(row.smallest_bytes), 7),
            )
        )
        yield Blank()
    ranks = sorted(overview.ranks, key=_peak_bytes, reverse=True)[:MAX_RANKS]
    peaks = [peak for one in overview.ranks if (peak := known(one.peak))]
    names = [name for name in _CATEGORIES if any(name in p.categories_bytes for p in peaks)]
    yield Table(
        (
            make_column("rank", ranks, lambda row: str(row.rank), 9),
            make_column("position", ranks, _show_position, 5, is_right=False),
            make_column("in use", ranks, lambda row: form.memory(_peak_bytes(row)), 9),
            make_column("residual", ranks, lambda row: form.or_dash(row.peak, _show_residual), 8),
            *(make_column(_title(name), ranks, partial(_show_category, name), 3) for name in names),
        )
    )
    if len(overview.ranks) > MAX_RANKS:
        yield Line(f"and {len(overview.ranks) - MAX_RANKS} ranks with less; --json has all")


def _list_rank(one: RankMemory, num_rows: int) -> Iterator[Part]:
    position = f", {known(one.place)}" if known(one.place) is not None else ""
    yield Headline(f"Rank {one.rank}{position}, on {form.clean_text(one.device)}")
    yield Line(f"allocator: {form.clean_text(one.allocator)}")
    points = one.points
    yield Table(
        (
            make_column("point", points, _name_point, 9, is_right=False),
            make_column("in use", points, lambda row: _size(row.allocated_bytes), 9),
            make_column("attributed", points, lambda row: form.memory(row.attributed_bytes), 7),
            make_column("residual", points, _show_residual, 8),
            make_column("of peak", points, lambda p: form.or_dash(p.residual_ratio, form.ratio), 6),
            make_column("reserved", points, lambda row: _size(row.reserved_bytes), 5),
            make_column("alloc. peak", points, lambda row: _size(row.peak_allocated_bytes), 4),
            make_column("resident", points, lambda row: _size(row.rss_bytes), 3),
        )
    )
    peak = known(one.peak)
    if peak is not None:
        yield Blank()
        yield from _list_peak(one, peak)
        yield from _list_estimate(one)
        yield from _list_modules(one, num_rows)


def _list_peak(one: RankMemory, peak: PointSummary) -> Iterator[Part]:
    during = form.clean_text(f", in {peak.during}" if peak.during else "", _PATH_WIDTH)
    yield Headline(f"At the peak ({_name_point(peak)}){during}")
    rows = sorted(peak.categories_bytes.items(), key=lambda item: -item[1])
    total = max(_peak_bytes(one), 1)
    yield Table(
        (
            make_column("category", rows, lambda row: _title(row[0]), 9, is_right=False),
            make_column("bytes", rows, lambda row: form.memory(row[1]), 9),
            make_column("of peak", rows, lambda row: form.ratio(row[1] / total), 7),
        )
    )
    for category, num_bytes in peak.elsewhere_bytes.items():
        yield Line(f"on another device: {_title(category)} {form.memory(num_bytes)}")


def _list_estimate(one: RankMemory) -> Iterator[Part]:
    """Each part at the peak, and all of them beside what the allocator had in use."""
    if not one.estimate:
        return
    rows = [(_title(e.category), e.estimated_bytes, e.found_bytes) for e in one.estimate]
    rows.append(("together; in use", sum(row[1] for row in rows), _peak_bytes(one)))
    yield Blank()
    yield Headline("At the peak, beside the estimate")
    yield Table(
        (
            make_column("what", rows, lambda row: row[0], 9, is_right=False),
            make_column("estimated", rows, lambda row: form.memory(row[1]), 9),
            make_column("found", rows, lambda row: form.memory(row[2]), 9),
            make_column("of the estimate", rows, lambda row: form.part(row[2], row[1]), 6),
        )
    )
    for line in one.estimate:
        if len(line.covers) > 1:
            more = ", ".join(_title(name) for name in line.covers[1:])
            yield Line(f"{_title(line.category)}: found with {more}")


def _list_modules(one: RankMemory, num_rows: int) -> Iterator[Part]:
    rows = one.modules[:num_rows]
    if rows:
        yield Blank()
        yield Table(
            (
                make_column("module", rows, lambda row: _show_path(row.path), 9, is_right=False),
                make_column("bytes", rows, lambda row: form.memory(row.total_bytes), 9),
                make_column(
                    "most of it", rows, lambda row: _most(row.categories_bytes), 5, is_right=False
                ),
            )
        )


def _show_category(name: str, one: RankMemory) -> str:
    return form.or_dash(one.peak, lambda peak: form.memory(peak.categories_bytes.get(name, 0)))


def _show_position(one: RankMemory) -> str:
    return form.or_dash(one.place, form.clean_text)


def _show_residual(point: PointSummary) -> str:
    return _size(point.residual_bytes)


def _size(num_bytes: int | Unavailable) -> str:
    return form.or_dash(num_bytes, form.memory)


def _most(sizes: Mapping[str, int]) -> str:
    name = max(sizes, key=lambda key: sizes[key], default="")
    return f"{_title(name)} {form.memory(sizes[name])}" if name else ""


def _name_point(point: PointSummary) -> str:
    where = "" if point.step < 0 else f" {point.step}"
    part = f".{point.microbatch}" if point.microbatch > 0 else ""
    return form.clean_text(f"{point.name.replace('_', ' ')}{where}{part}")


def _title(category: str) -> str:
    return form.clean_text(category.replace("_", " "))


def _show_path(path: str) -> str:
    return form.clean_text(path, _PATH_WIDTH) or "(outside of modules)"
