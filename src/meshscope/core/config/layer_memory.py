"""What the layers of a transformer keep for backward, tensor by tensor, in closed forms.

`memory_model` adds it up over a schedule for the engine, `plan.memory` for other programs. b
sequences of s tokens, T = b·s/cp; h the hidden size, a heads, k the width of all keys, f the MLP's;
c bytes of the compute dtype, r bytes of the residual stream (4 in the engine, 2 elsewhere); t = tp;
d = t under sequence parallel, else 1. Of one block:

    residual stream, input of both norms           2 · r·T·h/d
    normalised, before the weight (rmsnorm, cpu)   2 · r·T·h/d      (fused on an accelerator: 0)
    statistics of the norms                        2 · 4·T/d        (layernorm twice that)
    inputs of qkv and of up                        2 · c·T·h/d
    q, k, v; in the engine with rope also turned   c·T·(h + 2k)/t + c·T·(h + k)/t
    attention's output and log-sum-exp             c·T·h/t + 4·T·a/t
    or, without a fused kernel, the scores         5·b·a·s²/t       (softmax, dropped, mask)
    inside the MLP, gelu / swiglu                  2 / 4 · c·T·f/t  (a fused gate keeps 3)
    masks of dropout, where there is any           2 · T·h/d
    weights cast for this forward (autocast)       2 · weights of the block / t

With r = c = 2, dropout and scores this is sbh(10 + 24/t + 5as/ht) of Korthikanti et al. (arXiv
2205.05198), and sbh(34 + 5as/h)/t with sequence parallel, but for the norms' statistics. A
mixture of experts keeps k copies of a token's hidden state on its way in and out, and the MLP's
part once for each of the k experts; all-to-alls leave every rank as many tokens as it had, which
routing that is not even does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Protocol

from meshscope.core.schedule import Action, ActionKind, Schedule

FULL_BYTES = 4
"""Of a float32."""
HOST_WINDOW_BYTES = 256 << 20
"""Of device memory for what is on its way to the host, and as much for what is on its way back."""
WEIGHT_ON_DISK = 0.25
"""Of a segment's input that waits on disk, beside one in memory: segments are half as long as with
one microbatch in flight, whatever the number. At 0 each layer would be one, and disks too slow."""


class LayerWidths(Protocol):
    """What a model says of the width of its layers; `ModelConfig` and `plan.ModelShape` do."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def norm(self) -> str: ...
    @property
    def position(self) -> str: ...
    @property
    def num_attention_channels(self) -> int: ...
    @property
    def num_turned_channels(self) -> int: ...
    @property
    def num_latent_channels(self) -> int: ...
    @property
    def num_mlp_widths(self) -> int: ...
    @property
    def mlp_width(self) -> int: ...
    @property
    def num_routed_copies(self) -> int: ...
    @property
    def num_layer_matrix_weights(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What decides how much one block keeps. The defaults are the engine's."""

    model: LayerWidths
    microbatch_size: int
    compute_bytes: int = FULL_BYTES
    tp: int = 1
    sequence_parallel: bool = False
    has_fused_norm: bool = False
    """Whether rmsnorm keeps its input only, as on accelerators."""
    cp: int = 1
    stream_element_bytes: int = FULL_BYTES
    """Of the residual stream: float32 in the engine, the compute dtype in most others."""
    has_dropout: bool = False
    """Whether the outputs of both halves are dropped out, a byte of mask for each."""
    keeps_scores: bool = False
    """Whether attention is not fused: s² scores for each head, five bytes."""
    keeps_turned: bool = True
    """Whether rope keeps queries and keys before and after it turned them."""
    has_fused_gate: bool = False
    """Whether a gated MLP keeps three of its widths instead of four."""
    casts_weights: bool = True
    """Whether weights are cast for each forward, as by autocast."""

    @property
    def num_tokens(self) -> int:
        """Of one microbatch, on one cp rank."""
        return self.microbatch_size * self.model.sequence_length // self.cp

    @property
    def num_parts(self) -> int:
        """Into how many the residual stream is cut."""
        return self.tp if self.sequence_parallel else 1

    @property
    def stream_bytes(self) -> int:
        """Of the residual stream in one place: what a stage hands to the next."""
        width = self.stream_element_bytes * self.model.hidden_size
        return width * self.num_tokens // self.num_parts

    @property
    def norm_bytes(self) -> int:
        """Kept by one norm."""
        is_layernorm = self.model.norm == "layernorm"
        num_copies = 1 if is_layernorm or self.has_fused_norm else 2
        statistics = FULL_BYTES * self.num_tokens * (2 if is_layernorm else 1) // self.num_parts
        return num_copies * self.stream_bytes + statistics

    @property
    def linear_input_bytes(self) -> int:
        """Kept by a matrix that leads out of the residual stream."""
        return self.compute_bytes * self.num_tokens * self.model.hidden_size // self.num_parts

    @property
    def mask_bytes(self) -> int:
        """Of dropout at the end of one half."""
        return self.num_tokens * self.model.hidden_size // self.num_parts if self.has_dropout else 0

    @property
    def score_bytes(self) -> int:
        """Kept by attention for each pair of positions: what selective recompute leaves out."""
        if not self.keeps_scores:
            return 0
        pairs = self.num_tokens * self.model.sequence_length * self.model.num_heads
        # The softmax; with dropout also what it leaves of it, and its mask.
        size = self.compute_bytes * (1 + self.has_dropout) + self.has_dropout
        return size * pairs // self.tp

    @property
    def attention_bytes(self) -> int:
        """Kept by the first half of a block."""
        model, tokens = self.model, self.num_tokens
        width = model.num_attention_channels
        if model.position == "rope" and self.keeps_turned:
            width += model.num_turned_channels
        inside = self.compute_bytes * tokens * width
        if not self.keeps_scores:
            inside += FULL_BYTES * tokens * model.num_heads  # the log-sum-exp
        latent = self.compute_bytes * tokens * model.num_latent_channels // self.num_parts
        outside = self.norm_bytes + self.linear_input_bytes + self.mask_bytes + latent
        return outside + inside // self.tp + self.score_bytes

    @property
    def mlp_bytes(self) -> int:
        """Kept by the second half."""
        num_widths = self.model.num_mlp_widths - (
            self.has_fused_gate and self.model.num_mlp_widths > 2
        )
        inside = num_widths * self.compute_bytes * self.num_tokens * self.model.mlp_width
        inside += self.routed_bytes
        return self.norm_bytes + self.linear_input_bytes + self.mask_bytes + inside // self.tp

    @property
    def routed_bytes(self) -> int:
        """Of tokens' copies on their way to experts and back, over all tp ranks."""
        copies = 2 * self.num_tokens * self.model.num_routed_copies
        return self.compute_bytes * copies * self.model.hidden_size

    @property
    def cast_bytes(self) -> int:
        """Of the block's weights, cast for one forward."""
        if self.compute_bytes == FULL_BYTES or not self.casts_weights:
            return 0
        return self.compute_bytes * self.model.num_layer_matrix_weights // self.tp

    @property
    def layer_bytes(self) -> int:
        """Kept by a whole block."""
        return self.attention_bytes + self.mlp_bytes + self.cast_bytes

    @property
    def split_bytes(self) -> int:
        """Kept by a block between its I and its W: inputs of its matrices, and the gradients of
        what they gave (`engine.model.put_off_gradients`)."""
        model = self.model
        inputs = model.hidden_size + model.mlp_width
        outputs = model.num_attention_channels - model.hidden_size + _mlp_input_width(model)
        inside = self.compute_bytes * self.num_tokens * (inputs + outputs) // self.tp
        return 4 * self.linear_input_bytes + inside

    @property
    def backward_bytes(self) -> int:
        """Made by the widest operation of a block's backward, and gone after it: gradients inside
        the MLP where its parts meet, or beside those of its last matrix; or those of a norm."""
        model = self.model
        width = self.compute_bytes * self.num_tokens * model.mlp_width // self.tp
        matrix = self.compute_bytes * model.hidden_size * model.mlp_width // self.tp
        num_inside = 1 + model.num_mlp_widths // 2
        mlp = self.stream_bytes + max(num_inside * width, width + matrix)
        return max(mlp, (3 if self.has_fused_norm else 5) * self.stream_bytes)

    @property
    def num_head_weights(self) -> int:
        """On the tp rank with most of them."""
        return ceil(self.model.vocab_size / self.tp) * self.model.hidden_size

    @property
    def head_bytes(self) -> int:
        """Kept by the final norm and the head, without the logits."""
        is_cast = self.casts_weights and self.compute_bytes != FULL_BYTES
        cast = self.compute_bytes * self.num_head_weights if is_cast else 0
        return self.norm_bytes + self.linear_input_bytes + cast

    @property
    def logits_bytes(self) -> int:
        """Kept by the loss: their log-softmax in float32; on several tp ranks, themselves."""
        size = FULL_BYTES if self.tp == 1 else self.compute_bytes
        return size * self.num_tokens * ceil(self.model.vocab_size / self.tp)

    @property
    def loss_bytes(self) -> int:
        """Made by the loss and gone after it: the logits, and where they are narrow another copy in
        float32; on several tp ranks, which keep the logits, less."""
        size = FULL_BYTES
        if self.compute_bytes < FULL_BYTES:
            size += self.compute_bytes if self.tp == 1 else FULL_BYTES
        return size * self.num_tokens * ceil(self.model.vocab_size / self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageActivations:
    """What one stage holds of a microbatch from its forward to its backward."""

    kept_bytes: int
    temporary_bytes: int
    """Made in backward, for one microbatch at a time, beyond what is kept until then."""
    split_bytes: int = 0
    """Kept between I and W instead, where a schedule has them apart."""
    logits_bytes: int = 0
    temporary_logits_bytes: int = 0
    offloaded_bytes: int = 0
    """Kept elsewhere."""


def estimate_stage(
    shape: LayerShape,
    num_layers: int,
    strategy: str,
    *,
    is_first: bool,
    is_last: bool,
    num_in_flight: int = 1,
) -> StageActivations:
    """Of a stage of so many layers. `num_in_flight` decides how `aggressive` cuts its segments."""
    head = shape.head_bytes if is_last else 0
    logits = shape.logits_bytes if is_last else 0
    made_at_loss = shape.loss_bytes if is_last else 0
    split = num_layers * shape.split_bytes
    if is_last:
        size = shape.compute_bytes * shape.num_tokens * ceil(shape.model.vocab_size / shape.tp)
        split += shape.linear_input_bytes + size
    if strategy in ("basic", "cpu_offload", "standard"):
        is_again = strategy == "standard"
        layer = shape.stream_bytes if is_again else shape.layer_bytes
        made = shape.backward_bytes + (shape.layer_bytes if is_again else 0)
        # When layers are at it, the loss and the head are done with.
        made = max(0, made - head - logits)
        at_loss = max(made_at_loss, _measure_head_backward(shape) - logits) if is_last else 0
        if is_again:
            # Nothing keeps casts for backward, but autocast does until the forward has ended.
            casts = num_layers * shape.cast_bytes
            made, at_loss = max(made, casts), max(at_loss, made_at_loss + casts)
        whole = StageActivations(
            kept_bytes=num_layers * layer + head,
            temporary_bytes=made if made > at_loss else 0,
            split_bytes=split,
            logits_bytes=logits,
            temporary_logits_bytes=0 if made > at_loss else at_loss,
        )
        return _offload(whole, 2 * HOST_WINDOW_BYTES) if strategy == "cpu_offload" else whole
    weight = num_in_flight if strategy == "aggressive" else WEIGHT_ON_DISK
    num_segments = choose_num_segments(num_layers, weight)
    num_chunks = max(1, ceil(shape.model.vocab_size / _mlp_input_width(shape.model)))
    # The inputs of both halves of a segment's layers, and the insides of one half.
    window = 2 * ceil(num_layers / num_segments) * shape.stream_bytes
    half = max(shape.attention_bytes, shape.mlp_bytes) + shape.cast_bytes
    cut = StageActivations(
        # The first segment of the first stage begins with tokens; the loss keeps its own input.
        kept_bytes=(num_segments - is_first + is_last) * shape.stream_bytes,
        temporary_bytes=window + max(half, head),
        split_bytes=split,
        temporary_logits_bytes=(logits + made_at_loss) // num_chunks,
    )
    return cut if strategy == "aggressive" else _offload(cut, 2 * shape.stream_bytes)


def _measure_head_backward(shape: LayerShape) -> int:
    """The logits' gradient, and the gradients that are made of it: of weights and of input."""
    logits = shape.compute_bytes * shape.num_tokens * ceil(shape.model.vocab_size / shape.tp)
    return logits + shape.compute_bytes * shape.num_head_weights + shape.linear_input_bytes


def choose_num_segments(num_layers: int, num_in_flight: float) -> int:
    """How many segments keep least, with that many microbatches between forward and backward.

    Each keeps a tensor per segment, and the one in backward two for each layer of a segment
    (attention's input and the MLP's): m·k + 2·n/k is least at k = √(2n/m).
    """
    return max(1, min(num_layers, round(sqrt(2 * num_layers / num_in_flight))))


def _offload(stage: StageActivations, window_bytes: int) -> StageActivations:
    """The same with what is kept elsewhere, but for what is on its way there or back."""
    kept = stage.kept_bytes + stage.logits_bytes
    return replace(
        stage,
        kept_bytes=0,
        temporary_bytes=stage.temporary_bytes + min(window_bytes, kept),
        logits_bytes=0,
        offloaded_bytes=kept,
    )


def _mlp_input_width(model: LayerWidths) -> int:
    return model.num_mlp_widths // 2 * model.mlp_width


def find_peak_bytes(
    row: Sequence[Action],
    bytes_by_stage: Mapping[int, int],
    *,
    split_bytes: Mapping[int, int] | None = None,
    start: int = -1,
) -> int:
    """The most bytes that a rank holds at once, each stage's from F to the end of B or W; from the
    end of action `start` on. Between I and W it holds `split_bytes` of a stage, if given."""
    held = peak = 0
    for index, action in enumerate(row):
        size = bytes_by_stage[action.stage]
        split = size if split_bytes is None else split_bytes[action.stage]
        if action.kind is ActionKind.FORWARD:
            held += size
        elif action.kind is ActionKind.INPUT_GRAD:
            # What I makes is there before what it was made of is gone.
            peak = max(peak, held) if index >= start else peak
            held += split - size
        else:
            held -= size if action.kind is ActionKind.BACKWARD else split
        if index >= start:
            peak = max(peak, held)
    return peak


def find_first_gradients(row: Sequence[Action]) -> list[int]:
    """The actions of a rank's row that make a stage's first gradients of weights."""
    found: dict[int, int] = {}
    for index, action in enumerate(row):
        if action.kind not in (ActionKind.FORWARD, ActionKind.INPUT_GRAD):
            found.setdefault(action.stage, index)
    return sorted(found.values())


def count_in_flight(schedule: Schedule, pp_rank: int) -> int:
    """The most microbatches of one stage that a rank holds at once."""
    stages = schedule.stages_of(pp_rank)
    row = schedule.actions[pp_rank]
    return max(
        find_peak_bytes(row, {other: other == stage for other in stages}) for stage in stages
    )


# --- published formulas --------------------------------------------------------------------------


def count_published_layer_bytes(
    *,
    hidden_size: int,
    num_heads: int,
    sequence_length: int,
    microbatch_size: int,
    tp: int,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Activations of one layer in fp16 by Korthikanti et al. (arXiv 2205.05198, table 2).

    For comparison only: that model has dropout, gelu and no flash attention. `recompute` is none,
    selective (attention's scores) or full (all but the layer's input).
    """
    sbh = sequence_length * microbatch_size * hidden_size
    scores = 5 * num_heads * sequence_length / hidden_size if recompute == "none" else 0.0
    if recompute == "full":
        return 2.0 * sbh
    if sequence_parallel:
        return sbh * (34 + scores) / tp
    return sbh * (10 + 24 / tp + scores / tp)
