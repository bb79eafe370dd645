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

from meshscope.core.unavailable import Missing, Unavailable
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
    is_pattern: ClassVar[bool] = False
    """It says where or when time is lost, not why: a finding with a cause for half of the same time
    explains it (`diagnose.explaining`)."""
    resources: ClassVar[frozenset[str]] = frozenset()
    """What runs out, where that is not time: findings about the same on the same ranks are one
    cause's."""

    @abstractmethod
    def find(self, context: "Context") -> Iterable[Finding]:
        """All findings, in any order; none on a healthy run. It may raise `Missing` if it needs
        what is not known."""

    def run(self, context: "Context") -> list[Finding]:
        """The findings up to the first `Missing`."""
        return self.examine(context)[0]

    def examine(self, context: "Context") -> tuple[list[Finding], Unavailable | None]:
        """The findings up to the first `Missing`, and its reason."""
        found: list[Finding] = []
        try:
            for finding in self.find(context):
                found.append(finding)  # noqa: PERF402 - those before a Missing are kept
        except Missing as missing:
            return found, missing.value
        return found, None


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
