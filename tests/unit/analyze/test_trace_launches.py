"""Depth of the launch queue over time, and graphs, by closed forms."""

from made_traces import call, host, kernel, summarize
from meshscope.core.unavailable import Unavailable


def test_depth_is_weighed_by_time(tmp_path) -> None:
    """Calls at 0, 10, 20; begins at 40, 60, 100: depth 1, 2, 3, 2, 1 for 10, 10, 20, 20, 40."""
    events = [
        *(call("cudaLaunchKernel", 10 * at, at + 1) for at in range(3)),
        kernel("a", 40, 5, correlation=1),
        kernel("b", 60, 5, correlation=2),
        kernel("c", 100, 5, correlation=3),
    ]
    (device,) = summarize(tmp_path / "t.json", events).devices
    found = device.launches
    assert (found.num_launches, found.num_calls) == (3, 3)
    assert (found.p5_depth, found.median_depth, found.max_depth) == (1, 1, 3)
    assert found.empty_ratio == 0
    assert found.median_delay_ns == 50_000


def test_an_empty_queue_is_a_share_of_the_time(tmp_path) -> None:
    """Waiting 0..10 and 90..100 of 100: none 80 % of the time."""
    events = [
        call("cudaLaunchKernel", 0, 1),
        call("cudaLaunchKernel", 90, 2),
        kernel("a", 10, 5, correlation=1),
        kernel("b", 100, 5, correlation=2),
    ]
    (device,) = summarize(tmp_path / "t.json", events).devices
    assert device.launches.empty_ratio == 0.8
    assert device.launches.median_depth == 0


def test_a_graph_is_one_launch_with_a_share_of_the_device(tmp_path) -> None:
    events = [
        call("cudaGraphLaunch", 0, 1),
        kernel("a", 10, 10, correlation=1),
        kernel("b", 20, 20, correlation=1),
        call("cudaLaunchKernel", 30, 2),
        kernel("c", 50, 10, correlation=2),
        kernel("d", 60, 10, **{"graph id": 3}),
        kernel("e", 70, 50, **{"graph id": 0}),
    ]
    (device,) = summarize(tmp_path / "t.json", events).devices
    found = device.launches
    assert (found.num_graph_kernels, found.num_calls) == (3, 2)
    assert found.graph_time_ratio == 0.4
    assert found.max_depth == 1


def test_without_launches_there_is_no_queue(tmp_path) -> None:
    (device,) = summarize(tmp_path / "t.json", [kernel("a", 0, 1)]).devices
    assert isinstance(device.launches, Unavailable)


def test_what_a_graph_replays_is_told_from_other_work_without_an_operator(tmp_path) -> None:
    events = [
        call("cudaGraphLaunch", 0, 1),
        kernel("a", 10, 10, correlation=1),
        kernel("b", 20, 20, correlation=1),
        call("cudaLaunchKernel", 40, 2),
        kernel("c", 50, 12, correlation=2),
        host("cpu_op", "aten::mm", 60, 10, **{"External id": 7}),
        call("cudaGraphLaunch", 62, 3),
        kernel("d", 75, 5, correlation=3, **{"External id": 7}),
    ]
    (device,) = summarize(tmp_path / "t.json", events).devices
    found = {one.name: one.device_ns for one in device.coverage.uncounted}
    assert found == {"(graphs)": 30_000, "(no operator)": 12_000, "aten::mm": 5_000}
    assert device.launches.num_graph_kernels == 3
    assert device.coverage.unlaunched_ns == 42_000
