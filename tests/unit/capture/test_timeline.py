"""The timeline by itself: who the training thread is, and stamps without a place to keep them.

That phases and steps come out right whatever is called is in tests/property.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from meshscope.capture.native_steps import choose_timeline
from meshscope.capture.steps.timeline import Timeline
from meshscope.store.write.native import SWITCH_VARIABLE
from meshscope.store.write.now_file import NOW_NAME, NowFile
from meshscope.store.write.open_step import OpenStepWriter

DATA, FORWARD = 1, 2
AUGMENT = 64


@pytest.fixture(autouse=True, params=["native", "plain"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both timelines, that with compiled fields and that in Python."""
    if request.param == "plain":
        monkeypatch.setenv(SWITCH_VARIABLE, "0")


class Records:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.words: list[tuple[int, ...]] = []

    def put(self, *words: int) -> None:
        self.words.append(words)

    def spans(self) -> list[tuple[int, int, int, int]]:
        """Name, thread, start and duration."""
        return [(w[0] & 0xFFFF, w[0] >> 32, w[1], w[2]) for w in self.words]


def make_timeline(tmp_path: Path) -> tuple[Timeline, Records, Records]:
    timeline = choose_timeline()(lambda: 0)
    spans, phases = Records(), Records()
    timeline.spans, timeline.phases, timeline.steps = spans, phases, Records()
    timeline.store_stamps(OpenStepWriter(NowFile(tmp_path / NOW_NAME, mapped=True), 1))
    return timeline, spans, phases


def in_thread(work: Callable[[], None], during: Callable[[], None] | None = None) -> None:
    """Runs `work` in a thread of its own, which stays until `during` has run here."""
    is_done, may_go = threading.Event(), threading.Event()

    def run() -> None:
        work()
        is_done.set()
        may_go.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    assert is_done.wait(10)
    if during is not None:
        during()
    may_go.set()
    thread.join()


def test_a_phase_of_the_thread_that_came_first_ends_in_that_thread(tmp_path: Path) -> None:
    """A loader's thread records before the training thread begins its first step."""
    timeline, spans, phases = make_timeline(tmp_path)
    loader = timeline.stack_here()  # this thread is the loader's
    timeline.enter(loader, DATA, 100)

    def train() -> None:
        timeline.begin_step(110)
        timeline.enter(timeline.stack_here(), FORWARD, 120)

    def fetch_ends() -> None:
        assert timeline.stack_here() is loader
        timeline.leave(timeline.stack_here(), DATA, 130)

    in_thread(train, during=fetch_ends)
    timeline.leave(timeline.stack, FORWARD, 140)
    timeline.end_step(150)
    assert spans.spans() == [(DATA, 1, 100, 30)]
    assert phases.words == [(0, 0, 120, 140, 0, 0, 0)]


def test_threads_keep_numbers_of_their_own(tmp_path: Path) -> None:
    timeline, spans, _ = make_timeline(tmp_path)
    timeline.stack_here()

    def work(begin_ns: int) -> None:
        stack = timeline.stack_here()
        timeline.enter(stack, AUGMENT, begin_ns)
        timeline.leave(stack, AUGMENT, begin_ns + 1)

    def train() -> None:
        work(10)
        timeline.begin_step(20)
        work(30)

    def others() -> None:
        work(40)
        in_thread(lambda: work(50))

    in_thread(train, during=others)
    assert [(thread, start) for _, thread, start, _ in spans.spans()] == [
        (1, 10), (0, 30), (1, 40), (2, 50)
    ]  # fmt: skip


def test_without_a_place_for_stamps_times_may_be_large() -> None:
    """Before a run is open, and on network file systems; a host may be up for years."""
    timeline = choose_timeline()(lambda: 0)
    spans = timeline.spans = Records()
    uptime_ns = 3 * 365 * 86_400 * 10**9
    timeline.enter(timeline.stack_here(), FORWARD, uptime_ns)
    timeline.leave(timeline.stack_here(), FORWARD, uptime_ns + 5)
    assert spans.spans() == [(FORWARD, 0, uptime_ns, 5)]
