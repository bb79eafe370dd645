"""Small traces of torch.profiler with times in µs, read by the real reader."""

import json
from pathlib import Path
from typing import Any

from meshscope.analyze.device.trace_summary import TraceSummary, summarize_trace
from meshscope.core.layout import Layout
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.trace_columns import Trace

Event = dict[str, Any]
NAMES = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(x)",
    "all_to_all": "ncclDevKernel_SendRecv(x)",
    "send": "ncclDevKernel_SendRecv(x)",
    "recv": "ncclDevKernel_SendRecv(x)",
    "": "ncclDevKernel_SendRecv(x)",
}


def host(category: str, name: str, begin: float, length: float, thread: int = 1, **args: Any):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 100,
        "tid": thread,
        "ts": begin,
        "dur": length,
        "args": args,
    }


def step(number: int, begin: float, length: float) -> Event:
    return host("user_annotation", f"ProfilerStep#{number}", begin, length)


def call(name: str, begin: float, correlation: int, length: float = 1, thread: int = 1) -> Event:
    return host("cuda_runtime", name, begin, length, thread, correlation=correlation)


def kernel(name: str, begin: float, length: float, stream: int = 7, **args: Any) -> Event:
    event = host("kernel", name, begin, length, stream)
    return {**event, "pid": 0, "args": {"device": 0, "stream": stream, **args}}


def nccl(
    what: str,
    begin: float,
    length: float,
    *,
    group: str = "",
    ranks: list[int] | str | None = None,
    num_elements: int | None = 1000,
    stream: int = 20,
    **args: Any,
) -> Event:
    """A communication kernel; `args` with underscores for blanks in their names."""
    said: dict[str, Any] = {key.replace("_", " "): value for key, value in args.items()}
    if what:
        said["Collective name"] = what
    if group:
        said["Process Group Name"] = group
    if ranks is not None:
        said["Process Group Ranks"] = ranks if isinstance(ranks, str) else json.dumps(ranks)
    if num_elements is not None:
        said |= {"In msg nelems": num_elements, "Out msg nelems": num_elements, "dtype": "Float"}
    return kernel(NAMES[what], begin, length, stream, **said)


def groups(**members: list[int]) -> list[dict]:
    """A table of groups; names may be given descriptions after two underscores."""
    found = []
    for key, ranks in members.items():
        name, _, description = key.partition("__")
        found.append({"pg_name": name.removeprefix("g"), "pg_desc": description, "ranks": ranks})
    return found


def read(
    path: Path,
    events: list[Event],
    *,
    rank: int = 0,
    world_size: int = 2,
    table: list[dict] | None = None,
) -> Trace:
    information = {"rank": rank, "world_size": world_size, "pg_config": table or []}
    document = {"distributedInfo": information, "traceEvents": events}
    path.write_text(json.dumps(document), encoding="utf-8")
    return read_trace(path)


def summarize(
    path: Path, events: list[Event], *, layout: Layout | None = None, **header: Any
) -> TraceSummary:
    return summarize_trace(read(path, events, **header), layout=layout)
