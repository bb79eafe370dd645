"""Runs with chosen step times, signals and memory, one value per rank and step.

    make_signal_run(path, num_steps=40, step_ns=…, scalars={"loss": …}, rss=…, device=…)

Every argument that is a function takes rank and step. Written through the real writer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from builders import MS, START_MONO_NS, START_UNIX_NS, put_scalar, put_span, put_step
from meshscope.capture.memory.device_memory import pack_counts
from meshscope.core.layout import Layout
from meshscope.store.schema import MISSING
from meshscope.store.write.writer import RankWriter

MB = 1 << 20
GB = 1 << 30
SKIPPED = 4

PerStep = Callable[[int, int], float]


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What the allocator of a rank says at one step's end."""

    allocated: int
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    inactive_split: int = 0
    total: int = 80 * GB
    others: int = 0
    """Held on the device by other processes."""
    num_retries: int = 0
    num_ooms: int = 0


def make_signal_run(
    path: Path,
    *,
    num_ranks: int = 1,
    num_steps: int = 40,
    step_ns: PerStep = lambda rank, step: 50 * MS,
    gap_ns: int = MS,
    scalars: Mapping[str, PerStep] | None = None,
    rss: PerStep | None = None,
    device: Callable[[int, int], DeviceMemory] | None = None,
    host_limit_bytes: int | None = None,
    skipped: Callable[[int], bool] = lambda step: False,
    provenance: Mapping[str, object] | None = None,
    has_layout: bool = True,
    host: Callable[[int], str] = lambda rank: "node0",
    is_sampled: Callable[[int], bool] = lambda step: True,
    is_compiling: Callable[[int], bool] = lambda step: False,
    is_logged: Callable[[int], bool] = lambda step: True,
    device_limit_bytes: int | None = None,
    updates: Sequence[Mapping[str, object]] = (),
) -> Path:
    """Writes the run and returns its path; the ranks are a dp axis."""
    layout = Layout(dp=num_ranks) if has_layout else None
    for rank in range(num_ranks):
        header = {
            "rank": rank,
            "world_size": num_ranks,
            "launch_id": "launch",
            "restart_count": 0,
            "host": host(rank),
            "pid": 100 + rank,
            "start_host_mono_ns": START_MONO_NS,
            "start_unix_ns": START_UNIX_NS,
            "layout": layout.to_dict() if layout else None,
            "provenance": dict(provenance) if provenance is not None else None,
        }
        writer = RankWriter(path, rank, header=header)
        if host_limit_bytes is not None:
            writer.journal.write("update", host_memory={"total_bytes": host_limit_bytes})
        if device_limit_bytes is not None:
            writer.journal.write("update", device_memory={"limit_bytes": device_limit_bytes})
        for update in updates:
            writer.journal.write("update", **update)
        now_ns = START_MONO_NS + 500 * MS
        for step in range(num_steps):
            begin_ns, now_ns = now_ns, now_ns + int(step_ns(rank, step))
            put_span(writer, "forward", begin_ns, now_ns - begin_ns)
            if is_compiling(step):
                times = {"start_host_mono_ns": begin_ns, "duration_ns": now_ns - begin_ns}
                writer.journal.write("update", compilation={"step": step, **times})
            put_step(writer, step, begin_ns, now_ns, flags=SKIPPED if skipped(step) else 0)
            for name, value_of in (scalars or {}).items() if is_logged(step) else ():
                put_scalar(writer, name, step, now_ns, value_of(rank, step))
            if is_sampled(step):
                put_memory(writer, rank, step, now_ns, rss, device)
            now_ns += gap_ns
        writer.close(
            end_host_mono_ns=now_ns,
            last_step=num_steps - 1,
            num_errors=0,
            errors={},
            opening_cost_ns=MS,
            num_device_steps_given_up=0,
        )
    return path


def put_memory(
    writer: RankWriter,
    rank: int,
    step: int,
    now_ns: int,
    rss: PerStep | None,
    device: Callable[[int, int], DeviceMemory] | None,
) -> None:
    """One row of `memory`, and one of `allocator` where there is a device."""
    if rss is None and device is None:
        return
    resident = MISSING if rss is None else int(rss(rank, step))
    if device is None:
        missing = (MISSING, MISSING, MISSING, MISSING)
        writer.table("memory").put(step, now_ns, resident, *missing)
        return
    state = device(rank, step)
    writer.table("memory").put(
        step,
        now_ns,
        resident,
        state.allocated,
        max(state.reserved, state.allocated),
        max(state.peak_allocated, state.allocated),
        max(state.peak_reserved, state.reserved, state.allocated),
    )
    counts = pack_counts(state.num_retries, state.num_ooms)
    free = state.total - max(state.reserved, state.allocated) - state.others
    writer.table("allocator").put(
        step, now_ns, state.allocated, state.inactive_split, free, state.total, counts
    )
