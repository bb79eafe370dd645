"""What a rule is: a code that is never reused, a docstring that is its page, and `find`.

The docstring opens with one sentence, then has the five headings of `HEADINGS`, in that order, each
at the start of a line and followed by a colon. `docs/generate.py` turns it into the rule's page;
a test fails if a heading is missing.
"""

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from meshscope.core.unavailable import Missing
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.finding import Finding

if TYPE_CHECKING:
    from meshscope.diagnose.context import Context

HEADINGS = (
    "What it finds",
    "Why it matters",
    "How it is measured",
    "What to change",
    "When it is wrong",
)

CODE_PATTERN = re.compile(r"(HE|ST|IM|PA|IN|PP|LK|CO|CP|ME|CV|TI|HW|LT)[0-9]{3}")
"""Two letters for the subject, three digits."""

SUBJECTS = {
    "HE": "health of the recording",
    "ST": "stragglers",
    "IM": "imbalance",
    "PA": "pauses",
    "IN": "input",
    "PP": "pipeline",
    "LK": "links",
    "CO": "communication",
    "CP": "compute",
    "ME": "memory",
    "CV": "convergence",
    "TI": "step time",
    "HW": "hardware",
    "LT": "lost time",
}


class Rule(ABC):
    """Looks at one subject. It has no state: one instance serves any number of runs."""

    code: ClassVar[str]
    name: ClassVar[str]
    """In kebab case: "slow-rank"."""
    severities: ClassVar[tuple[Severity, Severity]] = (Severity.LOW, Severity.CRITICAL)
    """The lowest and the highest its findings can have."""
    thresholds: ClassVar[tuple[Threshold, ...]] = ()
    """All limits it reads."""
    symptom_of: ClassVar[frozenset[str]] = frozenset()
    """Codes of causes that also produce this rule's pattern. If one was found at MEDIUM or above
    and saves at least half as much, this rule's findings are demoted and point to it."""

    @abstractmethod
    def find(self, context: "Context") -> Iterable[Finding]:
        """All findings, in any order; none on a healthy run. It may raise `Missing` if it needs
        what is not known."""

    def run(self, context: "Context") -> list[Finding]:
        """The findings up to the first `Missing`."""
        found: list[Finding] = []
        try:
            for finding in self.find(context):
                found.append(finding)  # noqa: PERF402 - those before a Missing are kept
        except Missing:
            pass
        return found


def describe(rule: type[Rule]) -> str:
    return inspect.cleandoc(rule.__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def split_page(rule: type[Rule]) -> dict[str, str]:
    """Heading to text. ValueError if the docstring lacks a heading or has another order."""
    body = inspect.cleandoc(rule.__doc__ or "")
    pattern = "^(" + "|".join(map(re.escape, HEADINGS)) + "):[ ]*"
    parts = re.split(pattern, body, flags=re.MULTILINE)
    found = tuple(parts[1::2])
    if found != HEADINGS or not all(text.strip() for text in parts[2::2]):
        raise ValueError(
            f"the docstring of {rule.__name__} ({rule.code}) has the headings {found}; "
            f"it takes {HEADINGS}, each followed by text"
        )
    return {
        heading: _begin_sentence(inspect.cleandoc("\n" + text).strip())
        for heading, text in zip(found, parts[2::2], strict=True)
    }


def _begin_sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
