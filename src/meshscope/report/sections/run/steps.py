"""Step times, and what the job gets done in them: steps, tokens, loss."""

import math
from collections.abc import Sequence

from meshscope.analyze.rank.signals import JobSignal
from meshscope.analyze.rank.steps import JobStepSummary
from meshscope.analyze.rank.throughput import SampleRate, TokenRate
from meshscope.core.unavailable import Unavailable, known
from meshscope.numerics.distribution import Distribution
from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import (
    Column,
    Line,
    Part,
    Section,
    Series,
    Table,
    Tone,
    make_column,
    make_facts,
    missing_section,
)

_SIGNAL_TITLES = {"loss": "Loss", "grad_norm": "Gradient norm", "lr": "Learning rate"}
_Row = tuple[str, Distribution | Unavailable]


def show_steps(report: Report, detail: Detail) -> Section:
    """How long steps take, and how that changed over the run."""
    steps, is_one = report.study.steps, report.facts.num_ranks == 1
    over = "" if is_one else "median over ranks of each step"
    note = f"{over}{name_left_out(report, comma=bool(over))}"
    if isinstance(steps.time, Unavailable):
        reason = form.clean_text(steps.time.reason)
        return missing_section("steps", "Step time", reason, note=note)
    rows: list[_Row] = [("step", steps.time), ("start to start", steps.interval)]
    parts: list[Part] = []
    if is_one:
        parts.append(Table(_make_columns(rows)))
    else:
        parts.append(Table(_make_columns([*rows, ("slowest rank", steps.slowest_rank_time)])))
        parts.append(Line("slowest rank: the longest of each step, not the job's pace", Tone.QUIET))
    parts.append(_make_series(steps))
    facts = _list_facts(steps)
    if facts:
        parts.append(make_facts(facts))
    return Section(key="steps", title="Step time", note=note, parts=tuple(parts))


def name_left_out(report: Report, *, comma: bool = True) -> str:
    """`, without the first step`: the steps that statistics leave out."""
    steps = report.study.steps
    parts = [_first_steps(steps.num_warmup)] if steps.num_warmup else []
    parts += [form.plural(steps.num_profiled, "profiled step")] if steps.num_profiled else []
    if not parts:
        return ""
    return f"{', ' if comma else ''}without {' and '.join(parts)}"


def _first_steps(num_warmup: int) -> str:
    return "the first step" if num_warmup == 1 else f"the first {num_warmup} steps"


def _make_columns(rows: Sequence[_Row]) -> tuple[Column, ...]:
    def column(title: str, name: str, importance: int) -> Column:
        def show(row: _Row) -> str:
            return form.or_dash(row[1], lambda times: form.duration(getattr(times, name)))

        return make_column(title, rows, show, importance)

    def show_variation(row: _Row) -> str:
        return form.or_dash(row[1], lambda times: form.or_dash(times.cv_ratio, form.ratio))

    def show_count(row: _Row) -> str:
        times = known(row[1])
        return form.count(0 if times is None else times.count)

    return (
        make_column("", rows, lambda row: row[0], 9, is_right=False),
        column("median", "median_ns", 8),
        column("mean", "mean_ns", 7),
        column("p95", "p95_ns", 6),
        column("p99", "p99_ns", 5),
        column("min", "min_ns", 1),
        column("max", "max_ns", 3),
        make_column("CV", rows, show_variation, 4),
        make_column("count", rows, show_count, 2),
    )


def _make_series(steps: JobStepSummary) -> Series:
    """One mark per step or group of steps without warm-up, at the longest step."""
    bins = steps.series
    is_one_each = steps.num_steps <= len(bins)
    shown = bins[steps.num_warmup if is_one_each else bool(steps.num_warmup) :]

    def describe(marks: Sequence[float], per_mark: int) -> str:
        meaning = "one step" if per_mark == 1 else f"the longest of up to {per_mark} steps"
        first, last = shown[0].first_step, shown[-1].first_step + shown[-1].num_steps - 1
        span = f"{form.duration(min(marks))} to {form.duration(max(marks))}"
        span += ", drawn from 0" if form.is_steady(marks) else ""
        span += ", profiled ones included" if steps.num_profiled else ""
        return f"steps {first} to {last}, a mark is {meaning}: {span}"

    return Series(
        values=tuple(one.max_ns for one in shown),
        weights=tuple(one.num_steps for one in shown),
        describe=describe,
    )


def _list_facts(steps: JobStepSummary) -> list[tuple[str, str]]:
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
    return facts


def show_throughput(report: Report, detail: Detail) -> Section:
    """Steps and tokens per second, and where loss, gradient norm and learning rate went."""
    study = report.study
    facts = [
        ("Steps", form.or_reason(study.steps_per_s, lambda v: form.rate(v, "steps"))),
        ("Tokens", form.or_reason(study.tokens, lambda v: _describe_tokens(v, study.steps))),
        ("Samples", form.or_reason(study.samples, lambda v: _describe_samples(v, study.steps))),
        *(
            (_title_signal(name), form.or_reason(one, _describe_signal))
            for name, one in study.signals.items()
        ),
    ]
    return Section(
        key="throughput",
        title="Throughput and training",
        note="gaps included",
        parts=(make_facts(facts),),
    )


def _describe_tokens(tokens: TokenRate, steps: JobStepSummary) -> str:
    return _describe_rate(tokens.tokens_per_s, "tokens", tokens, steps)


def _describe_samples(samples: SampleRate, steps: JobStepSummary) -> str:
    return _describe_rate(samples.samples_per_s, "samples", samples, steps)


def _describe_rate(
    per_s: float, unit: str, rate: TokenRate | SampleRate, steps: JobStepSummary
) -> str:
    if not math.isfinite(per_s):
        return f"n/a: not a finite number ({per_s})"
    text = form.rate(per_s, unit)
    text += f" over {form.plural(rate.num_ranks, 'rank')}, {rate.source}"
    if rate.num_nonfinite:
        text += f"; {form.plural(rate.num_nonfinite, 'value')} not finite left out"
    if rate.num_steps < steps.num_steps:
        text += f"; known in {rate.num_steps} of {steps.num_steps} steps"
    return text


def _title_signal(name: str) -> str:
    """`Loss 2` for `loss 2`: that of the second optimizer."""
    signal, _, number = name.partition(" ")
    return f"{_SIGNAL_TITLES[signal]} {number}".rstrip()


def _describe_signal(found: JobSignal) -> str:
    shown = found.shown
    source = known(shown.source)
    name = form.clean_text(shown.name) + (f", {form.clean_text(source)}" if source else "")
    name += f"; {form.clean_text(shown.optimizer)}" if shown.optimizer else ""
    first_value, last_value = known(shown.first), known(shown.last)
    if first_value is None or last_value is None:
        text = form.or_reason(shown.last, str)
    else:
        first, last = form.numbers(first_value, last_value)
        text = last if first == last else f"{first} → {last}"
        text += f" at step {form.or_dash(shown.last_step, str)}"
    text += f" (rank {shown.rank}: {name})"
    if found.num_nonfinite:
        bad = form.plural(found.num_nonfinite, "value")
        text += f"; {bad} NaN or infinite on {form.name_ranks(found.nonfinite_ranks)}"
    return text
