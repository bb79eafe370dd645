"""What a planner must know of a model: widths, parameters by stage, products by layer.

Wider than the engine's `ModelConfig`: heads of any size, experts, latent attention (MLA). Counts
are closed forms; published totals of known models are what tests compare them with. Experts are
cut over ep first and over tp then; routers, norms and latents are whole on every tp rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshscope.core.config.model_config import ModelConfig, split_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture that stands for the MLP of most layers."""

    count: int
    active: int
    """Experts that one token passes, without the shared ones."""
    width: int
    """Inside one expert."""
    num_shared: int = 0
    """Experts of the same width that every token passes."""
    num_dense_layers: int = 0
    """First layers that have an MLP instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """DeepSeek's: keys and values are made from one narrow latent."""

    kv_rank: int
    query_rank: int
    """0 where queries come from the hidden state itself."""
    nope_size: int
    rope_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of a layer, for each token: n outputs from k inputs."""

    outputs: int
    inputs: int
    is_cut_outputs: bool
    """Whether tp cuts the outputs, else the inputs."""
    is_whole: bool = False
    """Whether every tp rank computes all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder; `LayerWidths` of `core.config.layer_memory` is the part that memory reads."""

    name: str = "model"
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_hidden_size: int
    sequence_length: int
    norm: str = "rmsnorm"
    position: str = "rope"
    activation: str = "swiglu"
    bias: bool = False
    tie_embeddings: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None

    # --- widths --------------------------------------------------------------------------------

    @property
    def num_ffn_inputs(self) -> int:
        return 2 if self.activation == "swiglu" else 1

    @property
    def num_mlp_widths(self) -> int:
        return 2 * self.num_ffn_inputs

    @property
    def mlp_width(self) -> int:
        """Of all MLPs that a token passes in a layer."""
        mixture = self.experts
        if mixture is None:
            return self.ffn_hidden_size
        return (mixture.active + mixture.num_shared) * mixture.width

    @property
    def num_routed_copies(self) -> int:
        return 0 if self.experts is None else self.experts.active

    @property
    def query_size(self) -> int:
        latent = self.latent
        head = self.head_size if latent is None else latent.nope_size + latent.rope_size
        return self.num_heads * head

    @property
    def value_size(self) -> int:
        """Width of attention's output before its last matrix."""
        latent = self.latent
        return self.num_heads * (self.head_size if latent is None else latent.value_size)

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size

    @property
    def num_attention_channels(self) -> int:
        if self.latent is None:
            return 2 * self.query_size + 2 * self.kv_size
        return 2 * self.query_size + 2 * self.value_size

    @property
    def num_turned_channels(self) -> int:
        return self.query_size + (self.kv_size if self.latent is None else self.query_size)

    @property
    def num_latent_channels(self) -> int:
        latent = self.latent
        return 0 if latent is None else latent.query_rank + latent.kv_rank + latent.rope_size

    # --- parameters ----------------------------------------------------------------------------

    @property
    def num_norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.norm == "layernorm" else 1)

    @property
    def attention_products(self) -> tuple[Product, ...]:
        hidden, latent = self.hidden_size, self.latent
        out = Product(hidden, self.value_size, is_cut_outputs=False)
        if latent is None:
            return (Product(self.query_size + 2 * self.kv_size, hidden, is_cut_outputs=True), out)
        down = Product(self.num_latent_channels, hidden, is_cut_outputs=True, is_whole=True)
        queries = Product(self.query_size, latent.query_rank or hidden, is_cut_outputs=True)
        keys = self.num_heads * (latent.nope_size + latent.value_size)
        return (down, queries, Product(keys, latent.kv_rank, is_cut_outputs=True), out)

    def list_mlp_products(self, width: int) -> tuple[Product, ...]:
        return (
            Product(self.num_ffn_inputs * width, self.hidden_size, is_cut_outputs=True),
            Product(self.hidden_size, width, is_cut_outputs=False),
        )

    @property
    def num_attention_weights(self) -> int:
        return sum(one.outputs * one.inputs for one in self.attention_products)

    def count_mlp_weights(self, width: int) -> int:
        return self.hidden_size * width * (self.num_ffn_inputs + 1)

    @property
    def num_layer_matrix_weights(self) -> int:
        """Weights that one token of a layer is multiplied with."""
        router = 0 if self.experts is None else self.hidden_size * self.experts.count
        return self.num_attention_weights + self.count_mlp_weights(self.mlp_width) + router

    def count_layer(self, tp: int = 1, ep: int = 1) -> int:
        """Parameters of one layer on one rank."""
        return self.count_dense_part(tp) + self.count_expert_part(tp, ep)

    def count_dense_part(self, tp: int = 1) -> int:
        """All but the routed experts."""
        mixture, hidden = self.experts, self.hidden_size
        whole = 2 * self.num_norm_parameters
        latent = self.latent
        if latent is not None:
            narrow = sum(
                one.outputs * one.inputs for one in self.attention_products if one.is_whole
            )
            whole += narrow + latent.kv_rank + latent.query_rank
        cut = self.num_attention_weights
        cut -= 0 if latent is None else narrow
        if mixture is None:
            cut += self.count_mlp_weights(self.ffn_hidden_size)
        else:
            cut += self.count_mlp_weights(mixture.num_shared * mixture.width)
            whole += hidden * mixture.count
        if self.bias:
            cut += self.query_size + 2 * self.kv_size + self.num_ffn_inputs * self.ffn_hidden_size
            whole += 2 * hidden
        return -(-cut // tp) + whole

    def count_expert_part(self, tp: int = 1, ep: int = 1) -> int:
        """The routed experts of one layer."""
        mixture = self.experts
        if mixture is None:
            return 0
        return -(-mixture.count * self.count_mlp_weights(mixture.width) // (tp * ep))

    @property
    def dense(self) -> "ModelShape":
        """The same with MLPs only, as the first layers of some mixtures have."""
        return self if self.experts is None else replace(self, experts=None)

    @property
    def num_dense_layers(self) -> int:
        """Layers with an MLP in a model that has experts, else all."""
        return self.num_layers if self.experts is None else self.experts.num_dense_layers

    def count_table(self, tp: int = 1) -> int:
        """Of the table of tokens, or of the head, on the tp rank with most."""
        return -(-self.vocab_size // tp) * self.hidden_size

    @property
    def num_position_parameters(self) -> int:
        return self.sequence_length * self.hidden_size if self.position == "learned" else 0

    @property
    def num_parameters(self) -> int:
        """Of the whole model, a tied table counted once."""
        tables = self.count_table() * (1 if self.tie_embeddings else 2)
        dense, routed = self.split_parameters(range(self.num_layers))
        return tables + self.num_position_parameters + self.num_norm_parameters + dense + routed

    @property
    def num_active_parameters(self) -> int:
        """That one token passes, without the table of tokens."""
        mixture, head = self.experts, self.count_table()
        if mixture is None:
            dense, _ = self.split_parameters(range(self.num_layers))
            return dense + head
        routed = (self.num_layers - mixture.num_dense_layers) * mixture.active
        dense, _ = self.split_parameters(range(self.num_layers))
        return dense + head + routed * self.count_mlp_weights(mixture.width)

    def split_parameters(self, layers: range, tp: int = 1, ep: int = 1) -> tuple[int, int]:
        """Of these layers on one rank: all but routed experts, and those."""
        num_dense = max(0, min(layers.stop, self.num_dense_layers) - layers.start)
        num_mixed = len(layers) - num_dense
        dense = num_dense * self.dense.count_dense_part(tp) + num_mixed * self.count_dense_part(tp)
        return dense, num_mixed * self.count_expert_part(tp, ep)

    def count_stages(
        self, num_stages: int, sizes: Sequence[int] | None, *, tp: int, ep: int
    ) -> list[tuple[int, int]]:
        """Dense and routed parameters of each stage; the last has a second tied table."""
        counts = [
            self.split_parameters(layers, tp, ep)
            for layers in split_layers(self.num_layers, num_stages, sizes)
        ]
        table = self.count_table(tp)
        first, last = counts[0], counts[-1]
        counts[0] = (first[0] + table + self.num_position_parameters, first[1])
        head = 0 if self.tie_embeddings and num_stages == 1 else table
        last = counts[-1]
        counts[-1] = (last[0] + head + self.num_norm_parameters, last[1])
        return counts

    # --- FLOPs ---------------------------------------------------------------------------------

    @property
    def num_forward_flops_per_token(self) -> float:
        """Two for each weight that multiplies, and attention's two products over all positions,
        causal or not (`core.flops` has the same convention)."""
        num_mixed = self.num_layers - self.num_dense_layers
        weights = self.num_dense_layers * self.dense.num_layer_matrix_weights
        weights += num_mixed * self.num_layer_matrix_weights if num_mixed else 0
        return 2.0 * (weights + self.count_table()) + self.num_layers * self.attention_flops

    @property
    def attention_flops(self) -> float:
        """Per token and layer: scores, and their product with the values."""
        return 2.0 * self.sequence_length * (self.query_size + self.value_size)

    @property
    def num_model_flops_per_token(self) -> float:
        """Forward and backward, nothing computed again."""
        return 3.0 * self.num_forward_flops_per_token


def from_model_config(config: ModelConfig, name: str = "model") -> ModelShape:
    """What the engine trains."""
    return ModelShape(
        name=name,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        ffn_hidden_size=config.ffn_hidden_size,
        sequence_length=config.sequence_length,
        norm=config.norm,
        position=config.position,
        activation=config.activation,
        bias=config.bias,
        tie_embeddings=config.tie_embeddings,
    )
