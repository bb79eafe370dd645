"""What `meshscope plan` shows: choices, the front of time against memory, rejections, sources."""

from collections.abc import Iterable, Sequence

from meshscope.core.unavailable import Unavailable, known
from meshscope.plan.answer import Estimate, PlanAnswer, PlannedLayout
from meshscope.plan.fits import FitAnswer
from meshscope.plan.memory.memory_parts import RankMemory
from meshscope.report import format as form
from meshscope.report.section import (
    Blank,
    Headline,
    Line,
    Part,
    Section,
    Table,
    Tone,
    make_column,
    make_facts,
)

DOCUMENT = ("meshscope-plan", 1)
"""Name and version of the JSON document: a `PlanAnswer`."""
FITS = ("meshscope-fits", 1)
"""Of `plan --fits`: a `FitAnswer`."""
_NANO = 1e9
_PARTS = (
    ("parameters", "parameters_bytes"), ("gradients", "gradients_bytes"),
    ("optimizer", "optimizer_bytes"), ("master", "master_bytes"),
    ("activations", "activations_bytes"), ("logits", "logits_bytes"), ("casts", "casts_bytes"),
    ("communication", "communication_bytes"), ("workspace", "workspace_bytes"),
    ("context*", "context_bytes"), ("fragments*", "fragmentation_bytes"),
)  # fmt: skip


def make_plan_sections(
    answer: PlanAnswer, *, is_why: bool = False, is_explained: bool = False
) -> list[Section]:
    """The head, the choices, the first one in full, the front, what was rejected, sources."""
    sections = [_show_head(answer)]
    if answer.choices:
        sections += [
            _show_choices("choices", "Best layouts", answer.choices),
            _show_first(answer.choices[0]),
            _show_choices("pareto", "Time against memory", answer.pareto),
        ]
    sections.append(_show_rejections(answer, is_why=is_why))
    return [*sections, _show_sources(answer, is_explained=is_explained)]


def _show_head(answer: PlanAnswer) -> Section:
    name = form.clean_text(answer.model)
    size = form.count(answer.num_parameters)
    where = f"{answer.num_devices:,} × {answer.device}, {answer.per_node} a node"
    searched = (
        f"{answer.num_combinations:,} combinations, {answer.num_bounded:,} may fit, "
        f"{answer.num_replayed:,} replayed."
    )
    if answer.choices:
        best = answer.choices[0]
        head = f"{best.layout}: {_span(best.step_s)} a step, {_rate(best.tokens_per_s)}"
    else:
        head = f"No layout {_say_why_none(answer)}."
    return Section(
        key="head",
        title="",
        parts=(
            Headline(head),
            Headline(
                f"{name}, {size} parameters, batch {answer.global_batch_size:,} × "
                f"{answer.sequence_length:,} tokens, on {where}.",
                Tone.PLAIN,
            ),
            Headline(searched, Tone.PLAIN),
            *_flag_impossible(answer),
            *(Headline(f"Fitted: {form.clean_text(text)}", Tone.PLAIN) for text in answer.fitted),
        ),
    )


def _say_why_none(answer: PlanAnswer) -> str:
    """Memory where layouts were bounded, else the rule that rules most out."""
    least = answer.least_memory_bytes
    if least is not None:
        return (
            f"fits: the leanest, {answer.least_memory_layout}, needs at least "
            f"{form.memory(least)}, a device has {form.memory(answer.memory_bytes)}, less what "
            "--memory-share leaves; use more devices or larger ones, or fewer bytes for each "
            "weight (--precision, --optimizer)"
        )
    if not answer.rejections:
        return "is possible: nothing was left to choose from"
    most = max(answer.rejections, key=lambda one: one.count)
    rest = "" if most.count == answer.num_combinations else "; the others' reasons stand below"
    return (
        f"is possible: {most.count:,} of {answer.num_combinations:,} combinations cannot be, "
        f"because {most.reason}{rest}"
    )


def _flag_impossible(answer: PlanAnswer) -> list[Headline]:
    """An MFU over 1 is shown as it is, and said to be wrong."""
    ratios = [known(one.mfu_ratio) for one in answer.choices]
    if not any(one is not None and one.value > 1 for one in ratios):
        return []
    text = "MFU above 100 %: the recording, the device or a given number is wrong."
    return [Headline(text, Tone.ALARM)]


def _show_choices(key: str, title: str, rows: Sequence[PlannedLayout]) -> Section:
    columns = (
        make_column("layout", rows, lambda one: one.layout, 9, is_right=False),
        make_column("step", rows, lambda one: form.duration(one.step_s.value * _NANO), 8),
        make_column("tokens/s", rows, lambda one: form.count(round(one.tokens_per_s.value)), 7),
        make_column("MFU", rows, lambda one: form.or_dash(one.mfu_ratio, _ratio), 6),
        make_column("memory", rows, lambda one: form.memory(one.peak_bytes), 8),
        make_column("bubble", rows, lambda one: form.ratio(one.bubble_ratio), 5),
        *(
            make_column(
                axis,
                rows,
                lambda one, axis=axis: form.part(  # type: ignore[misc]
                    getattr(one.exposed, f"{axis}_s"), one.step_s.value
                ),
                importance,
            )
            for axis, importance in (("tp", 4), ("dp", 4), ("pp", 3), ("cp", 2), ("ep", 1))
            if any(getattr(one.exposed, f"{axis}_s") for one in rows)
        ),
    )
    note = "shares of a step that communication takes and nothing hides stand under its axis"
    return Section(key=key, title=title, note=note, parts=(Table(columns),))


def _show_first(best: PlannedLayout) -> Section:
    facts = [
        ("Step", f"{_span(best.step_s)} (nine of ten)"),
        ("Compute", form.part(best.compute_s, best.step_s.value)),
        ("Optimizer", form.part(best.optimizer_s, best.step_s.value)),
        ("Headroom", form.memory(best.headroom_bytes)),
    ]
    if not isinstance(best.budget, Unavailable):
        budget = best.budget
        facts += [
            ("Days", _numbers(budget.days)),
            ("Cost", form.or_reason(budget.cost, _numbers)),
            ("Energy, kWh", form.or_reason(budget.energy_kwh, _numbers)),
        ]
    parts: list[Part] = [make_facts(facts), Blank(), memory_table(best.memory)]
    parts += [Line("* allowances, not derived", Tone.QUIET), Blank()]
    for name, flags in (
        ("Megatron-LM", best.megatron_flags),
        ("torchtitan 0.2", best.torchtitan_keys),
    ):
        shown = form.or_reason(flags, " ".join)
        parts.append(Line(f"{name}: {shown}"))
    parts.append(Line(f"meshscope train: {form.or_reason(best.engine, str)}"))
    return Section(key="best", title="The first in full", parts=tuple(parts))


def memory_table(ranks: Iterable[RankMemory]) -> Table:
    """Categories of each pipeline rank."""
    rows = list(ranks)
    shown = [(title, name) for title, name in _PARTS if any(getattr(one, name) for one in rows)]
    return Table(
        (
            make_column("stage", rows, lambda one: str(one.pp_rank), 9),
            *(
                make_column(
                    title, rows,
                    lambda one, name=name: form.memory(getattr(one, name)),  # type: ignore[misc]
                    5 if title in ("parameters", "optimizer", "activations") else 3,
                )
                for title, name in shown
            ),
            make_column("total", rows, lambda one: form.memory(one.total_bytes), 9),
        )
    )  # fmt: skip


def _show_rejections(answer: PlanAnswer, *, is_why: bool) -> Section:
    rows = answer.rejections
    columns = [
        make_column("layouts", rows, lambda one: f"{one.count:,}", 9),
        make_column("why not", rows, lambda one: one.reason, 8, is_right=False),
    ]
    if is_why:
        columns.append(make_column("such as", rows, lambda one: one.example, 7, is_right=False))
    note = "" if is_why else "--why shows one of each"
    return Section(key="why", title="Not chosen", note=note, parts=(Table(tuple(columns)),))


def _show_sources(answer: PlanAnswer, *, is_explained: bool) -> Section:
    facts = [(name, form.clean_text(text)) for name, text in answer.sources.items()]
    facts += [("inside nodes", answer.link_inside), ("between nodes", answer.link_between)]
    facts.append(("stack", answer.stack))
    parts: list[Part] = [make_facts(facts)]
    if is_explained:
        rows = answer.constants
        columns = (
            make_column("constant", rows, lambda one: one.name, 9, is_right=False),
            make_column("value", rows, lambda one: f"{one.value:.4g}", 8),
            make_column("source", rows, lambda one: form.clean_text(one.source), 7, is_right=False),
        )
        parts += [Blank(), Table(columns)]
    note = "" if is_explained else "--explain lists the constants"
    return Section(
        key="sources", title="Where the numbers come from", note=note, parts=tuple(parts)
    )


def make_fits_section(answer: FitAnswer) -> Section:
    """Whether a configuration fits, and the nearest that does."""
    tone = Tone.STRONG if answer.fits else Tone.ALARM
    verb = "hardly fits" if answer.fits and answer.is_tight else "fits"
    verb = verb if answer.fits else "does not fit"
    head = (
        f"It {verb}: the fullest rank needs about {form.memory(answer.peak_bytes)} in tensors, "
        f"{form.ratio(answer.peak_bytes / answer.memory_bytes)} of {answer.device}; "
        f"with allowances {form.memory(max(rank.total_bytes for rank in answer.ranks))}."
    )
    parts: list[Part] = [Headline(head, tone), Blank(), memory_table(answer.ranks)]
    parts.append(Line("* allowances, not derived", Tone.QUIET))
    if not answer.fits:
        nearest = form.or_reason(
            answer.nearest, lambda near: f"{near.change}: {form.memory(near.peak_bytes)}"
        )
        parts += [Blank(), Line(f"The nearest that fits: {nearest}")]
    return Section(key="fits", title="", parts=tuple(parts))


def _ratio(value: Estimate) -> str:
    return form.ratio(value.value)


def _span(value: Estimate) -> str:
    low, high = form.duration(value.low * _NANO), form.duration(value.high * _NANO)
    return f"{form.duration(value.value * _NANO)} ({low} to {high})"


def _rate(value: Estimate) -> str:
    return f"{form.count(round(value.value))} tokens/s"


def _numbers(value: Estimate) -> str:
    middle, low, high = form.numbers(value.value, value.low, value.high)
    return f"{middle} ({low} to {high})"
