"""What the recorder adds to the first steps of a program, against later ones.

    python benchmarks/first_steps.py [--objects N] [--pairs N] [--output FILE]

Each pair is two fresh processes that train the same model with many Python objects alive, one bare
and one watched as `meshscope run` does; which comes first alternates. CPU time of the training
thread per step, garbage collections and their number; what the recorder adds to a step is the
median over pairs of the difference. Also, free of the noise between processes: the CPU time of the
recorder's own callbacks per step, each wrapped in two readings of the thread's clock.
"""

import argparse
import functools
import gc
import json
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
    from meshscope.capture.steps import hooks, model_search
    from meshscope.capture.steps.automatic import Automatic

    for kind, names in (
        (hooks.UntracedHooks, ["forward_begins", "forward_ends"]),
        (hooks.UntracedHooks, ["optimizer_begins", "optimizer_ends"]),
        (hooks.Hooks, ["backward_begins", "backward_ends"]),
        (model_search.ModelSearch, ["_called", "_registered"]),
        (Automatic, ["_optimizer_made"]),
    ):
        for name in names:
            setattr(kind, name, _timed(getattr(kind, name), own_ns))


def _timed(function: Any, own_ns: list[int]) -> Any:
    @functools.wraps(function)
    def timed(*args: Any) -> Any:
        start_ns = time.thread_time_ns()
        try:
            return function(*args)
        finally:
            own_ns[0] += time.thread_time_ns() - start_ns

    return timed


def run(**options: Any) -> dict[str, Any]:
    """A fresh process."""
    command = [sys.executable, __file__, "--child", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(num_objects: int, num_pairs: int) -> dict[str, Any]:
    added: list[list[float]] = []
    collections: dict[bool, list[list[int]]] = {False: [], True: []}
    for pair in range(num_pairs):
        found = {}
        for is_watched in (pair % 2 == 0, pair % 2 == 1):
            found[is_watched] = run(
                is_watched=is_watched, num_objects=num_objects, counts_callbacks=False
            )
            collections[is_watched].append(found[is_watched]["collections"])
        both = zip(found[True]["steps_ns"], found[False]["steps_ns"], strict=True)
        added.append([watched - bare for watched, bare in both])
    by_step = [statistics.median(one[step] for one in added) / 1e3 for step in range(NUM_STEPS)]
    own = run(is_watched=True, num_objects=num_objects, counts_callbacks=True)["callbacks_ns"]
    return {
        "num_objects": num_objects,
        "num_pairs": num_pairs,
        "added_us_first_steps": [round(one, 1) for one in by_step[:NUM_FIRST]],
        "added_us_later_steps": round(statistics.median(by_step[NUM_FIRST:]), 1),
        "spread_us_later_steps": round(statistics.stdev(by_step[NUM_FIRST:]), 1),
        "callbacks_us_first_steps": [round(one / 1e3, 1) for one in own[:NUM_FIRST]],
        "callbacks_us_later_steps": round(statistics.median(own[NUM_FIRST:]) / 1e3, 1),
        "collections_bare": collections[False][0],
        "collections_watched": collections[True][0],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--objects", type=int, default=2_000_000)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(**json.loads(options.child))))
        return
    text = json.dumps(measure(options.objects, options.pairs), indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
