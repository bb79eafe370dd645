"""Loss, gradient norm and learning rate over the run: drawn small, the best value, a trend."""

from collections.abc import Sequence

from meshscope.analyze.training.convergence import Convergence, JobSeries, LossCourse
from meshscope.core.unavailable import known
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
            parts += [make_facts([(title, _describe(series))]), _draw(series, title)]
    if not parts:
        return None
    if isinstance(found.loss, JobSeries):
        parts.append(make_facts([("Trend", _describe_trend(found))]))
    note = "each step's median over ranks"
    return Section(key="training", title="Training", note=note, parts=tuple(parts))


def _describe(series: JobSeries) -> str:
    """`6.257 → 3.837; lowest 3.837 at step 59, highest 6.257 at step 0`."""
    points = (series.first, series.last, series.lowest, series.highest)
    first, last, lowest, highest = form.numbers(*(point.value for point in points))
    if lowest == highest:
        return f"{last} in all of {form.plural(len(series), 'step')}"
    extremes = f"lowest {lowest} at step {series.lowest.step}"
    return f"{first} → {last}; {extremes}, highest {highest} at step {series.highest.step}"


def _draw(series: JobSeries, title: str) -> Series:
    points = series.points
    per_point = -(-len(series) // len(points))

    def describe(marks: Sequence[float], most: int) -> str:
        meaning = "one step" if most == 1 else f"up to {most} steps"
        drawn = ", drawn from 0" if form.is_steady(marks) else ""
        span = f"steps {series.first.step} to {series.last.step}"
        return f"{title.lower()} at {span}, a mark is {meaning}{drawn}"

    return Series(
        values=tuple(point.value for point in points),
        weights=(per_point,) * len(points),
        describe=describe,
    )


def _describe_trend(found: Convergence) -> Cell:
    """The course of the loss in the last half of the run."""
    course, change = known(found.course), known(found.change_ratio)
    if course is None or change is None:
        return Cell(form.or_reason(found.course if course is None else found.change_ratio, str))
    low, middle, high = (f"{'-' if one < 0 else '+'}{form.ratio(abs(one))}" for one in change)
    text = (
        f"the loss is {_COURSES.get(course, course)}: {middle} over the last half ({low} to {high})"
    )
    if found.divergence is not None:
        text += f"; it was best at step {found.divergence.best_step}"
    return Cell(text, _TONES.get(course, Tone.PLAIN))
