"""Arithmetic of transformer training in closed form.

One multiply-add is two FLOPs; backward is twice forward; only matrix products are counted, the
two of attention at full length (a causal mask is not credited, as in the published tables), and
no embedding look-up. *Model* FLOPs are what the model needs; *hardware* FLOPs also count what is
computed again in backward because activations were not kept.

    MFU = model FLOPs of a step / (step time · devices · peak)
    HFU = hardware FLOPs of a step / (the same)

Formulas: Narayanan et al. (arXiv 2104.04473), Korthikanti et al. (arXiv 2205.05198), in general
form 6·N per token and 12·L·h·s for attention.

Wrong for models that do something else than attention and dense products (state spaces,
convolutions): count those with `Recorder.count_flops`.
"""

from dataclasses import dataclass
from enum import StrEnum

_BACKWARD_PER_FORWARD = 2
"""A matrix product has two in its backward."""


class Recompute(StrEnum):
    """What is computed again in backward."""

    NONE = "none"
    SELECTIVE = "selective"
    """The products inside attention."""
    FULL = "full"
    """Every layer's forward, but for the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """FLOPs of a step, a microbatch or a token."""

    model: float
    hardware: float
    """At least `model`."""

    def scaled(self, factor: float) -> "Flops":
        return Flops(model=self.model * factor, hardware=self.hardware * factor)

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(model=self.model + other.model, hardware=self.hardware + other.hardware)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """What decides the arithmetic of a decoder."""

    num_layers: int
    hidden_size: int
    sequence_length: int
    vocab_size: int
    ffn_size: int | None = None
    """None: four times the hidden size."""
    num_ffn_inputs: int = 1
    """Matrices that lead into the feed-forward: 2 with a gate (swiglu)."""
    kv_size: int | None = None
    """Width of keys, and of values; None: the hidden size."""
    num_active_experts: int = 1
    """Feed-forwards that one token passes; the shared ones count too."""
    router_width: int = 0
    """Experts there are to choose from; 0 without a router."""

    @property
    def layer_matrix_weights(self) -> int:
        """Weights of one layer that a token is multiplied with."""
        hidden = self.hidden_size
        ffn = 4 * hidden if self.ffn_size is None else self.ffn_size
        kv = hidden if self.kv_size is None else self.kv_size
        attention = 2 * hidden * hidden + 2 * hidden * kv
        expert = (self.num_ffn_inputs + 1) * hidden * ffn
        return attention + self.num_active_experts * expert + hidden * self.router_width

    @property
    def forward_layer_flops(self) -> float:
        """Per token, one layer, the matrices only."""
        return 2.0 * self.layer_matrix_weights

    @property
    def forward_attention_flops(self) -> float:
        """Per token, one layer: scores and their product with the values."""
        return 4.0 * self.sequence_length * self.hidden_size

    @property
    def forward_head_flops(self) -> float:
        """Logits, per token."""
        return 2.0 * self.hidden_size * self.vocab_size


def count_stage_flops(
    shape: TransformerShape,
    *,
    num_layers: int,
    has_head: bool,
    recompute: Recompute = Recompute.NONE,
) -> Flops:
    """Forward and backward of one token through some layers, and the head if it is with them."""
    layer, attention = shape.forward_layer_flops, shape.forward_attention_flops
    head = shape.forward_head_flops if has_head else 0.0
    model = (1 + _BACKWARD_PER_FORWARD) * (num_layers * (layer + attention) + head)
    again = {
        Recompute.NONE: 0.0,
        Recompute.SELECTIVE: num_layers * attention,
        Recompute.FULL: num_layers * (layer + attention),
    }[recompute]
    return Flops(model=model, hardware=model + again)
