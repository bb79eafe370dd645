"""The report as text: what to change and where the time went, in the first lines, then the details.

Everything shown is a number of the JSON document, and text that comes from a run is cleaned.
`screen` has the lines and tables, `findings_text` and `communication_text` their sections.
"""

from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from meshscope.report import format as form
from meshscope.report.budget_text import write_budget
from meshscope.report.document import (
    PhaseShare,
    ProblemFacts,
    RankFacts,
    Report,
    SignalFacts,
    Split,
    Spread,
    Times,
)
from meshscope.report.findings_text import describe_worst, write_findings
from meshscope.report.pipeline_text import write_pipeline
from meshscope.report.screen import Column, Screen, ScreenWriter
from meshscope.report.traces_text import write_traces
from meshscope.report.values import Absent

MAX_RANK_ROWS = 16
"""Ranks shown unless all are asked for."""
MAX_PROBLEM_ROWS = 12
MAX_PHASE_ROWS = 12
MAX_MORE_CLUES = 2
"""Clues named beside the first."""
MAX_OPEN_ROWS = 4
"""Unfinished ranks of which it is said where they stopped."""
_PHASE_IMPORTANCE = (70, 60, 28, 20)
"""Of the columns for the largest phases in the table of ranks."""
_OPEN = "running or killed"
"""Said of a rank without a closing line."""
_PHASE_STYLES = {
    "data": "yellow",
    "forward": "blue",
    "backward": "magenta",
    "optimizer": "cyan",
    "eval": "green",
    "comm": "red",
}
_SIGNAL_TITLES = {"loss": "Loss", "grad_norm": "Gradient norm", "lr": "Learning rate"}


def render_report(report: Report, screen: Screen) -> str:
    """The whole report; ends with a newline."""
    out = ScreenWriter(screen)
    _Writer(out=out, report=report).write()
    return out.finish()


def headline(report: Report) -> str:
    """The report in one sentence."""
    ranks = form.plural(report.run.num_ranks, "rank")
    layout = form.describe_degrees(report.layout.degrees)
    where = f"{ranks} ({layout})" if layout else ranks
    median_ns = report.steps.time.median_ns
    if isinstance(median_ns, Absent):
        recorded = form.duration(report.run.longest_wall_ns)
        return f"{where}, {recorded} recorded; no step to measure: {median_ns.unavailable}."
    opening = f"{form.plural(report.steps.num_steps, 'step')} on {where}, median step "
    shares = [phase for phase in report.phases if not phase.is_unattributed]
    rest = next((phase for phase in report.phases if phase.is_unattributed), None)
    parts = (
        [f"{_share(shares[0])} of it in {form.clean_text(shares[0].phase, 40)}"] if shares else []
    )
    if rest is not None:
        parts.append(f"{_share(rest)} unattributed")
    return f"{opening}{form.duration(median_ns)}; {', '.join(parts)}."


def describe_clues(report: Report) -> str:
    """Who stands out among its peers, in a sentence; empty when nobody does."""
    if not report.clues:
        return ""
    first, *more = report.clues
    others = "the others" if first.num_peers > 1 else "its only peer"
    if 1 < first.num_peers + 1 < report.run.num_ranks and report.layout.degrees:
        others = "its dp peers" if first.num_peers > 1 else "its only dp peer"
    text = (
        f"rank {first.rank} spends {form.duration(first.median_ns)} in "
        f"{form.clean_text(first.phase, 40)}, {others} {form.duration(first.peers_median_ns)} "
        f"(median)"
    )
    also = [
        f"rank {clue.rank} in {form.clean_text(clue.phase, 40)} "
        f"({form.duration(clue.median_ns)}, {form.duration(clue.peers_median_ns)})"
        for clue in more[:MAX_MORE_CLUES]
    ]
    if also:
        text += f"; also {', '.join(also)}"
    if len(more) > MAX_MORE_CLUES:
        text += f" and {len(more) - MAX_MORE_CLUES} more (see --json)"
    if not report.layout.degrees:
        text += "; the layout is not known, so they may do different work"
    return text


def _share(phase: PhaseShare) -> str:
    return form.or_dash(phase.ratio, form.ratio)


@dataclass(slots=True, kw_only=True)
class _Writer:
    out: ScreenWriter
    report: Report

    def write(self) -> None:
        self._write_head()
        self._write_breakdown()
        write_budget(self.out, self.report.budget, self.report.budget_reason)
        write_pipeline(self.out, self.report.pipeline, self.report.pipeline_reason)
        self._write_step_times()
        self._write_rates()
        self._write_spreads()
        self._write_communication()
        self._write_time()
        self._write_ranks()
        traces, num_profiled = self.report.traces, self.report.steps.num_profiled
        write_traces(self.out, traces, num_profiled, self.report.run.path)
        self._write_recording()

    def _count_of(self, part: int, whole: int) -> str:
        """`72 of 1,200 rank-steps`."""
        noun = "step" if self.report.run.num_ranks == 1 else "rank-step"
        return f"{form.count(part)} of {form.plural(whole, noun)}"

    # --- sections -----------------------------------------------------------------------------

    def _write_head(self) -> None:
        run, diagnosis = self.report.run, self.report.diagnosis
        worst = "" if diagnosis is None else describe_worst(diagnosis)
        if worst:
            self.out.headline(worst, "bold red")
        self.out.headline(headline(self.report), "bold")
        warning = describe_incompleteness(self.report)
        if warning:
            self.out.headline(f"! The recording is not complete: {warning}.", "red")
        self._write_alarms()
        clue = describe_clues(self.report)
        if diagnosis is not None:
            write_findings(self.out, diagnosis)
        elif clue:  # what stands out, for want of what it means
            self.out.headline(f"Clue: {clue}.", "yellow")
        self.out.blank()
        started = form.or_reason(run.started_unix_ns, form.moment)
        attempt = f" · attempt {run.attempt} of {run.num_attempts}" if run.num_attempts > 1 else ""
        hosts = [f"{form.clean_text(h.host, 40)} ({h.num_ranks})" for h in run.hosts[:4]]
        more = f" and {len(run.hosts) - 4} more hosts" if len(run.hosts) > 4 else ""
        facts = [
            ("Run", form.clean_path(run.path) + attempt),
            ("Recorded", f"{started} · {form.duration(run.longest_wall_ns)}"),
            ("Ranks", self._describe_ranks()),
            ("Hosts", (", ".join(hosts) + more) or "n/a: no rank's journal says"),
            ("Layout", self._describe_layout()),
        ]
        program = self._describe_program()
        self.out.facts([*facts, ("Program", program)] if program else facts)

    def _describe_layout(self) -> str:
        layout = self.report.layout
        shown = form.or_reason(layout.text, lambda text: form.layout(text, layout.degrees))
        return shown + _layout_source(self.report)

    def _describe_ranks(self) -> str:
        run, health = self.report.run, self.report.health
        known = f"{form.count(run.num_ranks)} of {form.count(run.world_size)} recorded"
        num_open = len(health.unfinished_ranks)
        if not num_open:
            return f"{known}, all finished"
        return f"{known}, {form.count(run.num_ranks - num_open)} finished, {num_open} {_OPEN}"

    def _describe_program(self) -> str:
        run = self.report.run
        parts = []
        if run.argv:
            words = [form.script(run.argv[0], self.out.screen.directory), *run.argv[1:]]
            parts.append(form.clean_text(" ".join(words), 120))
        if isinstance(run.git_revision, str):
            dirty = " (modified)" if run.is_git_dirty else ""
            parts.append(f"git {form.clean_text(run.git_revision)[:9]}{dirty}")
        if isinstance(run.torch_version, str):
            parts.append(f"torch {form.clean_text(run.torch_version, 30)}")
        if isinstance(run.device_name, str):
            parts.append(form.clean_text(run.device_name, 40))
        room = self.out.room - len("Recorded") - 2
        return fit_words(" · ".join(parts), room)

    def _write_breakdown(self) -> None:
        report = self.report
        self.out.section("Where a step's time goes", f"mean per step and rank{_without(report)}")
        if not report.phases:
            reason = report.steps.time.mean_ns
            self.out.line(form.or_reason(reason, form.duration), "dim")
            return
        shown, rest = report.phases[:-1][:MAX_PHASE_ROWS], report.phases[:-1][MAX_PHASE_ROWS:]
        rows = [*shown, report.phases[-1]]
        has_device = report.device_reason is None
        room = self.out.room - 18 - 9 - 11 - (11 if has_device else 0) - 4
        bar_width = max(8, min(44, room))
        names = [
            Text(form.clean_text(row.phase, 24), style=_phase_style(row.phase)) for row in rows
        ]
        bars = [
            Text(form.bar(_known(row.ratio), bar_width), style=_phase_style(row.phase))
            for row in rows
        ]
        total = report.time.steady_steps.wall_ns / report.time.num_steady_rank_steps
        columns = [
            Column(title="phase", cells=[*names, Text("step")], importance=9, is_right=False),
            Column(title="", cells=[*bars, Text("")], importance=5, is_right=False),
            Column(
                title="share", cells=[*map(Text, map(_share, rows)), Text("100 %")], importance=8
            ),
            Column(
                title="host",
                cells=[
                    *(Text(form.or_dash(row.mean_ns, form.duration)) for row in rows),
                    Text(form.duration(total), style="bold"),
                ],
                importance=7,
            ),
        ]
        if has_device:
            device = [Text(form.or_dash(row.device_mean_ns, form.duration)) for row in rows]
            columns.append(Column(title="device", cells=[*device, Text("")], importance=6))
        self.out.table(columns)
        if rest:
            self.out.line(f"and {form.plural(len(rest), 'smaller phase')} (see --json)", "dim")
        time = report.time
        if report.device_reason is not None:
            why = form.clean_text(report.device_reason)
            self.out.line(f"device time: none recorded: {why}", "dim")
        elif time.num_device_rank_steps < time.num_markable_rank_steps:
            marked, steps = time.num_device_rank_steps, time.num_markable_rank_steps
            self.out.line(f"device time: marked in {self._count_of(marked, steps)}", "dim")
        self._write_left_out()

    def _write_left_out(self) -> None:
        time = self.report.time
        if time.num_containers:
            named = ", ".join(form.clean_text(name, 24) for name in list(time.num_containers)[:3])
            spans = form.plural(sum(time.num_containers.values()), "span")
            self.out.line(f"{spans} across step boundaries left out ({named})", "dim")
        if time.num_other_threads:
            phases = form.plural(time.num_other_threads, "phase")
            self.out.line(f"{phases} of other threads left out", "dim")

    def _write_step_times(self) -> None:
        steps = self.report.steps
        is_one = self.report.run.num_ranks == 1
        note = "" if is_one else "median over ranks of each step"
        self.out.section("Step time", f"{note}{_without(self.report, comma=bool(note))}")
        if isinstance(steps.time.mean_ns, Absent):
            self.out.line(form.or_reason(steps.time.mean_ns, form.duration), "dim")
            return
        rows = [("step", steps.time), ("start to start", steps.interval)]
        if not is_one:
            rows.append(("slowest rank", steps.slowest_rank_time))
        self.out.table(_times_columns(rows))
        if not is_one:
            self.out.line("slowest rank: the longest of each step, not the job's pace", "dim")
        self._write_sparkline()
        facts = []
        if steps.warmup_ns:
            times = ", ".join(form.duration(ns) for ns in steps.warmup_ns)
            facts.append(("Warm-up", f"{_first_steps(steps.num_warmup)}: {times}"))
        if steps.slowest:
            often = ", ".join(f"rank {s.rank} in {form.count(s.num_steps)}" for s in steps.slowest)
            compared = form.plural(steps.num_compared, "step")
            facts.append(("Slowest", f"{often} of {compared}, more often than by chance"))
        if steps.num_partial:
            partial = form.plural(steps.num_partial, "step")
            facts.append(("Partial", f"{partial} not finished by every rank"))
        if facts:
            self.out.facts(facts)

    def _write_sparkline(self) -> None:
        """One mark per step or group of steps, warm-up left out, its highest step shown."""
        steps = self.report.steps
        is_one_each = steps.num_steps <= len(steps.series)
        series = steps.series[steps.num_warmup if is_one_each else bool(steps.num_warmup) :]
        room = min(self.out.room, 80)
        if len(series) < 2:
            return
        size = -(-len(series) // room)
        groups = [series[at : at + size] for at in range(0, len(series), size)]
        marks = [max(bin_.max_ns for bin_ in group) for group in groups]
        self.out.line(form.sparkline(marks, is_unicode=self.out.screen.is_unicode), "cyan")
        per_mark = max(sum(bin_.num_steps for bin_ in group) for group in groups)
        meaning = "one step" if per_mark == 1 else f"the longest of up to {per_mark} steps"
        first, last = series[0].first_step, series[-1].first_step + series[-1].num_steps - 1
        span = f"{form.duration(min(marks))} to {form.duration(max(marks))}"
        span += ", drawn from 0" if form.is_steady(marks) else ""
        span += ", profiled ones included" if steps.num_profiled else ""
        self.out.line(f"steps {first} to {last}, a mark is {meaning}: {span}", "dim")

    def _write_rates(self) -> None:
        report = self.report
        self.out.section("Throughput and training", "gaps included")
        facts = [("Steps", form.or_reason(report.steps_per_s, lambda v: form.rate(v, "steps")))]
        tokens = report.tokens
        text = form.or_reason(tokens.tokens_per_s, lambda v: form.rate(v, "tokens"))
        if not isinstance(tokens.tokens_per_s, Absent):
            source = form.or_reason(tokens.source, str)
            text += f" over {form.plural(tokens.num_ranks, 'rank')}, {source}"
            if tokens.num_nonfinite:
                text += f"; {form.plural(tokens.num_nonfinite, 'value')} not finite left out"
            if tokens.num_steps < report.steps.num_steps:
                text += f"; known in {tokens.num_steps} of {report.steps.num_steps} steps"
        facts.append(("Tokens", text))
        facts += [(_SIGNAL_TITLES[s.signal], _describe_signal(s)) for s in report.signals]
        self.out.facts(facts)

    def _write_spreads(self) -> None:
        report = self.report
        if report.run.num_ranks < 2 or not report.spreads:
            return
        order = "furthest above its peers first"
        self.out.section("Phases over ranks", f"mean per step{_without(report)}, {order}")
        self.out.table(_spread_columns(report.spreads[:MAX_PHASE_ROWS]))

    def _write_alarms(self) -> None:
        if self.report.communication is not None:
            from meshscope.report.communication_text import describe_alarms

            for alarm in describe_alarms(self.report.communication):
                self.out.headline(f"! {alarm}", "red")

    def _write_communication(self) -> None:
        """Says for several ranks that none was recorded, too."""
        report = self.report
        if report.communication is not None:
            from meshscope.report.communication_text import write_communication

            write_communication(
                self.out,
                report.communication,
                without=_without(report),
                has_profiled=report.steps.num_profiled > 0,
            )
        elif report.run.num_ranks > 1:
            self.out.section("Communication")
            self.out.line(f"n/a: {form.clean_text(report.communication_reason or '')}", "dim")

    def _write_time(self) -> None:
        time, num_ranks = self.report.time, self.report.run.num_ranks
        self.out.section("The recorded time", "mean per rank; the parts add up")
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
            Column(title="", cells=[Text(r[0]) for r in rows], importance=9, is_right=False),
            Column(title="time", cells=[Text(row[1]) for row in rows], importance=8),
            Column(title="share", cells=[Text(row[2]) for row in rows], importance=7),
        ]
        if any(row[3] for row in rows):
            cells = [Text(row[3], style="dim") for row in rows]
            columns.append(Column(title="of which", cells=cells, importance=10, is_right=False))
        self.out.table(columns)

    def _write_ranks(self) -> None:
        ranks = self.report.ranks
        hidden = 0
        note = "in order of rank"
        if len(ranks) > MAX_RANK_ROWS and not self.out.screen.shows_all_ranks:
            ordered = sorted(ranks, key=lambda r: (-_known(r.step_time.median_ns), r.rank))
            hidden = len(ranks) - MAX_RANK_ROWS
            ranks, note = ordered[:MAX_RANK_ROWS], "slowest median step first"
        self.out.section("Ranks", f"{note}{_without(self.report, comma=True)}")
        self.out.table(_rank_columns(ranks, self.report))
        if hidden:
            self.out.line(f"{form.plural(hidden, 'rank')} not shown (--all-ranks)", "dim")
        unfinished = [rank for rank in self.report.ranks if rank.state != "finished"]
        for rank in unfinished[:MAX_OPEN_ROWS]:
            when = form.or_reason(rank.last_record_unix_ns, form.moment)
            where = f" in {form.clean_text(rank.open_phase, 40)}" if rank.open_phase else ""
            self.out.line(f"rank {rank.rank}: {rank.state}{where}, last record {when}", "yellow")
        if len(unfinished) > MAX_OPEN_ROWS:
            more = form.plural(len(unfinished) - MAX_OPEN_ROWS, "more rank")
            self.out.line(f"and {more} {_OPEN} (see --json)", "dim")

    def _write_recording(self) -> None:
        health, overhead = self.report.health, self.report.health.overhead
        self.out.section("The recording itself")
        cost = form.or_reason(overhead.median_ns, form.duration)
        if not isinstance(overhead.median_ns, Absent):
            cost = (
                f"median {cost} a step ({form.or_dash(overhead.median_ratio, form.ratio)}), "
                f"p95 {form.or_dash(overhead.p95_ns, form.duration)} "
                f"({form.or_dash(overhead.p95_ratio, form.ratio)}), "
                f"measured in {self._count_of(overhead.num_steps, overhead.num_rank_steps)}"
                + (", opening included" if overhead.is_warmup_only else "")
            )
        facts = [
            ("Own cost", cost),
            ("Opening", form.or_reason(overhead.opening_cost_ns, form.duration) + ", once"),
            ("Errors", self._describe_errors()),
            ("Lost records", form.count(health.num_dropped) if health.num_dropped else "none"),
        ]
        if isinstance(overhead.opening_cost_ns, Absent):
            facts[1] = ("Opening", form.or_reason(overhead.opening_cost_ns, form.duration))
        if health.num_pauses:
            facts.append(
                ("Pauses", f"recording was paused {form.plural(health.num_pauses, 'time')}")
            )
        if health.num_device_steps_given_up:
            given_up = form.plural(health.num_device_steps_given_up, "step")
            facts.append(("Device", f"marks of {given_up} were never reached and given up"))
        facts += [
            ("Note", f"{form.clean_text(note.text)} ({form.name_ranks(note.ranks)})")
            for note in health.notes[:4]
        ]
        self.out.facts(facts)
        self._write_problems(health.problems)

    def _describe_errors(self) -> str:
        errors = self.report.health.errors
        if not errors:
            return "none caught"
        return "; ".join(
            f"{'at least ' if error.is_at_least else ''}{form.count(error.count)} in "
            f"{form.clean_text(error.site, 40)} ({form.name_ranks(error.ranks)}): "
            f"{form.clean_text(error.first_message, 100)}"
            for error in errors[:4]
        )

    def _write_problems(self, problems: list[ProblemFacts]) -> None:
        if not problems:
            return
        self.out.section("Problems")
        for problem in problems[:MAX_PROBLEM_ROWS]:
            self.out.line(describe_problem(problem), "red")
        if len(problems) > MAX_PROBLEM_ROWS:
            self.out.line(f"and {len(problems) - MAX_PROBLEM_ROWS} more (see --json)", "dim")


# --- words ------------------------------------------------------------------------------------


def describe_incompleteness(report: Report) -> str:
    """What is wrong with the recording in a few words; empty when nothing is."""
    health = report.health
    parts = []
    if health.errors:
        parts.append(f"{form.plural(sum(e.count for e in health.errors), 'error')} caught")
    if health.num_missing_ranks:
        parts.append(f"{form.plural(health.num_missing_ranks, 'rank')} missing")
    if health.unfinished_ranks:
        parts.append(f"{form.plural(len(health.unfinished_ranks), 'rank')} without an end")
    if health.short_ranks:
        parts.append(f"{form.name_ranks(health.short_ranks)} with fewer steps")
    if health.num_dropped:
        parts.append(f"{form.plural(health.num_dropped, 'record')} lost")
    told = ("missing-rank", "short-rank", "dropped")
    others = sum(problem.kind not in told for problem in health.problems)
    if others:
        parts.append(f"{form.plural(others, 'damaged or unreadable place')}")
    return ", ".join(parts)


def describe_problem(problem: ProblemFacts) -> str:
    """One line: where, and what."""
    where = [] if problem.rank is None else [f"rank {problem.rank}"]
    if problem.file is not None:
        where.append(form.clean_text(problem.file, 80))
    text = form.clean_text(problem.text)
    return f"{', '.join(where)}: {text}" if where else text


def _layout_source(report: Report) -> str:
    text, source = report.layout.text, report.layout.source
    if isinstance(text, Absent):  # its reason is said already
        return ""
    if isinstance(source, Absent):
        return " · how this is known was not recorded"
    return f" · {form.clean_text(source, 80)}"


def _first_steps(num_warmup: int) -> str:
    return "the first step" if num_warmup == 1 else f"the first {num_warmup} steps"


def _without(report: Report, *, comma: bool = True) -> str:
    steps = report.steps
    parts = [_first_steps(steps.num_warmup)] if steps.num_warmup else []
    parts += [form.plural(steps.num_profiled, "profiled step")] if steps.num_profiled else []
    if not parts:
        return ""
    return f"{', ' if comma else ''}without {' and '.join(parts)}"


def _describe_signal(signal: SignalFacts) -> str:
    if isinstance(signal.name, Absent):
        return form.or_reason(signal.name, str)
    name = form.clean_text(signal.name)
    if not isinstance(signal.source, Absent):
        name += f", {form.clean_text(signal.source)}"
    if isinstance(signal.last, Absent) or isinstance(signal.first, Absent):
        text = form.or_reason(signal.last, lambda value: form.numbers(value)[0])
    else:
        first, last = form.numbers(signal.first, signal.last)
        text = last if first == last else f"{first} → {last}"
        text += f" at step {form.or_dash(signal.last_step, str)}"
    text += f" (rank {form.or_dash(signal.rank, str)}: {name})"
    if signal.num_nonfinite:
        bad = form.plural(signal.num_nonfinite, "value")
        text += f"; {bad} NaN or infinite on {form.name_ranks(signal.nonfinite_ranks)}"
    return text


def _describe_furthest(spread: Spread) -> str:
    if isinstance(spread.excess_ns, Absent):
        return "n/a"
    if spread.excess_ns <= 0:
        return "none"
    return f"rank {spread.furthest_rank} +{form.duration(spread.excess_ns)}"


def _describe_split(split: Split, num_ranks: int) -> str:
    named = [
        f"{form.clean_text(name, 24)} {form.duration(ns / num_ranks)}"
        for name, ns in list(split.phase_ns.items())[:3]
    ]
    if not named:
        return ""
    return ", ".join([*named, f"unattributed {form.duration(split.unattributed_ns / num_ranks)}"])


def _ratio_of(part_ns: int, whole_ns: int) -> str:
    return form.ratio(part_ns / whole_ns) if whole_ns else "n/a"


def _known(value: float | Absent) -> float:
    """For bars and ordering, where nothing is drawn for what is not there."""
    return 0.0 if isinstance(value, Absent) else value


def _phase_style(phase: str) -> str:
    return "dim" if phase == "unattributed" else _PHASE_STYLES.get(phase, "")


def fit_words(text: str, width: int) -> str:
    """Cuts words longer than a line in their middle, so that none is broken over two lines."""
    return " ".join(word if cell_len(word) <= width else _cut(word, width) for word in text.split())


def _cut(word: str, width: int) -> str:
    head = max(0, width - 1) // 3
    tail = max(0, width - 1) - head
    while cell_len(word[:head]) + cell_len(word[len(word) - tail :]) + 1 > width and tail > 0:
        head, tail = head - (head > 0), tail - 1
    return f"{word[:head]}…{word[len(word) - tail :]}"


# --- tables -----------------------------------------------------------------------------------


def _times_columns(rows: list[tuple[str, Times]]) -> list[Column]:
    def cells(name: str) -> list[Text]:
        return [Text(form.or_dash(getattr(times, name), form.duration)) for _, times in rows]

    variation = [Text(form.or_dash(times.cv_ratio, form.ratio)) for _, times in rows]
    return [
        Column(title="", cells=[Text(name) for name, _ in rows], importance=9, is_right=False),
        Column(title="median", cells=cells("median_ns"), importance=8),
        Column(title="mean", cells=cells("mean_ns"), importance=7),
        Column(title="p95", cells=cells("p95_ns"), importance=6),
        Column(title="p99", cells=cells("p99_ns"), importance=5),
        Column(title="min", cells=cells("min_ns"), importance=1),
        Column(title="max", cells=cells("max_ns"), importance=3),
        Column(title="CV", cells=variation, importance=4),
        Column(
            title="count", cells=[Text(form.count(times.count)) for _, times in rows], importance=2
        ),
    ]


def _spread_columns(rows: list[Spread]) -> list[Column]:
    def column(title: str, cells: list[str], importance: int) -> Column:
        return Column(title=title, cells=[Text(cell) for cell in cells], importance=importance)

    names = [Text(form.clean_text(s.phase, 24), style=_phase_style(s.phase)) for s in rows]
    columns = [
        Column(title="phase", cells=names, importance=9, is_right=False),
        column("min", [form.duration(s.min_ns) for s in rows], 3),
        column("median", [form.duration(s.median_ns) for s in rows], 6),
        column("max", [form.duration(s.max_ns) for s in rows], 8),
    ]
    if any(s.furthest_rank != s.max_rank for s in rows):
        columns.append(column("at rank", [str(s.max_rank) for s in rows], 4))
    columns.append(column("above its peers", [_describe_furthest(s) for s in rows], 7))
    columns.append(column("ranks", [form.count(s.num_ranks) for s in rows], 1))
    return columns


def _rank_columns(ranks: list[RankFacts], report: Report) -> list[Column]:
    def column(title: str, cells: list[str], importance: int, *, is_right: bool = True) -> Column:
        return Column(
            title=title, cells=[Text(c) for c in cells], importance=importance, is_right=is_right
        )

    degrees = report.layout.degrees
    columns = [
        column("rank", [str(r.rank) for r in ranks], 99),
        column(
            "place",
            [form.or_dash(r.label, lambda label: form.place(label, degrees)) for r in ranks],
            50,
            is_right=False,
        ),
        column(
            "host",
            [form.or_dash(r.host, lambda host: form.clean_text(host, 16)) for r in ranks],
            35,
            is_right=False,
        ),
        column("steps", [form.count(r.num_steps) for r in ranks], 80),
        column("median", [form.or_dash(r.step_time.median_ns, form.duration) for r in ranks], 90),
        column("mean", [form.or_dash(r.step_time.mean_ns, form.duration) for r in ranks], 26),
    ]
    phases = [p.phase for p in report.phases if not p.is_unattributed][: len(_PHASE_IMPORTANCE)]
    for index, phase in enumerate(phases):
        cells = [
            _ratio_of(r.steady_steps.phase_ns.get(phase, 0), r.steady_steps.wall_ns) for r in ranks
        ]
        columns.append(column(form.clean_text(phase, 12), cells, _PHASE_IMPORTANCE[index]))
    columns.append(column("RSS", [form.or_dash(r.peak_rss_bytes, form.memory) for r in ranks], 45))
    if any(not isinstance(r.peak_device_bytes, Absent) for r in ranks):
        cells = [form.or_dash(r.peak_device_bytes, form.memory) for r in ranks]
        columns.append(column("device", cells, 47))
    if any(isinstance(r.label, Absent) for r in ranks):
        columns = [c for c in columns if c.title != "place"]
    columns.append(column("last", [form.or_dash(r.last_step, str) for r in ranks], 15))
    columns.append(column("state", [_short_state(r) for r in ranks], 65, is_right=False))
    return columns


def _short_state(rank: RankFacts) -> str:
    parts = ["finished" if rank.state == "finished" else _OPEN]
    if rank.num_errors:
        parts.append(form.plural(rank.num_errors, "error"))
    if rank.num_problems:
        parts.append(form.plural(rank.num_problems, "problem"))
    if rank.num_aborted_steps:
        parts.append(f"{rank.num_aborted_steps} aborted")
    if rank.num_skipped_updates:
        parts.append(f"{rank.num_skipped_updates} skipped")
    return ", ".join(parts)
