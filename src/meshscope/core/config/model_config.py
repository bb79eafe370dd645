"""What a transformer is made of, in numbers: shape, choices, parameter counts and FLOPs.

Pure arithmetic, no torch: counts are closed forms that tests compare with the real modules.

FLOPs are the model's own, forward and backward (PaLM's convention, arXiv 2204.02311, appendix B):
6 for each weight that multiplies a token, and 12·h·s per layer for attention, which counts the
whole s×s square although the causal half would do. Recomputation is not the model's work and is
not counted. Not counted either, as usual: norms, softmax, rotations, embedding look-ups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from meshscope.errors import UsageError

NormKind = Literal["rmsnorm", "layernorm"]
PositionKind = Literal["rope", "learned"]
ActivationKind = Literal["swiglu", "gelu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: Llama-like by default, GPT-like with the other choices.

    Blocks are pre-norm. There is no dropout: runs of different layouts must be comparable.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Heads of keys and values; fewer than `num_heads` is grouped-query attention."""
    ffn_hidden_size: int
    """Width inside the MLP; with swiglu, of the gate and of the value each."""
    sequence_length: int
    """The longest sequence, in tokens; with learned positions, the rows of their table."""
    norm: NormKind = "rmsnorm"
    position: PositionKind = "rope"
    activation: ActivationKind = "swiglu"
    bias: bool = False
    """Whether linear layers other than the head have a bias, as in GPT-2."""
    tie_embeddings: bool = False
    """Whether the head multiplies by the table of the token embedding."""
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    init_std: float = 0.02
    """For all matrices; those that write to the residual stream get init_std / √(2·num_layers)."""

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_size(self) -> int:
        """Width of all keys, or of all values."""
        return self.num_kv_heads * self.head_size

    @property
    def num_ffn_inputs(self) -> int:
        """How many matrices lead into the MLP: gate and value, or one."""
        return 2 if self.activation == "swiglu" else 1

    @property
    def num_attention_channels(self) -> int:
        """Of queries, keys, values and attention's output together."""
        return 2 * self.hidden_size + 2 * self.kv_size

    @property
    def num_turned_channels(self) -> int:
        """Of queries and keys."""
        return self.hidden_size + self.kv_size

    @property
    def num_latent_channels(self) -> int:
        """Of what queries, keys and values are made from; none without latent attention."""
        return 0

    @property
    def num_mlp_widths(self) -> int:
        """Tensors of the MLP's width that backward needs."""
        return 2 * self.num_ffn_inputs

    @property
    def mlp_width(self) -> int:
        return self.ffn_hidden_size

    @property
    def num_routed_copies(self) -> int:
        """Of a token's hidden state, sent to experts; none without them."""
        return 0

    @property
    def residual_init_std(self) -> float:
        """Standard deviation of the matrices that write to the residual stream (GPT-2's rule)."""
        return self.init_std / math.sqrt(2 * self.num_layers)

    # --- problems ------------------------------------------------------------------------------

    def validate(
        self,
        tp: int = 1,
        pp: int = 1,
        *,
        stage_sizes: Sequence[int] | None = None,
        sequence_parallel: bool = False,
    ) -> list[str]:
        """Everything that keeps this model from running on tp × pp, one sentence each.

        The vocabulary need not be divisible: its shards may differ by size, see `shard_range`.
        """
        problems = self._find_value_problems()
        problems += [
            f"{name} is {degree}, expected at least 1"
            for name, degree in (("tp", tp), ("pp", pp))
            if degree < 1
        ]
        if problems:
            return problems  # divisibility of zeros and negatives would only confuse

        def indivisible(what: str, size: int, by: str, number: int, remedy: str) -> list[str]:
            if size % number == 0:
                return []
            return [f"{what} ({size}) is not divisible by {by} ({number}); {remedy}"]

        heads, kv_heads = self.num_heads, self.num_kv_heads
        problems += indivisible(
            "hidden_size", self.hidden_size, "num_heads", heads, "change one of them"
        )
        problems += indivisible(
            "num_heads", heads, "num_kv_heads", kv_heads, "each kv head serves equally many heads"
        )
        if self.position == "rope" and self.hidden_size % heads == 0 and self.head_size % 2:
            problems.append(
                f"head size ({self.head_size}) is odd, but rope rotates pairs; use an even head "
                "size or learned positions"
            )
        problems += indivisible("num_heads", heads, "tp", tp, "lower tp or change num_heads")
        problems += indivisible(
            "num_kv_heads", kv_heads, "tp", tp, "lower tp, or use more kv heads"
        )
        problems += indivisible(
            "ffn_hidden_size", self.ffn_hidden_size, "tp", tp, "lower tp or round the width up"
        )
        if (tp - 1) * -(-self.vocab_size // tp) >= self.vocab_size:
            problems.append(
                f"vocab_size ({self.vocab_size}) leaves the last of {tp} tp ranks without a row; "
                "lower tp"
            )
        if sequence_parallel:
            problems += indivisible(
                "sequence_length", self.sequence_length, "tp", tp,
                "sequence parallel cuts the sequence into tp equal pieces",
            )  # fmt: skip
        return problems + find_split_problems(self.num_layers, pp, stage_sizes)

    def _find_value_problems(self) -> list[str]:
        counts = (
            "vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads",
            "ffn_hidden_size", "sequence_length",
        )  # fmt: skip
        choices = (
            ("norm", get_args(NormKind)),
            ("position", get_args(PositionKind)),
            ("activation", get_args(ActivationKind)),
        )
        problems = [
            f"{name} is {getattr(self, name)}, expected at least 1"
            for name in counts
            if getattr(self, name) < 1
        ]
        problems += [
            f"{name} is {getattr(self, name)!r}, expected {' or '.join(map(repr, allowed))}"
            for name, allowed in choices
            if getattr(self, name) not in allowed
        ]
        problems += [
            f"{name} is {getattr(self, name)}, expected more than 0"
            for name in ("norm_eps", "rope_theta", "init_std")
            if not getattr(self, name) > 0
        ]
        return problems

    # --- parameters ----------------------------------------------------------------------------

    @property
    def num_norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.norm == "layernorm" else 1)

    @property
    def num_layer_matrix_weights(self) -> int:
        """Weights of one block without biases and norms: what multiplies each token."""
        attention = self.hidden_size * (2 * self.hidden_size + 2 * self.kv_size)
        return attention + self.hidden_size * self.ffn_hidden_size * (self.num_ffn_inputs + 1)

    @property
    def num_layer_parameters(self) -> int:
        return self._count_layer(tp=1)

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the tables that tokens and positions are looked up in."""
        positions = self.sequence_length if self.position == "learned" else 0
        return (self.vocab_size + positions) * self.hidden_size

    @property
    def num_non_embedding_parameters(self) -> int:
        """All but the tables; the head counts when it has its own matrix."""
        head = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size
        return self.num_layers * self.num_layer_parameters + self.num_norm_parameters + head

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied table counted once."""
        return self.num_embedding_parameters + self.num_non_embedding_parameters

    def count_stage_parameters(
        self, num_stages: int = 1, stage_sizes: Sequence[int] | None = None, *, tp: int = 1
    ) -> tuple[int, ...]:
        """What each stage holds, with tp on the first tp rank (no other holds more).

        With tied embeddings and several stages the last one holds a second copy of the table, so
        the sum is larger than `num_parameters` by that copy.
        """
        table = -(-self.vocab_size // tp) * self.hidden_size
        positions = self.num_embedding_parameters - self.vocab_size * self.hidden_size
        counts = [
            len(layers) * self._count_layer(tp)
            for layers in split_layers(self.num_layers, num_stages, stage_sizes)
        ]
        counts[0] += table + positions
        counts[-1] += self.num_norm_parameters
        if not (self.tie_embeddings and num_stages == 1):
            counts[-1] += table
        return tuple(counts)

    def _count_layer(self, tp: int) -> int:
        # Biases of the matrices that lead in are cut with their rows; the two that lead out are
        # added once, after the sum over tp, and every rank holds them.
        cut_bias = self.hidden_size + 2 * self.kv_size + self.num_ffn_inputs * self.ffn_hidden_size
        whole_bias = 2 * self.hidden_size
        cut = self.num_layer_matrix_weights + (cut_bias if self.bias else 0)
        return cut // tp + (whole_bias if self.bias else 0) + 2 * self.num_norm_parameters

    # --- FLOPs ---------------------------------------------------------------------------------

    def count_flops_per_token(self, sequence_length: int | None = None) -> int:
        """Forward and backward of one token in a sequence of this length (default: the longest).

        The head counts whether it is tied or not. Forward alone is a third of it.
        """
        length = sequence_length or self.sequence_length
        head = self.vocab_size * self.hidden_size
        weights = self.num_layers * self.num_layer_matrix_weights + head
        return 6 * weights + 12 * self.num_layers * self.hidden_size * length


def find_split_problems(
    num_layers: int, num_stages: int, stage_sizes: Sequence[int] | None = None
) -> list[str]:
    """Why the layers cannot be split so, one sentence each."""
    if stage_sizes is None:
        if 1 <= num_stages <= num_layers:
            return []
        return [
            f"{num_layers} layers cannot fill {num_stages} stages; "
            "every stage needs a layer, lower the number of stages"
        ]
    problems = []
    if len(stage_sizes) != num_stages:
        problems.append(f"{len(stage_sizes)} stage sizes are given for {num_stages} stages")
    if sum(stage_sizes) != num_layers:
        problems.append(
            f"stage sizes {list(stage_sizes)} sum to {sum(stage_sizes)}, "
            f"but the model has {num_layers} layers"
        )
    if any(size < 1 for size in stage_sizes):
        problems.append(f"stage sizes {list(stage_sizes)} leave a stage without a layer")
    return problems


def split_layers(
    num_layers: int, num_stages: int, stage_sizes: Sequence[int] | None = None
) -> tuple[range, ...]:
    """The layers of each stage: as even as it goes, earlier stages larger, or of given sizes.

    Raises UsageError where `find_split_problems` finds any.
    """
    problems = find_split_problems(num_layers, num_stages, stage_sizes)
    if problems:
        raise UsageError("; ".join(problems))
    if stage_sizes is None:
        size, num_larger = divmod(num_layers, num_stages)
        stage_sizes = [size + (index < num_larger) for index in range(num_stages)]
    ends = list(accumulate(stage_sizes))
    return tuple(range(end - size, end) for end, size in zip(ends, stage_sizes, strict=True))
