"""What devices did in the time of a timeline: closed forms over a made-up kernel sample."""

from pathlib import Path

import pytest

from builders import MS, SECOND, put_device_span
from meshscope.analyze.budget.budget import measure_budget
from meshscope.analyze.rank.device_clock import fit_offsets
from meshscope.analyze.rank.kernel_sample import read_samples
from meshscope.analyze.timeline.device_parts import describe_evidence, divide_device_time
from meshscope.core.unavailable import Unavailable
from meshscope.store.kernel_table import KernelKind
from meshscope.store.schema import MISSING
from timeline_builders import TimedJob, timeline_of

UNKNOWN = Unavailable("not asked for")
LAG = 30 * MS
"""How far the device is behind its host in the runs made here."""
OFFSET = 7 * SECOND


class SampledJob(TimedJob):
    """One rank on a device whose marks are placed too early by `LAG`, as bounds alone would."""

    def sampled_step(self, step: int, kernels: list[tuple[int, int, KernelKind]]) -> None:
        """A step of 100 ms with these kernels, in ms from its start on the device."""
        at = 100 * step * MS
        self.phase(0, "forward", at, at + 20 * MS)
        local = self.local_ns(0, 0)
        put_device_span(
            self.writers[0],
            "forward",
            local + at,
            100 * MS,
            start_device_ns=local + at + LAG - OFFSET,
            offset_min_ns=OFFSET - LAG,
            offset_max_ns=OFFSET + SECOND,
        )
        self.own_step(0, step, at, at + 95 * MS)
        table = self.writers[0].table("kernels")
        for number, (start, end, kind) in enumerate(kernels):
            stream = 16 if kind is KernelKind.COMMUNICATION else 7
            launch = local + at + (1 + number) * MS // 10
            table.put(
                self.writers[0].name_id("kernel") | int(kind) << 16 | stream << 32,
                local + at + LAG + start * MS,
                (end - start) * MS,
                launch,
                1_000,
                0,
                MISSING,
            )

    def sample(self, first: int, last: int, num_rows: int) -> None:
        local = self.local_ns(0, 0)
        self.writers[0].journal.write(
            "update",
            kernel_window={
                "number": 0,
                "reason": "a kernel sample",
                "disturbed_from_step": first - 1,
                "disturbed_to_step": last + 1,
                "first_step": first,
                "last_step": last,
                "begin_host_mono_ns": local + 100 * (first - 1) * MS,
                "end_host_mono_ns": local + 100 * (last + 3) * MS,
                "num_rows": num_rows,
                "is_read": True,
            },
        )


COMPUTE, COMMUNICATION, COPY = KernelKind.COMPUTE, KernelKind.COMMUNICATION, KernelKind.COPY


def make_sampled(path: Path):
    job = SampledJob(path, num_ranks=1)
    kernels = [(0, 40, COMPUTE), (30, 60, COMMUNICATION), (60, 65, COPY), (95, 100, COMPUTE)]
    for step in range(20):
        job.sampled_step(step, kernels if 4 <= step <= 7 else [])
    job.sample(5, 6, 16)
    return job.close()


def test_a_sample_divides_all_other_steps(tmp_path: Path) -> None:
    """Of 100 ms: 45 compute, 20 of communication with nothing beside it, 5 copies, 30 idle."""
    attempt = make_sampled(tmp_path)
    timeline = timeline_of(attempt, warmup_steps=1)
    assert not {5, 6} & set(timeline.steps.tolist())
    parts = divide_device_time(attempt, timeline)
    budget = measure_budget(timeline, UNKNOWN, parts)
    shares = {
        line.name: total / budget.total_wall_ns
        for line, total in zip(budget.lines, budget.total_ns().tolist(), strict=True)
    }
    assert shares == pytest.approx(
        {
            "compute": 0.45,
            "exposed communication other": 0.20,
            "exposed copies": 0.05,
            "idle, other stream": 0.30,
        },
        abs=1e-6,
    )
    assert budget.residual_ratio == 0
    assert describe_evidence(parts) == "kernel samples of steps 5–6"
    # What is removed for a replay is removed evenly.
    left = parts.remove(timeline, "dependency")
    assert left.sum() == pytest.approx(0.7 * timeline.pieces.duration_ns.sum(), rel=1e-6)


def test_marks_are_placed_by_kernels(tmp_path: Path) -> None:
    attempt = make_sampled(tmp_path)
    timeline = timeline_of(attempt, warmup_steps=1)
    # The host's step begins at 100 ms times its number, the device's 30 ms later.
    first = timeline.step_start_ns[0, 0] - 100 * int(timeline.steps[0]) * MS
    other = timeline.step_start_ns[0, 1] - 100 * int(timeline.steps[1]) * MS
    assert first == other
    (rank,) = attempt
    (sample,) = read_samples(rank)
    spans = rank.read("device_spans")
    found = fit_offsets(
        [sample],
        spans["host_start_host_mono_ns"].astype("int64"),
        spans["start_device_ns"].astype("int64"),
    )
    assert found is not None
    assert found.offset_ns.tolist() == pytest.approx([OFFSET], abs=MS)
