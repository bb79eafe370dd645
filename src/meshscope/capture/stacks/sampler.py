"""Samples where the training thread is, from a thread that sleeps unless it is asked.

    session.stack_sampler.start(SampleReason.KERNELS, expected_ns=2 * step_ns)  # training thread
    …                                                                           # some steps
    session.stack_sampler.stop()

Neither call waits for anything. Between requests the thread waits for an event without a timeout;
before the first there is no thread. A request takes about 200 samples over the expected time, and
never more than `_MAX_SAMPLES`. One that would bring the cost over a thousandth of the run's time is
declined. No frame is kept beyond its sample. The sampler needs the interpreter's lock: a program
that holds it is seen where it next gives it up, so that times of pure Python are blurred by the
5 ms after which the interpreter makes it.
"""

import sys
import threading
from collections.abc import Callable
from typing import Protocol

from meshscope.capture.guard import Guard
from meshscope.capture.memory.object_reserve import ObjectReserve
from meshscope.capture.stacks.frames import FrameTexts, Spot

_SAMPLES_WANTED = 200
_MAX_SAMPLES = 512
_MIN_PERIOD_NS = 1_000_000
_MAX_PERIOD_NS = 20_000_000
_MAX_COST_RATIO = 0.001
_FREE_COST_NS = 20_000_000
"""What may be spent before the run is long enough for the share to say anything."""
_MAX_STACKS = 1000
"""Different ones that are written out in one run."""
_OTHER_STACKS = "(other stacks)"
_NUM_OBJECTS = 128
"""Of the thread and of the stacks it sees in one request: 60 to 120."""


class StackTarget(Protocol):
    """Where samples go."""

    clock: Callable[[], int]
    guard: Guard

    def name_id(self, name: str) -> int:
        """The id of a text in the rank's name list."""

    def put(self, name: str, *words: int) -> None:
        """Writes one record of a table."""


class StackSampler:
    """The sampling thread of one recorder."""

    def __init__(self, target: StackTarget, find_step: Callable[[], int]) -> None:
        self._target = target
        self._find_step = find_step
        self.is_on = True
        """False: no request is taken."""
        self._first_ns = target.clock()
        self.cost_ns = 0
        """Spent on samples so far, with the interpreter's lock."""
        self.reserve = ObjectReserve(_NUM_OBJECTS)
        self._prepare()

    def _prepare(self) -> None:
        self._thread: threading.Thread | None = None
        self._asked = threading.Event()
        self._stopped = threading.Event()
        self._ident = 0
        self._reason = 0
        self._period_ns = _MIN_PERIOD_NS
        self._is_closed = False
        self._texts: FrameTexts | None = None
        self._known: dict[tuple[Spot, ...], str] = {}

    @property
    def is_sampling(self) -> bool:
        """Whether a request is being served."""
        return self._asked.is_set()

    def start(self, reason: int, *, expected_ns: int) -> bool:
        """Samples the calling thread until `stop`, about 200 times in the expected time.

        False when that is declined: it is off, under way already, or has cost enough.
        """
        if not self.is_on or self._is_closed or self._asked.is_set() or self._has_spent():
            return False
        self._ident = threading.get_ident()
        self._reason = reason
        self._period_ns = min(max(expected_ns // _SAMPLES_WANTED, _MIN_PERIOD_NS), _MAX_PERIOD_NS)
        self._stopped.clear()
        self._asked.set()
        if self._thread is None:
            self.reserve.spend()
            self._thread = threading.Thread(
                target=self._serve, name="meshscope-stacks", daemon=True
            )
            self._thread.start()
        return True

    def stop(self) -> None:
        """Ends the request, if there is one."""
        self._stopped.set()

    def close(self) -> None:
        """Ends the thread; no request is taken from now on."""
        self._is_closed = True
        self._stopped.set()
        self._asked.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            self._thread = None

    def forget_thread(self) -> None:
        """In a forked child: the thread is the parent's."""
        self._prepare()

    def _has_spent(self) -> bool:
        run_ns = self._target.clock() - self._first_ns
        return self.cost_ns > _FREE_COST_NS + _MAX_COST_RATIO * run_ns

    def _serve(self) -> None:
        """The thread's life."""
        while not self._is_closed:
            self._asked.wait()
            self._target.guard.run("stack samples", self._sample_until_stopped)
            self._asked.clear()

    def _sample_until_stopped(self) -> None:
        clock, period_s = self._target.clock, self._period_ns / 1e9
        for _ in range(_MAX_SAMPLES):
            if self._stopped.is_set():
                return
            start_ns = clock()
            self._take_sample(start_ns)
            self.cost_ns += clock() - start_ns
            self._stopped.wait(period_s)

    def _take_sample(self, now_ns: int) -> None:
        frame = sys._current_frames().get(self._ident)
        if frame is None:  # the thread has ended
            self._stopped.set()
            return
        if self._texts is None:
            self._texts = FrameTexts()
        spots = self._texts.find_spots(frame)
        del frame
        target = self._target
        name_id = target.name_id(self._write(self._texts, spots))
        target.put("stacks", name_id | self._reason << 16, self._find_step(), now_ns, 0, 0, 0, 0)

    def _write(self, texts: FrameTexts, spots: tuple[Spot, ...]) -> str:
        found = self._known.get(spots)
        if found is None and len(self._known) < _MAX_STACKS:
            found = self._known[spots] = texts.write(spots)
        return found or _OTHER_STACKS
