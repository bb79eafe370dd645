"""Asks for stacks of a step where time that no phase claims comes again and again.

Looked at are pairs of consecutive steps, at first all, then a few a second: the gap between them,
and what the usual phases leave of the second. If that is a twentieth of the period or more in three
of the last eight pairs, the next step is sampled from the end of the last one to its own. Every
further request waits four times as many steps. Phases that were not taken on the timeline's short
cut are not known here: the check may ask for a sample that nobody needs.
"""

from meshscope.capture.stacks.sampler import StackSampler
from meshscope.capture.steps.timeline import Timeline
from meshscope.store.schema import SampleReason

_MIN_RATIO = 0.05
_NUM_PAIRS = 8
_MIN_LONG = 3
_FIRST_STEP = 5
"""First steps pause for reasons of their own."""
_PAIR_EVERY_NS = 100_000_000
_EAGER_UNTIL_STEP = 20
"""All steps are looked at up to here: short runs are to have a sample, too."""
_FIRST_WAIT_STEPS = 25
_WAIT_FACTOR = 4


class GapWatch:
    """Looks at one rank's steps, at their ends."""

    def __init__(self, timeline: Timeline, sampler: StackSampler) -> None:
        self._timeline = timeline
        self._sampler = sampler
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self._last_step = -1
        self._last_end_ns = 0
        self._next_pair_ns = 0
        self._recent = 0
        """A bit per pair, the newest lowest: 1 where much time was not claimed."""
        self._is_sampling = False
        self._next_step = _FIRST_STEP
        self._wait_steps = _FIRST_WAIT_STEPS

    def visit(self, step: int, end_ns: int) -> bool:
        """Called at the end of a step; whether the end of the next one is of interest, too."""
        if self._is_sampling:
            self._is_sampling = False
            self._sampler.stop()
        is_pair = step == self._last_step + 1
        period_ns = end_ns - self._last_end_ns
        if is_pair and step >= _FIRST_STEP:
            is_long = self._find_unclaimed(end_ns) >= _MIN_RATIO * period_ns
            self._recent = (self._recent << 1 | is_long) & ((1 << _NUM_PAIRS) - 1)
        self._last_step, self._last_end_ns = step, end_ns
        if is_pair and step >= self._next_step and self._recent.bit_count() >= _MIN_LONG:
            self._ask(step, period_ns)
        if self._is_sampling or step < _EAGER_UNTIL_STEP:
            return True
        if end_ns < self._next_pair_ns:
            return False
        self._next_pair_ns = end_ns + _PAIR_EVERY_NS
        return True

    def _ask(self, step: int, period_ns: int) -> None:
        self._next_step = step + self._wait_steps
        self._wait_steps *= _WAIT_FACTOR
        self._recent = 0
        self._is_sampling = self._sampler.start(SampleReason.GAP, expected_ns=period_ns)

    def _find_unclaimed(self, end_ns: int) -> int:
        """From the end of the last step: outside of the usual phases, as far as they are known."""
        timeline = self._timeline
        gap_ns: int = timeline.step_start_ns - self._last_end_ns
        stamps = timeline.stamps
        if timeline.device is not None or timeline.microbatch > 1 or not stamps[2]:
            return gap_ns
        claimed_ns: int = sum(stamps[1::2]) - sum(stamps[0::2])
        return gap_ns + end_ns - timeline.step_start_ns - claimed_ns
