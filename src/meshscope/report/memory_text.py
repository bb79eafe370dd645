"""What ranks' memory was used for, as text: ranks and stages first, then the fullest rank."""

from functools import partial

from meshscope.analyze.memory.memory_attribution import MemoryOverview, PointSummary, RankMemory
from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.screen import Screen, ScreenWriter, make_column

MAX_RANKS = 32
PATH_WIDTH = 60


def render_memory(
    overview: MemoryOverview, screen: Screen, *, num_rows: int, rank: int | None = None
) -> str:
    """The whole text; in full about `rank`, else about the rank with most in use."""
    out = ScreenWriter(screen)
    shown = [one for one in overview.ranks if not isinstance(one.peak, Unavailable)]
    chosen = [one for one in shown if one.rank == rank] if rank is not None else shown
    if len(overview.ranks) > 1:
        _write_ranks(out, overview)
        out.blank()
    if chosen:
        _write_rank(out, max(chosen, key=_peak_bytes), num_rows)
    for one in overview.ranks:
        for problem in one.problems:
            out.line(f"problem: rank {one.rank}: {form.clean_text(problem)}", "yellow")
    return out.finish()


def _peak_bytes(one: RankMemory) -> int:
    if isinstance(one.peak, Unavailable):
        return 0
    allocated = one.peak.allocated_bytes
    return one.peak.attributed_bytes if isinstance(allocated, Unavailable) else allocated


def _write_ranks(out: ScreenWriter, overview: MemoryOverview) -> None:
    out.headline(f"Memory of {form.plural(len(overview.ranks), 'rank')} at their peaks", "bold")
    if len(overview.stages) > 1:
        stages = overview.stages
        out.table(
            [
                make_column("stage", stages, lambda row: str(row.stage), 9),
                make_column("ranks", stages, lambda row: str(len(row.ranks)), 5),
                make_column("most", stages, lambda row: form.memory(row.largest_bytes), 9),
                make_column("on rank", stages, lambda row: str(row.largest_rank), 6),
                make_column("least", stages, lambda row: form.memory(row.smallest_bytes), 7),
            ]
        )
        out.blank()
    ranks = sorted(overview.ranks, key=_peak_bytes, reverse=True)[:MAX_RANKS]
    out.table(
        [
            make_column("rank", ranks, lambda row: str(row.rank), 9),
            make_column("place", ranks, lambda row: _or_dash(row.place), 5, is_right=False),
            make_column("in use", ranks, lambda row: form.memory(_peak_bytes(row)), 9),
            make_column("residual", ranks, _peak_residual, 8),
            *(
                make_column(_title(name), ranks, partial(_category, name), 3)
                for name in _common_categories(overview)
            ),
        ]
    )
    if len(overview.ranks) > MAX_RANKS:
        out.line(f"and {len(overview.ranks) - MAX_RANKS} ranks with less; --json has all")


def _common_categories(overview: MemoryOverview) -> list[str]:
    wanted = ("parameters", "gradients", "optimizer_state", "activations")
    return [name for name in wanted if any(_has(one, name) for one in overview.ranks)]


def _has(one: RankMemory, name: str) -> bool:
    return not isinstance(one.peak, Unavailable) and name in one.peak.categories_bytes


def _category(name: str, one: RankMemory) -> str:
    if isinstance(one.peak, Unavailable):
        return "n/a"
    return form.memory(one.peak.categories_bytes.get(name, 0))


def _peak_residual(one: RankMemory) -> str:
    return "n/a" if isinstance(one.peak, Unavailable) else _residual(one.peak)


def _write_rank(out: ScreenWriter, one: RankMemory, num_rows: int) -> None:
    place = "" if isinstance(one.place, Unavailable) else f", {one.place}"
    out.headline(f"Rank {one.rank}{place}, on {form.clean_text(one.device)}", "bold")
    out.line(f"allocator: {form.clean_text(one.allocator)}")
    points = list(one.points)
    out.table(
        [
            make_column("point", points, _name, 9, is_right=False),
            make_column("in use", points, lambda row: _memory(row.allocated_bytes), 9),
            make_column("attributed", points, lambda row: form.memory(row.attributed_bytes), 7),
            make_column("residual", points, _residual, 8),
            make_column("of peak", points, _residual_ratio, 6),
            make_column("reserved", points, lambda row: _memory(row.reserved_bytes), 5),
            make_column("alloc. peak", points, lambda row: _memory(row.peak_allocated_bytes), 4),
            make_column("resident", points, lambda row: _memory(row.rss_bytes), 3),
        ]
    )
    if isinstance(one.peak, Unavailable):
        return
    _write_peak(out, one, one.peak, num_rows)


def _write_peak(out: ScreenWriter, one: RankMemory, peak: PointSummary, num_rows: int) -> None:
    out.blank()
    during = form.clean_text(f", in {peak.during}" if peak.during else "", PATH_WIDTH)
    out.headline(f"At the peak ({_name(peak)}){during}", "bold")
    rows = sorted(peak.categories_bytes.items(), key=lambda item: -item[1])
    total = max(_peak_bytes(one), 1)
    out.table(
        [
            make_column("category", rows, lambda row: _title(row[0]), 9, is_right=False),
            make_column("bytes", rows, lambda row: form.memory(row[1]), 9),
            make_column("of peak", rows, lambda row: form.ratio(row[1] / total), 7),
        ]
    )
    for category, num_bytes in peak.elsewhere_bytes.items():
        out.line(f"on another device: {_title(category)} {form.memory(num_bytes)}")
    _write_estimate(out, one)
    modules = one.modules[:num_rows]
    if modules:
        out.blank()
        out.table(
            [
                make_column("module", modules, lambda row: _path(row.path), 9, is_right=False),
                make_column("bytes", modules, lambda row: form.memory(row.total_bytes), 9),
                make_column(
                    "most of it",
                    modules,
                    lambda row: _most(row.categories_bytes),
                    5,
                    is_right=False,
                ),
            ]
        )


def _write_estimate(out: ScreenWriter, one: RankMemory) -> None:
    """Each part at its fullest, and all of them beside what the allocator had in use."""
    if not one.estimate:
        return
    rows = [(_title(e.category), e.estimated_bytes, e.found_bytes) for e in one.estimate]
    rows.append(("together; in use", sum(row[1] for row in rows), _peak_bytes(one)))
    out.blank()
    out.headline("Each at its fullest, beside the estimate", "bold")
    out.table(
        [
            make_column("what", rows, lambda row: row[0], 9, is_right=False),
            make_column("estimated", rows, lambda row: form.memory(row[1]), 9),
            make_column("found", rows, lambda row: form.memory(row[2]), 9),
            make_column("of the estimate", rows, _found_ratio, 6),
        ]
    )
    for line in one.estimate:
        if len(line.covers) > 1:
            more = ", ".join(_title(name) for name in line.covers[1:])
            out.line(f"{_title(line.category)}: found with {more}")


def _found_ratio(row: tuple[str, int, int]) -> str:
    return form.ratio(row[2] / row[1]) if row[1] else "n/a"


def _most(categories: object) -> str:
    sizes = dict(categories) if isinstance(categories, dict) else {}
    name = max(sizes, key=lambda key: sizes[key], default="")
    return f"{_title(name)} {form.memory(sizes[name])}" if name else ""


def _name(point: PointSummary) -> str:
    where = "" if point.step < 0 else f" {point.step}"
    part = f".{point.microbatch}" if point.microbatch > 0 else ""
    return form.clean_text(f"{point.name.replace('_', ' ')}{where}{part}")


def _title(category: str) -> str:
    return form.clean_text(category.replace("_", " "))


def _path(path: str) -> str:
    return form.clean_text(path, PATH_WIDTH) or "(outside of modules)"


def _memory(value: int | Unavailable) -> str:
    return "n/a" if isinstance(value, Unavailable) else form.memory(value)


def _residual(point: PointSummary) -> str:
    value = point.residual_bytes
    if isinstance(value, Unavailable):
        return "n/a"
    return f"-{form.memory(-value)}" if value < 0 else form.memory(value)


def _residual_ratio(point: PointSummary) -> str:
    value = point.residual_ratio
    return "n/a" if isinstance(value, Unavailable) else form.ratio(value)


def _or_dash(value: str | Unavailable) -> str:
    return "n/a" if isinstance(value, Unavailable) else form.clean_text(value)
