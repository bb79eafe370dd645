"""Judges what a diagnosis says of a run whose fault is known, and measures what the fault cost.

What a fault really cost is the difference between the steps of the recording that has it and of the
one that has not: a step lasts from the end of the one before to its own end, on the rank that ends
last. What comes in few steps has no share in medians: means of blocks of steps are compared then.
The standard error is of the steps' scatter; what the machine does slowly between two recordings is
not in it.

A diagnosis is right when one finding above LOW has a code, the ranks and the words (phase, stage,
axis) of the truth, no other finding is above LOW, and the gain it states is the measured one within
the larger of 10 % and three standard errors. Of several faults each needs its finding (one that
names the ranks and words of all will do), and their gains together are held against what all of
them cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Finding
from meshscope.diagnose.runner import diagnose
from meshscope.store.read.run import open_run

ANY_CODE = ("*",)
"""Of a truth whose cause is told by its words."""
NUM_WARMUP_STEPS = 3
NUM_RESAMPLES = 400
GAIN_TOLERANCE_RATIO = 0.10
ROUGH_TOLERANCE_RATIO = 0.30
"""Where ranks had to wait for their cores: two runs of the same program differ by as much."""
NUM_ERRORS = 3.0
"""Standard errors of the measured effect that a gain may be off in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What was done to a run, and what has to be said of it."""

    kind: str
    codes: tuple[str, ...] = ()
    """Any of these names it; none: nothing above low may be said."""
    ranks: tuple[int, ...] | None = None
    """The culprits; None where it is nobody in particular."""
    phase: str | None = None
    stage: int | None = None
    axis: str | None = None
    every: int = 1
    """It comes in one of so many steps; medians do not show it from 2 on."""
    is_uneven: bool = False
    """It changes over the run: medians do not show it either."""
    says: tuple[str, ...] = ()
    """One of these is in its title or summary; for causes, whatever the rule."""
    advises: tuple[str, ...] = ()
    """One of these is there, or in what it says to change."""
    is_everyone: bool = False
    """All ranks do it: a finding that names none in particular is right, too."""
    may_split: bool = False
    """Several ranks do the same: one finding for all of them, or one for each."""
    first_step: int | None = None
    """The finding must say this step."""

    @property
    def words(self) -> tuple[str, ...]:
        """What a finding's title or summary must have."""
        stage = None if self.stage is None else f"stage {self.stage}"
        return tuple(word for word in (self.phase, stage, self.axis) if word is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a fault cost in a step, measured by taking it away."""

    saved_ns: float
    error_ns: float
    """Standard error of it."""
    faulty_ns: float
    clean_ns: float

    def __str__(self) -> str:
        return (
            f"{self.faulty_ns / 1e6:.2f} ms − {self.clean_ns / 1e6:.2f} ms = "
            f"{self.saved_ns / 1e6:.2f} ± {self.error_ns / 1e6:.2f} ms"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a diagnosis compares with the truth."""

    is_culprit_named: bool
    """Of a healthy run: always."""
    others: tuple[str, ...]
    """Findings above low that are about nothing that was done, or a second one about it."""
    gain_error_ratio: float | None
    """Stated over measured gain, less one; None where no gain was measured, or none stated."""
    is_gain_right: bool
    found: tuple[str, ...]
    """Everything above low, in words."""
    sure: tuple[tuple[str, bool], ...] = ()
    """Of everything above low: how sure it says it is, and whether it is about what was done."""

    @property
    def is_right(self) -> bool:
        return self.is_culprit_named and not self.others and self.is_gain_right

    @property
    def is_gain_within_tolerance(self) -> bool:
        """Strictly: within 10 %, whatever the scatter."""
        error = self.gain_error_ratio
        return error is not None and abs(error) <= GAIN_TOLERANCE_RATIO

    def __str__(self) -> str:
        names = [
            *([] if self.is_culprit_named else ["culprit not named"]),
            *([f"false: {', '.join(self.others)}"] if self.others else []),
            *([] if self.is_gain_right else ["gain wrong"]),
        ]
        error = "" if self.gain_error_ratio is None else f", gain {self.gain_error_ratio:+.1%}"
        return f"{'; '.join(names) or 'right'}{error} [{' | '.join(self.found)}]"


def judge(
    run_dir: Path,
    truths: Truth | Sequence[Truth],
    effect: Effect | None = None,
    *,
    tolerance_ratio: float = GAIN_TOLERANCE_RATIO,
) -> Verdict:
    """Diagnoses a recording and holds the result against the truth."""
    return judge_findings(find(run_dir), truths, effect, tolerance_ratio=tolerance_ratio)


def find(run_dir: Path) -> tuple[Finding, ...]:
    """The diagnosis of a run's last attempt."""
    return diagnose(open_context(run_dir)).findings


def open_context(run_dir: Path) -> Context:
    return Context(Study(open_run(run_dir).last_attempt))


def judge_findings(
    findings: Sequence[Finding],
    truths: Truth | Sequence[Truth],
    effect: Effect | None,
    *,
    tolerance_ratio: float = GAIN_TOLERANCE_RATIO,
) -> Verdict:
    """`effect`: what it cost, where that was measured."""
    truths = [truths] if isinstance(truths, Truth) else list(truths)
    faults = [truth for truth in truths if truth.codes]
    loud = [finding for finding in findings if finding.severity > Severity.LOW]
    named = find_named(loud, faults)
    error = measure_error(named, effect) if named and effect is not None else None
    limit = 0.0 if effect is None else max(tolerance_ratio, find_scatter(effect))
    about = {id(finding) for finding in named or match_any(loud, faults)}
    return Verdict(
        is_culprit_named=bool(named) or not faults,
        others=tuple(finding.label for finding in loud if id(finding) not in about),
        gain_error_ratio=error,
        is_gain_right=effect is None or (error is not None and abs(error) <= limit),
        found=tuple(map(describe, loud)),
        sure=tuple((one.confidence.level.value, id(one) in about) for one in loud),
    )


def find_named(loud: Sequence[Finding], truths: Sequence[Truth]) -> list[Finding]:
    """The findings that name all of the truths between them; empty where one is not named."""
    for finding in loud:
        if len(truths) > 1 and is_about_all(finding, truths):
            return [finding]
    named: list[Finding] = []
    for truth in truths:
        left = [one for one in loud if all(one is not other for other in named)]
        found = match(left, truth)
        if not found:
            return []
        named += found
    return named


def match(loud: Sequence[Finding], truth: Truth) -> list[Finding]:
    """The finding that names a truth, or those that do between them."""
    for finding in loud:
        if is_about(finding, truth):
            return [finding]
    if not truth.may_split:
        return []
    parts = [one for one in loud if any(is_about(one, each) for each in split(truth))]
    ranks = [rank for one in parts for rank in one.ranks]
    return parts if sorted(ranks) == sorted(truth.ranks or ()) else []


def split(truth: Truth) -> list[Truth]:
    return [replace(truth, ranks=(rank,), is_everyone=False) for rank in truth.ranks or ()]


def match_any(loud: Sequence[Finding], truths: Sequence[Truth]) -> list[Finding]:
    """Findings about one of several truths, where not all are named."""
    found = [match(loud, truth) for truth in truths]
    return [finding for part in found for finding in part]


def is_about(finding: Finding, truth: Truth) -> bool:
    """Whether a finding names what was done: the code, the ranks and the place."""
    text = f"{finding.title} {finding.summary}"
    advice = f"{text} {finding.change}".lower()
    has_ranks = truth.ranks is None or sorted(finding.ranks) == sorted(truth.ranks)
    return (
        (finding.code in truth.codes or truth.codes == ANY_CODE)
        and (has_ranks or (truth.is_everyone and not finding.ranks))
        and all(word in text for word in truth.words)
        and (not truth.says or any(word in text.lower() for word in truth.says))
        and (not truth.advises or any(word in advice for word in truth.advises))
        and truth.first_step in (None, finding.first_step)
    )


def is_about_all(finding: Finding, truths: Sequence[Truth]) -> bool:
    """Whether one finding names the ranks and places of several truths."""
    ranks = tuple(sorted({rank for truth in truths for rank in truth.ranks or ()}))
    return all(is_about(finding, replace(truth, ranks=ranks)) for truth in truths)


def measure_error(findings: Sequence[Finding], effect: Effect) -> float | None:
    """The gains stated over the measured one, less one."""
    saved_ns = 0.0
    for finding in findings:
        if isinstance(finding.gain, Unavailable):
            return None
        saved_ns += float(finding.gain.saved_ns)
    return saved_ns / effect.saved_ns - 1.0


def find_scatter(effect: Effect) -> float:
    """What `measure_error` may be by the scatter of steps alone."""
    return NUM_ERRORS * effect.error_ns / abs(effect.saved_ns)


def describe(finding: Finding) -> str:
    """For whoever reads why a case failed."""
    gain = finding.gain
    stated = gain.reason if isinstance(gain, Unavailable) else f"{gain.saved_ns / 1e6:.2f} ms"
    return f"{finding.label} ({finding.severity.word}, {stated})"


def measure_effect(faulty: Path, clean: Path, truth: Truth) -> Effect:
    """From the two recordings."""
    middle = np.mean if truth.every > 1 or truth.is_uneven else np.median
    random = np.random.default_rng(1)
    found = []
    # What is uneven over a run is priced by the mean of the steps that a diagnosis looks at.
    num_left_out = 0 if truth.is_uneven else NUM_WARMUP_STEPS
    for path in (faulty, clean):
        steps_ns = average_blocks(read_steps_ns(path)[num_left_out:], truth.every)
        drawn = random.choice(steps_ns, (NUM_RESAMPLES, len(steps_ns)))
        found.append((float(middle(steps_ns)), float(np.std(middle(drawn, axis=1)))))
    (faulty_ns, faulty_error_ns), (clean_ns, clean_error_ns) = found
    return Effect(
        saved_ns=faulty_ns - clean_ns,
        error_ns=float(np.hypot(faulty_error_ns, clean_error_ns)),
        faulty_ns=faulty_ns,
        clean_ns=clean_ns,
    )


def average_blocks(steps_ns: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.float64]:
    """Means of whole blocks of steps: each has one of what comes once in so many steps."""
    num_blocks = len(steps_ns) // length
    return steps_ns[: num_blocks * length].reshape(num_blocks, length).mean(axis=1)


def read_steps_ns(path: Path) -> npt.NDArray[np.int64]:
    """How long each step of the run took, without the first."""
    ranks = open_run(path).last_attempt.ranks
    columns = [rank.read("steps")["end_host_mono_ns"] for rank in ranks.values()]
    num_steps = min(map(len, columns))
    ends_ns = np.array([column[:num_steps] for column in columns]).max(axis=0)
    return np.diff(ends_ns)
