"""The transformer, in stages: contiguous ranges of layers that a pipeline runs one after the other.

Parameters have the names of the whole model (`layers.7.mlp.down.weight`) on any stage and
tp rank they are, so initial weights and checkpoints do not depend on the layout.

Shape suffixes: B batch, S sequence, s this rank's part of it under sequence parallel (S without),
D hidden size, N heads and K kv heads of this rank, H head size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshscope.core.config.model_config import ModelConfig, split_layers
from meshscope.engine.memory.recompute import StageRunner
from meshscope.engine.model.initialization import initialize_parameters
from meshscope.engine.model.sharding import ParameterShard
from meshscope.engine.model.tensor_parallel import (
    SEQUENCE_DIM,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from meshscope.engine.model.tensor_regions import (
    Group,
    drop_single,
    gather_from_region,
    group_rank,
    group_size,
)
from meshscope.errors import UsageError

_TOKEN_TABLE = "token_embedding.weight"
"""The parameter that a tied head shares."""

IGNORED_TARGET = -100
"""Targets with this value have no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageOptions:
    """What the modules of a stage have in common beside the model's configuration."""

    tp_group: Group = None
    sequence_parallel: bool = False
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32


def build_stage(
    config: ModelConfig,
    stage_index: int = 0,
    num_stages: int = 1,
    *,
    stage_sizes: Sequence[int] | None = None,
    tp_group: Group = None,
    sequence_parallel: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> "Stage":
    """This rank's part of one stage, with initial weights; by default, of the whole model.

    On the device `meta` it has shapes and no values. Raises UsageError with every problem.
    """
    tp_group = drop_single(tp_group)
    problems = config.validate(
        group_size(tp_group),
        num_stages,
        stage_sizes=stage_sizes,
        sequence_parallel=sequence_parallel,
    )
    if not 0 <= stage_index < num_stages:
        problems.append(f"stage {stage_index} is outside 0..{num_stages - 1}")
    if problems:
        raise UsageError("; ".join(problems))
    options = _StageOptions(
        tp_group=tp_group,
        sequence_parallel=sequence_parallel and tp_group is not None,
        device=device,
        dtype=dtype,
    )
    layers = split_layers(config.num_layers, num_stages, stage_sizes)[stage_index]
    stage = Stage(config, layers, options)
    if torch.device(device).type != "meta":
        initialize_parameters(stage, seed=seed)
    return stage


class Stage(nn.Module):
    """A range of layers; the first stage has the embedding too, the last one norm, head and loss.

    A whole model is the stage of all layers.
    """

    def __init__(self, config: ModelConfig, layers: range, options: _StageOptions) -> None:
        super().__init__()
        self.config = config
        self.layer_range = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_layers
        self.tp_group = options.tp_group
        self.sequence_parallel = options.sequence_parallel
        self.runner = StageRunner()
        """Calls the layers and the loss; memory strategies put theirs here and into the blocks."""
        if self.is_first:
            self.token_embedding = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                group=options.tp_group,
                sequence_parallel=options.sequence_parallel,
                init_std=config.init_std,
                device=options.device,
                dtype=options.dtype,
            )
            if config.position == "learned":
                self.position_embedding = PositionEmbedding(config, options)
        if config.position == "rope":
            self.rotation = Rotation(config, options)
        self.layers = nn.ModuleDict({str(index): Block(config, options) for index in layers})
        if self.is_last:
            self.final_norm = _make_norm(config, options)
            self.head = ColumnParallelLinear(
                config.hidden_size,
                config.vocab_size,
                group=options.tp_group,
                sequence_parallel=options.sequence_parallel,
                init_std=config.init_std,
                device=options.device,
                dtype=options.dtype,
            )
            if config.tie_embeddings:
                self._tie_head()

    def _tie_head(self) -> None:
        if self.is_first:
            self.head.weight = self.token_embedding.weight
        shards = self.head.parameter_shards
        shards["weight"] = replace(shards["weight"], tied_to=_TOKEN_TABLE)

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The copy of a tied table whose gradient must be summed over first and last stage.

        None where there is nothing to sum: not tied, a stage in between, or one stage for all.
        """
        if not self.config.tie_embeddings or self.is_first == self.is_last:
            return None
        return self.token_embedding.weight if self.is_first else self.head.weight

    def hidden_shape(
        self, batch_size: int, sequence_length: int | None = None
    ) -> tuple[int, int, int]:
        """The shape of what one stage hands to the next, on this rank."""
        length = sequence_length or self.config.sequence_length
        num_parts = group_size(self.tp_group) if self.sequence_parallel else 1
        return batch_size, length // num_parts, self.config.hidden_size

    def forward(
        self, x: Tensor, targets_BS: Tensor | None = None, num_targets: Tensor | int | None = None
    ) -> Tensor:
        """From token ids (first stage) or hidden states to hidden states, or to loss or logits.

        The last stage gives the sum of the tokens' losses divided by `num_targets`, by default the
        targets in this batch that are not ignored; without targets, the logits of all tokens. To
        average over microbatches and dp ranks exactly, pass the number of targets in all of them.
        """
        rotation = self.rotation if self.config.position == "rope" else None
        blocks = list(self.layers.values())
        first = self._embed if self.is_first else None
        x_BsD = self.runner.run_layers(blocks, x, rotation, first=first)
        if not self.is_last:
            return x_BsD
        if targets_BS is None:
            logits = self.head(self.final_norm(x_BsD))
            return gather_from_region(logits, self.tp_group, -1, self.config.vocab_size)
        return self._average_loss(x_BsD, targets_BS, num_targets)

    def _embed(self, ids_BS: Tensor) -> Tensor:
        if ids_BS.shape[1] > self.config.sequence_length:
            raise UsageError(
                f"got {ids_BS.shape[1]} tokens, but sequence_length is "
                f"{self.config.sequence_length}; cut the batch or raise it"
            )
        x_BsD: Tensor = self.token_embedding(ids_BS)
        if self.config.position == "learned":
            x_BsD = self.position_embedding(x_BsD)
        return x_BsD

    def _average_loss(
        self, x_BsD: Tensor, targets_BS: Tensor, num_targets: Tensor | int | None
    ) -> Tensor:
        if num_targets is None:
            # At least 1: a batch of nothing but ignored targets has loss 0, not nan.
            num_targets = (targets_BS != IGNORED_TARGET).sum().clamp(min=1)
        total = self.runner.sum_losses(
            self._sum_losses,
            x_BsD,
            targets_BS,
            # The logits of a chunk are then no larger than what an MLP computes inside.
            num_chunks=math.ceil(
                self.config.vocab_size / (self.config.num_ffn_inputs * self.config.ffn_hidden_size)
            ),
            num_sequence_parts=group_size(self.tp_group) if self.sequence_parallel else 1,
        )
        return total / num_targets

    def _sum_losses(self, x_BsD: Tensor, targets_BS: Tensor) -> Tensor:
        losses_BS = vocab_parallel_cross_entropy(
            self.head(self.final_norm(x_BsD)),
            targets_BS,
            vocab_size=self.config.vocab_size,
            group=self.tp_group,
            ignore_index=IGNORED_TARGET,
        )
        return losses_BS.sum()


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, options: _StageOptions) -> None:
        super().__init__()
        self.attention_norm = _make_norm(config, options)
        self.attention = Attention(config, options)
        self.mlp_norm = _make_norm(config, options)
        self.mlp = Mlp(config, options)
        self.runner = StageRunner()

    def forward(self, x_BsD: Tensor, rotation: "Rotation | None") -> Tensor:
        """The residual stream after this block."""
        x_BsD = self.runner.run_part(self._attend, x_BsD, rotation)
        return self.runner.run_part(self._feed_forward, x_BsD)

    def _attend(self, x_BsD: Tensor, rotation: "Rotation | None") -> Tensor:
        added: Tensor = self.attention(self.attention_norm(x_BsD), rotation)
        return x_BsD + added

    def _feed_forward(self, x_BsD: Tensor) -> Tensor:
        added: Tensor = self.mlp(self.mlp_norm(x_BsD))
        return x_BsD + added


class Attention(nn.Module):
    """Causal attention; a tp rank has its share of the heads and of the kv heads they use."""

    def __init__(self, config: ModelConfig, options: _StageOptions) -> None:
        super().__init__()
        self.head_size = config.head_size
        tp = group_size(options.tp_group)
        self.local_sizes = [size // tp for size in (config.hidden_size, *2 * (config.kv_size,))]
        self.is_grouped = config.num_kv_heads != config.num_heads
        self.qkv = _make_column_linear(
            config, options, (config.hidden_size, config.kv_size, config.kv_size)
        )
        self.output = _make_residual_linear(config, options, config.hidden_size)

    def forward(self, x_BsD: Tensor, rotation: "Rotation | None") -> Tensor:
        """What attention adds to the residual stream."""
        q_BSNH, k_BSKH, v_BSKH = (
            part.unflatten(-1, (-1, self.head_size))
            for part in self.qkv(x_BsD).split(self.local_sizes, -1)
        )
        if rotation is not None:
            q_BSNH, k_BSKH = rotation(q_BSNH), rotation(k_BSKH)
        mixed_BNSH = F.scaled_dot_product_attention(
            q_BSNH.transpose(1, 2),
            k_BSKH.transpose(1, 2),
            v_BSKH.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.is_grouped,
        )
        added: Tensor = self.output(mixed_BNSH.transpose(1, 2).flatten(2))
        return added


class Mlp(nn.Module):
    """silu(gate)·value or gelu, then down; gate and value are one matrix."""

    def __init__(self, config: ModelConfig, options: _StageOptions) -> None:
        super().__init__()
        self.is_gated = config.activation == "swiglu"
        self.up = _make_column_linear(
            config, options, (config.ffn_hidden_size,) * config.num_ffn_inputs
        )
        self.down = _make_residual_linear(config, options, config.ffn_hidden_size)

    def forward(self, x_BsD: Tensor) -> Tensor:
        """What the MLP adds to the residual stream."""
        x = self.up(x_BsD)
        if self.is_gated:
            gate, value = x.chunk(2, -1)
            x = F.silu(gate) * value
        else:
            x = F.gelu(x, approximate="tanh")
        added: Tensor = self.down(x)
        return added


class Rotation(nn.Module):
    """Rotary position embedding (arXiv 2104.09864), pairs half a head apart as in Llama."""

    def __init__(self, config: ModelConfig, options: _StageOptions) -> None:
        super().__init__()
        device = options.device
        exponents = torch.arange(0, config.head_size, 2, device=device).float() / config.head_size
        positions = torch.arange(config.sequence_length, device=device).float()
        angles = torch.outer(positions, config.rope_theta**-exponents).repeat(1, 2)
        # [S, 1, H]: made in float32, used in the dtype of what is rotated.
        self.register_buffer("cosines", angles.cos().unsqueeze(1), persistent=False)
        self.register_buffer("sines", angles.sin().unsqueeze(1), persistent=False)
        self.cosines: Tensor
        self.sines: Tensor

    def forward(self, x_BSNH: Tensor) -> Tensor:
        """Each head turned by its token's position."""
        length = x_BSNH.shape[SEQUENCE_DIM]
        first, second = x_BSNH.chunk(2, -1)
        turned_BSNH = torch.cat([-second, first], -1)
        cosines = self.cosines[:length].to(x_BSNH.dtype)
        return x_BSNH * cosines + turned_BSNH * self.sines[:length].to(x_BSNH.dtype)


class PositionEmbedding(nn.Module):
    """A learned vector for each position, whole on every tp rank."""

    def __init__(self, config: ModelConfig, options: _StageOptions) -> None:
        super().__init__()
        shape = (config.sequence_length, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=options.device, dtype=options.dtype))
        self.parameter_shards = {
            "weight": ParameterShard(
                full_shape=shape,
                init_std=config.init_std,
                is_sequence_parallel=options.sequence_parallel,
            )
        }
        self.part_index = group_rank(options.tp_group) if options.sequence_parallel else 0

    def forward(self, x_BsD: Tensor) -> Tensor:
        """Adds its vector to each token; under sequence parallel, those of this rank's tokens."""
        length = x_BsD.shape[SEQUENCE_DIM]
        return x_BsD + self.weight.narrow(0, self.part_index * length, length)


def _make_norm(config: ModelConfig, options: _StageOptions) -> nn.Module:
    """The configured norm over the hidden size, whole on every tp rank."""
    size = config.hidden_size
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    norm = kind(size, config.norm_eps, device=options.device, dtype=options.dtype)
    norm.parameter_shards = {  # type: ignore[assignment]  # a module takes any attribute
        name: ParameterShard(
            full_shape=(size,),
            init_mean=1.0 if name == "weight" else 0.0,
            is_sequence_parallel=options.sequence_parallel,
        )
        for name, _ in norm.named_parameters()
    }
    return norm


def _make_column_linear(
    config: ModelConfig, options: _StageOptions, out_features: Sequence[int]
) -> ColumnParallelLinear:
    """From the residual stream into the tp region."""
    return ColumnParallelLinear(
        config.hidden_size,
        out_features,
        group=options.tp_group,
        bias=config.bias,
        sequence_parallel=options.sequence_parallel,
        init_std=config.init_std,
        device=options.device,
        dtype=options.dtype,
    )


def _make_residual_linear(
    config: ModelConfig, options: _StageOptions, in_features: int
) -> RowParallelLinear:
    """From the tp region back to the residual stream."""
    return RowParallelLinear(
        in_features,
        config.hidden_size,
        group=options.tp_group,
        bias=config.bias,
        sequence_parallel=options.sequence_parallel,
        init_std=config.residual_init_std,
        device=options.device,
        dtype=options.dtype,
    )
