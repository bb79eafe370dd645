"""What rules may read: the analyses of one attempt, each made once, when a rule first asks.

Every analysis may be `Unavailable`, and one that raises becomes it, with a failure that the runner
turns into a finding. Rules read analyses through here only, so that none is made twice and what a
rule rests on can be seen in one place. An analysis of a single subject needs no property: its rules
call `context.obtain(build)` with a function of the context, and share what it returns.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from meshscope.core.thresholds import Thresholds
from meshscope.core.unavailable import Unavailable
from meshscope.diagnose.failure import Failure, attempt_to
from meshscope.store.read.run import Attempt

if TYPE_CHECKING:
    from meshscope.analyze.budget.budget import Budget
    from meshscope.analyze.summary import AttemptSummary
    from meshscope.analyze.timeline.timeline import Timeline
    from meshscope.analyze.timeline.work import WorkTable
    from meshscope.core.layout import Layout
    from meshscope.simulate.what_if import Edit, Gain, Replay

T = TypeVar("T")


class Context:
    """One attempt under diagnosis."""

    def __init__(
        self,
        attempt: Attempt,
        *,
        thresholds: Thresholds | None = None,
        warmup_steps: int | None = None,
        summary: "AttemptSummary | None" = None,
    ) -> None:
        self.attempt = attempt
        self.thresholds = thresholds or Thresholds()
        self.warmup_steps = warmup_steps
        """What the user asked for; None: the analyses' own choice."""
        self.failures: list[Failure] = []
        """Analyses that raised."""
        self._given_summary = summary
        self._made: dict[Callable[..., Any], Any] = {}

    def obtain(self, build: "Callable[[Context], T | Unavailable]") -> T | Unavailable:
        """What `build` makes of this context; made once, and Unavailable where it raises."""
        if build not in self._made:
            self._made[build] = self._make(build.__name__.strip("_"), lambda: build(self))
        made: T | Unavailable = self._made[build]
        return made

    def _make(self, what: str, build: Callable[[], T | Unavailable]) -> T | Unavailable:
        made = attempt_to(what, build)
        if isinstance(made, Failure):
            self.failures.append(made)
            return Unavailable(f"{what.replace('_', ' ')} failed: {made.error}")
        return made

    # The summary is what the report shows, too.

    @cached_property
    def summary(self) -> "AttemptSummary":
        """Never unavailable: without it there is no report either."""
        from meshscope.analyze.summary import summarize_attempt

        return self._given_summary or summarize_attempt(
            self.attempt, warmup_steps=self.warmup_steps
        )

    @property
    def layout(self) -> "Layout | Unavailable":
        """Degrees of the mesh, where they are known."""
        return self.summary.layout

    @property
    def num_ranks(self) -> int:
        """Ranks the job had, recorded or not."""
        return max(self.attempt.world_size, len(self.attempt.ranks))

    @cached_property
    def step_ns(self) -> float | Unavailable:
        """The period of a step: median over steps from one start to the next, gaps included."""
        interval = self.summary.steps.interval
        time = interval if not isinstance(interval, Unavailable) else self.summary.steps.time
        return time if isinstance(time, Unavailable) else time.median_ns

    @property
    def num_steady_steps(self) -> int:
        """Steps after warm-up that at least one rank finished."""
        return self.summary.steps.num_steps - self.summary.steps.num_warmup

    @cached_property
    def has_accelerators(self) -> bool:
        """Whether any rank recorded an accelerator's memory or stream."""
        return any(
            not isinstance(rank.device, Unavailable)
            or not isinstance(rank.peak_device_bytes, Unavailable)
            for rank in self.summary.ranks
        )

    # The time of all ranks together, and what follows from it.

    @cached_property
    def timeline(self) -> "Timeline | Unavailable":
        """All ranks' time on one clock."""

        def build() -> "Timeline | Unavailable":
            from meshscope.analyze.timeline.timeline import build_timeline

            return build_timeline(self.attempt, warmup_steps=self.warmup_steps)

        return self._make("the timeline", build)

    @cached_property
    def work(self) -> "WorkTable | Unavailable":
        """What every rank worked, by step and phase."""
        timeline = self.timeline
        if isinstance(timeline, Unavailable):
            return timeline

        def build() -> "WorkTable":
            from meshscope.analyze.timeline.work import measure_work

            return measure_work(timeline)

        return self._make("the work of ranks", build)

    @cached_property
    def budget(self) -> "Budget | Unavailable":
        """Where the wall clock of every rank and step went."""
        timeline = self.timeline
        if isinstance(timeline, Unavailable):
            return timeline

        def build() -> "Budget":
            from meshscope.analyze.budget.budget import measure_budget
            from meshscope.analyze.budget.model_flops import read_flops

            return measure_budget(timeline, read_flops(self.attempt))

        return self._make("the budget", build)

    @cached_property
    def replay(self) -> "Replay | Unavailable":
        """The run as a graph that can be timed again with other durations."""
        timeline = self.timeline
        if isinstance(timeline, Unavailable):
            return timeline

        def build() -> "Replay | Unavailable":
            from meshscope.simulate.what_if import build_replay

            return build_replay(timeline)

        return self._make("the replay", build)

    def price(self, edits: "Sequence[Edit]") -> "list[Gain | Unavailable]":
        """What each edit would save, all in one replay; never raises."""
        replay = self.replay
        if isinstance(replay, Unavailable):
            return [replay for _ in edits]

        def build() -> "list[Gain | Unavailable] | Unavailable":
            return replay.price(edits)

        gains = self._make("pricing", build)
        return [gains for _ in edits] if isinstance(gains, Unavailable) else gains
