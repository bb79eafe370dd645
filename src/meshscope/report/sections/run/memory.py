"""How much memory ranks used, how it grew, and what is left."""

from meshscope.analyze.memory.memory import Place, RankMemory
from meshscope.core.unavailable import Unavailable, known
from meshscope.numerics.growth import Growth, GrowthKind
from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import Line, Part, Section, Table, Tone, make_column

MAX_ROWS = 16
"""Rows shown by default."""
_PLACES = {Place.DEVICE: 0, Place.HOST: 1}


def show_memory(report: Report, detail: Detail) -> Section | None:
    """A row per rank and place, the fullest first; None where no memory was read."""
    found = known(report.study.memory)
    if found is None or not found.ranks:
        return None
    rows = sorted(found.ranks, key=lambda one: (_PLACES[one.place], -one.peak_bytes, one.rank))
    shown = rows if detail.shows_all_ranks else rows[:MAX_ROWS]
    has_allocator = any(known(row.allocator) is not None for row in shown)
    columns = [
        make_column("rank", shown, lambda row: str(row.rank), 9),
        make_column("of", shown, lambda row: str(row.place), 8, is_right=False),
        make_column("peak", shown, lambda row: form.memory(row.peak_bytes), 9),
        make_column("step", shown, lambda row: str(row.peak_step), 3),
        make_column("last", shown, lambda row: form.memory(row.last_bytes), 6),
        make_column("limit", shown, lambda row: form.or_dash(row.limit_bytes, form.memory), 5),
        make_column("peak of it", shown, _describe_use, 7),
        make_column("growth", shown, lambda row: _describe_growth(row.growth), 8, is_right=False),
    ]
    if has_allocator:
        columns.append(make_column("unused at peak", shown, _describe_unused, 4))
    parts: list[Part] = [Table(tuple(columns))]
    if len(rows) > len(shown):
        hidden = form.plural(len(rows) - len(shown), "row")
        parts.append(Line(f"{hidden} not shown (--all-ranks)", Tone.QUIET))
    if sum(size > 0 for size in rows[0].parts_bytes.values()) > 1:
        parts.append(Line(_describe_parts(rows[0])))
    if report.attempt.is_from_traces:
        more = "moment by moment, and outside of steps: meshscope trace FILE"
        note = "from [memory] events, in steps"
    else:
        more = "what it was used for: meshscope memory, after run --profiling"
        note = "read at the ends of steps; on a device the allocator's own peak"
    parts.append(Line(more, Tone.QUIET))
    return Section(key="memory", title="Memory", note=note, parts=tuple(parts))


PARTS = {
    "parameters": "trained parameters",
    "other_at_start": "of other things at the end of step {first}",
    "added_later": "added by later steps",
    "within_steps": "freed within the step",
}
"""Of `RankMemory.parts_bytes`, in words."""


def _describe_parts(row: RankMemory) -> str:
    """`rank 1's 3.64 GiB: 2.30 MiB trained parameters, …`: what any run tells without a profile."""
    shown = [
        f"{form.memory(size)} {PARTS[name].format(first=row.first_step)}"
        for name, size in row.parts_bytes.items()
        if size
    ]
    return f"the {form.memory(row.peak_bytes)} of rank {row.rank}: {', '.join(shown)}"


def _describe_use(row: RankMemory) -> str:
    return form.or_dash(row.limit_bytes, lambda limit: form.part(row.peak_bytes, limit))


def _describe_growth(growth: Growth | Unavailable) -> str:
    """`1.2 MiB per step` where it grows steadily, else what it does."""
    if isinstance(growth, Unavailable):
        return "n/a"
    if growth.kind is GrowthKind.STEADY:
        return f"{form.memory(round(growth.per_step))} per step"
    return str(growth.kind)


def _describe_unused(row: RankMemory) -> str:
    return form.or_dash(row.allocator, lambda state: form.memory(state.unused_at_peak_bytes))
