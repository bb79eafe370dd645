"""The programs of the table: how each is started, and what only its author knows of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of program."""

    name: str
    program: str
    """Below `programs`."""
    arguments: tuple[str, ...] = ()
    style: str = ""
    """`-c` and `-m`: how Python is given the program, if not as a file."""
    num_processes: int = 0
    """Ranks that torchrun starts; 0: the program is started by itself."""
    num_ranks: int = 1
    """Ranks that are to be recorded, without torchrun."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """Degrees above 1."""
    unknown: tuple[str, ...] = ()
    """Questions that cannot be answered from outside: the report is to say that it does not know.
    Their cells count as neither right nor wrong."""
    extra: tuple[str, ...] = ("compile",)
    """Phases that are recorded and were not timed by hand."""

    @property
    def world_size(self) -> int:
        return self.num_processes or self.num_ranks


def _make(name: str, program: str, *arguments: str, **rest: Any) -> Kind:
    return Kind(name=name, program=program, arguments=arguments, **rest)


_COMPILED = "compiled/compiled.py"
_HF = "packages/hf_trainer.py"
_TWO: dict[str, Any] = {"num_processes": 2, "layout": {"dp": 2}}
_TWO_STARTED: dict[str, Any] = {"num_ranks": 2, "layout": {"dp": 2}}

KINDS = (
    _make("plain loop", "plain/loop.py"),
    _make("python -c", "plain/loop.py", style="-c"),
    _make("python -m", "plain/loop.py", style="-m"),
    _make("cells of a notebook", "plain/notebook.py"),
    _make("DataLoader, workers", "plain/loader.py", "--workers", "2"),
    _make("DataLoader, no workers", "plain/loader.py", "--workers", "0"),
    _make("accumulation, clipping, schedule", "plain/accumulation.py"),
    _make("autocast and GradScaler", "plain/scaler.py"),
    _make("GAN, two optimizers", "plain/gan.py", unknown=("samples",)),
    _make("RL agent, root never called", "plain/agent.py"),
    _make("model.loss(x)", "plain/uncalled_root.py", "--call", "loss"),
    _make("model.forward(x)", "plain/uncalled_root.py", "--call", "forward"),
    _make("L-BFGS with a closure", "plain/closure.py"),
    _make("sweep, each model deleted", "plain/sweep.py"),
    _make("steps in two threads", "plain/executor.py"),
    _make("diffusion with an average", "plain/diffusion.py"),
    _make("resume from a checkpoint", "plain/resume.py"),
    _make("torch.save", "plain/saving.py", "--with", "torch"),
    _make("DCP", "plain/saving.py", "--with", "dcp"),
    _make("safetensors", "plain/saving.py", "--with", "safetensors"),
    _make("torch.compile(model)", _COMPILED, "--way", "model", "--backend", "inductor"),
    _make("model.compile()", _COMPILED, "--way", "in_place"),
    _make("compiled loss function", _COMPILED, "--way", "loss"),
    _make("compiled with backward", _COMPILED, "--way", "backward"),
    _make("compiled step with update", _COMPILED, "--way", "step"),
    _make("compiled optimizer step", _COMPILED, "--way", "optimizer"),
    _make("jit.script beside training", "compiled/exported.py", "--way", "script"),
    _make("fx beside training", "compiled/exported.py", "--way", "fx"),
    _make("torch.export beside training", "compiled/exported.py", "--way", "export"),
    _make("DDP", "parallel/ddp.py", **_TWO),
    _make("DDP, optimizer first", "parallel/ddp.py", "--optimizer", "first", **_TWO),
    _make("PPO, rollouts in DDP", "parallel/rollouts.py", **_TWO),
    _make("FSDP2 on a named mesh", "parallel/fsdp2.py", **_TWO),
    _make(
        "FSDP2 × TP",
        "parallel/fsdp2.py",
        "--tp",
        "2",
        num_processes=4,
        layout={"dp": 2, "tp": 2},
    ),
    _make("torch pipelining", "parallel/pipelining.py", num_processes=2, layout={"pp": 2}),
    _make("mp.spawn", "parallel/started.py", "--start", "spawn", **_TWO_STARTED),
    _make("forked ranks", "parallel/started.py", "--start", "fork", **_TWO_STARTED),
    _make("fork server", "parallel/started.py", "--start", "forkserver", **_TWO_STARTED),
    _make("HF Trainer", _HF),
    _make("HF Trainer, 2 ranks", _HF, **_TWO),
    _make(
        "HF Trainer, accumulation, eval, save",
        _HF,
        "--accumulate",
        "2",
        "--evaluate",
    ),
    _make("Accelerate", "packages/accelerate_loop.py", "--accumulate", "2"),
    _make("Accelerate, 2 ranks", "packages/accelerate_loop.py", **_TWO),
    _make(
        "Accelerate, debug_launcher",
        "packages/accelerate_loop.py",
        "--debug-launcher",
        **_TWO_STARTED,
    ),
    _make("Lightning", "packages/lightning_fit.py"),
    _make("Lightning, DDP", "packages/lightning_fit.py", "--devices", "2", **_TWO_STARTED),
    _make("TRL SFTTrainer", "packages/trl_sft.py"),
)


def _visit(name: str, program: str, *arguments: str, **rest: Any) -> Kind:
    return _make(name, f"guests/{program}.py", *arguments, **rest)


GUESTS = (
    _visit("nanoGPT", "nano"),
    _visit("torchvision's reference", "pictures", extra=("compile", "eval")),
    _visit("sequence to sequence", "translate"),
    _visit("LoRA, checkpointed blocks", "lora"),
    _visit("two backwards, one update", "two_backwards"),
    _visit("sharpness-aware", "sharpness"),
    _visit("meta-learning", "tasks_in_tasks"),
    _visit("deep Q-learning", "replay"),
    _visit("two optimizers a step", "two_optimizers"),
    _visit("optimizers in backward", "in_backward"),
    _visit("distillation", "distill"),
    _visit("a trainer of their own", "their_trainer"),
    _visit("coroutines", "coroutines"),
    _visit("blocks compiled one by one", "regional"),
    _visit("pairs, no root", "clip_pairs"),
    *(
        _visit(f"DDP, {way}", "ddp_ways", "--way", way, **_TWO)
        for way in ("static", "powersgd", "fp16", "accumulate", "manual", "buckets", "local")
    ),
    _visit("FSDP1", "sharded_ways", "--way", "fsdp1", **_TWO),
    _visit("HSDP", "sharded_ways", "--way", "hsdp", num_processes=4, layout={"dp": 4}),
    *(
        _visit(f"pipeline, {way}", "stages", "--schedule", way, num_processes=2, layout={"pp": 2})
        for way in ("1f1b", "interleaved")
    ),
    _visit("saved and judged", "saved_and_judged", **_TWO),
    _visit("torch.func", "functional"),
    _visit("reentrant checkpoints", "recomputed"),
    _visit("float32 masters", "masters"),
    _visit("tasks that take turns", "taking_turns"),
    _visit("truncated backpropagation", "truncated"),
    _visit("early stop and resume", "stops_early"),
    _visit("prefetched by hand", "prefetched"),
    _visit("physics, two optimizers in turn", "physics"),
    _visit("groups made late", "late_groups", num_processes=4, layout={"dp": 4}),
)
"""Written to be recorded, by somebody who had not read the recorder, and judged once before
anything was changed for them. Not among them, as a cell is wrong, not known or the program fails by
itself: `streamed` (waits for its worker, which is true), `profiled` (its profilers' garbage),
`experts` and `ring` (no layout), `stages --schedule zbv` (the last loss), `sharded_ways --way tp`
(the loss is a DTensor), `ddp_ways --way zero` (aborts at its end) and `join` (ranks' steps differ),
and those that end in odd ways. From `torch.func` on they are a second guest's, who had read it: all
but one (its last loss) were right at once. What was wrong there for good is no program here: it is
said in docs/recorder.md and docs/report.md."""
