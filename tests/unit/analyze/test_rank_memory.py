from dataclasses import replace

import numpy as np
import pytest

from builders import MS
from meshscope.analyze.memory.memory import Place, analyze_memory, forecast_device, forecast_host
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.growth import GrowthKind
from meshscope.store.read.run import open_run
from signal_builders import GB, MB, DeviceMemory, make_signal_run

NOISE = np.random.default_rng(0).normal(size=(8, 1000))


def analyze(path, **options):
    return analyze_memory(open_run(make_signal_run(path, **options)).last_attempt)


def leak_on(leaking, mb=5.0, noise_mb=0.5):
    def rss(rank, step):
        kept = mb * step if rank == leaking else 0
        return (300 + kept + noise_mb * NOISE[rank, step]) * MB

    return rss


@pytest.mark.parametrize("num_steps", [20, 40])
def test_a_leak_of_five_megabytes_a_step_is_found_in_a_short_run(tmp_path, num_steps):
    memory = analyze(tmp_path / "run", num_ranks=4, num_steps=num_steps, rss=leak_on(2))
    (leaking,) = memory.leaking(Place.HOST)
    assert leaking.rank == 2
    assert leaking.growth.per_step == pytest.approx(5 * MB, rel=0.1)


def test_noise_is_no_leak(tmp_path):
    memory = analyze(tmp_path / "run", num_ranks=4, rss=leak_on(None, noise_mb=20))
    assert memory.leaking(Place.HOST) == ()


def test_a_jump_is_no_leak(tmp_path):
    memory = analyze(tmp_path / "run", rss=lambda rank, step: (300 + 200 * (step >= 20)) * MB)
    assert memory.leaking(Place.HOST) == ()
    assert memory.ranks[0].growth.kind is GrowthKind.JUMP
    assert memory.ranks[0].growth.jump.height == 200 * MB


def test_a_creep_of_kilobytes_is_no_leak(tmp_path):
    memory = analyze(tmp_path / "run", rss=lambda rank, step: 300 * MB + 4096 * step)
    assert memory.ranks[0].growth.kind is GrowthKind.STEADY
    assert memory.leaking(Place.HOST) == ()


def test_the_host_is_full_when_all_its_ranks_together_are(tmp_path):
    memory = analyze(tmp_path / "run", num_ranks=2, rss=leak_on(1), host_limit_bytes=2 * GB)
    forecast = forecast_host(memory, "node0", 50 * MS)
    left = 2 * GB - sum(rank.last_bytes for rank in memory.ranks)
    assert forecast.ranks == (1,)
    assert forecast.num_steps == pytest.approx(left / (5 * MB), rel=0.05)
    assert forecast.seconds == pytest.approx(forecast.num_steps * 0.05)


def test_without_a_limit_there_is_no_forecast(tmp_path):
    memory = analyze(tmp_path / "run", rss=leak_on(0))
    assert forecast_host(memory, "node0", 50 * MS) == Unavailable(
        "how much memory there is was not recorded"
    )


def test_a_device_fills_up_from_the_allocators_peak(tmp_path):
    memory = analyze(
        tmp_path / "run",
        device=lambda rank, step: DeviceMemory(
            allocated=10 * GB + 100 * MB * step, peak_allocated=20 * GB + 100 * MB * step
        ),
    )
    (leaking,) = memory.leaking(Place.DEVICE)
    forecast = forecast_device(leaking, Unavailable("no steps"))
    assert forecast.num_steps == pytest.approx((60 * GB - 39 * 100 * MB) / (100 * MB))
    assert isinstance(forecast.seconds, Unavailable)


def test_the_allocator_is_looked_at_where_most_is_reserved(tmp_path):
    def device(rank, step):
        is_peak = step == 7
        return DeviceMemory(
            allocated=10 * GB,
            reserved=(30 if is_peak else 12) * GB,
            peak_allocated=18 * GB,
            peak_reserved=30 * GB,
            inactive_split=(9 if is_peak else 1) * GB,
            num_retries=max(0, step - 5),
            num_ooms=1 if step > 30 else 0,
        )

    (rank,) = analyze(tmp_path / "run", device=device).ranks
    state = rank.allocator
    assert (state.step, state.reserved_bytes, state.inactive_split_bytes) == (7, 30 * GB, 9 * GB)
    assert state.unused_at_peak_bytes == 12 * GB
    assert (state.num_retries, state.num_failures, state.first_retry_step) == (34, 1, 6)
    assert rank.limit_bytes == 80 * GB


def test_peers_are_compared_and_strangers_are_not(tmp_path):
    options = {"num_ranks": 3, "rss": lambda rank, step: (300 + 200 * (rank == 1)) * MB}
    (skew,) = analyze(tmp_path / "run", **options).skews
    assert (skew.rank, skew.peak_bytes, skew.peers_bytes) == (1, 500 * MB, 300 * MB)
    assert analyze(tmp_path / "unknown", has_layout=False, **options).skews == ()


def test_a_run_without_samples_says_so(tmp_path):
    assert analyze(tmp_path / "run") == Unavailable("memory was not sampled")


def test_what_rose_while_code_was_compiled_is_no_leak(tmp_path):
    options = {"num_steps": 20, "rss": lambda rank, step: (300 + 40 * step) * MB}
    memory = analyze(tmp_path / "a", **options, is_compiling=lambda step: True)
    assert memory.leaking(Place.HOST) == ()
    assert memory.ranks[0].growth.kind is GrowthKind.LEVEL
    # A leak beside a few compilations is one, with its own slope.
    some = analyze(tmp_path / "b", **options, is_compiling=lambda step: step in (3, 9))
    (leaking,) = some.leaking(Place.HOST)
    assert leaking.growth.per_step == pytest.approx(40 * MB, rel=0.05)


def limit_of(path, **options):
    others, peak = options.pop("others", 0), options.pop("peak", 0)
    device = DeviceMemory(allocated=10 * GB, reserved=12 * GB, peak_allocated=peak, others=others)
    (rank,) = analyze(path, device=lambda rank, step: device, **options).ranks
    return rank.limit_bytes


def test_a_device_ends_where_other_processes_or_a_share_begin(tmp_path):
    assert limit_of(tmp_path / "a") == 80 * GB
    assert limit_of(tmp_path / "b", others=30 * GB) == 50 * GB
    assert limit_of(tmp_path / "c", device_limit_bytes=20 * GB) == 20 * GB
    assert limit_of(tmp_path / "d", device_limit_bytes=-1) == 80 * GB
    assert limit_of(tmp_path / "e", others=30 * GB, peak=60 * GB) == 60 * GB  # it has had that


def grow_holes(lengths):
    """Blocks of a caching allocator that no longer one fits into: each new longest is added."""
    highest, reserved = 0, 0
    for length in lengths.tolist():
        if length > highest:
            highest, reserved = length, reserved + length
        yield DeviceMemory(
            allocated=GB,
            reserved=GB + reserved,
            peak_allocated=GB + highest,
            peak_reserved=GB + reserved,
        )


def find_holes(path, lengths):
    states = list(grow_holes(lengths))
    options = {"num_steps": len(states), "is_sampled": lambda step: step % 3 == 0}
    (rank,) = analyze(path, device=lambda rank, step: states[step], **options).ranks
    return rank.allocator


def test_blocks_too_small_for_the_next_length_are_seen_to_grow(tmp_path):
    state = find_holes(tmp_path, 64 * MB + 2 * MB * np.arange(60))
    assert state.is_hollowing(128 * MB)
    # All but the newest block: each step adds one, of 64 to 182 MiB.
    assert state.unused_at_peak_bytes == sum((64 + 2 * step) * MB for step in range(57))
    assert 90 * MB < state.growth.per_step < 160 * MB


def test_random_lengths_leave_holes_that_come_to_an_end(tmp_path):
    random = np.random.default_rng(0)
    found = [
        find_holes(tmp_path / str(draw), (512 * MB * random.random(60)).astype(np.int64))
        for draw in range(20)
    ]
    assert sum(state.is_hollowing(0) for state in found) == 0


def test_the_parts_of_a_peak_sum_to_it_and_say_when_they_came(tmp_path):
    memory = analyze(tmp_path / "run", num_ranks=2, num_steps=20, rss=leak_on(1, noise_mb=0))
    grown = memory.ranks[1]
    assert grown.parts_bytes == {
        "parameters": 0,
        "other_at_start": 300 * MB,
        "added_later": 5 * 19 * MB,
        "within_steps": 0,
    }
    assert sum(grown.parts_bytes.values()) == grown.peak_bytes


def test_counted_parameters_are_a_part_of_what_was_there_at_first(tmp_path):
    memory = analyze(tmp_path / "run", num_steps=20, rss=leak_on(None, noise_mb=0))
    counted = replace(memory.ranks[0], parameter_bytes=100 * MB, peak_bytes=350 * MB)
    assert counted.parts_bytes["parameters"] == 100 * MB
    assert counted.parts_bytes["other_at_start"] == 200 * MB
    assert counted.parts_bytes["within_steps"] == 50 * MB
