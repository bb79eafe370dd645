"""The communication profiler: what it counts, what it leaves out, and what it must not do."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ended_process import run_process
from fake_clock import FakeClock
from meshscope.capture.communication import (
    CommunicationConfig,
    CommunicationEvent,
    CommunicationProfiler,
    OperationStats,
    communication,
    init_communication,
    reset_communication,
)
from meshscope.capture.communication.events import known_bus_factor
from meshscope.capture.communication.groups import MAX_GROUPS, sampling_hash
from meshscope.capture.communication.ledger import MAX_FAILED_EVENTS, MAX_NAMES
from meshscope.capture.communication.profiler import FOLD_EVERY
from meshscope.core.operations import DTYPES, Kind, Outcome
from meshscope.errors import UsageError

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
MS = 1_000_000
OK = int(Outcome.OK)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(5_000)


@pytest.fixture
def profiler(clock: FakeClock):
    made = make_profiler(clock)
    yield made
    assert made.guard.counts == {}


@pytest.fixture(autouse=True)
def _no_default_is_left():
    reset_communication()
    yield
    reset_communication()


def make_profiler(clock: FakeClock | None = None, **settings) -> CommunicationProfiler:
    clock = clock or FakeClock(5_000)
    return CommunicationProfiler(
        CommunicationConfig(**settings),
        rank=3,
        clock=clock,
        wall_clock=lambda: clock() + 1_000_000_000,
    )


def observe(profiler, kind=Kind.ALL_REDUCE, **fields) -> None:
    """`observe` with everything that a test does not care about filled in."""
    given = {
        "group_id": 0, "sequence": 0, "size_bytes": MIB, "start_ns": 0, "duration_ns": MS,
        "outcome": OK, "step": -1, "dtype_code": 0, "is_async": 0, "peer": -1,
    } | fields  # fmt: skip
    profiler.observe(int(kind), *map(int, given.values()))


def stats_of(profiler, kind="all_reduce") -> OperationStats:
    found = profiler.operation_stats(kind)
    assert found is not None
    return found


def only_event(profiler) -> CommunicationEvent:
    (event,) = profiler.events()
    return event


# --- timing -------------------------------------------------------------------------------------


def test_a_timed_block_is_an_event_with_everything_said_about_it(profiler, clock):
    profiler.find_step = lambda: 12
    with profiler.timed(
        "all_reduce", size_bytes=8 * MIB, group="tp_0", axis="tp", group_size=4, sequence=7,
        dtype="torch.bfloat16", metadata={"layer": 3},
    ) as operation:  # fmt: skip
        clock.advance(2 * MS)
        operation.note("bucket", "last")
    assert only_event(profiler) == CommunicationEvent(
        event_id=1,
        kind=Kind.ALL_REDUCE,
        name="",
        rank=3,
        group="tp_0",
        axis="tp",
        group_size=4,
        sequence=7,
        size_bytes=8 * MIB,
        dtype="bfloat16",
        is_async=False,
        peer=None,
        step=12,
        start_unix_ns=1_000_005_000,
        start_host_mono_ns=5_000,
        duration_ns=2 * MS,
        outcome=Outcome.OK,
        message="",
        metadata={"layer": 3, "bucket": "last"},
    )


def test_a_block_may_say_its_size_when_it_knows_it(profiler, clock):
    with profiler.timed("broadcast") as operation:
        clock.advance(MS)
        operation.size_bytes = 1000
    assert only_event(profiler).size_bytes == 1000
    assert only_event(profiler).algbw_bytes_per_s == 1e6


def test_a_decorated_function_is_timed_and_keeps_its_value_and_name(profiler, clock):
    @profiler.timed("all_gather", size_bytes=10)
    def gather(a: int, *, b: int) -> int:
        """Doc."""
        clock.advance(5)
        return a + b

    assert (gather(1, b=2), gather(3, b=4)) == (3, 7)
    assert (gather.__name__, gather.__doc__) == ("gather", "Doc.")
    stats = stats_of(profiler, "all_gather")
    assert (stats.count, stats.total_duration_ns) == (2, 10)


def test_one_block_object_nests_in_itself(profiler, clock):
    block = profiler.timed("reduce")
    with block as outer:
        clock.advance(10)
        with block as inner:
            assert inner is not outer
            clock.advance(1)
        clock.advance(100)
    assert [event.duration_ns for event in profiler.events()] == [1, 111]


def test_async_functions_are_timed_to_their_end_however_they_interleave(profiler, clock):
    @profiler.timed("recv")
    async def receive(first: asyncio.Event, then: asyncio.Event) -> str:
        await first.wait()
        clock.advance(10)
        then.set()
        return "done"

    async def receive_two() -> list[str]:
        go, first_done, second_done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        tasks = [
            asyncio.create_task(receive(first_done, second_done)),
            asyncio.create_task(receive(go, first_done)),
        ]
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(receive_two()) == ["done", "done"]
    assert sorted(event.duration_ns for event in profiler.events()) == [10, 20]


def test_a_generator_function_is_refused_where_it_is_decorated(profiler):
    with pytest.raises(UsageError, match="generator"):

        @profiler.timed("send")
        def items():
            yield 1


def test_an_async_generator_may_be_left_by_another_task(profiler, clock):
    async def items():
        with profiler.timed("scatter"):
            yield 1
            clock.advance(3)

    async def use():
        iterator = items()
        await asyncio.create_task(anext(iterator))
        with pytest.raises(StopAsyncIteration):
            await asyncio.create_task(anext(iterator))

    asyncio.run(use())
    assert only_event(profiler).duration_ns == 3


# --- failures -----------------------------------------------------------------------------------


class GlooTimeout(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "outcome", "message"),
    [
        (ValueError("wrong shape"), Outcome.ERROR, "ValueError: wrong shape"),
        (RuntimeError("connection closed by peer"), Outcome.ERROR,
         "RuntimeError: connection closed by peer"),
        (TimeoutError(), Outcome.TIMEOUT, "TimeoutError"),
        (GlooTimeout("Timed out waiting 1000ms for recv operation to complete"), Outcome.TIMEOUT,
         "GlooTimeout: Timed out waiting 1000ms for recv operation to complete"),
        (RuntimeError("Watchdog caught collective operation timeout"), Outcome.TIMEOUT,
         "RuntimeError: Watchdog caught collective operation timeout"),
        (KeyboardInterrupt(), Outcome.ERROR, "KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_an_exception_is_recorded_and_goes_on_unchanged(profiler, clock, error, outcome, message):
    def fail() -> None:
        with profiler.timed("all_reduce", size_bytes=MIB, sequence=4) as operation:
            clock.advance(MS)
            operation.note("layer", 2)
            raise error

    with pytest.raises(type(error)) as raised:
        fail()
    assert raised.value is error
    event = only_event(profiler)
    assert (event.outcome, event.message, event.sequence) == (outcome, message, 4)
    assert (event.duration_ns, event.metadata) == (MS, {"layer": 2})
    assert event.is_failed
    assert event.algbw_bytes_per_s is None
    assert profiler.num_failed == 1


def test_a_decorated_function_that_raises_is_recorded(profiler):
    @profiler.timed("barrier")
    def fail() -> None:
        raise OSError("gone")

    @profiler.timed("barrier")
    async def fail_later() -> None:
        raise OSError("gone later")

    with pytest.raises(OSError, match="gone"):
        fail()
    with pytest.raises(OSError, match="gone later"):
        asyncio.run(fail_later())
    assert [e.message for e in profiler.failed_operations()] == [
        "OSError: gone", "OSError: gone later",
    ]  # fmt: skip


def test_an_early_return_out_of_the_block_is_recorded(profiler, clock):
    def leave_early() -> int:
        with profiler.timed("gather"):
            clock.advance(1)
            return 5

    assert leave_early() == 5
    assert stats_of(profiler, "gather").count == 1


def test_an_exception_whose_text_cannot_be_had_is_recorded(profiler):
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    with pytest.raises(Mute), profiler.timed("send"):
        raise Mute
    assert only_event(profiler).message.startswith("Mute")


def test_slow_is_not_failed_and_failed_is_not_slow(profiler):
    observe(profiler, duration_ns=3600 * 10**9)
    observe(profiler, duration_ns=1, outcome=Outcome.ERROR)
    observe(profiler, duration_ns=1, outcome=Outcome.TIMEOUT)
    observe(profiler, duration_ns=-1, outcome=Outcome.UNFINISHED)
    observe(profiler, duration_ns=-1, outcome=Outcome.UNSEEN)
    assert profiler.num_failed == stats_of(profiler).num_failed == 2
    assert [e.outcome for e in profiler.failed_operations()] == [Outcome.ERROR, Outcome.TIMEOUT]


def test_failures_outlive_the_ring_and_are_counted_for_ever(profiler):
    profiler.configure(max_events=10)
    for number in range(MAX_FAILED_EVENTS + 5):
        observe(profiler, outcome=Outcome.ERROR, sequence=number)
        observe(profiler)
    for _ in range(20):
        observe(profiler)
    assert not any(event.is_failed for event in profiler.events())
    assert profiler.num_failed == MAX_FAILED_EVENTS + 5
    kept = profiler.failed_operations()
    assert [event.sequence for event in kept] == list(range(5, MAX_FAILED_EVENTS + 5))
    assert kept[-1].event_id == 2 * MAX_FAILED_EVENTS + 9


# --- statistics ---------------------------------------------------------------------------------


def test_statistics_of_a_hundred_durations_are_exact(profiler):
    for number in range(100, 0, -1):
        profiler.record("all_reduce", number * MS, size_bytes=MIB, group_size=4)
    total_s = sum(range(1, 101)) / 1e3
    assert stats_of(profiler) == OperationStats(
        count=100,
        num_observed=100,
        num_failed=0,
        total_bytes=100 * MIB,
        total_duration_ns=5050 * MS,
        min_ns=1 * MS,
        mean_ns=50.5 * MS,
        max_ns=100 * MS,
        p50_ns=50 * MS,
        p95_ns=95 * MS,
        p99_ns=99 * MS,
        percentile_error_ratio=0,
        algbw_bytes_per_s=pytest.approx(100 * MIB / total_s),
        busbw_bytes_per_s=pytest.approx(100 * MIB * 1.5 / total_s),
    )


def test_percentiles_of_many_durations_are_within_one_percent(profiler):
    durations_ns = [round(1000 * 1.001**number) for number in range(5000)]
    for duration_ns in durations_ns:
        observe(profiler, duration_ns=duration_ns)
    stats = stats_of(profiler)
    assert stats.percentile_error_ratio == 0.01
    for q, found in ((0.5, stats.p50_ns), (0.95, stats.p95_ns), (0.99, stats.p99_ns)):
        assert found == pytest.approx(durations_ns[math.ceil(q * 5000) - 1], rel=0.0101)
    assert stats.total_duration_ns == sum(durations_ns)


@pytest.mark.parametrize(
    ("kind", "group_size", "factor"),
    [
        ("all_reduce", 8, 1.75),
        ("all_reduce", 2, 1.0),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 8, 0.875),
        ("broadcast", 8, 1.0),
        ("broadcast", None, 1.0),
        ("reduce", 8, 1.0),
        ("send", None, 1.0),
        ("all_reduce", None, None),
        ("all_reduce", 1, None),
        ("broadcast", 1, None),
        ("barrier", 8, None),
        ("my_own_exchange", 8, None),
    ],
)
def test_bus_bandwidth_of_each_kind(profiler, kind, group_size, factor):
    profiler.record(kind, 1000, size_bytes=4000, group_size=group_size)
    event, stats = only_event(profiler), stats_of(profiler, kind)
    assert event.algbw_bytes_per_s == stats.algbw_bytes_per_s == 4e9
    expected = None if factor is None else 4e9 * factor
    assert event.busbw_bytes_per_s == stats.busbw_bytes_per_s == expected
    assert known_bus_factor(event.kind, group_size) == factor


def test_bandwidth_is_that_of_what_moved_and_arrived(profiler):
    """Not of barriers, failures and operations whose end nobody saw; missing is not zero."""
    profiler.record("all_gather", 1000, size_bytes=4000, group_size=2)
    profiler.record("all_gather", 9000, size_bytes=0, group_size=2)
    profiler.record("all_gather", 0, size_bytes=4000, group_size=2)
    profiler.record("all_gather", None, size_bytes=4000, group_size=2, outcome=Outcome.UNSEEN)
    profiler.record("all_gather", 50_000, size_bytes=4000, group_size=2, outcome=Outcome.TIMEOUT)
    stats = stats_of(profiler, "all_gather")
    assert (stats.algbw_bytes_per_s, stats.busbw_bytes_per_s) == (4e9, 2e9)
    assert (stats.count, stats.total_bytes, stats.total_duration_ns) == (5, 16_000, 60_000)
    assert (stats.min_ns, stats.mean_ns, stats.max_ns) == (0, 15_000, 50_000)
    events = profiler.events()
    assert [event.algbw_bytes_per_s for event in events] == [4e9, None, None, None, None]
    assert [event.latency_ms for event in events] == [0.001, 0.009, 0, None, 0.05]


def test_what_was_never_seen_has_no_statistics(profiler):
    assert profiler.operation_stats("all_reduce") is None
    assert profiler.axis_stats("tp") is None
    assert (profiler.all_operation_stats(), profiler.rank_stats(0)) == ({}, {})
    profiler.record("all_reduce", None)
    stats = stats_of(profiler)
    assert (stats.count, stats.min_ns, stats.mean_ns, stats.p99_ns) == (1, None, None, None)


def test_operations_are_ordered_by_the_time_they_took(profiler):
    for kind, duration_ns in (("send", 1), ("recv", 30), ("barrier", 2), ("recv", 1)):
        profiler.record(kind, duration_ns)
    assert list(profiler.all_operation_stats()) == ["recv", "barrier", "send"]


def test_sums_stay_exact_where_floats_would_not(profiler):
    profiler.record("send", 1, size_bytes=2**60)
    profiler.record("send", 2**60, size_bytes=1)
    stats = stats_of(profiler, "send")
    assert (stats.total_bytes, stats.total_duration_ns) == (2**60 + 1, 2**60 + 1)


def test_statistics_per_rank_axis_and_size(profiler):
    profiler.set_group(0, "tp_0", "tp", range(4))
    profiler.set_group(1, "dp_0", "dp", range(2))
    observe(profiler, group_id=0, size_bytes=MIB, duration_ns=10)
    observe(profiler, group_id=0, size_bytes=MIB + 5, duration_ns=20)
    observe(profiler, Kind.ALL_GATHER, group_id=1, size_bytes=64, duration_ns=40)
    profiler.record("all_reduce", 80, size_bytes=64, rank=9)
    assert {rank: set(profiler.rank_stats(rank)) for rank in (0, 3, 9)} == {
        0: set(), 3: {"all_reduce", "all_gather"}, 9: {"all_reduce"},
    }  # fmt: skip
    assert profiler.rank_stats(3)["all_reduce"].total_duration_ns == 30
    assert {axis: s.total_duration_ns for axis, s in profiler.all_axis_stats().items()} == {
        "": 80, "dp": 40, "tp": 30,
    }  # fmt: skip
    tp = profiler.axis_stats("tp")
    assert tp.busbw_bytes_per_s == pytest.approx((2 * MIB + 5) * 1.5 / 30e-9)
    sizes = profiler.size_stats("all_reduce")
    assert {bucket: stats.count for bucket, stats in sizes.items()} == {64: 1, MIB: 2}
    assert profiler.total_stats().total_duration_ns == 150


def test_an_axis_that_becomes_known_later_brings_its_past_along(profiler):
    observe(profiler, group_id=5)
    profiler.set_group(5, "5", "", range(4))
    observe(profiler, group_id=5)
    assert set(profiler.all_axis_stats()) == {""}
    profiler.set_group(5, "5", "pp", range(4))
    observe(profiler, group_id=5)
    assert {axis: stats.count for axis, stats in profiler.all_axis_stats().items()} == {"pp": 3}
    assert stats_of(profiler).busbw_bytes_per_s == pytest.approx(1.5 * MIB / 1e-3)
    assert {(event.group, event.axis, event.group_size) for event in profiler.events()} == {
        ("5", "pp", 4)
    }


def test_a_group_named_by_hand_is_the_registered_one_unless_something_contradicts(profiler):
    profiler.set_group(5, "tp_0", "tp", range(4))
    profiler.record("all_reduce", 1, group="tp_0")
    profiler.record("all_reduce", 1, group="tp_0", axis="tp", group_size=4)
    profiler.record("all_reduce", 1, group="tp_0", group_size=2)
    assert [(event.axis, event.group_size) for event in profiler.events()] == [
        ("tp", 4), ("tp", 4), ("", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("setting", ["per_operation", "per_rank", "per_axis", "per_size"])
def test_statistics_that_are_switched_off_are_not_there_and_the_others_are(clock, setting):
    profiler = make_profiler(clock, **{setting: False})
    profiler.record("all_reduce", 1, axis="tp", size_bytes=64)
    found = {
        "per_operation": profiler.all_operation_stats(),
        "per_rank": profiler.rank_stats(3),
        "per_axis": profiler.all_axis_stats(),
        "per_size": profiler.size_stats("all_reduce"),
    }
    assert {name for name, stats in found.items() if not stats} == {setting}


# --- custom operations ----------------------------------------------------------------------------


def test_what_is_no_known_kind_is_a_custom_operation_of_that_name(profiler):
    profiler.record("AllReduce", 1)
    profiler.record("halo exchange", 2)
    profiler.record(Kind.CUSTOM, 4, name="pack")
    profiler.record(Kind.CUSTOM, 8, name="all_reduce")
    profiler.record("custom", 16)
    observe(profiler, 200, duration_ns=32)
    found = profiler.all_operation_stats()
    assert {name: stats.total_duration_ns for name, stats in found.items()} == {
        "all_reduce": 1, "halo exchange": 2, "pack": 4, "custom all_reduce": 8, "custom": 16,
        "kind 200": 32,
    }  # fmt: skip
    assert stats_of(profiler, "halo exchange").count == 1
    assert stats_of(profiler, Kind.ALL_REDUCE).count == 1
    assert [event.kind for event in profiler.events()] == [Kind.ALL_REDUCE] + 5 * [Kind.CUSTOM]


def test_endless_new_names_and_groups_do_not_fill_the_memory(profiler):
    for number in range(MAX_NAMES + MAX_GROUPS):
        profiler.record(f"operation {number}", 1)
        profiler.record("send", 1, group=f"group {number}")
    found = profiler.all_operation_stats()
    assert len(found) == MAX_NAMES + 2
    assert found["(other)"].count == MAX_GROUPS
    assert found["send"].count == MAX_NAMES + MAX_GROUPS
    groups = {event.group for event in profiler.events()}
    assert len(groups) <= MAX_GROUPS + 1


# --- sampling -------------------------------------------------------------------------------------


def test_splitmix64_gives_the_published_numbers():
    """The stream from seed 0 (Vigna's splitmix64.c)."""
    assert [sampling_hash(0, number) for number in range(3)] == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F,
    ]  # fmt: skip


def kept_sequences(profiler, *, group_id=0, kind=Kind.ALL_REDUCE, number=400) -> list[int]:
    for sequence in range(number):
        observe(profiler, kind, group_id=group_id, sequence=sequence)
    return [event.sequence for event in profiler.events()]


def test_every_rank_keeps_the_same_operations_of_a_group(clock):
    kept = []
    for rank, group_id in ((0, 7), (1, 2)):  # ids are each process's own
        profiler = make_profiler(clock, sampling_rate=0.25)
        profiler.rank = rank
        profiler.set_group(group_id, f"name on {rank}", "tp" if rank else "", (0, 1, 4, 5))
        kept.append(kept_sequences(profiler, group_id=group_id))
    assert kept[0] == kept[1]
    assert 60 < len(kept[0]) < 140


def test_groups_and_classes_of_operations_are_sampled_apart(clock):
    kept = []
    for kind, ranks in (("send", (0, 1)), ("recv", (0, 1)), ("all_reduce", (0, 1)), ("send", (2,))):
        profiler = make_profiler(clock, sampling_rate=0.25)
        profiler.set_group(0, "", "", ranks)
        kept.append(kept_sequences(profiler, kind=Kind[kind.upper()]))
    assert kept[0] == kept[1]  # both ends of a message
    assert len({tuple(sequences) for sequences in kept}) == 3


SAMPLE = """
    from meshscope.capture.communication import CommunicationConfig, CommunicationProfiler
    profiler = CommunicationProfiler(CommunicationConfig(sampling_rate=0.1))
    profiler.set_group(3, "anything", "", (0, 2, 4))
    for sequence in range(300):
        profiler.observe(1, 3, sequence, 8, 0, 1, 1, -1, 0, 0, -1)
        profiler.record("halo", 1, group="named")
    print([(event.group, event.sequence) for event in profiler.events()])
"""


def test_the_sample_is_the_same_in_processes_with_different_hash_seeds():
    outputs = [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(SAMPLE)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    ]
    assert outputs[0].count("anything") > 10
    assert outputs[0].count("named") > 10
    assert len(set(outputs)) == 1


def test_sampled_totals_stand_for_all_operations(clock):
    """20 000 operations at 10 %: the standard error of a count is sqrt(n·(1-p)/p) = 424."""
    profiler = make_profiler(clock, sampling_rate=0.1)
    for sequence in range(20_000):
        observe(profiler, sequence=sequence, size_bytes=100, duration_ns=1000 + sequence % 100)
    stats = stats_of(profiler)
    assert stats.count == pytest.approx(20_000, abs=4 * 424)
    assert stats.total_bytes == 100 * stats.count
    assert stats.mean_ns == pytest.approx(1049.5, rel=0.01)
    assert stats.p95_ns == pytest.approx(1094, rel=0.02)
    assert stats.total_duration_ns == pytest.approx(stats.count * stats.mean_ns)
    assert stats.num_observed == profiler.num_observed
    assert profiler.num_sampled_out == 20_000 - stats.num_observed
    assert stats.algbw_bytes_per_s == pytest.approx(100 / 1049.5e-9, rel=0.01)


def test_weights_are_those_of_the_rate_an_operation_was_seen_under(clock):
    profiler = make_profiler(clock)
    for sequence in range(1000):
        observe(profiler, sequence=sequence)
    profiler.configure(sampling_rate=0.5)
    for sequence in range(1000, 2000):
        observe(profiler, sequence=sequence)
    stats = stats_of(profiler)
    assert stats.count == 1000 + 2 * (stats.num_observed - 1000)


def test_no_failure_is_sampled_out_and_each_counts_once(clock):
    profiler = make_profiler(clock, sampling_rate=1e-9)
    for sequence in range(100):
        observe(profiler, sequence=sequence)
        observe(profiler, sequence=sequence, outcome=Outcome.ERROR, duration_ns=7)
    stats = stats_of(profiler)
    assert (stats.count, stats.num_failed, stats.total_duration_ns) == (100, 100, 700)
    assert profiler.num_sampled_out == 100


def test_operations_without_a_number_are_counted_as_every_rank_would(profiler):
    for _ in range(2):
        profiler.record("all_reduce", 1, group="dp")
        profiler.record("only on this rank", 1, group="dp")
        profiler.record("all_gather", 1, group="dp")
        profiler.record("send", 1, group="dp", peer=1)
        profiler.record("send", 1, group="dp", peer=2)
        profiler.record("broadcast", 1, group="tp")
    assert [(e.operation, e.peer, e.sequence) for e in profiler.events()] == [
        ("all_reduce", None, 1), ("only on this rank", None, 1), ("all_gather", None, 2),
        ("send", 1, 1), ("send", 2, 1), ("broadcast", None, 1),
        ("all_reduce", None, 3), ("only on this rank", None, 2), ("all_gather", None, 4),
        ("send", 1, 2), ("send", 2, 2), ("broadcast", None, 2),
    ]  # fmt: skip


def test_operations_that_automatic_capture_could_not_number_are_sampled_too(clock):
    profiler = make_profiler(clock, sampling_rate=0.5)
    for _ in range(200):
        observe(profiler, sequence=-1)
    assert 50 < stats_of(profiler).num_observed < 150


# --- what is kept ---------------------------------------------------------------------------------


def test_short_operations_are_counted_but_are_no_events(clock):
    profiler = make_profiler(clock, min_duration_ns=1000)
    for duration_ns in (1, 999, 1000, 5000):
        profiler.record("all_reduce", duration_ns, size_bytes=10)
    profiler.record("all_reduce", 3, outcome=Outcome.ERROR)
    profiler.record("all_reduce", None, outcome=Outcome.UNFINISHED)
    stats = stats_of(profiler)
    assert (stats.count, stats.min_ns, stats.total_duration_ns) == (6, 1, 7003)
    assert [event.duration_ns for event in profiler.events()] == [1000, 5000, 3, None]
    assert profiler.num_below_minimum == 2


def test_the_ring_keeps_the_newest_and_the_statistics_keep_all(clock):
    profiler = make_profiler(clock, max_events=5)
    for number in range(2 * FOLD_EVERY + 3):
        observe(profiler, sequence=number)
    total = 2 * FOLD_EVERY + 3
    assert [event.event_id for event in profiler.events()] == list(range(total - 4, total + 1))
    assert [event.sequence for event in profiler.recent_events(2)] == [total - 2, total - 1]
    assert len(profiler.recent_events(100)) == 5
    assert profiler.recent_events(0) == profiler.recent_events(-1) == []
    assert profiler.num_evicted == total - 5
    assert stats_of(profiler).count == total


def test_settings_change_while_it_runs(profiler):
    for number in range(10):
        observe(profiler, sequence=number)
    profiler.configure(max_events=3, min_duration_ns=50)
    assert [event.sequence for event in profiler.events()] == [7, 8, 9]
    assert (profiler.config.max_events, profiler.num_evicted) == (3, 7)
    profiler.configure(max_events=5)
    observe(profiler, sequence=10)
    assert [event.event_id for event in profiler.events()] == [8, 9, 10, 11]
    profiler.configure(max_events=0)
    observe(profiler)
    assert profiler.events() == []
    assert stats_of(profiler).count == 12


def test_what_came_before_a_change_is_judged_by_the_settings_of_then(profiler):
    observe(profiler, duration_ns=10)
    profiler.configure(min_duration_ns=100)
    observe(profiler, duration_ns=10)
    assert (len(profiler.events()), profiler.num_below_minimum) == (1, 1)


def test_switched_off_nothing_is_recorded_and_everything_works(profiler, clock):
    profiler.enabled = False
    observe(profiler)
    profiler.record("send", 1)
    with profiler.timed("recv") as operation:
        operation.note("key", 1)
    block = profiler.timed("gather")
    with block:
        profiler.enabled = True
    assert profiler.all_operation_stats() == {}
    with block:
        clock.advance(1)
    assert (stats_of(profiler, "gather").count, profiler.enabled) == (1, True)


def test_clear_forgets_everything_but_settings_groups_and_numbering(profiler):
    profiler.configure(max_events=7)
    profiler.set_group(0, "tp_0", "tp", range(4))
    profiler.record("halo", 1, group="tp_0", outcome=Outcome.ERROR)
    observe(profiler)
    fresh = make_profiler(max_events=7).to_dict()
    profiler.clear()
    assert profiler.to_dict() == fresh
    profiler.record("halo", 1, group="tp_0")
    event = only_event(profiler)
    assert (event.event_id, event.sequence, event.axis) == (1, 2, "tp")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sampling_rate": 0}, "sampling_rate is 0, but a number above 0"),
        ({"sampling_rate": 1.5}, "sampling_rate is 1.5"),
        ({"sampling_rate": math.nan}, "sampling_rate is nan"),
        ({"sampling_rate": True}, "sampling_rate is True"),
        ({"max_events": -1}, "max_events is -1, but a whole number of at least 0"),
        ({"max_events": 1.5}, "max_events is 1.5"),
        ({"min_duration_ns": "1"}, "min_duration_ns is '1'"),
        ({"enabled": 1}, "enabled is 1, but True or False"),
        ({"per_axis": None, "max_events": True}, r"(?s)per_axis is None.*max_events is True"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_do_and_change_nothing(profiler, settings, text):
    with pytest.raises(UsageError, match=text):
        CommunicationConfig(**settings)
    with pytest.raises(UsageError, match=text):
        profiler.configure(**settings)
    assert profiler.config == CommunicationConfig()


def test_an_unknown_setting_is_refused(profiler):
    with pytest.raises(UsageError, match="unknown setting max_event; settings: enabled"):
        profiler.configure(max_event=1)


# --- automatic capture ----------------------------------------------------------------------------


def test_an_observed_operation_is_an_event_with_all_its_numbers(profiler):
    profiler.set_group(2, "pp_0", "pp", (3, 7))
    bfloat16 = DTYPES.index("bfloat16")
    profiler.observe(int(Kind.SEND), 2, 41, 4096, 700, 2000, OK, 9, bfloat16, 64, 7)
    assert only_event(profiler) == CommunicationEvent(
        event_id=1, kind=Kind.SEND, name="", rank=3, group="pp_0", axis="pp", group_size=2,
        sequence=41, size_bytes=4096, dtype="bfloat16", is_async=True, peer=7, step=9,
        start_unix_ns=1_000_000_700, start_host_mono_ns=700, duration_ns=2000,
        outcome=Outcome.OK, message="", metadata={},
    )  # fmt: skip


def test_minus_one_is_what_is_not_known(profiler):
    profiler.observe(int(Kind.RECV), -1, -1, -1, 700, -1, 99, -1, 99, 0, -1)
    event = only_event(profiler)
    assert (event.sequence, event.duration_ns, event.step, event.peer) == (None, None, None, None)
    assert (event.group, event.group_size, event.size_bytes) == ("", None, 0)
    assert (event.dtype, event.outcome) == ("(other)", Outcome.UNSEEN)
    assert stats_of(profiler, "recv").total_bytes == 0


def test_nothing_is_folded_before_somebody_asks_or_enough_have_come(profiler):
    for _ in range(FOLD_EVERY - 1):
        observe(profiler)
    assert len(profiler._pending) == FOLD_EVERY - 1
    observe(profiler)
    assert profiler._pending == []
    observe(profiler)
    assert profiler.num_observed == FOLD_EVERY + 1
    assert profiler._pending == []


def test_a_record_that_cannot_be_counted_is_an_error_of_ours_and_not_raised(clock):
    profiler = make_profiler(clock)
    profiler.observe(1, 0, 0, 8, 0, None, OK, 0, 0, 0, -1)
    profiler.record("send", "soon")
    profiler.record("send", 1, size_bytes="many")
    profiler.set_group(0, "x", "y", ["no rank"])
    with profiler.timed("send", group_size="several"):
        pass
    assert profiler.operation_stats("send") is None
    assert profiler.guard.counts == {"statistics": 1, "record": 2, "group": 1, "timed operation": 1}
    assert "errors of the profiler itself: 5" in profiler.summary()
    profiler.record("send", 1)
    assert stats_of(profiler, "send").count == 1


def test_a_missing_name_or_group_is_an_empty_one(profiler):
    with profiler.timed("send", group=None, axis=None, name=None, dtype=None):
        pass
    event = only_event(profiler)
    assert (event.group, event.axis, event.name, event.dtype) == ("", "", "", "")


# --- threads, forks and signals -------------------------------------------------------------------


def test_no_operation_is_lost_between_threads():
    profiler = CommunicationProfiler(rank=0)
    num_threads, num_each = 8, 3000
    block = profiler.timed("broadcast", size_bytes=2)
    stop = threading.Event()

    def work() -> None:
        for number in range(num_each):
            observe(profiler, sequence=number, size_bytes=1)
            with block:
                pass

    def ask() -> None:
        while not stop.is_set():
            profiler.summary()
            profiler.recent_events(5)

    workers = [threading.Thread(target=work) for _ in range(num_threads)]
    asker = threading.Thread(target=ask)
    for thread in (asker, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    asker.join()
    assert profiler.guard.counts == {}
    stats = profiler.all_operation_stats()
    assert {name: found.count for name, found in stats.items()} == {
        "all_reduce": num_threads * num_each, "broadcast": num_threads * num_each,
    }  # fmt: skip
    assert profiler.total_stats().total_bytes == 3 * num_threads * num_each
    ids = [event.event_id for event in profiler.events()]
    assert ids == list(range(ids[0], 2 * num_threads * num_each + 1))


def test_a_training_thread_does_not_wait_for_one_that_asks(profiler):
    with profiler._lock:
        thread = threading.Thread(
            target=lambda: [observe(profiler) for _ in range(3 * FOLD_EVERY)], daemon=True
        )
        thread.start()
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert profiler.num_observed == 3 * FOLD_EVERY


@pytest.mark.parametrize("moment", ["_cell", "_factor"])
def test_a_signal_handler_may_ask_in_the_middle_of_folding_or_asking(profiler, monkeypatch, moment):
    answers = []

    def handle(*_: object) -> None:
        for _ in range(FOLD_EVERY):
            observe(profiler, Kind.SEND)
        answers.append(profiler.all_operation_stats())

    original = getattr(profiler._ledger, moment)

    def interrupted(*args):
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGUSR1)
        return original(*args)

    monkeypatch.setattr(profiler._ledger, moment, interrupted)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        observe(profiler)
        assert profiler.all_operation_stats()["all_reduce"].count == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(answers) == 1
    assert stats_of(profiler, "send").count == FOLD_EVERY


def test_a_forked_child_begins_anew_even_if_a_thread_held_the_lock():
    program = """
        import os, threading
        from meshscope.capture.communication import communication
        profiler = communication()
        profiler.set_group(0, "tp_0", "tp", (0, 1))
        profiler.record("send", 5)
        held, release = threading.Event(), threading.Event()
        def hold():
            with profiler._lock:
                held.set()
                release.wait()
        threading.Thread(target=hold).start()
        held.wait()
        child = os.fork()
        if child == 0:
            profiler.observe(1, 0, 0, 8, 0, 7, 1, -1, 0, 0, -1)
            (event,) = profiler.events()
            os._exit(0 if (event.event_id, event.axis) == (1, "tp") else 1)
        assert os.waitpid(child, 0)[1] == 0
        release.set()
        assert list(profiler.all_operation_stats()) == ["send"]
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# --- metadata -------------------------------------------------------------------------------------


class Tensor:
    """Whose text must not be asked for: that would wait for the device."""

    def __array__(self):
        raise AssertionError("nobody may read this")

    __str__ = __repr__ = __array__


def test_metadata_is_plain_and_holds_nothing_of_the_program(profiler):
    given = {
        "text": "x", "int": 1, "float": 1.5, "none": None, "flag": True, "nan": math.nan,
        "shape": (2, 3), "kind": Kind.SEND, "path": Path("a/b"), "tensor": Tensor(), 5: b"x",
        "long": "y" * 10_000,
    }  # fmt: skip
    profiler.record("send", 1, metadata=given)
    assert only_event(profiler).metadata == {
        "text": "x", "int": 1, "float": 1.5, "none": None, "flag": True, "nan": "nan",
        "shape": [2, 3], "kind": 8, "path": "a/b", "tensor": "<Tensor>", "5": "b'x'",
        "long": "y" * 500,
    }  # fmt: skip
    assert "Infinity" not in profiler.export_json()


def test_metadata_can_be_added_to_an_event(profiler):
    profiler.record("send", 1, metadata={"a": 1})
    event = only_event(profiler)
    assert event.with_metadata("b", (1, 2)).metadata == {"a": 1, "b": [1, 2]}
    assert event.metadata == {"a": 1}


# --- exchange -------------------------------------------------------------------------------------


def strict_json(text: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_holds_everything_under_string_keys(profiler, clock):
    profiler.set_group(0, "tp_0", "tp", range(4))
    observe(profiler)
    profiler.record("halo exchange", None, metadata={"ratio": math.inf})
    profiler.record("send", 5, outcome=Outcome.ERROR, message="gone", rank=1)
    document = strict_json(profiler.export_json())
    assert document == profiler.to_dict()
    assert document["config"]["max_events"] == 10_000
    assert set(document["operation_stats"]) == {"all_reduce", "halo exchange", "send"}
    assert document["operation_stats"]["halo exchange"]["min_ns"] is None
    assert set(document["rank_stats"]) == {"1", "3"}
    assert set(document["axis_stats"]) == {"tp", ""}
    assert set(document["size_stats"]["all_reduce"]) == {str(MIB)}
    assert [event["operation"] for event in document["events"]] == [
        "all_reduce", "halo exchange", "send",
    ]  # fmt: skip
    assert document["failed_operations"][0]["message"] == "gone"
    assert document["events"][0]["busbw_bytes_per_s"] == pytest.approx(1.5 * MIB / 1e-3)
    assert (document["num_observed"], document["num_failed"]) == (3, 1)


def test_an_empty_profiler_exports_valid_json(profiler):
    document = strict_json(profiler.export_json())
    assert (document["events"], document["cells"]) == ([], [])
    assert document["total_stats"]["min_ns"] is None


def test_json_goes_to_a_file(profiler, tmp_path):
    observe(profiler)
    path = tmp_path / "communication.json"
    text = profiler.export_json(path)
    assert path.read_text(encoding="utf-8") == text
    with pytest.raises(UsageError, match="cannot be written"):
        profiler.export_json(tmp_path / "missing" / "x.json")


def test_merged_ranks_are_as_if_one_had_seen_everything(clock):
    together = make_profiler(clock)
    merged = make_profiler(clock)
    for rank in range(4):
        one = make_profiler(clock)
        one.rank = rank
        one.set_group(rank, "tp_0", "tp", range(4))  # ids are each process's own
        for number in range(100):
            duration_ns = 1000 * rank + number
            observe(one, group_id=rank, sequence=number, duration_ns=duration_ns)
            one.record("halo", duration_ns, outcome=Outcome.ERROR)
            together.record(
                "all_reduce", duration_ns, size_bytes=MIB, rank=rank, group="tp_0", axis="tp",
                group_size=4,
            )  # fmt: skip
            together.record("halo", duration_ns, rank=rank, outcome=Outcome.ERROR)
        merged.merge(one if rank % 2 else strict_json(one.export_json()))
    assert merged.all_operation_stats() == together.all_operation_stats()
    assert merged.all_axis_stats() == together.all_axis_stats()
    assert merged.size_stats("all_reduce") == together.size_stats("all_reduce")
    for rank in range(4):
        assert merged.rank_stats(rank) == together.rank_stats(rank)
    assert (merged.num_failed, merged.events()) == (400, [])


def test_merging_adds_what_was_left_out(clock):
    merged = make_profiler(clock)
    one = make_profiler(clock, sampling_rate=0.5, min_duration_ns=MS)
    for sequence in range(100):
        observe(one, sequence=sequence, duration_ns=5)
    merged.merge(one)
    merged.merge(one)
    assert merged.num_sampled_out == 2 * one.num_sampled_out > 0
    assert merged.num_below_minimum == 2 * one.num_below_minimum > 0
    assert stats_of(merged).count == 2 * stats_of(one).count


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        None,
        {"version": 99},
        {"version": 1, "cells": [{"kind": "send"}], "num_sampled_out": 0, "num_below_minimum": 0},
        {"version": 1, "cells": 5, "num_sampled_out": 0, "num_below_minimum": 0},
    ],
)
def test_what_is_no_export_is_refused_and_changes_nothing(profiler, wrong):
    observe(profiler)
    with pytest.raises(UsageError, match="no export of a communication profiler"):
        profiler.merge(wrong)
    assert profiler.num_observed == 1


# --- text -----------------------------------------------------------------------------------------


def test_the_summary_counts_everything_and_orders_by_time(clock):
    profiler = make_profiler(clock, max_events=2, min_duration_ns=500)
    profiler.set_group(0, "tp_0", "tp", range(4))
    for duration_ns in (1 * MS, 2 * MS, 3 * MS):
        observe(profiler, size_bytes=2 * MIB, duration_ns=duration_ns)
    profiler.record("halo\x1b[31m", 20 * MS, outcome=Outcome.ERROR)
    profiler.record("barrier", 100)
    clock.advance(1_500_000_000)
    text = profiler.summary()
    assert [line.rstrip() for line in text.splitlines()] == [
        "communication: 5 operations, 6.00 MiB, 26.000 ms in them, 1 failed; over 1.5 s",
        "not kept as events, but counted: 1 below the minimum duration, 2 evicted from the ring",
        "",
        "axis       count  failed   MiB  total ms  mean ms  min ms  p50 ms  p95 ms  p99 ms  max ms"
        "  alg MiB/s  bus MiB/s",
        "(no axis)      2       1  0.00    20.000   10.000   0.000   0.000  20.000  20.000  20.000"
        "        n/a        n/a",
        "tp             3       0  6.00     6.000    2.000   1.000   2.000   3.000   3.000   3.000"
        "    1,000.0    1,500.0",
        "",
        "operation   count  failed   MiB  total ms  mean ms  min ms  p50 ms  p95 ms  p99 ms  max ms"
        "  alg MiB/s  bus MiB/s",
        "halo?[31m       1       1  0.00    20.000   20.000  20.000  20.000  20.000  20.000  20.000"
        "        n/a        n/a",
        "all_reduce      3       0  6.00     6.000    2.000   1.000   2.000   3.000   3.000   3.000"
        "    1,000.0    1,500.0",
        "barrier         1       0  0.00     0.000    0.000   0.000   0.000   0.000   0.000   0.000"
        "        n/a        n/a",
    ]


def test_the_summary_says_when_numbers_are_estimates(clock):
    profiler = make_profiler(clock, sampling_rate=0.5)
    for sequence in range(1000):
        observe(profiler, sequence=sequence)
    text = profiler.summary()
    kept, left_out = profiler.num_observed, profiler.num_sampled_out
    assert f"sampled: {kept} looked at, {left_out} left out" in text
    assert "percentiles are within 1%" in text


# --- the process's own ----------------------------------------------------------------------------


def test_the_process_has_one_profiler_made_on_first_use():
    assert communication() is communication()
    assert communication().config == CommunicationConfig()


def test_it_can_be_set_up_once_and_before_its_first_use():
    made = init_communication(CommunicationConfig(max_events=5))
    assert communication() is made
    with pytest.raises(UsageError, match="already"):
        init_communication()
    assert communication() is made
    reset_communication()
    assert communication() is not made


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "5", "WORLD_SIZE": "8"}, 5),
        ({"WORLD_SIZE": "8"}, None),
        ({"RANK": "x", "WORLD_SIZE": "8"}, None),
    ],
)
def test_its_rank_is_the_launchers_and_never_guessed(monkeypatch, environment, rank):
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "OMPI_", "PMI")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    profiler = CommunicationProfiler()
    profiler.record("send", 1)
    assert (profiler.rank, only_event(profiler).rank) == (rank, rank)
    assert set(profiler.to_dict()["rank_stats"]) == {"unknown" if rank is None else str(rank)}


def test_its_rank_is_remembered_when_the_process_group_is_gone(monkeypatch):
    state = {"is_up": True}
    fake = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: state["is_up"], get_rank=lambda: 6
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)
    profiler = CommunicationProfiler()
    for _ in range(FOLD_EVERY):
        observe(profiler)
    state["is_up"] = False
    assert profiler.rank == 6


def test_the_page_about_it_shows_what_runs(tmp_path):
    page = (ROOT / "docs" / "communication-api.md").read_text(encoding="utf-8")
    snippets = re.findall(r"<!-- runnable -->\n```python\n(.*?)```", page, flags=re.DOTALL)
    assert snippets
    for code in snippets:
        done = run_process(
            [sys.executable, "-c", code],
            cwd=tmp_path,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
    for name in CommunicationConfig.__dataclass_fields__:
        assert f"| `{name}` |" in page
    for name in OperationStats.__dataclass_fields__:
        assert f"`{name}`" in page
