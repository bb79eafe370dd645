"""What the dashboard costs and how fast it answers while a run of 64 ranks is recorded.

    python benchmarks/serve_load.py                     # about four minutes
    python benchmarks/serve_load.py --seconds 20 --no-save

`live_run.py` records through the store's own writer, `meshscope serve` runs as users start it, and
clients are plain sockets in this process. Three parts, each with a run of its own:

- watched: one listener, 4 steps a second: CPU time of all processes of the server, as a share of a
  core;
- load: 50 clients, each with an event stream, that fetch the page whenever a report is newer and
  ask for matrices, timelines, curves and the list of runs, one question every two seconds each;
- hour: 3,600 steps in two minutes, 50 listeners: resident memory of the server's processes.

Latencies are those of the clients, from the first byte sent to the last byte read, and include
waiting for this process, which shares the cores with all others. `floor` is a constant of 600 bytes
that costs nothing to make: what it takes is the machine's. `load_average` is of the minute before.
"""

import argparse
import asyncio
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from synthetic_run import describe_machine

HERE = Path(__file__).parent
RESULT = HERE / "results" / "serve_load.json"
RANKS = 64
CLIENTS = 50
PAUSE_S = 2.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
GOAL_P95_MS = 200.0
METRICS = ("excess", "wait", "transfer", "work", "period")


# --- processes ------------------------------------------------------------------------------------


@dataclass
class Usage:
    """CPU seconds and resident bytes of one process."""

    cpu_s: float
    rss_bytes: int


def list_family(pid: int) -> list[int]:
    """A process and its children."""
    found = [pid]
    for one in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = one.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(one.parent.name))
    return found


def measure(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1])
    ticks = int(fields[11]) + int(fields[12])
    return Usage(cpu_s=ticks / TICKS_PER_S, rss_bytes=pages * PAGE_BYTES)


def name_process(pid: int, server: int) -> str:
    return "server" if pid == server else f"analysis {pid}"


@contextmanager
def start_writer(folder: Path, steps_per_s: float, seconds: float, first: int) -> Iterator[None]:
    command = [
        sys.executable, str(HERE / "live_run.py"), str(folder / "live"), "--ranks", str(RANKS),
        "--steps-per-s", str(steps_per_s), "--seconds", str(seconds), "--first-steps", str(first),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@contextmanager
def start_server(folder: Path) -> Iterator[tuple[int, int]]:
    """Its process and port."""
    code = "from meshscope.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    port = int(re.search(r":(\d+)/", process.stdout.readline())[1])  # type: ignore[index]
    try:
        yield process.pid, port
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


# --- clients --------------------------------------------------------------------------------------


class Connection:
    """One HTTP/1.1 connection, kept open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def _send(self, path: str, headers: str = "") -> tuple[int, dict[str, str]]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n{headers}\r\n"
        writer.write(head.encode())
        status = int((await reader.readline()).split()[1])
        found = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            found[name.lower()] = value.strip()
        return status, found

    async def get(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        status, headers = await self._send(path)
        assert self._streams is not None
        body = await self._streams[0].readexactly(int(headers.get("content-length", 0)))
        return status, body, headers

    async def listen(self, path: str) -> AsyncIterator[str]:
        """Kinds of events."""
        await self._send(path, "Accept: text/event-stream\r\n")
        assert self._streams is not None
        while line := await self._streams[0].readline():
            if line.startswith(b"event: "):
                yield line[7:].strip().decode()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


class Packed(bytes):
    """A body that is gzip; unpacking takes time that is not the server's."""


@dataclass
class Seen:
    """What the clients saw."""

    latency_ms: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0

    async def ask(self, connection: Connection, kind: str, path: str) -> bytes:
        begun = time.perf_counter()
        status, body, headers = await connection.get(path)
        self.latency_ms.setdefault(kind, []).append((time.perf_counter() - begun) * 1e3)
        self.num_bytes += len(body)
        if status not in (200, 304):
            self.errors.append(f"{status} {path}")
        return body if headers.get("content-encoding") != "gzip" else Packed(body)

    def describe(self) -> dict[str, object]:
        every = sorted(one for values in self.latency_ms.values() for one in values)
        return {
            "num_requests": len(every),
            "num_errors": len(self.errors),
            "p50_ms": quantile(every, 0.5),
            "p95_ms": quantile(every, 0.95),
            "p99_ms": quantile(every, 0.99),
            "max_ms": quantile(every, 1.0),
            "p95_ms_by_kind": {
                kind: quantile(sorted(values), 0.95)
                for kind, values in sorted(self.latency_ms.items())
            },
            "events": dict(sorted(self.events.items())),
            "received_bytes": self.num_bytes,
        }


def quantile(ordered: list[float], share: float) -> float:
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 1) if ordered else -1.0


async def follow(port: int, run: str, seen: Seen, *, loads_pages: bool) -> None:
    """A tab: its event stream, and the page whenever a report is newer."""
    stream, other = Connection(port), Connection(port)
    try:
        async for kind in stream.listen(f"/api/v1/runs/{run}/events"):
            seen.events[kind] = seen.events.get(kind, 0) + 1
            if kind == "report" and loads_pages:
                await seen.ask(other, "page", f"/api/v1/runs/{run}/page")
    finally:
        stream.close()
        other.close()


async def click(port: int, run: str, seen: Seen, seed: int) -> None:
    """A reader who asks for something every two seconds."""
    draw = random.Random(seed)
    connection = Connection(port)
    base = f"/api/v1/runs/{run}"
    await asyncio.sleep(draw.uniform(0, PAUSE_S))
    try:
        while True:
            kind = draw.choice(
                ("matrix", "window", "timeline", "series", "report", "runs", "floor")
            )
            step = draw.randrange(5, 60)
            path = {
                "matrix": f"{base}/matrix?metric={draw.choice(METRICS)}",
                "window": f"{base}/matrix?metric=excess&steps={step}-{step + 40}&ranks=0-31",
                "timeline": f"{base}/timeline?step={step}&ranks=0-15",
                "series": f"{base}/series?name=loss",
                "report": f"{base}/report",
                "runs": "/api/v1/runs",
                "floor": "/",
            }[kind]
            await seen.ask(connection, kind, path)
            await asyncio.sleep(PAUSE_S)
    finally:
        connection.close()


async def find_run(port: int) -> str:
    connection = Connection(port)
    seen = Seen()
    while True:
        body = await seen.ask(connection, "runs", "/api/v1/runs")
        rows = json.loads(gzip.decompress(body) if isinstance(body, Packed) else body)["runs"]
        if rows:
            connection.close()
            return str(rows[0]["id"])
        await asyncio.sleep(0.2)


async def stay(tasks: list["asyncio.Task[None]"], seconds: float) -> None:
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    for done in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(done, Exception):
            raise done


# --- parts ----------------------------------------------------------------------------------------


async def warm_up(port: int, run: str) -> None:
    """Until the first report is there."""
    connection = Connection(port)
    await Seen().ask(connection, "page", f"/api/v1/runs/{run}/page")
    connection.close()
    await asyncio.sleep(3)


async def watch(port: int, server: int, seconds: float) -> dict[str, object]:
    run = await find_run(port)
    await warm_up(port, run)
    before = {pid: measure(pid) for pid in list_family(server)}
    begun = time.monotonic()
    seen = Seen()
    await stay([asyncio.create_task(follow(port, run, seen, loads_pages=True))], seconds)
    passed = time.monotonic() - begun
    shares = {
        name_process(pid, server): (measure(pid).cpu_s - usage.cpu_s) / passed
        for pid, usage in before.items()
    }
    return {
        "steps_per_s": 4.0,
        "seconds": round(passed, 1),
        "cpu_share": round(sum(shares.values()), 4),
        "cpu_share_of_server": round(shares["server"], 4),
        "num_reports": seen.events.get("report", 0),
        "num_status": seen.events.get("status", 0),
    }


async def load(port: int, server: int, seconds: float) -> dict[str, object]:
    run = await find_run(port)
    await warm_up(port, run)
    before = {pid: measure(pid) for pid in list_family(server)}
    seen = Seen()
    tasks = [asyncio.create_task(follow(port, run, seen, loads_pages=True)) for _ in range(CLIENTS)]
    tasks += [asyncio.create_task(click(port, run, seen, seed)) for seed in range(CLIENTS)]
    begun = time.monotonic()
    await stay(tasks, seconds)
    passed = time.monotonic() - begun
    cpu = sum(measure(pid).cpu_s - usage.cpu_s for pid, usage in before.items())
    return {"num_clients": CLIENTS, "cpu_share": round(cpu / passed, 3), **seen.describe()}


async def pass_hour(port: int, server: int, seconds: float) -> dict[str, object]:
    """Memory, in ten equal parts of the time."""
    run = await find_run(port)
    await warm_up(port, run)
    seen = Seen()
    tasks = [
        asyncio.create_task(follow(port, run, seen, loads_pages=number == 0))
        for number in range(CLIENTS)
    ]
    samples: list[dict[str, int]] = []
    for _ in range(10):
        await asyncio.sleep(seconds / 10)
        samples.append(
            {name_process(pid, server): measure(pid).rss_bytes for pid in list_family(server)}
        )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    own = [one["server"] for one in samples]
    total = [sum(one.values()) for one in samples]
    return {
        "num_listeners": CLIENTS,
        "server_rss_bytes": own,
        "all_rss_bytes": total,
        "server_growth_ratio_second_half": round(own[-1] / own[4] - 1, 4),
        "all_growth_ratio_second_half": round(total[-1] / total[4] - 1, 4),
        "events": dict(sorted(seen.events.items())),
    }


PARTS = {
    "watched": (watch, 4.0, 60, 0.8),
    "load": (load, 4.0, 60, 1.0),
    "hour": (pass_hour, 30.0, 60, 2.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of one part; the hour has two")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--part", choices=list(PARTS), action="append")
    arguments = parser.parse_args()
    result: dict[str, object] = {"num_ranks": RANKS, "machine": describe_machine()}
    for name in arguments.part or PARTS:
        run_part, steps_per_s, first_steps, length = PARTS[name]
        seconds = arguments.seconds * length
        folder = Path(tempfile.mkdtemp(prefix="serve_load"))
        try:
            with (
                start_writer(folder, steps_per_s, seconds + 120, first_steps),
                start_server(folder) as (pid, port),
            ):
                result[name] = asyncio.run(run_part(port, pid, seconds))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        result[name]["load_average"] = round(os.getloadavg()[0], 1)  # type: ignore[index]
        print(name, json.dumps(result[name], indent=1), flush=True)
    if "load" in result:
        p95 = result["load"]["p95_ms"]  # type: ignore[index]
        print(f"p95 {p95} ms; the goal is {GOAL_P95_MS:.0f} ms")
    if not arguments.no_save:
        before = json.loads(RESULT.read_bytes()) if RESULT.exists() else {}
        RESULT.write_text(json.dumps({**before, **result}, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
