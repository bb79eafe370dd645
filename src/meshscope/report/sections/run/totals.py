"""Sums over the run, and what the program counted and timed itself."""

from meshscope.analyze.training.totals import Counter, JobTotals, TimedName
from meshscope.core.unavailable import known
from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report, sort_phases
from meshscope.report.section import (
    Blank,
    Line,
    Part,
    Section,
    Table,
    Tone,
    make_column,
    make_facts,
)

_MAX_PHASES = 6
_MAX_ROWS = 20
_NAME = 32


def show_totals(report: Report, detail: Detail) -> Section | None:
    """None where nothing was recorded."""
    found = known(report.study.totals)
    if found is None or not (found.num_rank_steps or found.counters or found.times):
        return None
    parts: list[Part] = [make_facts(_list_sums(found, report))]
    for table in (_list_counters(found.counters), _list_times(found.times)):
        parts += [Blank(), table] if table is not None else []
    shown = (found.counters, found.times)
    num_hidden = found.num_names_left_out + sum(max(len(one) - _MAX_ROWS, 0) for one in shown)
    if num_hidden:
        parts.append(Line(f"and {form.plural(num_hidden, 'more name')} (see --json)", Tone.QUIET))
    note = "sums over all ranks and steps, warm-up included"
    return Section(key="totals", title="Counts and totals", note=note, parts=tuple(parts))


def _list_sums(found: JobTotals, report: Report) -> list[tuple[str, str]]:
    ranks = form.plural(report.facts.num_ranks, "rank")
    passes = form.plural(found.num_backwards, "backward pass", "backward passes")
    num_tokens = known(found.num_tokens)
    tokens = "" if num_tokens is None else f", {form.count(num_tokens)} tokens"
    phases = list(sort_phases(found.phase_ns).items())[:_MAX_PHASES]
    times = [f"{form.clean_text(name, 24)} {form.duration(ns)}" for name, ns in phases]
    return [
        ("Done", f"{form.plural(found.num_rank_steps, 'step')} on {ranks}, {passes}{tokens}"),
        ("Time", ", ".join(times) or "no phase was seen"),
    ]


def _list_counters(rows: tuple[Counter, ...]) -> Table | None:
    rows = rows[:_MAX_ROWS]
    columns = (
        make_column("counter", rows, lambda r: form.clean_text(r.name, _NAME), 9, is_right=False),
        make_column("total", rows, lambda r: form.numbers(r.total)[0], 8),
        make_column("times", rows, lambda r: form.count(r.num_values), 5),
        make_column("ranks", rows, lambda r: form.count(r.num_ranks), 3),
    )
    return Table(columns) if rows else None


def _list_times(rows: tuple[TimedName, ...]) -> Table | None:
    rows = rows[:_MAX_ROWS]
    columns = (
        make_column("timed", rows, lambda r: form.clean_text(r.name, _NAME), 9, is_right=False),
        make_column("total", rows, lambda r: form.duration(r.total_ns), 8),
        make_column("mean", rows, lambda r: form.duration(r.total_ns / max(r.num_times, 1)), 7),
        make_column("times", rows, lambda r: form.count(r.num_times), 5),
        make_column("ranks", rows, lambda r: form.count(r.num_ranks), 3),
        make_column(
            "by", rows, lambda r: "the program" if r.is_given else "meshscope", 6, is_right=False
        ),
    )
    return Table(columns) if rows else None
