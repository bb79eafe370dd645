"""Probes of a device's clock, on a device made of two numbers."""

from meshscope.capture.steps.clock_probe import EVERY_NS, ClockProbe, DeviceOffset


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**9

    def __call__(self) -> int:
        self.now_ns += 1_000
        return self.now_ns


class Backend:
    """Events are reached after some looks."""

    def __init__(self, num_looks: int) -> None:
        self.num_looks = num_looks

    def Stream(self) -> object:
        return object()

    def Event(self, enable_timing: bool) -> "Backend.One":
        return Backend.One(self)

    class One:
        def __init__(self, backend: "Backend") -> None:
            self.backend = backend
            self.looks = 0

        def record(self, stream: object) -> None:
            self.looks = 0

        def query(self) -> bool:
            self.looks += 1
            return self.looks > self.backend.num_looks


def test_a_probe_tells_when_it_was_issued():
    clock = Clock()
    probe = ClockProbe(Backend(3), clock)
    heard = []
    probe.listeners.append(lambda event, issued_ns: heard.append(issued_ns))
    probe.visit(clock())
    probe.visit(clock())  # not due yet
    probe.visit(clock() + EVERY_NS)
    assert len(heard) == probe.num_taken == 2
    assert heard[0] == 10**9 + 2_000


def test_streams_that_share_a_queue_are_left_alone():
    clock = Clock()
    probe = ClockProbe(Backend(10**9), clock)
    for _ in range(10):
        clock.now_ns += 2 * EVERY_NS
        probe.visit(clock())
    assert (probe.num_taken, probe.num_late) == (0, 3)


def test_the_highest_lower_bound_holds_until_an_upper_one_is_below():
    told = []
    offset = DeviceOffset(told.append)
    for bound in (100_000, 50_000, 110_000, 300_000):
        offset.bound_below(bound)
    assert offset.ns == 300_000
    offset.bound_above(400_000)
    assert offset.ns == 300_000
    offset.bound_above(250_000)
    assert told == [100_000, 300_000, 250_000]  # every value, for those who place times anew
