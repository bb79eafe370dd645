"""The recorded time in parts that add up, and a row per rank."""

from collections.abc import Sequence

from meshscope.analyze.rank.phases import TimeSplit
from meshscope.analyze.rank.rank_summary import RankState, RankSummary
from meshscope.core.unavailable import known
from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report, sort_phases
from meshscope.report.section import (
    Cell,
    Column,
    Line,
    Part,
    Section,
    Table,
    Tone,
    make_column,
)
from meshscope.report.sections.run.head import OPEN
from meshscope.report.sections.run.steps import name_left_out

MAX_ROWS = 16
"""Ranks shown by default."""
_UNFINISHED = (RankState.OPEN, RankState.FAILED)
_MAX_OPEN_ROWS = 4
"""Unfinished ranks whose last position is shown."""
MAX_PHASES = 3
_PHASE_IMPORTANCE = (70, 60, 28, 20)
"""Of the columns for the largest phases."""


def show_time(report: Report, detail: Detail) -> Section:
    """Time before, in, between and after the steps."""
    time, num_ranks = report.study.time, report.facts.num_ranks
    parts = [
        ("before the first step", time.before_first),
        ("steps", time.steps),
        ("between steps", time.between),
        ("after the last step", time.after_last),
    ]
    rows = [
        (name, form.duration(split.wall_ns / num_ranks), _ratio_of(split.wall_ns, time.wall_ns),
         "" if name == "steps" else _describe_split(split, num_ranks))
        for name, split in parts
        if split.wall_ns
    ]  # fmt: skip
    rows.append(("recorded", form.duration(time.wall_ns / num_ranks), "100 %", ""))
    columns = [
        make_column("", rows, lambda row: row[0], 9, is_right=False),
        make_column("time", rows, lambda row: row[1], 8),
        make_column("share", rows, lambda row: row[2], 7),
    ]
    if any(row[3] for row in rows):
        columns.append(
            make_column("of which", rows, lambda row: Cell(row[3], Tone.QUIET), 10, is_right=False)
        )
    return Section(
        key="time",
        title="The recorded time",
        note="mean per rank; the parts add up",
        parts=(Table(tuple(columns)),),
    )


def _describe_split(split: TimeSplit, num_ranks: int) -> str:
    named = [
        f"{form.clean_text(name, 24)} {form.duration(ns / num_ranks)}"
        for name, ns in list(sort_phases(split.phase_ns).items())[:MAX_PHASES]
    ]
    if not named:
        return ""
    return ", ".join([*named, f"unattributed {form.duration(split.unattributed_ns / num_ranks)}"])


def _ratio_of(part_ns: int, whole_ns: int) -> str:
    return form.ratio(part_ns / whole_ns) if whole_ns else "n/a"


def show_ranks(report: Report, detail: Detail) -> Section:
    """A row per rank, or the slowest of many; then where unfinished ranks stopped."""
    ranks: Sequence[RankSummary] = report.study.ranks
    order = "in order of rank"
    num_hidden = 0
    if len(ranks) > MAX_ROWS and not detail.shows_all_ranks:
        num_hidden = len(ranks) - MAX_ROWS
        ranks = sorted(ranks, key=lambda rank: (-_median_ns(rank), rank.rank))[:MAX_ROWS]
        order = "slowest median step first"
    parts: list[Part] = [Table(_make_columns(ranks, report))]
    if num_hidden:
        hidden = form.plural(num_hidden, "rank")
        parts.append(Line(f"{hidden} not shown (--all-ranks)", Tone.QUIET))
    unfinished = [rank for rank in report.study.ranks if rank.state in _UNFINISHED]
    parts += [Line(_describe_end(rank), Tone.NOTICE) for rank in unfinished[:_MAX_OPEN_ROWS]]
    if len(unfinished) > _MAX_OPEN_ROWS:
        more = form.plural(len(unfinished) - _MAX_OPEN_ROWS, "more rank")
        parts.append(Line(f"and {more} {OPEN} (see --json)", Tone.QUIET))
    note = f"{order}{name_left_out(report)}"
    return Section(key="ranks", title="Ranks", note=note, parts=tuple(parts))


def _median_ns(rank: RankSummary) -> float:
    times = known(rank.step_time)
    return 0.0 if times is None else times.median_ns


def _describe_end(rank: RankSummary) -> str:
    when = form.or_reason(rank.last_record_unix_ns, form.moment)
    where = f" in {form.clean_text(rank.open_phase, 40)}" if rank.open_phase else ""
    return f"rank {rank.rank}: {rank.state}{where}, last record {when}"


def _make_columns(ranks: Sequence[RankSummary], report: Report) -> tuple[Column, ...]:
    degrees = report.layout.degrees
    columns = [make_column("rank", ranks, lambda r: str(r.rank), 99)]
    if all(known(rank.label) is not None for rank in ranks):
        columns.append(
            make_column(
                "position",
                ranks,
                lambda r: form.or_dash(r.label, lambda label: form.position(label, degrees)),
                50,
                is_right=False,
            )
        )
    columns += [
        make_column(
            "host",
            ranks,
            lambda r: form.or_dash(r.host, lambda host: form.clean_text(host, 16)),
            35,
            is_right=False,
        ),
        make_column("steps", ranks, lambda r: form.count(r.num_steps), 80),
        _make_step_column("median", "median_ns", ranks, 90),
        _make_step_column("mean", "mean_ns", ranks, 26),
        *_make_phase_columns(ranks, report),
    ]
    if not report.attempt.is_from_traces:
        columns.append(
            make_column("RSS", ranks, lambda r: form.or_dash(r.peak_rss_bytes, form.memory), 45)
        )
    if any(known(rank.peak_device_bytes) is not None for rank in ranks):
        columns.append(
            make_column(
                "device", ranks, lambda r: form.or_dash(r.peak_device_bytes, form.memory), 47
            )
        )
    columns.append(make_column("last", ranks, lambda r: form.or_dash(r.last_step, str), 15))
    if any(map(_describe_state, ranks)):
        columns.append(
            make_column("state", ranks, lambda r: _describe_state(r) or "n/a", 65, is_right=False)
        )
    return tuple(columns)


def _make_step_column(
    title: str, name: str, ranks: Sequence[RankSummary], importance: int
) -> Column:
    def show(rank: RankSummary) -> str:
        return form.or_dash(rank.step_time, lambda times: form.duration(getattr(times, name)))

    return make_column(title, ranks, show, importance)


def _make_phase_columns(ranks: Sequence[RankSummary], report: Report) -> list[Column]:
    names = [one.phase for one in report.phases if not one.is_unattributed]

    def make(phase: str, importance: int) -> Column:
        def show(rank: RankSummary) -> str:
            split = rank.time.steady_steps
            return _ratio_of(split.phase_ns.get(phase, 0), split.wall_ns)

        return make_column(form.clean_text(phase, 12), ranks, show, importance)

    return [
        make(phase, importance) for phase, importance in zip(names, _PHASE_IMPORTANCE, strict=False)
    ]


def _describe_state(rank: RankSummary) -> str:
    """How it ended, and what is wrong with it; empty where a trace says neither."""
    parts = []
    if (state := known(rank.state)) is not None:
        parts.append(OPEN if state is RankState.OPEN else str(state))
    if rank.num_errors:
        parts.append(form.plural(rank.num_errors, "error"))
    if rank.num_problems:
        parts.append(form.plural(rank.num_problems, "problem"))
    if rank.num_aborted_steps:
        parts.append(f"{rank.num_aborted_steps} aborted")
    if rank.num_skipped_updates:
        parts.append(f"{rank.num_skipped_updates} skipped")
    return ", ".join(parts)
