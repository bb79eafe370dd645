"""Where a step's time goes, by phase: over all ranks, and compared between them."""

from collections.abc import Sequence

from meshscope.analyze.timeline.peers import PhaseSpread
from meshscope.core.unavailable import Unavailable, known
from meshscope.report import format as form
from meshscope.report.run.report import Detail, PhaseShare, Report, sort_phases
from meshscope.report.section import (
    Cell,
    Column,
    Line,
    Part,
    Section,
    Table,
    Tone,
    make_column,
    missing_section,
)
from meshscope.report.sections.run.steps import name_left_out

MAX_ROWS = 12
_TONES = {
    "data": Tone.DATA,
    "forward": Tone.FORWARD,
    "backward": Tone.BACKWARD,
    "optimizer": Tone.OPTIMIZER,
    "eval": Tone.EVAL,
    "comm": Tone.ALARM,
    "unattributed": Tone.QUIET,
}
_FIXED_WIDTH = 42
"""Columns beside the bars: names, shares, times and gaps."""
_DEVICE_WIDTH = 11


def show_phases(report: Report, detail: Detail) -> Section:
    """Host and device time of every phase, mean per step and rank."""
    title = "Where a step's time goes"
    note = f"mean per step and rank{name_left_out(report)}"
    if not report.phases:
        reason = report.study.steps.time
        text = reason.reason if isinstance(reason, Unavailable) else "no step finished"
        return missing_section("phases", title, form.clean_text(text), note=note)
    shown, rest = report.phases[:-1][:MAX_ROWS], report.phases[:-1][MAX_ROWS:]
    parts: list[Part] = [Table(_make_columns(report, [*shown, report.phases[-1]]))]
    lines = [f"and {form.plural(len(rest), 'smaller phase')} (see --json)"] if rest else []
    lines += [*_describe_device(report), *_describe_left_out(report)]
    parts += [Line(line, Tone.QUIET) for line in lines]
    return Section(key="phases", title=title, note=note, parts=tuple(parts))


def _make_columns(report: Report, rows: Sequence[PhaseShare]) -> tuple[Column, ...]:
    time = report.study.time
    has_device = known(time.device_phase_ns) is not None
    tones = [_TONES.get(row.phase, Tone.PLAIN) for row in rows]
    names = [form.clean_text(row.phase, 24) for row in rows]
    total = form.duration(time.steady_steps.wall_ns / time.num_steady_rank_steps)

    def column(title: str, cells: Sequence[str], last: str | Cell, importance: int) -> Column:
        found = (*map(Cell, cells), Cell(last) if isinstance(last, str) else last)
        return Column(title=title, cells=found, importance=importance)

    shares = [form.or_dash(row.ratio, form.ratio) for row in rows]
    host = [form.duration(row.mean_ns) for row in rows]
    columns = [
        Column(
            title="phase",
            cells=(*map(Cell, names, tones), Cell("step")),
            importance=9,
            is_right=False,
        ),
        Column(
            title="",
            cells=(*(Cell("", tone) for tone in tones), Cell("")),
            importance=5,
            is_right=False,
            bars=tuple(known(row.ratio) or 0.0 for row in rows),
            fixed_width=_FIXED_WIDTH + has_device * _DEVICE_WIDTH,
        ),
        column("share", shares, "100 %", 8),
        column("host", host, Cell(total, Tone.STRONG), 7),
    ]
    if has_device:
        device = [form.or_dash(row.device_mean_ns, form.duration) for row in rows]
        columns.append(column("device", device, "", 6))
    return tuple(columns)


def _describe_device(report: Report) -> list[str]:
    time = report.study.time
    if isinstance(time.device_phase_ns, Unavailable):
        why = form.clean_text(time.device_phase_ns.reason)
        return [f"device time: none recorded: {why}"]
    if time.num_device_rank_steps == time.num_markable_rank_steps:
        return []
    marked = count_of(report, time.num_device_rank_steps, time.num_markable_rank_steps)
    return [f"device time: marked in {marked}"]


def count_of(report: Report, part: int, whole: int) -> str:
    """`72 of 1,200 rank-steps`."""
    noun = "step" if report.facts.num_ranks == 1 else "rank-step"
    return f"{form.count(part)} of {form.plural(whole, noun)}"


def _describe_left_out(report: Report) -> list[str]:
    time = report.study.time
    lines = []
    if time.given:
        named = ", ".join(form.clean_text(name, 24) for name in time.given[:MAX_ROWS])
        lines.append(f"some times were given by the program, not measured: {named}")
    if time.containers:
        named = ", ".join(
            form.clean_text(name, 24) for name in list(sort_phases(time.containers))[:3]
        )
        spans = form.plural(sum(time.containers.values()), "span")
        lines.append(f"{spans} across step boundaries left out ({named})")
    if time.num_other_threads:
        lines.append(f"{form.plural(time.num_other_threads, 'phase')} of other threads left out")
    return lines


def show_peers(report: Report, detail: Detail) -> Section | None:
    """Each phase compared over ranks; None for a single rank."""
    rest = report.study.unattributed
    rows = [*report.study.spreads, *([] if isinstance(rest, Unavailable) else [rest])]
    if report.facts.num_ranks < 2 or not rows:
        return None
    note = f"mean per step{name_left_out(report)}, furthest above its peers first"
    table = Table(_make_spread_columns(rows[:MAX_ROWS]))
    return Section(key="peers", title="Phases over ranks", note=note, parts=(table,))


def _make_spread_columns(rows: Sequence[PhaseSpread]) -> tuple[Column, ...]:
    columns = [
        make_column("phase", rows, _name_phase, 9, is_right=False),
        make_column("min", rows, lambda s: form.duration(s.min_ns), 3),
        make_column("median", rows, lambda s: form.duration(s.median_ns), 6),
        make_column("max", rows, lambda s: form.duration(s.max_ns), 8),
    ]
    if any(s.furthest_rank != s.max_rank for s in rows):
        columns.append(make_column("at rank", rows, lambda s: str(s.max_rank), 4))
    columns.append(make_column("above its peers", rows, _describe_furthest, 7))
    columns.append(make_column("ranks", rows, lambda s: form.count(s.num_ranks), 1))
    return tuple(columns)


def _name_phase(spread: PhaseSpread) -> Cell:
    return Cell(form.clean_text(spread.phase, 24), _TONES.get(spread.phase, Tone.PLAIN))


def _describe_furthest(spread: PhaseSpread) -> str:
    """`rank 5 +50.2 ms`."""

    def describe(excess_ns: float) -> str:
        rank = f"rank {spread.furthest_rank}"
        return f"{rank} +{form.duration(excess_ns)}" if excess_ns > 0 else "none"

    return form.or_dash(spread.excess_ns, describe)
