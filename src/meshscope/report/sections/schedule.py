"""The automatic schedule and the built-in ones in one table."""

from meshscope.core.schedule_search import NAME
from meshscope.plan.schedule_choice import RatedSchedule, ScheduleChoice
from meshscope.report import format as form
from meshscope.report.section import (
    Blank,
    Cell,
    Headline,
    Line,
    Section,
    Table,
    Tone,
    make_column,
    make_facts,
)

DOCUMENT = ("meshscope-schedule", 1)
"""Name and version of the JSON document: a `ScheduleChoice`."""


def make_schedule_section(choice: ScheduleChoice) -> Section:
    """The schedule found first, then the built-in ones, the best first."""
    held = "activations of a microbatch on a rank, from F to W"
    if choice.kept_ratio < 1:
        held += f"; {form.ratio(choice.kept_ratio)} of them from I on"
    rows = (choice.found, *choice.built_in)
    return Section(
        key="schedule",
        title="",
        parts=(
            Headline(_say_best(choice)),
            make_facts([("Costs", form.clean_text(choice.source)), ("Held", held)]),
            Blank(),
            Table(
                (
                    make_column("schedule", rows, lambda row: row.name, 100, is_right=False),
                    make_column("bubble", rows, lambda row: form.ratio(row.bubble_ratio), 90),
                    make_column("longest rank", rows, lambda row: form.duration(row.span_ns), 80),
                    make_column("all ranks", rows, lambda row: form.duration(row.makespan_ns), 70),
                    make_column("held", rows, lambda row: f"{row.max_held:.1f}", 60),
                    make_column("memory", rows, _show_fit, 65, is_right=False),
                )
            ),
            Line(
                "Bubble: of the longest rank's time, from its own start to its own end. By replay: "
                "transfers neither queue nor slow actions down.",
                Tone.QUIET,
            ),
        ),
    )


def _say_best(choice: ScheduleChoice) -> str:
    """The best that fits, and the best of the others: chunks can beat one stage on each rank."""
    rows = {one.name: one for one in (choice.found, *choice.built_in) if one.fits}
    # Of those with the same bubble the one that holds least: its bubble is the cheaper one.
    ordered = sorted(rows.values(), key=lambda one: (round(one.bubble_ratio, 6), one.max_held))
    best = ordered[0]
    text = (
        f"Of those that fit {_name(best)} has the smallest bubble, {form.ratio(best.bubble_ratio)}"
    )
    if len(ordered) == 1:
        return f"{text}; no other schedule fits the memory."
    second = ordered[1]
    if round(second.bubble_ratio - best.bubble_ratio, 6) == 0:
        return f"{text}; {_name(second)} has the same and holds {_compare_held(best, second)}."
    return f"{text}; {_name(second)} has {form.ratio(second.bubble_ratio)}."


def _compare_held(best: RatedSchedule, other: RatedSchedule) -> str:
    return "more" if other.max_held > best.max_held else "as much"


def _name(rated: RatedSchedule) -> str:
    return "the automatic schedule" if rated.name == NAME else rated.name


def _show_fit(row: RatedSchedule) -> Cell:
    return Cell("fits") if row.fits else Cell("too much", Tone.NOTICE)
