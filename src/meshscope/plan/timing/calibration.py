"""The constants of the time model: few, physical, each with where it comes from.

`MEGATRON_A100` was fitted by `benchmarks/planner_vtrain.py` on a stated part of vTrain's measured
iteration times (A100, Megatron-LM of 2021 and 2022) and is tried on the rest; its results file has
the residuals. For other stacks and devices the same constants are assumptions: the host's part is
smaller there (fewer kernels for each layer), and the interval is wider and says so.

`layer_ratios` holds measured layers: how much longer a layer took than the roofline says, for a
hidden size, sequence length, microbatch and tp. Timed layouts give them. A kernel library chooses
its kernels by such shapes, which no roofline follows; layers that were not measured keep 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

LayerKey = tuple[int, int, int, int]
"""Hidden size, tokens of a sequence, sequences of a microbatch, tp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Ratios are of the device's or link's own figures, times in seconds."""

    name: str
    gemm_ratio: float | None = None
    """Of the dense peak, for large matrix products; None takes the device's preset."""
    gemm_half_size: float = 45.0
    """A dimension d of a product costs (1 + this/d) times as much."""
    attention_ratio: float = 0.4
    """Of the dense peak, for attention's own products."""
    memory_ratio: float = 0.8
    """Of the memory's bandwidth, for everything that only moves bytes."""
    host_layer_s: float = 3e-4
    """What the host needs to issue one layer's forward; the longer of it and the device counts."""
    host_microbatch_s: float = 0.0
    """Of the host for a microbatch on a stage, beside its layers: data, loss, messages. Counts as
    far as layers wait for the host."""
    kernel_s: float = 0.0
    """Of the device for each kernel, beside its bytes and products: its start and uneven end."""
    host_again_ratio: float = 1.0
    """Of that, what issuing a layer's forward again in backward takes."""
    overlap_cost_ratio: float = 0.0
    """Of communication that compute hides, how much longer it makes compute."""
    collective_latency_s: float = 5e-5
    """For each doubling of the group; between processes on a host for each message of the ring."""
    cut_step_s: float = 0.0
    """Between processes, FSDP2's own work for a layer beside its collectives (hooks, copies in and
    out, memory): once a step under ZeRO 1 and 2."""
    cut_pass_s: float = 0.0
    """The same, for each microbatch."""
    cut_whole_s: float = 0.0
    """The same, for each microbatch under ZeRO 3."""
    p2p_latency_s: float = 2.5e-5
    network_ratio: float = 1.0
    """Of the link between nodes, beyond the link's own ratio."""
    link_ratio: float = 1.0
    """Of all links, likewise."""
    logit_passes: float = 8.5
    """Times that the loss's forward and backward read or write a float32 for each logit."""
    step_s: float = 3e-3
    """Of the host, once a step."""
    pace_ratio: float = 1.0
    """All devices' compute, times this: stragglers, and a device that is not its preset."""
    interval_ratio: float = 0.25
    """Nine of ten steps are expected within a factor of 1 + this of the prediction."""
    layer_ratios: Mapping[LayerKey, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where a constant comes from, by its name; `*` for all others."""

    def find_source(self, name: str) -> str:
        return self.sources.get(name) or self.sources.get("*", "assumed")

    def with_layers(self, ratios: Mapping[LayerKey, float], source: str) -> "Constants":
        """The same with measured layers."""
        return replace(
            self, layer_ratios=dict(ratios), sources={**self.sources, "layer_ratios": source}
        )


_FITTED = (
    "fitted on every fourth single-node and every second multi-node row of vTrain's measured "
    "iteration times (benchmarks/planner_vtrain.py)"
)
_ASSUMED = "assumed: not measured for this stack and device"

_PUBLIC = "public measurements of large matrix products and copies on A100; not fitted"

_A100_LAYERS: dict[LayerKey, float] = {
    (hidden, 1024, size, tp): ratio
    for hidden, tp, ratios in (
        (1024, 1, {1: 0.925, 2: 0.982, 4: 1.157, 8: 1.024}),
        (1024, 2, {1: 0.977, 2: 1.051, 4: 0.852, 8: 0.97}),
        (1024, 4, {1: 1.038, 2: 0.998, 4: 1.132}),
        (1024, 8, {1: 1.073}),
        (2048, 1, {1: 0.992, 2: 1.001, 4: 0.967, 8: 0.949}),
        (2048, 2, {1: 1.002, 2: 1.175, 4: 0.958, 8: 0.85}),
        (2048, 4, {1: 0.915, 2: 0.814, 4: 1.081, 8: 0.916}),
    )
    for size, ratio in ratios.items()
}
"""Those that at least two calibration rows have; their rows differ by 1 to 3 %."""

MEGATRON_A100 = Constants(
    name="Megatron-LM of 2021 on A100",
    gemm_ratio=0.80,
    gemm_half_size=26.4,
    attention_ratio=0.424,
    memory_ratio=0.80,
    host_layer_s=1.102e-3,
    host_microbatch_s=1.28e-3,
    host_again_ratio=0.0,
    collective_latency_s=8.7e-5,
    p2p_latency_s=4.5e-5,
    network_ratio=0.948,
    logit_passes=16.2,
    step_s=2.6e-3,
    interval_ratio=0.18,
    layer_ratios=_A100_LAYERS,
    sources={
        "*": _FITTED,
        "layer_ratios": "a roofline, and where the same layer is among the calibration rows what "
        "it took there (docs/plan.md)",
        "gemm_ratio": _PUBLIC,
        "host_again_ratio": "all rows compute again: it is in the other constants",
        "overlap_cost_ratio": "nothing is hidden by this stack",
        "kernel_s": "in the other constants",
        "memory_ratio": _PUBLIC,
        "pace_ratio": "1 by definition: devices that nothing else uses",
    },
)
FITTED_NAMES = (
    "gemm_half_size",
    "attention_ratio",
    "host_layer_s",
    "host_microbatch_s",
    "collective_latency_s",
    "p2p_latency_s",
    "network_ratio",
    "logit_passes",
    "step_s",
)
"""What `benchmarks/planner_vtrain.py --fit` fits."""
_H200 = "an H200 with torch 2.11 (benchmarks/results/planner_gpu.json); on others assumed"
PRESENT = Constants(
    name="present stacks",
    gemm_half_size=100.0,
    attention_ratio=0.54,
    kernel_s=2e-6,
    overlap_cost_ratio=0.65,
    collective_latency_s=3e-5,
    interval_ratio=0.4,
    sources={
        "*": _ASSUMED,
        "gemm_half_size": f"single products and whole layers on {_H200}",
        "attention_ratio": f"cuDNN's kernels on {_H200}",
        "kernel_s": f"models of 50 to 350 million parameters on {_H200}",
        "overlap_cost_ratio": "fitted on every second of 64 published runs of MPT with FSDP on A100"
        " and H100 (benchmarks/planner_published.py)",
        "interval_ratio": f"{_ASSUMED}; 123 of 131 published runs lie within "
        "(benchmarks/planner_published.py)",
    },
)
EAGER = replace(
    PRESENT,
    name="present stacks, not compiled",
    memory_ratio=0.6,
    host_again_ratio=3.5,
    sources={
        **PRESENT.sources,
        "host_again_ratio": f"torch.utils.checkpoint around layers of 350m on {_H200}",
        "memory_ratio": f"the middle of nine separate operations (0.42 to 0.84) on {_H200}",
    },
)
_CUT = (
    "steps of the engine on 2 processes with and without FSDP2, 1 and 4 microbatches, less the "
    "collectives (benchmarks/planner_host_terms.py)"
)
HOST = Constants(
    name="processes on a host's cores",
    gemm_half_size=16.0,
    attention_ratio=0.5,
    host_layer_s=1e-3,
    host_again_ratio=3.5,
    overlap_cost_ratio=1.0,
    collective_latency_s=2.8e-4,
    cut_step_s=1.8e-3,
    cut_pass_s=0.6e-3,
    cut_whole_s=4.9e-3,
    logit_passes=6,
    step_s=3e-3,
    sources={
        "*": "assumed: not measured on this host",
        "overlap_cost_ratio": "1 by definition: the cores that compute also send",
        "host_again_ratio": f"torch.utils.checkpoint around layers of 350m on {_H200}",
        "collective_latency_s": "an all-reduce of 4 KiB between processes that share two cores: "
        "0.26 to 0.29 ms of a core for each message of the ring on 2, 4 and 8 of them",
        **dict.fromkeys(("cut_step_s", "cut_pass_s", "cut_whole_s"), _CUT),
    },
)
HOST_FITTED_NAMES = ("pace_ratio", "host_layer_s", "network_ratio", "collective_latency_s")
"""What `from_run.fit_host_runs` fits."""

BY_STACK: dict[str, Constants] = {
    "megatron-2021": MEGATRON_A100,
    "torchtitan": EAGER,
    "meshscope": EAGER,
}


def find_constants(stack: str, device: str = "") -> Constants:
    """What is known of a stack; measured layers only on the device that they were measured on."""
    found = BY_STACK.get(stack, PRESENT)
    is_measured = found is not MEGATRON_A100 or "A100" in device
    return found if is_measured else replace(found, layer_ratios={})
