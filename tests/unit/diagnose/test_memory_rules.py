import numpy as np
import pytest

from meshscope.analyze.study import Study
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Thresholds
from meshscope.diagnose.context import Context
from meshscope.diagnose.rules.memory import (
    AllocatorRetries,
    Fragmentation,
    MemoryLeak,
    MemorySkew,
    NearCapacity,
)
from meshscope.diagnose.runner import diagnose
from meshscope.store.read.run import open_run
from signal_builders import GB, MB, DeviceMemory, make_signal_run

NOISE = np.random.default_rng(1).normal(size=(8, 200))


def find(rule, path, changed=None, **options):
    attempt = open_run(make_signal_run(path / "run", **options)).last_attempt
    return list(rule().run(Context(Study(attempt), thresholds=Thresholds(changed=changed or {}))))


def leak(rank, step):
    return (300 + 5 * step * (rank == 1) + 0.5 * NOISE[rank, step]) * MB


def test_a_leak_names_its_rank_and_when_memory_is_full(tmp_path):
    (finding,) = find(MemoryLeak, tmp_path, num_ranks=2, rss=leak, host_limit_bytes=2 * GB)
    assert (finding.code, finding.ranks, finding.severity) == ("ME001", (1,), Severity.CRITICAL)
    assert "growing by 5.0" in finding.summary
    assert "2.00 GiB are full after" in finding.summary


def test_a_leak_of_unknown_limit_is_high_and_says_why(tmp_path):
    (finding,) = find(MemoryLeak, tmp_path, num_ranks=2, rss=leak)
    assert finding.severity is Severity.HIGH
    assert "how much memory there is was not recorded" in finding.summary


def test_a_leak_that_takes_months_is_medium(tmp_path):
    (finding,) = find(MemoryLeak, tmp_path, num_ranks=2, rss=leak, host_limit_bytes=10**9 * MB)
    assert finding.severity is Severity.MEDIUM


@pytest.mark.parametrize(
    "rss",
    [
        lambda rank, step: (300 + 5 * NOISE[rank, step]) * MB,
        lambda rank, step: (300 + 200 * (step >= 17)) * MB,
        lambda rank, step: (300 + 100 * (1 - np.exp(-step / 6))) * MB,
    ],
    ids=["healthy", "one-off jump", "warm-up"],
)
def test_what_is_no_leak_is_silent(tmp_path, rss):
    assert find(MemoryLeak, tmp_path, num_ranks=2, rss=rss, host_limit_bytes=8 * GB) == []


POOLS_FILL = {
    0: 345403392, 1: 347430912, 4: 353243136, 6: 356552704, 8: 358727680, 10: 360873984,
    12: 360935424, 15: 362897408, 18: 368177152, 21: 371417088, 23: 371437568,
}  # fmt: skip
"""Of a healthy program whose all-to-alls have other sizes in every step, in its first second."""


def test_pools_that_fill_in_the_first_second_are_a_hint_at_most(tmp_path):
    (finding,) = find(
        MemoryLeak, tmp_path, num_steps=25, rss=lambda rank, step: POOLS_FILL.get(step, 0),
        is_sampled=POOLS_FILL.__contains__, host_limit_bytes=23 * GB,
    )  # fmt: skip
    assert finding.severity is Severity.LOW
    assert "nearly level" in finding.confidence.text


def test_a_forecast_far_beyond_what_was_seen_is_not_critical(tmp_path):
    """40 steps of some seconds tell little about the 8,000 after them, an hour or not."""
    (finding,) = find(MemoryLeak, tmp_path, num_ranks=2, rss=leak, host_limit_bytes=40 * GB)
    assert finding.severity is Severity.HIGH


def test_a_leaking_device_is_told_for_its_rank(tmp_path):
    (finding,) = find(
        MemoryLeak, tmp_path, device=lambda rank, step: DeviceMemory(allocated=GB + 9 * MB * step)
    )
    assert finding.title == "device memory of rank 0 grows with every step"


def leak_on_device(rank, step):
    return DeviceMemory(allocated=5 * GB + 64 * MB * step, total=139 * GB)


def test_sixty_four_megabytes_a_step_are_seen_in_sixty_steps_read_every_third(tmp_path):
    """A step of 25 ms: 139 GiB are full within a minute."""
    (finding,) = find(
        MemoryLeak,
        tmp_path,
        num_steps=60,
        step_ns=lambda rank, step: 24e6,
        device=leak_on_device,
        is_sampled=lambda step: step % 3 == 0,
    )
    assert finding.severity is Severity.CRITICAL
    # At the last reading, of step 57: (139 - 5) GiB / 64 MiB - 57.
    assert "139 GiB are full after 2,087 more steps, 52.2 s at this pace" in finding.summary


def full_device(used_gb):
    return lambda rank, step: DeviceMemory(allocated=20 * GB, peak_allocated=int(used_gb * GB))


@pytest.mark.parametrize(("used_gb", "severity"), [(73, Severity.MEDIUM), (79, Severity.HIGH)])
def test_a_nearly_full_device_is_told(tmp_path, used_gb, severity):
    (finding,) = find(NearCapacity, tmp_path, num_ranks=2, device=full_device(used_gb))
    assert (finding.code, finding.ranks, finding.severity) == ("ME002", (0, 1), severity)


def test_a_device_with_room_is_silent_unless_the_limit_is_changed(tmp_path):
    assert find(NearCapacity, tmp_path, device=full_device(71)) == []
    changed = {"memory_near_capacity_ratio": 0.5}
    assert find(NearCapacity, tmp_path / "b", changed, device=full_device(71))


def test_a_host_is_full_when_its_ranks_together_are(tmp_path):
    rss = lambda rank, step: 1 * GB  # noqa: E731
    (finding,) = find(NearCapacity, tmp_path, num_ranks=4, rss=rss, host_limit_bytes=int(4.2 * GB))
    assert finding.title == "host memory of ranks 0-3 is nearly full"
    assert find(NearCapacity, tmp_path / "b", num_ranks=4, rss=rss, host_limit_bytes=8 * GB) == []


def holes(reserved_gb, allocated_gb):
    return lambda rank, step: DeviceMemory(
        allocated=5 * GB,
        reserved=reserved_gb * GB,
        peak_allocated=allocated_gb * GB,
        peak_reserved=reserved_gb * GB,
        inactive_split=3 * GB,
    )


def test_holes_matter_on_a_full_device_and_are_low_on_one_with_room(tmp_path):
    (full,) = find(Fragmentation, tmp_path / "a", device=holes(76, 50))
    (roomy,) = find(Fragmentation, tmp_path / "b", device=holes(40, 20))
    assert (full.code, full.severity, roomy.severity) == ("ME003", Severity.MEDIUM, Severity.LOW)
    assert "3.00 GiB in holes" in full.summary


def test_holes_that_grow_are_told_before_the_device_is_full(tmp_path):
    def hollowing(rank, step):
        reserved = 8 * GB + 64 * MB * step
        return DeviceMemory(
            allocated=5 * GB, peak_allocated=8 * GB, reserved=reserved, peak_reserved=reserved
        )

    (found,) = find(Fragmentation, tmp_path, num_steps=60, device=hollowing)
    assert (found.code, found.severity, found.ranks) == ("ME003", Severity.MEDIUM, (0,))
    assert found.title == "reserved device memory that is not used grows with every step"
    # (80 - 8) GiB / 64 MiB - 59 steps.
    assert "grows by 64.0 MiB a step, and 80.0 GiB are reserved after 1,093 more" in found.summary
    assert "expandable_segments" in found.change


def test_a_cache_that_is_used_at_the_peak_is_no_fragmentation(tmp_path):
    # At the step's end 5 of 76 GiB are allocated, at the peak 70 were.
    assert find(Fragmentation, tmp_path, device=holes(76, 70)) == []


def test_a_rank_that_needs_more_than_its_peers_is_low_while_there_is_room(tmp_path):
    rss = lambda rank, step: (300 + 200 * (rank == 1)) * MB  # noqa: E731
    (finding,) = find(MemorySkew, tmp_path / "a", num_ranks=3, rss=rss, host_limit_bytes=64 * GB)
    assert (finding.code, finding.ranks, finding.severity) == ("ME004", (1,), Severity.LOW)
    full = lambda rank, step: DeviceMemory(allocated=(70 if rank == 2 else 40) * GB)  # noqa: E731
    (finding,) = find(MemorySkew, tmp_path / "b", num_ranks=3, device=full)
    assert (finding.ranks, finding.severity) == ((2,), Severity.MEDIUM)


def test_small_differences_and_leaks_are_no_skew(tmp_path):
    small = lambda rank, step: (300 + 50 * (rank == 1)) * MB  # noqa: E731
    assert find(MemorySkew, tmp_path / "a", num_ranks=3, rss=small) == []
    assert find(MemorySkew, tmp_path / "b", num_ranks=2, num_steps=100, rss=leak) == []


def test_repeated_and_failed_allocations_are_told(tmp_path):
    def device(num_retries, num_ooms):
        return lambda rank, step: DeviceMemory(
            allocated=GB, num_retries=num_retries * (step > 9), num_ooms=num_ooms * (step > 20)
        )

    (finding,) = find(AllocatorRetries, tmp_path / "a", device=device(4, 0))
    assert (finding.code, finding.severity, finding.first_step) == ("ME005", Severity.MEDIUM, 10)
    (finding,) = find(AllocatorRetries, tmp_path / "b", device=device(4, 1))
    assert finding.severity is Severity.HIGH
    assert find(AllocatorRetries, tmp_path / "c", device=device(0, 0)) == []


def test_retries_are_priced_by_the_steps_they_were_in(tmp_path):
    def device(rank, step):
        return DeviceMemory(allocated=GB, num_retries=2 * (step >= 20) + 2 * (step >= 30))

    slow = {20, 30}
    options = {"device": device, "step_ns": lambda rank, step: (209 if step in slow else 49) * 1e6}
    (found,) = find(AllocatorRetries, tmp_path, num_steps=40, **options)
    # Steps 1 to 38 of 50 ms have a period, two of them take 160 ms more: 320 ms over 38 steps.
    assert found.gain.saved_ns == pytest.approx(320e6 / 38)
    assert found.severity is Severity.HIGH  # 14 % of a step
    assert "4 allocations succeeded only after the cache had been emptied" in found.summary
    assert "one takes about 80.0 ms" in found.summary


def test_what_a_leak_leads_to_is_a_symptom_of_it(tmp_path):
    def device(rank, step):
        return DeviceMemory(
            allocated=40 * GB + 500 * MB * step, num_retries=5 * (step >= 70) + 5 * (step >= 75)
        )

    attempt = open_run(make_signal_run(tmp_path, num_steps=80, device=device)).last_attempt
    found = {finding.code: finding for finding in diagnose(Context(Study(attempt))).findings}
    assert found["ME001"].severity is Severity.CRITICAL
    assert {found[code].severity for code in ("ME002", "ME005")} == {Severity.LOW}
    assert "ME001" in found["ME005"].explained_by


@pytest.mark.parametrize(
    "rule", [MemoryLeak, NearCapacity, Fragmentation, MemorySkew, AllocatorRetries]
)
def test_a_run_without_memory_samples_is_silent(tmp_path, rule):
    assert find(rule, tmp_path) == []
