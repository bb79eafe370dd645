"""Writes profiler traces of a made-up job whose every time is known: real JSON, real readers.

    write_traces(folder, num_ranks=4, num_steps=12, extra_ns={2: 5 * MS})

Every rank computes forward and backward, all-reduces, and updates; its host is ahead of its device
by LEAD_NS. The all-reduce of a step begins on a rank when its backward is over and ends on all
together, TRANSFER_NS after the last began. Ranks' clocks are apart by `skew_ns`.
"""

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

US = 1_000
MS = 1_000_000
BASE_NS = 1_767_225_600_000_000_000
"""1 January 2026, as baseTimeNanoseconds."""
FORWARD_NS = 10 * MS
BACKWARD_NS = 20 * MS
TRANSFER_NS = 4 * MS
UPDATE_NS = 2 * MS
LEAD_NS = 1 * MS
NUM_ELEMENTS = 1_000_000

Events = list[dict[str, Any]]


class RankTrace:
    """Collects the events of one rank; times are of its own clock, in nanoseconds."""

    def __init__(self, rank: int, world_size: int, *, skew_ns: int = 0) -> None:
        self.rank = rank
        self.world_size = world_size
        self.skew_ns = skew_ns
        self.events: Events = []
        self._correlation = 0

    def add(self, category: str, name: str, begin_ns: int, end_ns: int, **fields: Any) -> None:
        """One event."""
        arguments = fields.pop("args", {})
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": fields.pop("pid", 100),
                "tid": fields.pop("tid", 100),
                "ts": (begin_ns + self.skew_ns) / 1e3,
                "dur": (end_ns - begin_ns) / 1e3,
                "args": arguments,
            }
        )

    def launch(
        self,
        name: str,
        called_ns: int,
        begin_ns: int,
        end_ns: int,
        *,
        tid: int = 100,
        stream: int = 7,
        category: str = "kernel",
        **arguments: Any,
    ) -> None:
        """A piece of device work and the call that launched it, of 5 µs."""
        self._correlation += 1
        number = self._correlation
        self.add(
            "cuda_runtime",
            "cudaLaunchKernel",
            called_ns,
            called_ns + 5 * US,
            tid=tid,
            args={"correlation": number},
        )
        self.add(
            category,
            name,
            begin_ns,
            end_ns,
            pid=0,
            tid=stream,
            args={"device": 0, "stream": stream, "correlation": number, **arguments},
        )

    def all_reduce(self, called_ns: int, begin_ns: int, end_ns: int, **more: Any) -> None:
        """An all-reduce of the whole job on a stream of its own."""
        self.launch(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            called_ns,
            begin_ns,
            end_ns,
            stream=20,
            **{
                "Collective name": "allreduce",
                "In msg nelems": NUM_ELEMENTS,
                "Out msg nelems": NUM_ELEMENTS,
                "Group size": self.world_size,
                "dtype": "Float",
                "Process Group Name": "0",
                "Process Group Description": "default_pg",
                "Process Group Ranks": json.dumps(list(range(self.world_size))),
                **more,
            },
        )

    def write(self, path: Path, *, has_steps: bool = True) -> Path:
        """The trace as a file."""
        kept = [e for e in self.events if has_steps or not e["name"].startswith("ProfilerStep")]
        document = {
            "schemaVersion": 1,
            "baseTimeNanoseconds": BASE_NS,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
            "distributedInfo": {
                "backend": "nccl",
                "rank": self.rank,
                "world_size": self.world_size,
                "pg_config": [
                    {
                        "pg_name": "0",
                        "pg_desc": "default_pg",
                        "backend_config": "cuda:nccl",
                        "pg_size": self.world_size,
                        "ranks": list(range(self.world_size)),
                    }
                ],
            },
            "traceEvents": kept,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as file:
            json.dump(document, file)
        return path


def write_traces(
    folder: Path,
    *,
    num_ranks: int,
    num_steps: int,
    extra_ns: Callable[[int, int], int] | Mapping[int, int] | None = None,
    skew_ns: Callable[[int], int] = lambda rank: 0,
    first_step: int = 5,
    has_steps: bool = True,
) -> list[Path]:
    """Traces of a job; `extra_ns` is what a rank's forward takes longer, of rank and step."""
    if extra_ns is None or isinstance(extra_ns, Mapping):
        longer = dict(extra_ns or {})
        extra = lambda rank, step: longer.get(rank, 0)  # noqa: E731
    else:
        extra = extra_ns
    traces = [RankTrace(rank, num_ranks, skew_ns=skew_ns(rank)) for rank in range(num_ranks)]
    start = [100 * MS] * num_ranks
    for step in range(num_steps):
        computed = [
            start[rank] + FORWARD_NS + extra(rank, step) + BACKWARD_NS for rank in range(num_ranks)
        ]
        over = max(computed) + TRANSFER_NS
        for rank, trace in enumerate(traces):
            _add_step(trace, first_step + step, start[rank], extra(rank, step), over)
            start[rank] = over + UPDATE_NS
    return [
        trace.write(folder / f"rank{trace.rank}.pt.trace.json.gz", has_steps=has_steps)
        for trace in traces
    ]


def _add_step(trace: RankTrace, number: int, begin: int, extra: int, over: int) -> None:
    """The host's step is the device's, LEAD_NS earlier."""
    host = begin - LEAD_NS
    forward_end = begin + FORWARD_NS + extra
    backward_end = forward_end + BACKWARD_NS
    trace.add("user_annotation", f"ProfilerStep#{number}", host, over + UPDATE_NS - LEAD_NS)
    trace.add("cpu_op", "aten::linear", host + 10 * US, host + 30 * US)
    trace.launch("gemm_forward", host + 15 * US, begin, forward_end)
    half = begin + (forward_end - begin) // 2
    trace.add(
        "cpu_op",
        "autograd::engine::evaluate_function: AddmmBackward0",
        half,
        half + 60 * US,
        tid=200,
    )
    trace.launch("gemm_backward", half + 5 * US, forward_end, backward_end, tid=200)
    trace.all_reduce(half + 40 * US, backward_end, over)
    trace.add("user_annotation", "Optimizer.step#AdamW.step", half + 100 * US, half + 200 * US)
    trace.add("cpu_op", "aten::_foreach_add_", half + 110 * US, half + 150 * US)
    trace.launch("adamw", half + 120 * US, over, over + UPDATE_NS)
