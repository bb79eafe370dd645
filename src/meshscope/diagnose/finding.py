"""What a rule says: one cause, with its evidence, how sure it is, what to change, what it saves.

A finding is about a cause, not about a number that is high. Ranks and steps say where, `evidence`
holds numbers that a reader can check against the report, and `gain` is what a step would save,
replayed without the cause if a replay is possible. `edit` is that replay's edit: the runner
combines the edits of two findings to see whether they are about the same waits.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.store.read.arrays import Floats, Int64s

if TYPE_CHECKING:
    from meshscope.simulate.what_if import Edit, Gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One number or fact that supports a finding."""

    name: str
    """What it is, in words: "work of rank 5 in forward"."""
    value: float | int | str
    """In `unit`, never rounded."""
    unit: str = ""
    """`ns`, `bytes`, `ratio`, `per_s`, `steps`, …; empty for counts and words. `report.format`
    makes text of it."""


class ConfidenceLevel(StrEnum):
    """How much a finding may be trusted."""

    HIGH = "high"
    """Counted, or past a test at the error rate of the pages."""
    MEDIUM = "medium"
    """The pattern fits and nothing contradicts it."""
    LOW = "low"
    """A hint: there are few steps, or another cause would look the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """How sure a finding is, and why."""

    level: ConfidenceLevel
    text: str
    """One clause: "p < 1e-9 over 58 steps, corrected for 8 tests; effect 18 to 22 %"."""
    p_value: float | None = None
    """Corrected for all tests; None where no test was made."""


MEASURED = Confidence(level=ConfidenceLevel.HIGH, text="counted, not estimated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A gain that was added up from measured times, not replayed; same fields as a `Gain`."""

    saved_ns: float
    """Per step."""
    step_ns: float
    """The step it is a part of."""
    basis: str
    """How it was computed: "median over the slow steps, spread over all steps"."""
    alone_ns: float | None = None
    """What is saved if nothing else is fixed, where other losses hide this one."""

    @property
    def saved_ratio(self) -> float:
        return self.saved_ns / self.step_ns if self.step_ns > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLoss:
    """Time lost in some steps, beyond what they usually take."""

    step: Int64s
    """Numbers, ascending."""
    lost_ns: Floats
    """0 in steps that are as usual."""


class Course(StrEnum):
    """How a cause is spread over the analysed steps."""

    ALWAYS = "always"
    """There in the first of them already, and since."""
    SINCE = "since"
    """From a later step on, or for a while."""
    AT_TIMES = "at times"
    """In some steps, with others between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    """Since when a cause is there."""

    step: int
    """The first step with it; of `always` the first that was analysed."""
    start_unix_ns: int | Unavailable
    """When that step began, by the clock of its rank's host."""
    course: Course
    is_over: bool = False
    """Whether the last analysed step is without it."""


NOT_DATED = Unavailable("it is judged over all steps together, not step by step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, found by one rule."""

    code: str
    """The rule's: "ST001"."""
    title: str
    """A few words, no full stop: "rank 5 is slow in forward"."""
    severity: Severity
    summary: str
    """One sentence with the numbers."""
    ranks: tuple[int, ...] = ()
    """The causes, not the ranks that wait for them; empty: all ranks, or no specific one."""
    first_step: int | None = None
    """First and last step with the cause; None: all analysed steps."""
    last_step: int | None = None
    onset: Onset | Unavailable = field(default=NOT_DATED, compare=False, repr=False)
    """Set by the runner, from `first_step` or from what the edit removes of each step."""
    evidence: tuple[Evidence, ...] = ()
    confidence: Confidence = MEASURED
    change: str
    """What to do, as an order: "Replace the host …"."""
    gain: "Gain | Estimate | Unavailable"
    """Saved per step without the cause; Unavailable where the cost is not time."""
    edit: "Edit | None" = field(default=None, compare=False, repr=False)
    """What `gain` was replayed with, or would be."""
    lost_steps: "StepLoss | None" = field(default=None, compare=False, repr=False)
    """In which steps the time is lost, where no edit says it."""
    explained_by: str | None = None
    """Set by the runner, on symptoms: "ST001 rank 5 is slow in forward"."""

    @property
    def saved_ns(self) -> float:
        """Per step, for ranking; 0 where no gain is known."""
        return 0.0 if isinstance(self.gain, Unavailable) else float(self.gain.saved_ns)

    @property
    def label(self) -> str:
        return f"{self.code} {self.title}"


def check_finding(found: object, code: str) -> None:
    """Raises TypeError for what a rule of this code must not give: others write rules, too."""
    if not isinstance(found, Finding) or found.code != code:
        what = found.code if isinstance(found, Finding) else type(found).__name__
        raise TypeError(f"it gave {what}; a rule gives findings of its own code, {code}")
    texts = (found.title, found.summary, found.change)
    for name, is_good in (
        ("severity", isinstance(found.severity, Severity)),
        ("title, summary or change", all(isinstance(text, str) for text in texts)),
        ("ranks", isinstance(found.ranks, tuple) and all(type(r) is int for r in found.ranks)),
        ("evidence", all(isinstance(one, Evidence) for one in found.evidence)),
        ("confidence", isinstance(found.confidence, Confidence)),
        ("gain", hasattr(found.gain, "saved_ns") or isinstance(found.gain, Unavailable)),
    ):
        if not is_good:
            raise TypeError(f"the {name} of a finding has the wrong type; see {__name__}")
