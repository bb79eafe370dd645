"""What always-on recording costs per training step, beside pytscope and torch.profiler.

    python benchmarks/recorder_overhead.py [--device cpu|cuda] [--rounds N] [--output FILE]

Whole steps: one process trains one model. Blocks of steps run under each variant in a random order,
round after round, so that drift of the machine hits all alike; the cost of a variant is the median
over rounds of (its block - the mean of the round's two bare blocks), per step. On the CPU blocks
are measured in CPU seconds of the process, on a GPU in wall seconds after a synchronisation at the
block's end. The bare blocks against each other give the noise floor of the same estimator. The C
allocator is told to keep its memory (see `keep_memory`): otherwise moving one deallocation by a few
microseconds shifts a step by up to 0.1 ms either way, more than anything measured here.

In place (CPU): every callback of the recorder and of pytscope is wrapped in two clock readings
inside real steps; the sum of the callbacks' medians, less what the readings cost by themselves;
the median of three times, in turn with and without the compiled helper and under pytscope. This
leaves out what torch spends on calling them, and is far less noisy.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import meshscope
from meshscope.capture.native_steps import choose_timeline
from meshscope.capture.recorder import Recorder, RecorderConfig

Step = Callable[[], None]

IN_PLACE_TIMES = 3

MALLOC_SETTINGS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "10000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


def keep_memory() -> None:
    """Starts this program again with an allocator that neither returns memory nor maps it anew."""
    if any(os.environ.get(name) != value for name, value in MALLOC_SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC_SETTINGS})


class Trainer:
    """A model, its optimizer and one step over it; `call` places a variant's marks, if any."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.model = model
        self.inputs = inputs
        self.targets = targets
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        self.loss_function = nn.CrossEntropyLoss()

    def step(self) -> None:
        """One plain training step."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model(self.inputs))
        loss.backward()
        self.optimizer.step()

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Cross entropy over all positions."""
        return self.loss_function(logits.flatten(0, -2), self.targets.flatten())


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A small GPT."""

    def __init__(self, vocab: int, width: int, depth: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, num_heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def make_trainer(size: str, device: str) -> Trainer:
    """The model of one step size."""
    shapes = {  # vocab, width, depth, heads, length, batch
        "5ms": (256, 96, 2, 4, 64, 4),
        "50ms": (512, 192, 6, 6, 128, 4),
        "10M": (8192, 256, 8, 8, 512, 8),
        "350M": (50304, 1024, 24, 16, 1024, 16),
    }
    vocab, width, depth, heads, length, batch = shapes[size]
    torch.manual_seed(0)
    model = Gpt(vocab, width, depth, heads, length).to(device)
    if device == "cuda":
        model = model.to(torch.bfloat16)
    ids = torch.randint(vocab, (batch, length + 1), device=device)
    return Trainer(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


@contextlib.contextmanager
def bare(trainer: Trainer, folder: Path) -> Iterator[Step]:
    """No instrument at all."""
    yield trainer.step


@contextlib.contextmanager
def meshscope_auto(trainer: Trainer, folder: Path) -> Iterator[Step]:
    """`attach`: the always-on default, training signals and memory samples included."""
    recorder = Recorder(folder, config=RecorderConfig(provenance=False))
    recorder.attach(trainer.model, trainer.optimizer)
    try:
        yield trainer.step
    finally:
        recorder.close()
        if recorder.guard.num_errors:
            raise SystemExit(f"recorder errors: {recorder.guard.first_messages}")


@contextlib.contextmanager
def meshscope_plain(trainer: Trainer, folder: Path) -> Iterator[Step]:
    """The same without the compiled helper."""
    os.environ["MESHSCOPE_NATIVE"] = "0"
    try:
        with meshscope_auto(trainer, folder) as step:
            yield step
    finally:
        del os.environ["MESHSCOPE_NATIVE"]


@contextlib.contextmanager
def meshscope_manual(trainer: Trainer, folder: Path) -> Iterator[Step]:
    """The explicit API: a step with four phases."""
    recorder = Recorder(folder, config=RecorderConfig(provenance=False))

    def step() -> None:
        with recorder.step():
            with recorder.phase("zero_grad"):
                trainer.optimizer.zero_grad(set_to_none=True)
            with recorder.phase("forward"):
                loss = trainer.loss(trainer.model(trainer.inputs))
            with recorder.phase("backward"):
                loss.backward()
            with recorder.phase("optimizer"):
                trainer.optimizer.step()

    try:
        yield step
    finally:
        recorder.close()


@contextlib.contextmanager
def pytscope_auto(trainer: Trainer, folder: Path, *, sync: bool = False) -> Iterator[Step]:
    """pytscope's AutoProfiler."""
    from pytscope import AutoProfiler

    profiler = AutoProfiler(str(folder), trainer.model, trainer.optimizer, sync=sync)
    profiler.start()
    try:
        yield trainer.step
    finally:
        profiler.finish()


@contextlib.contextmanager
def pytscope_sync(trainer: Trainer, folder: Path) -> Iterator[Step]:
    """pytscope with a device synchronisation at every mark (its way to be right on a GPU)."""
    with pytscope_auto(trainer, folder, sync=True) as step:
        yield step


@contextlib.contextmanager
def pytscope_manual(trainer: Trainer, folder: Path) -> Iterator[Step]:
    """pytscope's begin/mark/end with four marks."""
    from pytscope import Profiler

    profiler = Profiler(str(folder))
    profiler.start()

    def step() -> None:
        profiler.begin_step()
        trainer.optimizer.zero_grad(set_to_none=True)
        profiler.mark("other")
        loss = trainer.loss(trainer.model(trainer.inputs))
        profiler.mark("forward")
        loss.backward()
        profiler.mark("backward")
        trainer.optimizer.step()
        profiler.mark("optimizer")
        profiler.end_step()

    try:
        yield step
    finally:
        profiler.finish()


@contextlib.contextmanager
def torch_profiler(trainer: Trainer, folder: Path) -> Iterator[Step]:
    """torch.profiler on every step, without shapes or stacks, not exported."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities):
        yield trainer.step


VARIANTS = {
    "bare": bare,
    "bare again": bare,
    "meshscope auto": meshscope_auto,
    "meshscope auto, plain Python": meshscope_plain,
    "meshscope manual": meshscope_manual,
    "pytscope auto": pytscope_auto,
    "pytscope manual": pytscope_manual,
    "pytscope sync": pytscope_sync,
    "torch.profiler": torch_profiler,
}


def measure_block(step: Step, num_steps: int, device: str) -> float:
    """Seconds per step of one block: CPU time on the CPU, wall time on a device."""
    step()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / num_steps
    begin = time.process_time()
    for _ in range(num_steps):
        step()
    return (time.process_time() - begin) / num_steps


def measure(
    size: str, device: str, names: list[str], rounds: int, steps: int, slow_every: int
) -> dict[str, object]:
    """Interleaved blocks of every variant; costs per step over the bare block of each round."""
    trainer = make_trainer(size, device)
    for _ in range(20):
        trainer.step()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    differences: dict[str, list[float]] = {name: [] for name in names}
    generator = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="meshscope-bench-") as scratch:
        for round_index in range(rounds):
            order = [n for n in names if n != "torch.profiler" or round_index % slow_every == 0]
            generator.shuffle(order)
            block: dict[str, float] = {}
            for name in order:
                folder = Path(scratch) / f"{round_index}-{name.replace(' ', '-')}"
                with VARIANTS[name](trainer, folder) as step:
                    block[name] = measure_block(step, steps, device)
            bare_block = (block["bare"] + block["bare again"]) / 2
            for name, value in block.items():
                seconds[name].append(value)
                differences[name].append(value - bare_block)
    bare_s = statistics.median(seconds["bare"])
    rows = {}
    for name in names:
        low, middle, high = interval_of_median(differences[name])
        rows[name] = {
            "us_per_step": round(middle * 1e6, 2),
            "us_per_step_low": round(low * 1e6, 2),
            "us_per_step_high": round(high * 1e6, 2),
            "ratio_of_step": round(middle / bare_s, 6),
            "num_rounds": len(differences[name]),
        }
    return {"bare_step_ms": round(bare_s * 1e3, 3), "steps_per_block": steps, "variants": rows}


def repeat_in_place(size: str, steps: int) -> dict[str, object]:
    """Microseconds per step inside the callbacks: medians, and what each time found."""
    runs = [measure_in_place(size, steps) for _ in range(IN_PLACE_TIMES)]
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {"in_place_us_per_step": medians, "in_place_runs": runs}


def measure_in_place(size: str, steps: int) -> dict[str, float]:
    """Microseconds per step inside the callbacks of the recorder and of pytscope."""
    found = {}
    for name, variant, wrap in (
        ("meshscope auto", meshscope_auto, wrap_meshscope),
        ("meshscope auto, plain Python", meshscope_plain, wrap_meshscope),
        ("pytscope auto", pytscope_auto, wrap_pytscope),
    ):
        if name.startswith("pytscope") and not has_pytscope():
            continue
        trainer = make_trainer(size, "cpu")
        timings: dict[str, list[int]] = {"probe": []}
        with (
            tempfile.TemporaryDirectory(prefix="meshscope-bench-") as scratch,
            wrap(timings),
            variant(trainer, Path(scratch) / "run") as step,
        ):
            for _ in range(steps):
                step()
                begin = time.monotonic_ns()
                timings["probe"].append(time.monotonic_ns() - begin)
        probe = statistics.median(timings.pop("probe"))
        found[name] = round(
            sum(statistics.median(values) - probe for values in timings.values()) / 1e3, 2
        )
    return found


@contextlib.contextmanager
def wrap_meshscope(timings: dict[str, list[int]]) -> Iterator[None]:
    """Times the bodies of all hooks; the recorder's own sampling of its cost is left out."""
    from meshscope.capture import watching
    from meshscope.capture.steps import timeline

    names = ("forward_begins", "forward_ends", "backward_begins", "backward_ends")
    names += ("optimizer_begins", "optimizer_ends")
    choose_hooks, every = watching.choose_hooks, timeline.SAMPLE_EVERY_STEPS

    def choose_timed(*parts):  # type: ignore[no-untyped-def]
        kind = choose_hooks(*parts)
        wrapped = {n: timed(getattr(kind, n), timings.setdefault(n, [])) for n in names}
        return type("TimedHooks", (kind,), {**wrapped, "__slots__": ()})

    watching.choose_hooks, timeline.SAMPLE_EVERY_STEPS = choose_timed, 1 << 40
    try:
        yield
    finally:
        watching.choose_hooks, timeline.SAMPLE_EVERY_STEPS = choose_hooks, every


@contextlib.contextmanager
def wrap_pytscope(timings: dict[str, list[int]]) -> Iterator[None]:
    """Times the bodies of AutoProfiler's callbacks, without the optimizer step inside one."""
    from pytscope import AutoProfiler

    originals = {
        name: getattr(AutoProfiler, name)
        for name in ("_on_forward_pre", "_on_forward", "_on_optimizer_step")
    }
    inner_ns = [0]

    def on_optimizer_step(self, step, *args):  # type: ignore[no-untyped-def]
        def timed_step(*step_args):  # type: ignore[no-untyped-def]
            begin = time.monotonic_ns()
            result = step(*step_args)
            inner_ns[0] = time.monotonic_ns() - begin
            return result

        begin = time.monotonic_ns()
        result = originals["_on_optimizer_step"](self, timed_step, *args)
        timings.setdefault("optimizer", []).append(time.monotonic_ns() - begin - inner_ns[0])
        return result

    for name in ("_on_forward_pre", "_on_forward"):
        setattr(AutoProfiler, name, timed(originals[name], timings.setdefault(name, [])))
    AutoProfiler._on_optimizer_step = on_optimizer_step
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(AutoProfiler, name, original)


def timed(function: Callable[..., object], into: list[int]) -> Callable[..., object]:
    """`function` between two clock readings."""

    def wrapper(*args: object) -> object:
        begin = time.monotonic_ns()
        result = function(*args)
        into.append(time.monotonic_ns() - begin)
        return result

    return wrapper


def has_pytscope() -> bool:
    """Whether the peer is installed."""
    return importlib.util.find_spec("pytscope") is not None


def interval_of_median(values: list[float]) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval."""
    generator = random.Random(1)
    medians = sorted(
        statistics.median(generator.choices(values, k=len(values))) for _ in range(1000)
    )
    return medians[25], statistics.median(values), medians[975]


def describe_machine(device: str) -> dict[str, object]:
    """What the numbers were measured on; no names of machines."""
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "meshscope": meshscope.__version__,
        "compiled_callbacks": choose_timeline().is_native,
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, one torch thread",
    }
    with contextlib.suppress(ImportError):
        import pytscope

        facts["pytscope"] = getattr(pytscope, "__version__", "unknown")
    return facts


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", nargs="*")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--steps", type=int, default=40, help="steps per block")
    parser.add_argument("--only", nargs="*", help="variants to measure")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = arguments.device
    keep_memory()
    if device == "cpu":
        torch.set_num_threads(1)
    names = [n for n in VARIANTS if device == "cuda" or n != "pytscope sync"]
    if not has_pytscope():
        print("pytscope is not installed (make bench installs it): left out", file=sys.stderr)
        names = [n for n in names if not n.startswith("pytscope")]
    if arguments.only:
        names = [n for n in names if n in {"bare", "bare again", *arguments.only}]
    results: dict[str, object] = {"machine": describe_machine(device)}
    for size in arguments.sizes or (["5ms", "50ms"] if device == "cpu" else ["350M", "10M"]):
        found = measure(size, device, names, arguments.rounds, arguments.steps, slow_every=5)
        if device == "cpu":
            found |= repeat_in_place(size, 400)
        results[size] = found
        print_table(size, found)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def print_table(size: str, found: dict[str, object]) -> None:
    """One table per step size, with ratios to the best pytscope variant."""
    rows: dict[str, dict[str, float]] = found["variants"]  # type: ignore[assignment]
    peers = [rows[n]["us_per_step"] for n in ("pytscope auto", "pytscope manual") if n in rows]
    print(f"\n{size}: bare step {found['bare_step_ms']} ms")
    print(f"{'variant':28} {'us/step':>9} {'95 % interval':>19} {'of step':>9} {'of pytscope':>12}")
    for name, row in rows.items():
        share = f"{row['us_per_step'] / min(peers):.2f}" if peers and min(peers) > 0 else "-"
        interval = f"{row['us_per_step_low']:8.1f} … {row['us_per_step_high']:6.1f}"
        print(
            f"{name:28} {row['us_per_step']:9.1f} {interval:>19} "
            f"{row['ratio_of_step']:9.3%} {share:>12}"
        )
    in_place: dict[str, float] = found.get("in_place_us_per_step", {})  # type: ignore[assignment]
    for name, value in in_place.items():
        peer = in_place.get("pytscope auto")
        ratio = f", {value / peer:.2f} of pytscope" if peer else ""
        print(f"in place: {name:28} {value:6.1f} us per step{ratio}")


if __name__ == "__main__":
    main()
