"""What the recorder adds to the first steps of a program, against later ones, and to a launch.

    python benchmarks/first_steps.py                     # 20 pairs each with 0 and 2 M objects
    python benchmarks/first_steps.py --objects 0 --pairs 5
    python benchmarks/first_steps.py --launches 20       # `meshscope run true` only
    python benchmarks/first_steps.py --output FILE       # adds to what the file has

Each pair is two fresh processes that train the same model with many Python objects alive, one bare
and one watched as `meshscope run` does; which comes first alternates. CPU time of the training
thread per step, garbage collections and their number; what the recorder adds to a step is the
median over pairs of the difference. Also, free of the noise between processes: the CPU time of the
recorder's own callbacks per step, each wrapped in two readings of the thread's clock, in several
fresh processes.

`--output` keeps pairs of earlier runs of the same code, so that it can be run in pieces.
A launch is `meshscope run true`, less `true`: user and system time of all its processes.
"""

import argparse
import functools
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_STEPS = 40
NUM_FIRST = 5
NUM_BLOCKS = 24
NUM_OWN = 5
"""Processes in which callbacks are timed, per number of objects."""


def train(*, is_watched: bool, num_objects: int, counts_callbacks: bool) -> dict[str, Any]:
    """One process: CPU time of each step, and what the collector did meanwhile."""
    import torch
    from torch import nn

    from meshscope.capture.recorder import Recorder, RecorderConfig
    from meshscope.store.write.writer import ensure_manifest

    torch.set_num_threads(1)
    own_ns = [0]
    if counts_callbacks:
        count_own_time(own_ns)
    width = 64
    inputs = torch.randn(8, 4, width)
    for _ in range(3):  # torch's own first steps, before anything is watched
        warm = nn.Sequential(nn.TransformerEncoderLayer(width, 4, 128))
        warm(inputs).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run").mkdir()
        ensure_manifest(Path(folder, "run"), {})  # the launcher does
        recorder = Recorder(Path(folder) / "run", config=RecorderConfig(provenance=False))
        if is_watched:
            recorder.watch_everything()
        kept = [[] for _ in range(num_objects)]
        layers = [nn.TransformerEncoderLayer(width, 4, 128) for _ in range(NUM_BLOCKS)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        gc.collect()
        before = count_collections()
        steps_ns, callbacks_ns = [], []
        for _ in range(NUM_STEPS):
            own_ns[0] = 0
            start_ns = time.thread_time_ns()
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps_ns.append(time.thread_time_ns() - start_ns)
            callbacks_ns.append(own_ns[0])
        after = count_collections()
        if is_watched:
            assert model in recorder.watching.models
        recorder.close()
        assert recorder.guard.counts == {}, recorder.guard.first_messages
        assert len(kept) == num_objects
    return {
        "steps_ns": steps_ns,
        "callbacks_ns": callbacks_ns,
        "collections": [b - a for a, b in zip(before, after, strict=True)],
    }


def count_collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]


def count_own_time(own_ns: list[int]) -> None:
    """Wraps the callbacks of a step, and those of the search for models, in clock readings."""
    from meshscope.capture.native_steps import UntracedHooks
    from meshscope.capture.steps import model_search
    from meshscope.capture.steps.automatic import Automatic
    from meshscope.capture.steps.hooks import Hooks

    entries = ["forward_begins", "forward_ends", "optimizer_begins", "optimizer_ends"]
    depth = [0]
    for kind, names in (
        (UntracedHooks, entries),
        (Hooks, [*entries, "_take_loss"]),  # also those that compiled hooks hand over to
        (model_search.ModelSearch, ["_called", "_registered"]),
        (Automatic, ["_optimizer_made"]),
    ):
        for name in names:
            setattr(kind, name, _timed(getattr(kind, name), own_ns, depth))


def _timed(function: Any, own_ns: list[int], depth: list[int]) -> Any:
    @functools.wraps(function)
    def timed(*args: Any) -> Any:
        start_ns = time.thread_time_ns()
        depth[0] += 1
        try:
            return function(*args)
        finally:
            depth[0] -= 1
            if not depth[0]:
                own_ns[0] += time.thread_time_ns() - start_ns

    return timed


def run(**options: Any) -> dict[str, Any]:
    """A fresh process."""
    command = [sys.executable, __file__, "--child", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(num_objects: int, num_pairs: int, kept: dict[str, Any]) -> dict[str, Any]:
    """`kept`: what an earlier run of the same code measured."""
    added: list[list[float]] = kept.get("added_ns", [])
    own: list[list[int]] = kept.get("callbacks_ns", [])
    collections: list[int] = kept.get("further_collections", [])
    for pair in range(num_pairs):
        found = {}
        for is_watched in (pair % 2 == 0, pair % 2 == 1):
            found[is_watched] = run(
                is_watched=is_watched, num_objects=num_objects, counts_callbacks=False
            )
        both = zip(found[True]["steps_ns"], found[False]["steps_ns"], strict=True)
        added.append([watched - bare for watched, bare in both])
        watched, bare = (sum(found[one]["collections"]) for one in (True, False))
        collections.append(watched - bare)
    for _ in range(max(NUM_OWN - len(own), 0)):
        one = run(is_watched=True, num_objects=num_objects, counts_callbacks=True)
        own.append(one["callbacks_ns"])
    return {
        "num_objects": num_objects,
        "num_pairs": len(added),
        "paired": summarize(added),
        "callbacks": summarize(own),
        "further_collections": collections,
        "added_ns": added,
        "callbacks_ns": own,
    }


def summarize(rows: list[list[float]]) -> dict[str, Any]:
    """Medians over processes, in microseconds, and the first steps' ratio to later ones."""
    if not rows:
        return {}
    by_step = [statistics.median(row[step] for row in rows) / 1e3 for step in range(NUM_STEPS)]
    later = statistics.median(by_step[NUM_FIRST:])
    return {
        "first_steps_us": [round(one, 1) for one in by_step[:NUM_FIRST]],
        "later_steps_us": round(later, 1),
        "spread_of_later_steps_us": round(statistics.stdev(by_step[NUM_FIRST:]), 1),
        "worst_first_to_later": round(max(by_step[:NUM_FIRST]) / later, 2) if later > 0 else None,
    }


def measure_launches(num_launches: int) -> dict[str, Any]:
    """CPU seconds of `meshscope run true`, less those of `true`."""
    program = str(Path(sys.executable).with_name("meshscope"))
    with tempfile.TemporaryDirectory() as folder:
        launch = [program, "run", "-o", f"{folder}/run", "--", "true"]
        both = [(spend_cpu_s(launch), spend_cpu_s(["true"])) for _ in range(num_launches)]
    added = sorted(watched - bare for watched, bare in both)
    return {
        "num_launches": num_launches,
        "median_cpu_s": round(statistics.median(added), 3),
        "least_cpu_s": round(added[0], 3),
        "most_cpu_s": round(added[-1], 3),
    }


def spend_cpu_s(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--objects", type=int, nargs="*", default=[0, 2_000_000])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--launches", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(**json.loads(options.child))))
        return
    document: dict[str, Any] = {}
    if options.output and options.output.exists():
        document = json.loads(options.output.read_text(encoding="utf-8"))
    if options.launches:
        document["launch"] = measure_launches(options.launches)
    else:
        for num in options.objects:
            kept = document.get(f"{num} objects", {})
            document[f"{num} objects"] = measure(num, options.pairs, kept)
    document["machine"] = {"cores": os.cpu_count(), "kernel": platform.release().split("-")[0]}
    document["load_average"] = round(os.getloadavg()[0], 1)  # of the last minute: 1 when quiet
    document["python"] = platform.python_version()
    for name, one in document.items():
        shown = (
            {key: value for key, value in one.items() if not key.endswith("_ns")}
            if isinstance(one, dict)
            else one
        )
        print(name, json.dumps(shown))
    if options.output:
        options.output.write_text(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
