"""Fetches: those of loaders that torch does not know, and which ones are for an evaluation.

A fetch says nothing of what its batch is for. It is for an evaluation where gradients are off, or
where no model is in training mode; a loader that feeds training is known by the backward calls that
follow its fetches (some programs are in evaluation mode until their next forward). Those fetches
are part of the phase `eval`: a slow validation loader is no stall of the training's input.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from meshscope.capture.guard import Guard
from meshscope.capture.steps.hooks import DATA, EVAL
from meshscope.capture.steps.module_hook import WRAPPED
from meshscope.capture.steps.step_inference import StepInference
from meshscope.capture.steps.timeline import Timeline

T = TypeVar("T")


class LoaderUses:
    """Learns what loaders feed: training or evaluation."""

    def __init__(
        self, torch: Any, timeline: Timeline, list_models: Callable[[], list[Any]]
    ) -> None:
        self._is_grad_enabled = torch.is_grad_enabled
        self._timeline = timeline
        self._list_models = list_models
        self._scores: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """By dataset how many fetches were followed by a backward, less those that were not."""
        self._last: weakref.ref[Any] | None = None
        self._last_backward = (0, 0)

    def is_evaluation(self, iterator: Any) -> bool:
        """Whether the batch that is being fetched is for an evaluation. Called for every fetch."""
        # Iterators are made anew for every epoch; what they read from stays.
        dataset = getattr(iterator, "_dataset", getattr(iterator, "dataset", None))
        key = next((one for one in (dataset, iterator) if _is_known_by_identity(one)), None)
        if key is not None:
            self._learn(key)
            if self._scores.get(key, 0) > 0:
                return False
        if not self._is_grad_enabled():
            return True
        models = self._list_models()
        return bool(models) and not any(map(_is_training, models))

    def _learn(self, key: Any) -> None:
        backward = (self._timeline.step, self._timeline.microbatch)
        has_trained = backward != self._last_backward
        last = None if self._last is None else self._last()
        # Several in a row before a backward say nothing: batches are fetched ahead.
        if last is not None and (has_trained or key is not last):
            score = self._scores.get(last, 0) + (1 if has_trained else -1)
            self._scores[last] = max(min(score, 3), -3)
        self._last, self._last_backward = weakref.ref(key), backward


def _is_training(model: Any) -> bool:
    """By what a wrapper is put around, which programs tell and evaluate without the wrapper."""
    wrapped = model._modules.get(WRAPPED)
    return bool((model if wrapped is None else wrapped).training)


def _is_known_by_identity(value: Any) -> bool:
    """Whether it can be a weak key that equals nothing but itself: lists and tuples cannot."""
    kind: Any = type(value)
    return bool(value is not None and kind.__weakrefoffset__ and kind.__hash__ is object.__hash__)


def time_fetches(
    loader: Iterable[T],
    timeline: Timeline,
    steps: StepInference,
    guard: Guard,
    clock: Callable[[], int],
    is_evaluation: Callable[[Any], bool] | None,
) -> Iterator[T]:
    """What `loader` gives; each fetch is a phase "data", or "eval" if it is for an evaluation."""

    def begin() -> int:
        now_ns = clock()
        phase = EVAL if is_evaluation is not None and is_evaluation(loader) else DATA
        if phase == EVAL:
            steps.evaluation_begins()
        elif not steps.is_explicit:
            steps.batch_fetch_begins(now_ns)
        timeline.enter(timeline.stack_here(), phase, now_ns)
        return phase

    def end(phase: int) -> None:
        timeline.leave(timeline.stack_here(), phase, clock())

    iterator = iter(loader)
    while True:
        phase = guard.run("data begin", begin)
        try:
            item = next(iterator)
        except StopIteration:
            steps.batch_fetch_was_empty()
            return
        finally:
            if phase:
                guard.run("data end", end, phase)
        yield item
