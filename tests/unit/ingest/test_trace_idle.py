"""Causes of idle time, per device and per step; they sum to it."""

import pytest

from made_traces import call, host, kernel, step, summarize


def causes(idle):
    return (
        idle.host_ns,
        idle.synchronising_ns,
        idle.communicating_ns,
        idle.launch_ns,
        idle.dependency_ns,
        idle.unknown_ns,
    )


def test_gaps_of_each_step_have_their_causes(tmp_path) -> None:
    """Step 1: the host has launched 31 after the gap's begin, 5 of it synchronising, 10 in a call,
    then 20 of launch and 9 too long for one. Step 2: queued before the gap: dependency."""
    events = [
        step(1, 0, 100),
        step(2, 100, 100),
        call("cudaLaunchKernel", 0, 1),
        kernel("a", 10, 10, correlation=1),
        call("cudaDeviceSynchronize", 20, 0, length=5),
        host("cpu_op", "c10d::allreduce_", 30, 10),
        call("cudaLaunchKernel", 50, 2),
        kernel("b", 80, 10, correlation=2),
        call("cudaLaunchKernel", 110, 3),
        call("cudaLaunchKernel", 112, 4),
        kernel("c", 120, 10, correlation=3),
        kernel("d", 150, 10, correlation=4),
        kernel("e", 170, 10),
    ]
    (device,) = summarize(tmp_path / "t.json", events).devices
    first, second = device.steps
    assert causes(first.idle) == (16_000, 5_000, 10_000, 20_000, 9_000, 0)
    assert causes(second.idle) == (0, 0, 0, 0, 20_000, 10_000)
    for one, time in zip(device.steps, device.breakdown.steps, strict=True):
        assert sum(causes(one.idle)) == one.idle.total_ns == time.time.idle_ns
    assert sum(causes(device.idle)) == device.idle.total_ns == device.breakdown.time.idle_ns


@pytest.mark.parametrize("num_steps", [1, 7])
def test_every_step_with_work_is_there(tmp_path, num_steps) -> None:
    events = []
    for number in range(num_steps):
        events += [
            step(number, 100 * number, 100),
            call("cudaLaunchKernel", 100 * number, number + 1),
            kernel("a", 100 * number + 10, 10, correlation=number + 1),
            kernel("b", 100 * number + 30, 10),
        ]
    (device,) = summarize(tmp_path / "t.json", events).devices
    assert [one.step for one in device.steps] == list(range(num_steps))
    assert all(one.idle.total_ns == 10_000 for one in device.steps)


@pytest.mark.parametrize(
    ("synchronises_from", "track", "expected"),
    [(10, None, 31_000), (21, None, 4_000), (10, 300, 0)],
    ids=[
        "device runs dry in it",
        "only later in the gap",
        "another thread, which launches nothing",
    ],
)
def test_all_that_is_behind_a_wait_for_the_device_is_its_fault(
    tmp_path, synchronises_from, track, expected
) -> None:
    """The device ends at 20, the wait at 25, and the next launch is from 50 to 51."""
    length = 25 - synchronises_from
    waiting = call("cudaStreamSynchronize", synchronises_from, 0, length=length)
    events = [
        step(1, 0, 100),
        call("cudaLaunchKernel", 0, 1),
        kernel("a", 5, 15, correlation=1),
        waiting if track is None else {**waiting, "tid": track},
        call("cudaLaunchKernel", 50, 2),
        kernel("b", 60, 10, correlation=2),
    ]
    (device,) = summarize(tmp_path / "t.json", events).devices
    assert device.idle.synchronising_ns == expected
    assert device.idle.host_ns == 31_000 - expected
