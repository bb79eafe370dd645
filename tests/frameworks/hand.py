"""Timers placed by hand in the programs of the table: what a recording of the same run must show.

    with hand("forward"): loss = model(x)
    hand.step(loss=loss.item(), samples=8, tokens=512)
    hand.write()

A phase inside another one takes its time from it. The file goes where the environment says, one
per rank; without the variable nothing is written. Standard library only.
"""

import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PLACE = "HAND_TIMES"
"""The variable with the prefix of the files."""


class Hand:
    """The timers of one process."""

    def __init__(self) -> None:
        self._phases: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Begin and own duration."""
        self._inner_ns: list[int] = []
        self._steps: list[dict[str, float]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._inner_ns.append(0)
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            duration_ns = time.perf_counter_ns() - start_ns
            self._phases[phase].append((start_ns, duration_ns - self._inner_ns.pop()))
            if self._inner_ns:
                self._inner_ns[-1] += duration_ns

    def around(self, owner: Any, method: str, phase: str) -> None:
        """Times a method that a framework calls."""
        function = getattr(owner, method)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(phase):
                return function(*args, **kwargs)

        setattr(owner, method, timed)

    def around_fetches(self, model: Any) -> None:
        """Times how loaders without workers make their batches, in whoever's loop."""
        from torch.utils.data import dataloader

        kind = dataloader._SingleProcessDataLoaderIter
        fetch = kind._next_data

        def timed(iterator: Any) -> Any:
            with self("data" if model.training else "eval"):
                return fetch(iterator)

        kind._next_data = timed

    def step(self, **numbers: float) -> None:
        """A step is over: its losses (`loss`, or `loss_NAME` of several), `samples`, `tokens`."""
        self._steps.append({"end_ns": time.perf_counter_ns(), **numbers})

    def write(self, rank: int | None = None) -> None:
        """Writes what was timed in this rank."""
        if place := os.environ.get(PLACE):
            rank = int(os.environ.get("RANK", "0")) if rank is None else rank
            with open(f"{place}.{rank}", "w", encoding="utf-8") as file:
                json.dump({"phases": self._phases, "steps": self._steps}, file)


hand = Hand()
