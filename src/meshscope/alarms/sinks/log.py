"""Lines on standard output: every event, and one about the run now and then."""

import time
from collections.abc import Callable

from meshscope.alarms.sample import Sample
from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.alarm_event import DOCUMENT, SHAPES, AlarmEvent, EventKind
from meshscope.report.encode import encode_line


class LogSink:
    name = "log"

    def __init__(
        self, write: Callable[[str], None], *, every_s: float, as_json: bool = False
    ) -> None:
        self._write, self._every_s, self._as_json = write, every_s, as_json
        self._next = float("-inf")
        self._state = ""

    def tell(self, event: AlarmEvent) -> None:
        if self._as_json:
            self._write(encode_line(*DOCUMENT, event, SHAPES))
        else:
            self._write(f"{_clock(event.told_unix_ns)} {describe_event(event)}")

    def measure(self, sample: Sample) -> None:
        if self._as_json or not self._every_s:
            return
        now = time.monotonic()
        if now < self._next and sample.state == self._state:
            return
        self._next, self._state = now + self._every_s, sample.state
        self._write(f"{_clock(sample.unix_ns)} {describe_sample(sample)}")

    def close(self) -> None:
        """Nothing is held."""

    def problems(self) -> list[str]:
        return []


def describe_event(event: AlarmEvent) -> str:
    """`RAISED high ST001 rank 5 is slow in forward (node0): saves 14 ms of 124 ms a step`."""
    if event.event is EventKind.CLEARED:
        lasted = form.duration(max(event.told_unix_ns - event.since_unix_ns, 0))
        return f"CLEARED {event.code} {event.title} after {lasted}: {event.reason}"
    hosts = f" ({', '.join(event.hosts[:3])})" if event.hosts else ""
    price = describe_price(event)
    saves = f"saves {price}" if price else event.summary
    change = f". {event.change}" if event.change else ""
    head = f"{event.event.value.upper()} {event.severity.word} {event.code} {event.title}"
    return f"{head}{hosts}: {saves}{change}"


def describe_price(event: AlarmEvent) -> str:
    """`31.0 ms of 190 ms a step (16 %)`; empty without a price."""
    saved, step, share = event.saved_ns, event.step_ns, event.saved_ratio
    if isinstance(saved, Unavailable) or isinstance(step, Unavailable):
        return ""
    ratio = "" if isinstance(share, Unavailable) else f" ({form.ratio(share)})"
    return f"{form.duration(saved)} of {form.duration(step)} a step{ratio}"


def describe_sample(sample: Sample) -> str:
    step = "no step yet" if sample.step is None else f"step {form.count(sample.step)}"
    parts = [sample.name, sample.state, step]
    if sample.steps_per_s:
        parts.append(f"{sample.steps_per_s:.3g} steps/s")
    if "loss" in sample.signals:
        parts.append(f"loss {sample.signals['loss']:.4g}")
    is_whole = sample.num_ranks == sample.world_size
    ranks = form.plural(sample.num_ranks, "rank")
    parts.append(ranks if is_whole else f"{sample.num_ranks} of {sample.world_size} ranks")
    return f"{' '.join(parts)}: {form.plural(len(sample.alarms), 'alarm')}"


def _clock(unix_ns: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_ns / 1e9))
