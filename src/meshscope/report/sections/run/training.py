"""Loss, gradient norm and learning rate over the run: drawn small, the best value, a trend."""

from collections.abc import Sequence

from meshscope.analyze.training.convergence import Convergence, JobSeries, LossCourse
from meshscope.core.unavailable import Unavailable, known
from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import Cell, Part, Section, Series, Tone, make_facts

_TITLES = {"loss": "Loss", "grad_norm": "Gradient norm", "learning_rate": "Learning rate"}
_COURSES = {
    LossCourse.PLATEAU: "on a plateau",
    LossCourse.UNCLEAR: "neither clearly falling nor clearly rising",
}
_TONES = {LossCourse.RISING: Tone.NOTICE, LossCourse.DIVERGED: Tone.ALARM}


def show_training(report: Report, detail: Detail) -> Section | None:
    """The logged signals; None without any."""
    found = known(report.study.convergence)
    if found is None:
        return None
    parts: list[Part] = []
    for name, title in _TITLES.items():
        series = getattr(found, name)
        if isinstance(series, JobSeries):
            text = _describe(series, is_loss=name == "loss")
            parts += [make_facts([(title, text)]), _draw(series, title)]
        if name == "loss" and parts:
            parts.append(make_facts([("Trend", describe_trend(found))]))
    for name, series in found.further.items():
        title = _title_further(name)
        text = _describe(series, is_loss=name.startswith("loss"))
        parts += [make_facts([(title, text)]), _draw(series, title)]
    if not parts:
        return None
    note = "each step's median over ranks"
    return Section(key="training", title="Training", note=note, parts=tuple(parts))


def _title_further(name: str) -> str:
    """`Loss 2` for `loss 2`: that of the second optimizer."""
    signal, _, number = name.partition(" ")
    return f"{_TITLES.get(signal, _TITLES['learning_rate'])} {number}"


def _describe(series: JobSeries, *, is_loss: bool) -> str:
    """`6.257 → 3.837 at step 60; best 3.837 at step 59, highest 6.257 at step 0`."""
    points = (series.first, series.last, series.lowest, series.highest)
    first, last, lowest, highest = form.numbers(*(point.value for point in points))
    if lowest == highest:
        return f"{last} in all of {form.plural(len(series), 'step')}"
    extremes = f"{'best' if is_loss else 'lowest'} {lowest} at step {series.lowest.step}"
    ends = f"{first} → {last} at step {series.last.step}"
    return f"{ends}; {extremes}, highest {highest} at step {series.highest.step}"


def _draw(series: JobSeries, title: str) -> Series:
    points = series.points
    per_point = -(-len(series) // len(points))

    def describe(marks: Sequence[float], most: int) -> str:
        meaning = "one step" if most == 1 else f"up to {most} steps"
        drawn = ", drawn from 0" if form.is_steady(marks) else ""
        first, last = series.first.step, series.last.step
        seen = "" if len(series) > last - first else f"{form.count(len(series))} of "
        return f"{title.lower()} at {seen}steps {first} to {last}, a mark is {meaning}{drawn}"

    return Series(
        values=tuple(point.value for point in points),
        weights=(per_point,) * len(points),
        describe=describe,
    )


def describe_trend(found: Convergence) -> Cell:
    """The course of the loss in the last half of the run, with its slope and the interval."""
    course, trend = known(found.course), known(found.trend)
    if course is None or trend is None or not isinstance(found.loss, JobSeries):
        return Cell(form.or_reason(found.course if course is None else found.trend, str))
    first, last = int(found.loss.step[len(found.loss) // 2]), found.loss.last.step
    num_steps = 10 ** max(len(str(last - first)) - 1, 0)
    slopes = [one * num_steps for one in (trend.slope_low, trend.slope, trend.slope_high)]
    low, middle, high = (
        f"{'-' if slope < 0 else '+'}{text}"
        for slope, text in zip(slopes, form.numbers(*map(abs, slopes)), strict=True)
    )
    unit = "step" if num_steps == 1 else f"{form.count(num_steps)} steps"
    text = f"{_COURSES.get(course, course)}: {middle} per {unit} ({low} to {high})"
    text += f" in the last half, steps {first} to {last}"
    if found.divergence is not None:
        text += f"; it was best at step {found.divergence.best_step}"
    return Cell(text, _TONES.get(course, Tone.PLAIN))


def show_training_briefly(report: Report) -> Section | None:
    """For the first screen: the loss of each optimizer, small, and what is trained on a second."""
    study = report.study
    found = known(study.convergence)
    losses = {} if found is None else {"loss": found.loss, **found.further}
    parts: list[Part] = []
    for name, series in losses.items():
        if isinstance(series, JobSeries) and name.startswith("loss"):
            title = _TITLES[name] if name in _TITLES else _title_further(name)
            parts += [make_facts([(title, _describe(series, is_loss=True))]), _draw(series, title)]
        if name == "loss" and found is not None and not isinstance(found.trend, Unavailable):
            parts.append(make_facts([("Trend", describe_trend(found))]))
    tokens, samples = known(study.tokens), known(study.samples)
    rates = [form.rate(tokens.tokens_per_s, "tokens")] if tokens else []
    rates += [form.rate(samples.samples_per_s, "samples")] if samples else []
    if rates:
        parts.append(make_facts([("Rate", ", ".join(rates))]))
    return Section(key="training", title="Training", parts=tuple(parts)) if parts else None
