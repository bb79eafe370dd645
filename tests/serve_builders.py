"""Runs that a dashboard serves, and one that is recorded while it is looked at."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from builders import MS, START_MONO_NS, Faults, make_run, make_writer, put_scalar, put_step
from meshscope.core.layout import Layout
from meshscope.serve.security import Access
from trace_builders import write_traces

HOSTILE = '<script>alert(1)<|script>"\u202e;= x'
SECRET = "the secret of somebody else"


@dataclass(frozen=True)
class Served:
    folder: Path
    client: httpx.Client
    access: Access

    def rows(self) -> dict[str, dict[str, object]]:
        runs = self.client.get("/api/v1/runs").json()["runs"]
        return {row["name"]: row for row in runs}

    def find(self, name: str) -> str:
        return str(self.rows()[name]["id"])

    def get(self, name: str, what: str) -> httpx.Response:
        return self.client.get(f"/api/v1/runs/{self.find(name)}/{what}")


def make_folder(folder: Path) -> Path:
    make_run(
        folder / "slow",
        layout=Layout(dp=4),
        num_steps=12,
        scalars={"loss": lambda rank, step: 4.0 - step / 10},
        faults=Faults(slow={2: 1.5}),
    )
    make_run(folder / "deep" / HOSTILE, num_steps=3)
    outside = folder.parent / "outside"
    make_run(outside, num_steps=3)
    (outside / "note.txt").write_text(SECRET)
    make_run(folder / "linked", num_steps=3)
    os.symlink(outside / "rank00000", folder / "linked" / "rank00001")
    os.symlink(outside, folder / "link_to_run")
    foreign = folder / "foreign"
    foreign.mkdir()
    (foreign / "run.json").write_text(json.dumps({"name": "of another program"}))
    make_run(foreign / "below", num_steps=3)
    (folder / "profiled").mkdir()
    write_traces(folder / "profiled", num_ranks=2, num_steps=6)
    (folder / "profiled" / "settings.json").write_text("{}")
    return folder


class LiveRun:
    """Two ranks that record while a test looks."""

    def __init__(self, path: Path) -> None:
        now = {"start_unix_ns": time.time_ns(), "layout": {"dp": 2}}
        self.writers = [make_writer(path, rank, 2, **now) for rank in range(2)]
        self.step = 0

    def add(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for rank, writer in enumerate(self.writers):
                begin = START_MONO_NS + self.step * 20 * MS
                put_scalar(writer, "loss", self.step, begin, 5.0 - self.step / 100)
                put_step(writer, self.step, begin, begin + (10 + rank) * MS)
            self.step += 1

    def close(self) -> None:
        for writer in self.writers:
            writer.close(end_host_mono_ns=START_MONO_NS + 9000 * MS, num_errors=0, errors={})
