"""What a finding is called and where its evidence is seen: a view with its state, not a sentence.

An id is the rule's code and a number, `ST003.1`, in the order of the findings of that code.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.study import Study
from meshscope.core.unavailable import known
from meshscope.diagnose.finding import Finding
from meshscope.page.heat.cells import list_phases
from meshscope.page.step_spans import choose_steps

_AXES = ("dp", "tp", "pp", "cp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A view and what it is to show; null: as it is."""

    view: str
    """`heat`, `budget`, `timeline`, `pipeline`, `communication`, `bandwidth`, `pairs`, `memory`,
    `training` or `trust`."""
    metric: str | None = None
    ranks: tuple[int, ...] = ()
    """Empty: all."""
    steps: tuple[int, int] | None = None
    """First and last."""
    axis: str | None = None
    step: int | None = None
    phase: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingLinks:
    """One entry of the report's findings, at the same index."""

    id: str
    code: str
    lamp: str
    """The question it answers: `fast`, `move`, `fit`, `learn` or `trust`."""
    cause: str | None
    """Id of the finding that explains it."""
    links: tuple[Link, ...]
    """The best evidence first."""


_VIEWS: dict[str, tuple[tuple[str, str | None], ...]] = {
    "ST": (("heat", "excess"), ("timeline", None)),
    "IM": (("heat", "work"), ("timeline", None)),
    "PA": (("heat", "excess"), ("timeline", None)),
    "LT": (("heat", "excess"), ("timeline", None)),
    "TI": (("heat", "period"), ("budget", None)),
    "IN": (("budget", None), ("timeline", None)),
    "PP": (("pipeline", None), ("timeline", None)),
    "LK": (("pairs", None), ("bandwidth", None), ("communication", None)),
    "CO": (("communication", None), ("budget", None), ("timeline", None)),
    "CP": (("budget", None), ("timeline", None)),
    "HW": (("heat", "work"), ("trust", None)),
    "ME": (("memory", None), ("heat", "memory")),
    "CV": (("training", None),),
    "HE": (("trust", None),),
}
"""By the letters of a rule's code; the view and its metric."""
_LAMPS = {"ME": "fit", "CV": "learn", "HE": "trust"}
_MOVES = ("HE002", "HE006")


def choose_lamp(code: str) -> str:
    """Which of the five questions a rule is about."""
    return "move" if code in _MOVES else _LAMPS.get(code[:2], "fast")


def name_findings(findings: Iterable[Finding]) -> list[str]:
    """Ids, in order."""
    counts: Counter[str] = Counter()
    names = []
    for one in findings:
        counts[one.code] += 1
        names.append(f"{one.code}.{counts[one.code]}")
    return names


def link_findings(study: Study, findings: tuple[Finding, ...]) -> tuple[FindingLinks, ...]:
    names = name_findings(findings)
    named = list(zip(names, findings, strict=True))
    by_label = {one.label: name for name, one in reversed(named)}
    return tuple(
        FindingLinks(
            id=name,
            code=one.code,
            lamp=choose_lamp(one.code),
            cause=None if one.explained_by is None else by_label.get(one.explained_by),
            links=_link(study, one),
        )
        for name, one in named
    )


def find_step(study: Study, finding: Finding) -> int | None:
    """The first step of the timeline that shows the cause; of a cause that was there from the
    beginning a typical one, since first steps are not like the others."""
    timeline = known(study.timeline)
    if timeline is None or not len(timeline.steps):
        return None
    beginning = int(timeline.steps[min(1, len(timeline.steps) - 1)])
    first = beginning if finding.first_step is None else finding.first_step
    if first <= beginning and finding.last_step is None:
        first = choose_steps(study).get("median", first)
    index = int(np.searchsorted(timeline.steps, first))
    if index >= len(timeline.steps):
        return None
    step = int(timeline.steps[index])
    return step if finding.last_step is None or step <= finding.last_step else None


def _link(study: Study, finding: Finding) -> tuple[Link, ...]:
    text = f"{finding.title} {finding.summary}"
    words = text.replace(",", " ").replace(".", " ").split()
    axis = next((word for word in words if word in _AXES), None)
    phase = next((name for name in list_phases(study) if name and f" in {name}" in text), None)
    steps = None
    if finding.first_step is not None:
        end = int(study.steps.step[-1]) if study.steps.num_steps else finding.first_step
        steps = (finding.first_step, end if finding.last_step is None else finding.last_step)
    return tuple(
        Link(
            view=view,
            metric=metric,
            ranks=finding.ranks,
            steps=steps,
            axis=axis,
            step=find_step(study, finding) if view == "timeline" else None,
            phase=phase if view == "heat" else None,
        )
        for view, metric in _VIEWS.get(finding.code[:2], (("trust", None),))
    )
