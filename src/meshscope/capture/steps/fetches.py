"""Times what a program fetches from a loader that torch does not know."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from meshscope.capture.guard import Guard
from meshscope.capture.steps.hooks import DATA
from meshscope.capture.steps.step_inference import StepInference
from meshscope.capture.steps.timeline import Timeline

T = TypeVar("T")


def time_fetches(
    loader: Iterable[T],
    timeline: Timeline,
    steps: StepInference,
    guard: Guard,
    clock: Callable[[], int],
) -> Iterator[T]:
    """What `loader` gives; each fetch is a phase "data"."""

    def begin() -> bool:
        now_ns = clock()
        if not steps.is_explicit:
            steps.batch_fetch_begins(now_ns)
        timeline.enter(timeline.stack_here(), DATA, now_ns)
        return True

    def end() -> None:
        timeline.leave(timeline.stack_here(), DATA, clock())

    iterator = iter(loader)
    while True:
        has_begun = guard.run("data begin", begin)
        try:
            item = next(iterator)
        except StopIteration:
            steps.batch_fetch_was_empty()
            return
        finally:
            if has_begun:
                guard.run("data end", end)
        yield item
