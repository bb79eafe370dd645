"""Events of one live run, for any number of listeners; knows nothing of HTTP.

The last events are kept, so that a listener that was cut off gets what it missed. One that does not
keep up is not waited for: its queue is emptied, and it is told to ask anew.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

RING_EVENTS = 1000
QUEUE_EVENTS = 64
RECENT_EVENTS = 240
_MERGE_FROM = 8
"""Queued events from which on new steps are added to those that wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedEvent:
    """One event, numbered from 1."""

    seq: int
    kind: str
    data: Mapping[str, Any]

    def encode(self, server: str) -> bytes:
        """As server-sent events have it."""
        body = msgspec.json.encode(self.data)
        return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (
            server.encode(),
            self.seq,
            self.kind.encode(),
            body,
        )


class Listener:
    """One browser's queue."""

    def __init__(self) -> None:
        self._queue: deque[FeedEvent] = deque()
        self._is_filled = asyncio.Event()
        self.is_closed = False

    def offer(self, event: FeedEvent) -> None:
        """Adds an event; what waits may become one with it."""
        if event.kind == "status":
            self._queue = deque(one for one in self._queue if one.kind != "status")
        last = self._queue[-1] if self._queue else None
        if event.kind == "steps" and last is not None and len(self._queue) >= _MERGE_FROM:
            merged = _merge_steps(last, event)
            if merged is not None:
                self._queue[-1] = merged
                return
        if len(self._queue) >= QUEUE_EVENTS:
            status = [one for one in self._queue if one.kind == "status"][-1:]
            self._queue.clear()
            self._queue.extend(status)
            event = FeedEvent(
                seq=event.seq, kind="reset", data={"reason": "too many events were waiting"}
            )
        self._queue.append(event)
        self._is_filled.set()

    async def take(self, timeout_s: float) -> FeedEvent | None:
        """The next event; None where none came in time, or nobody tells any more."""
        if not self._queue and not self.is_closed:
            self._is_filled.clear()
            try:
                await asyncio.wait_for(self._is_filled.wait(), timeout_s)
            except TimeoutError:
                return None
        return self._queue.popleft() if self._queue else None

    def close(self) -> None:
        self.is_closed = True
        self._is_filled.set()

    def __len__(self) -> int:
        return len(self._queue)


def _merge_steps(first: FeedEvent, second: FeedEvent) -> FeedEvent | None:
    """One event with the steps of both; None where they cannot be one."""
    if first.kind != "steps" or first.data["matrix"] or second.data["matrix"]:
        return None
    data = {
        "from": first.data.get("from", second.data.get("from")),
        "to": second.data.get("to"),
        "steps": [*first.data["steps"], *second.data["steps"]],
        "job_ns": [*first.data["job_ns"], *second.data["job_ns"]],
        "matrix": None,
    }
    return FeedEvent(seq=second.seq, kind="steps", data=data)


def _join_recent(events: Iterable[FeedEvent], seq: int) -> Iterator[FeedEvent]:
    """At most one event with all steps, and one with all points."""
    joined: FeedEvent | None = None
    points: dict[str, tuple[list[Any], list[Any]]] = {}
    for event in events:
        if event.kind == "series":
            for one in event.data["points"]:
                step, value = points.setdefault(one["key"], ([], []))
                step += one["step"]
                value += one["value"]
        elif not event.data["matrix"]:
            joined = event if joined is None else _merge_steps(joined, event)
    if joined is not None:
        yield FeedEvent(seq=seq, kind="steps", data=joined.data)
    if points:
        told = [{"key": key, "step": step, "value": v} for key, (step, v) in points.items()]
        yield FeedEvent(seq=seq, kind="series", data={"points": told})


class Feed:
    """The events of one run."""

    def __init__(self) -> None:
        self.seq = 0
        self.status: Mapping[str, Any] | None = None
        """The last one."""
        self.is_over = False
        self.num_reports = 0
        self._ring: deque[FeedEvent] = deque(maxlen=RING_EVENTS)
        self._recent: deque[FeedEvent] = deque(maxlen=RECENT_EVENTS)
        """Steps and points that may be newer than the page that a listener has."""
        self._listeners: set[Listener] = set()

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def publish(self, kind: str, data: Mapping[str, Any]) -> None:
        self.seq += 1
        event = FeedEvent(seq=self.seq, kind=kind, data=data)
        self.num_reports += kind in ("report", "reset", "end")
        if kind == "status":
            self.status = data
        else:  # only the last status is of any use
            self._ring.append(event)
        if kind == "reset":
            self._recent.clear()
        elif kind in ("steps", "series"):
            self._recent.append(event)
        self.is_over = kind == "end" or (self.is_over and kind == "status")
        for listener in self._listeners:
            listener.offer(event)

    def listen(self, after: int | None = None) -> Listener:
        """A listener that gets what came after event `after`; a reset where that is not known any
        more, or of another server (negative). A new one gets the last steps, which its page may
        lack."""
        listener = Listener()
        if after is None:
            for event in _join_recent(self._recent, self.seq):
                listener.offer(event)
        else:
            missed = [event for event in self._ring if event.seq > after]
            is_whole = len(self._ring) < RING_EVENTS or self._ring[0].seq <= after + 1
            if not 0 <= after <= self.seq or not is_whole or len(missed) >= QUEUE_EVENTS:
                missed = [
                    FeedEvent(seq=self.seq, kind="reset", data={"reason": "too long ago to go on"})
                ]
            for event in missed:
                listener.offer(event)
        if self.status is not None:
            listener.offer(FeedEvent(seq=self.seq, kind="status", data=self.status))
        if self.is_over:
            listener.offer(FeedEvent(seq=self.seq, kind="end", data={"state": self._end_state}))
        self._listeners.add(listener)
        return listener

    @property
    def _end_state(self) -> str:
        return "" if self.status is None else str(self.status.get("state", ""))

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
