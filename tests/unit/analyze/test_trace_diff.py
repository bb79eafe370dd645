"""Two sets of traces: parts, causes, axes, kernels and operators, by closed forms."""

from made_traces import call, groups, host, kernel, nccl, step, summarize
from meshscope.analyze.compare.trace_diff import compare_traces
from meshscope.core.unavailable import Unavailable

TABLE = groups(g1__mesh_tp=[0, 1], g2__mesh_dp=[0, 2])


def job(path, *, gemm_us, group, has_extra):
    """Two steps alike: a product, a collective, 10 of waiting for the host, and one more kernel."""
    events = []
    for at in range(2):
        base = 1000 * at
        events += [
            step(at, base, 1000),
            host("cpu_op", "aten::mm", base, 5, **{"External id": 10 * at + 1}),
            call("cudaLaunchKernel", base + 1, 10 * at + 1),
            call("cudaLaunchKernel", base + 6, 10 * at + 2),
            kernel(
                "gemm", base + 10, gemm_us, correlation=10 * at + 1, **{"External id": 10 * at + 1}
            ),
            nccl("allreduce", base + 10 + gemm_us, 20, group=group, correlation=10 * at + 2),
        ]
        if has_extra:
            late = base + 40 + gemm_us
            events += [
                call("cudaLaunchKernel", late, 10 * at + 3),
                kernel("extra", late, 5, correlation=10 * at + 3),
            ]
    return summarize(path, events, world_size=4, table=TABLE)


def test_every_part_has_its_change_and_ratio(tmp_path) -> None:
    before = job(tmp_path / "a.json", gemm_us=40, group="1", has_extra=False)
    after = job(tmp_path / "b.json", gemm_us=60, group="2", has_extra=True)
    found = compare_traces([before], [after])
    assert found.is_per_step
    parts = {row.part: (row.first_ns, row.change_ns, row.ratio) for row in found.parts}
    assert parts["compute"] == (40_000, 25_000, 65 / 40)
    assert parts["exposed communication"] == (20_000, 0, 1)
    assert parts["idle: host"][:2] == (0, 10_000)
    assert isinstance(parts["idle: host"][2], Unavailable)
    sums = [
        sum(row.first_ns if side == 0 else row.second_ns for row in found.parts if ":" in row.part)
        for side in range(2)
    ]
    assert sums == [parts["idle"][0], parts["idle"][0] + parts["idle"][1]]


def test_axes_kernels_and_operators_say_what_is_only_in_one(tmp_path) -> None:
    before = job(tmp_path / "a.json", gemm_us=40, group="1", has_extra=False)
    after = job(tmp_path / "b.json", gemm_us=60, group="2", has_extra=True)
    found = compare_traces([before], [after])
    axes = {row.axis: row for row in found.communication}
    assert (axes["tp"].first_ns, axes["tp"].second_ns, axes["tp"].second_count) == (20_000, 0, 0)
    assert (axes["dp"].first_ns, axes["dp"].second_ns, axes["dp"].first_count) == (0, 20_000, 0)
    assert (axes["tp"].first_bytes, axes["tp"].first_exposed_ns) == (4_000, 20_000)
    kernels = {row.name: row for row in found.kernels}
    assert (kernels["gemm"].change_ns, kernels["gemm"].first_count) == (20_000, 1)
    assert (kernels["extra"].first_count, kernels["extra"].second_count) == (0, 1)
    operators = {row.name: row for row in found.operators}
    assert operators["aten::mm"].ratio == 1.5
    assert [abs(row.change_ns) for row in found.kernels] == [20_000, 5_000, 0]


def test_hosts_are_compared_where_there_is_no_device(tmp_path) -> None:
    def made(name, length):
        return summarize(tmp_path / name, [step(0, 0, 100), host("cpu_op", "aten::mm", 10, length)])

    found = compare_traces([made("a.json", 20)], [made("b.json", 50)])
    assert found.is_of_hosts
    parts = {row.part: row.change_ns for row in found.parts}
    assert (parts["operators"], parts["other"], parts["total"]) == (30_000, -30_000, 0)
    (row,) = found.operators
    assert (row.name, row.first_ns, row.second_ns) == ("aten::mm", 20_000, 50_000)
    device = summarize(tmp_path / "c.json", [kernel("a", 0, 1)])
    assert isinstance(compare_traces([device], [made("d.json", 1)]), Unavailable)
