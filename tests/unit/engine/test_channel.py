import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

from meshscope.core.operations import Kind  # noqa: E402
from meshscope.engine.data_parallel.channel import LastWorks, Traffic, Transfer  # noqa: E402


class FakeWork:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(f"waited for {self.name}")


def test_a_transfer_waits_for_one_step_before_it_starts_the_next() -> None:
    log: list[str] = []

    def steps():
        for name in ("first", "second"):
            log.append(f"started {name}")
            works = [FakeWork(log, name)]
            yield works if name == "first" else LastWorks(works)
        log.append("finished")

    transfer = Transfer(steps())
    assert (log, transfer.is_done) == (["started first"], False)
    transfer.advance()
    assert log[1:] == ["waited for first", "started second"]
    transfer.advance()
    assert len(log) == 3, "nobody waits for the last step before the result is needed"
    transfer.wait()
    assert (log[3:], transfer.is_done) == (["waited for second", "finished"], True)
    transfer.wait()
    assert len(log) == 5


def test_traffic_counts_what_a_ring_would_send() -> None:
    traffic, x = Traffic(), torch.zeros(100)
    traffic.add(Kind.ALL_REDUCE, x, x.nbytes, 4)
    traffic.add(Kind.ALL_GATHER, x, 4 * x.nbytes, 4)
    traffic.add(Kind.SEND, x, x.nbytes, 4)
    expected = Traffic(num_operations=3, handed_bytes=1200, wire_bytes=600.0 + 1200.0 + 400.0)
    assert traffic == expected
    traffic.merge(expected)
    assert traffic.num_operations == 6
