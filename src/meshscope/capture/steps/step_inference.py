"""Finds step boundaries in a loop that does not announce them.

A step begins when its first batch is fetched, or with its first forward (or backward) when no
loader was seen, and ends when its last optimizer has stepped. The time between one step's end
and the next one's begin is a gap: checkpointing, logging and evaluation happen there and are never
called data loading. A batch that is followed by an evaluation pass begins nothing.

Several optimizers: a step goes on until an optimizer that has already stepped in it steps again,
or a batch is fetched. The record of a step is written at its first optimizer's end and replaced if
another one extends it, so a killed run misses nothing.
"""

from collections.abc import Callable
from typing import Any

from meshscope.capture.steps.timeline import Timeline
from meshscope.store.schema import StepFlag


class StepInference:
    """Listens to the automatic hooks and opens and ends steps on the timeline."""

    __slots__ = (
        "_batch_start_ns",
        "_ended_microbatches",
        "_ended_optimizers",
        "_ended_start_ns",
        "_ended_step",
        "_stepped",
        "_timeline",
        "has_fetched",
        "has_several",
        "is_explicit",
        "num_updates",
    )

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.is_explicit = False
        """The program marks its steps itself; nothing is inferred."""
        self.has_several = True
        """False once it is known that a single optimizer exists: then no step can be extended."""
        self.reset()

    def reset(self) -> None:
        self._batch_start_ns = 0
        self.has_fetched = False
        """A batch was fetched since the last step: the next one begins with that."""
        self._stepped: tuple[int, ...] = ()
        """Optimizers (by id) that have stepped in the open step."""
        self._ended_optimizers: tuple[int, ...] = ()
        """Optimizers of the last step that was written, while it may still be extended."""
        self._ended_step = 0
        self._ended_start_ns = 0
        self._ended_microbatches = 0
        self.num_updates = 0

    def forget_optimizers(self) -> None:
        """Called when others take over: none of theirs goes on with the last step."""
        self._ended_optimizers = self._stepped = ()

    def batch_fetch_begins(self, now_ns: int) -> None:
        """Called when a loader is asked for a batch: the next step may start here."""
        if self._timeline.step_start_ns:
            return
        if not self._batch_start_ns:
            self._batch_start_ns = now_ns
        self.has_fetched = True

    def batch_fetch_was_empty(self) -> None:
        """Called when the loader was at its end: no step starts."""
        if not self._timeline.step_start_ns:
            self._batch_start_ns = 0

    def evaluation_begins(self) -> None:
        """Called for a forward without training: its batch was not a step's."""
        if not self._timeline.step_start_ns:
            self._batch_start_ns = 0

    def training_begins(self, now_ns: int) -> None:
        """Called for a training forward, or a backward whose forward was not seen."""
        if self._timeline.step_start_ns or self.is_explicit:
            return
        self._timeline.begin_step(self._batch_start_ns or now_ns)
        if self.has_several:
            self._stepped = ()
        if self.has_fetched:
            self._ended_optimizers = ()
            self.has_fetched = False
            self._batch_start_ns = 0

    def optimizer_begins(self, optimizer: int, now_ns: int) -> None:
        """Called before an optimizer (by id) steps."""
        if self.is_explicit:
            return
        extendable = () if self.has_fetched else self._ended_optimizers
        if extendable and optimizer not in extendable:
            self._go_on_with_ended_step()
        else:
            self.training_begins(now_ns)
        self._ended_optimizers = ()

    def _go_on_with_ended_step(self) -> None:
        """Joins an apparent new step to the last one: it was a second optimizer's part."""
        timeline = self._timeline
        microbatches = timeline.microbatch if timeline.step_start_ns else 0
        timeline.reopen_step(
            self._ended_step, self._ended_start_ns, self._ended_microbatches + microbatches
        )
        self._stepped = self._ended_optimizers

    def optimizers_end(self, optimizers: tuple[int, ...], now_ns: int, flags: int = 0) -> None:
        """Called when optimizers have stepped (or were skipped: see `flags`)."""
        self.num_updates += 1
        timeline = self._timeline
        if self.is_explicit or not timeline.step_start_ns:
            return
        self._ended_optimizers = self._stepped = self._stepped + optimizers
        self._ended_step = timeline.step
        self._ended_start_ns = timeline.step_start_ns
        self._ended_microbatches = timeline.microbatch
        timeline.end_step(now_ns, flags)

    def update_skipped(self, optimizer: int, now_ns: int) -> None:
        """Called when a gradient scaler skipped the optimizer."""
        self.optimizers_end((optimizer,), now_ns, StepFlag.SKIPPED)


def wraps_training(module: Any) -> bool:
    """Whether what a module is put around trains: programs forget to tell the wrapper."""
    return any(part is not None and part.training for part in module._modules.values())


def is_mapped(list_transforms: Callable[[], Any] | None) -> bool:
    """Whether `torch.vmap` is going on: gradients are taken sample by sample."""
    found = list_transforms() if list_transforms is not None else None
    return any(one.key().name == "Vmap" for one in found or ())
