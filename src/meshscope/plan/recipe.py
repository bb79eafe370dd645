"""How a program trains, apart from its layout: number formats, optimizer, and what it fuses.

Bytes a parameter, before anything is cut over ranks (weights + gradients + master + states):
`bf16` and `fp16` 2 + 4 + 4 + 8 = 18 (Megatron-LM: float32 main gradients), `bf16-grads`
2 + 2 + 4 + 8 = 16 (ZeRO, arXiv 1910.02054), `fp32` and `autocast` 4 + 4 + 0 + 8 = 16 (torch's FSDP2
and this engine).
"""

from dataclasses import dataclass
from typing import Any

from meshscope.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes of each kind of number; see the module's docstring for the sums."""

    name: str
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int
    compute_bytes: int
    cast_bytes: int = 0
    """For each weight, copies that stay: fp8 keeps the matrix and its transpose."""
    dtype: str = "bfloat16"
    """What matrix products run in, as `core.hardware` names it."""
    casts_each_forward: bool = False
    """Whether autograd keeps a cast of each weight for every microbatch in flight (autocast)."""


PRECISIONS: dict[str, Precision] = {
    one.name: one
    for one in (
        Precision(name="bf16", weight_bytes=2, gradient_bytes=4, master_bytes=4, compute_bytes=2),
        Precision(
            name="bf16-grads", weight_bytes=2, gradient_bytes=2, master_bytes=4, compute_bytes=2
        ),
        Precision(
            name="fp16", weight_bytes=2, gradient_bytes=4, master_bytes=4, compute_bytes=2,
            dtype="float16",
        ),
        Precision(
            name="fp8", weight_bytes=2, gradient_bytes=4, master_bytes=4, compute_bytes=2,
            cast_bytes=2, dtype="float8",
        ),
        Precision(
            name="autocast", weight_bytes=4, gradient_bytes=4, master_bytes=0, compute_bytes=2,
            casts_each_forward=True,
        ),
        Precision(
            name="fp32", weight_bytes=4, gradient_bytes=4, master_bytes=0, compute_bytes=4,
            dtype="float32",
        ),
    )
}  # fmt: skip

OPTIMIZER_BYTES: dict[str, float] = {
    "adamw": 8,
    "adamw-bf16": 4,
    "adamw-8bit": 2.03,
    "lion": 4,
    "muon": 4,
    "sgd-momentum": 4,
    "adafactor": 0.02,
    "sgd": 0,
}
"""States for each parameter. 8-bit states have a float32 scale for 256 of them (arXiv 2110.02861);
adafactor keeps a row and a column of each matrix (arXiv 1804.04235), here of a 4096-wide one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What the training program does in its own way."""

    name: str
    description: str
    has_fused_attention: bool = True
    has_dropout: bool = False
    stream_element_bytes: int = 2
    keeps_turned: bool = False
    has_fused_gate: bool = True
    is_fused: bool = True
    """Whether what lies between products is one kernel or few, by hand or by a compiler."""
    gathers_once: bool = False
    """Whether ranks of a pipeline gather cut weights once a step and keep them."""
    gathers_tables_alone: bool = False
    """Whether ZeRO 3 gathers table and head by themselves, with nothing to hide behind."""
    overlaps_gradients: bool = True
    """Whether gradients are reduced while the last backward runs."""
    overlaps_routing: bool = False
    """Whether experts' all-to-alls between nodes run beside another microbatch's compute, where
    ranks have several chunks (Megatron-LM's `overlap-moe-expert-parallel-comm`, as in the recipes
    that its publisher measures on H100 and B200; those of racks mostly do without)."""
    has_blocking_sends: bool = False
    """Whether a rank waits until its pipeline message has left (Megatron-LM's 1F1B)."""
    sends_shards: bool = True
    """Whether tp ranks each send their part of a pipeline message (scatter-gather)."""
    softmax_group: int = 1
    """Attention's softmax is fused where sequences × heads of a rank divide by this, else it is
    separate operations in float32."""
    accumulates_in_product: bool = True
    """Whether a weight gradient is added up by the product that makes it, else by itself."""
    counts_full_attention: bool = False
    """Whether masked pairs of positions are computed, too."""
    selective: str = "attention"
    """What selective recompute makes again: attention's scores, or with a fused kernel its output;
    or `half` of the products' outputs, and all that is no product."""
    logit_backward_bytes: int = 2
    """For each logit, beside what the loss keeps: 2 where its gradient takes the place of the
    softmax and is then cast, 8 where two gradients in float32 are made."""
    schedules: tuple[str, ...] = ("1f1b", "interleaved_1f1b", "gpipe")
    zero_stages: tuple[int, ...] = (0, 1, 3)
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    precision: str = "bf16"
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    """What the program can train in."""


_TORCHTITAN: dict[str, Any] = {
    "has_fused_gate": False,
    "gathers_once": True,
    "keeps_turned": True,
    "sends_shards": False,
    "selective": "half",
    "logit_backward_bytes": 8,
    "schedules": ("1f1b", "interleaved_1f1b", "gpipe", "looped_bfs", "zb_v"),
    "zero_stages": (3,),
    "recomputes": ("none", "selective", "full"),
    "precision": "autocast",
}

STACKS: dict[str, Stack] = {
    one.name: one
    for one in (
        Stack(
            name="megatron",
            description="Megatron-LM with flash attention and overlapped gradients",
            overlaps_routing=True,
            schedules=("1f1b", "interleaved_1f1b"),
            zero_stages=(0, 1),
            recomputes=("none", "selective", "full", "every-2"),
        ),
        Stack(
            name="megatron-2021",
            description="Megatron-LM as published in 2021 and 2022: dropout, attention's scores in "
            "memory, gradients reduced after the last backward",
            has_fused_attention=False,
            has_dropout=True,
            overlaps_gradients=False,
            has_blocking_sends=True,
            softmax_group=4,
            accumulates_in_product=False,
            counts_full_attention=True,
            schedules=("1f1b", "interleaved_1f1b", "gpipe"),
            zero_stages=(0, 1),
        ),
        Stack(
            name="torchtitan",
            description="torchtitan: FSDP2, tensor parallel with sequence parallel, torch's "
            "pipeline schedules; not compiled",
            is_fused=False,
            **_TORCHTITAN,
        ),
        Stack(
            name="torchtitan-compile",
            description="torchtitan with compile.enable: what lies between products is fused",
            **_TORCHTITAN,
        ),
        Stack(
            name="meshscope",
            description="meshscope train",
            is_fused=False,
            gathers_tables_alone=True,
            stream_element_bytes=4,
            keeps_turned=True,
            has_fused_gate=False,
            sends_shards=False,
            schedules=(
                "1f1b", "interleaved_1f1b", "gpipe", "round_robin", "looped_bfs", "zb_h1", "zb_h2",
                "zb_v",
            ),
            zero_stages=(0, 3),
            recomputes=("none", "full"),
            precision="autocast",
            precisions=("autocast", "fp32"),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All of it."""

    stack: Stack
    precision: Precision
    optimizer: str = "adamw"

    @property
    def optimizer_bytes(self) -> float:
        return OPTIMIZER_BYTES[self.optimizer]

    @property
    def state_bytes(self) -> float:
        """Of one parameter, before anything is cut."""
        precision = self.precision
        kept = precision.weight_bytes + precision.gradient_bytes + precision.master_bytes
        return kept + self.optimizer_bytes


def make_recipe(
    stack: str = "megatron", precision: str | None = None, optimizer: str = "adamw"
) -> Recipe:
    """By names, in capitals or not; UsageError with all that are unknown."""
    stack, optimizer = stack.strip().casefold(), optimizer.strip().casefold()
    precision = None if precision is None else precision.strip().casefold()
    problems = [
        f"there is no {what} {name[:40]!r}; use one of {', '.join(known)}"
        for what, name, known in (
            ("stack", stack, tuple(STACKS)),
            ("precision", precision, tuple(PRECISIONS)),
            ("optimizer", optimizer, tuple(OPTIMIZER_BYTES)),
        )
        if name is not None and name not in known
    ]
    if not problems and precision is not None and precision not in STACKS[stack].precisions:
        known = " or ".join(STACKS[stack].precisions)
        problems = [f"{stack} trains in {known}, not in {precision}"]
    if problems:
        raise UsageError("; ".join(problems))
    found = STACKS[stack]
    return Recipe(
        stack=found, precision=PRECISIONS[precision or found.precision], optimizer=optimizer
    )
