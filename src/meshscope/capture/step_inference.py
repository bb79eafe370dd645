"""Finds step boundaries in a loop that does not announce them.

A step begins when its first batch is fetched, or with its first forward (or backward) when no
loader was seen, and ends when its last optimizer has stepped. Whatever lies between one step's end
and the next one's begin is a gap: checkpointing, logging and evaluation happen there and are never
called data loading. A batch that is followed by an evaluation pass begins nothing.

Several optimizers: a step goes on until an optimizer that has already stepped in it steps again,
or a batch is fetched. The record of a step is written at its first optimizer's end and replaced if
another one extends it, so a killed run misses nothing.
"""

from dataclasses import dataclass

from meshscope.capture.timeline import Timeline
from meshscope.store.schema import StepFlag


@dataclass(slots=True)
class _EndedStep:
    """A step that was written down, in case another optimizer turns out to belong to it."""

    step: int
    start_ns: int
    microbatches: int
    optimizers: set[int]


class StepInference:
    """Listens to the automatic hooks and opens and ends steps on the timeline."""

    __slots__ = (
        "_batch_start_ns",
        "_ended",
        "_has_fetched",
        "_mergeable",
        "_optimizers",
        "_timeline",
        "is_explicit",
        "num_updates",
    )

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.is_explicit = False
        """The program marks its steps itself; nothing is inferred."""
        self.reset()

    def reset(self) -> None:
        """Forgets everything seen so far."""
        self._batch_start_ns = 0
        self._has_fetched = False
        self._optimizers: set[int] = set()
        self._ended: _EndedStep | None = None
        self._mergeable: _EndedStep | None = None
        self.num_updates = 0

    def batch_fetch_begins(self, now_ns: int) -> None:
        """A loader was asked for a batch: the next step may begin here."""
        if self._timeline.step_start_ns:
            return
        if not self._batch_start_ns:
            self._batch_start_ns = now_ns
        self._has_fetched = True

    def evaluation_begins(self) -> None:
        """A forward pass without training: the batch just fetched was not a step's."""
        if not self._timeline.step_start_ns:
            self._batch_start_ns = 0

    def training_begins(self, now_ns: int) -> None:
        """A training forward, or a backward whose forward went unseen."""
        if self._timeline.step_start_ns or self.is_explicit:
            return
        self._mergeable = None if self._has_fetched else self._ended
        self._timeline.begin_step(self._batch_start_ns or now_ns)
        self._batch_start_ns = 0
        self._has_fetched = False
        self._optimizers = set()

    def optimizer_begins(self, optimizer: int, now_ns: int) -> None:
        """An optimizer (by id) is about to step."""
        if self.is_explicit:
            return
        if self._timeline.step_start_ns:
            earlier = self._mergeable
            if earlier is not None and optimizer not in earlier.optimizers:
                self._go_on_with(earlier, self._timeline.microbatch)
            self._mergeable = None
            return
        earlier = None if self._has_fetched else self._ended
        if earlier is not None and optimizer not in earlier.optimizers:
            self._go_on_with(earlier, 0)
        else:
            self.training_begins(now_ns)
            self._mergeable = None

    def _go_on_with(self, earlier: _EndedStep, microbatches: int) -> None:
        self._timeline.reopen_step(
            earlier.step, earlier.start_ns, earlier.microbatches + microbatches
        )
        self._optimizers = earlier.optimizers

    def optimizer_ends(self, optimizer: int, now_ns: int, flags: int = 0) -> None:
        """An optimizer has stepped (or its step was skipped: see `flags`)."""
        self.num_updates += 1
        timeline = self._timeline
        if self.is_explicit or not timeline.step_start_ns:
            return
        self._optimizers.add(optimizer)
        self._ended = _EndedStep(
            timeline.step, timeline.step_start_ns, timeline.microbatch, self._optimizers
        )
        timeline.end_step(now_ns, flags)

    def update_skipped(self, optimizer: int, now_ns: int) -> None:
        """A gradient scaler found non-finite gradients and did not call the optimizer."""
        self.optimizer_ends(optimizer, now_ns, StepFlag.SKIPPED)
