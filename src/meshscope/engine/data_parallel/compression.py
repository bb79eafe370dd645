"""Gradients in fewer bytes: each compressor sums a bucket over a group, about.

What a rank hands to collectives for N elements in float32 on n ranks (flat strategy):

| compressor | bytes | collectives |
|---|---|---|
| none | 4 N | all-reduce |
| fp16, bf16 | 2 N | all-reduce |
| int8 | (n + 1) (c + 4 b); c: N/n rounded up to b whole blocks | all-to-all, all-gather |
| topk | 6 k, k = ratio N rounded up; every rank receives 6 k from each | all-gather |
| powersgd | 4 r (rows + columns) for each matrix, 4 for each other element | 2 all-reduces |

All but the casts keep what they left out and add it to the next step's gradient (error feedback,
arXiv 1901.09847): without it top-k and low rank do not converge to the same loss. After a step with
a NaN or Inf, the result is not finite on all ranks, and what was left out of those elements is
forgotten, so one bad step does not spoil the next. All ranks end with the same bits, since every
rank decodes the same bytes; PowerSGD needs the ranks' CPUs or GPUs to be of one kind for that.

State (error feedback, PowerSGD's last factors) belongs to buckets and goes with them when
a reducer is rebuilt; it is in no checkpoint. What was left out has the loss scale of its step:
`rescale` it when that changes.
"""

from dataclasses import dataclass, field
from math import ceil
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from meshscope.core.unavailable import Unavailable
from meshscope.engine.data_parallel.allreduce import FlatAllReduce, Strategy
from meshscope.engine.data_parallel.channel import GradientChannel, LastWorks, Steps, Transfer
from meshscope.engine.data_parallel.gradient_buckets import Bucket
from meshscope.errors import UsageError

COMPRESSORS = ("fp16", "bf16", "topk", "int8", "powersgd")

_FLAT = FlatAllReduce()

_LEAST_BITS, _MOST_BITS = 2, 8
_INT8_LEVELS = 127
"""Symmetric: -127 … 127."""


@dataclass(slots=True)
class _CompressionError:
    """How far what a rank sent is from what it had, by L2 norms. Tensors: nothing waits for it."""

    left_out: Tensor
    had: Tensor

    @property
    def ratio(self) -> float:
        """0 for an exact compressor."""
        left_out, had = self.left_out.item(), self.had.item()
        return left_out / had if had else 0.0


class Compressor(Protocol):
    """Sums buckets over a group in fewer bytes."""

    keeps_errors: bool
    """Whether what was left out is added to the next step's."""

    @property
    def name(self) -> str:
        """Key in COMPRESSORS."""

    def reduce(
        self, bucket: Bucket, channel: GradientChannel, strategy: Strategy = _FLAT
    ) -> Transfer:
        """Begins to sum `bucket.buffer` in place; `strategy` does the all-reduces in it."""

    def read_error(self, bucket: Bucket) -> float | Unavailable:
        """The relative L2 error of what this rank sent last for the bucket."""

    def rescale(self, ratio: float) -> None:
        """Multiplies what was left out, because gradients to come are larger by that much."""


def make_compressor(
    name: str, *, ratio: float = 0.01, bits: int = 8, rank: int = 4, keeps_errors: bool = True
) -> Compressor:
    """A compressor by its name; each takes what concerns it."""
    made: Compressor
    if name in ("fp16", "bf16"):
        return CastCompressor(torch.float16 if name == "fp16" else torch.bfloat16)
    if name == "topk":
        made = TopKCompressor(ratio)
    elif name == "int8":
        made = Int8Compressor(bits=bits)
    elif name == "powersgd":
        made = PowerSgdCompressor(rank)
    else:
        raise UsageError(f"{name!r} is no compressor; expected one of {', '.join(COMPRESSORS)}")
    made.keeps_errors = keeps_errors
    return made


class _ErrorFeedback:
    """What a compressor remembers of each bucket: what it left out, and its last error."""

    keeps_errors = True
    """False: what is left out of a step is lost."""

    def __init__(self) -> None:
        self._left_out: WeakKeyDictionary[Bucket, Tensor] = WeakKeyDictionary()
        self._errors: WeakKeyDictionary[Bucket, _CompressionError] = WeakKeyDictionary()

    def read_error(self, bucket: Bucket) -> float | Unavailable:
        error = self._errors.get(bucket)
        return Unavailable("nothing was compressed yet") if error is None else error.ratio

    @torch.no_grad()
    def rescale(self, ratio: float) -> None:
        for left_out in self._left_out.values():
            left_out.mul_(ratio)

    def _take_left_out(self, bucket: Bucket) -> Tensor:
        """What was left out so far, with the bucket's gradients added."""
        left_out = self._left_out.get(bucket)
        if left_out is None:
            left_out = torch.zeros_like(bucket.buffer, dtype=torch.float32)
            if self.keeps_errors:
                self._left_out[bucket] = left_out
        return left_out.add_(bucket.buffer)


class CastCompressor(_ErrorFeedback):
    """Sent and summed in 16 bits. fp16 overflows above 65,504, which makes the step not finite."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise UsageError(f"got {dtype}; expected torch.float16 or torch.bfloat16")
        super().__init__()
        self.name = "fp16" if dtype is torch.float16 else "bf16"
        self.dtype = dtype

    def reduce(
        self, bucket: Bucket, channel: GradientChannel, strategy: Strategy = _FLAT
    ) -> Transfer:
        return Transfer(self._steps(bucket, channel, strategy))

    def _steps(self, bucket: Bucket, channel: GradientChannel, strategy: Strategy) -> Steps:
        short = bucket.buffer.to(self.dtype)
        lost = (bucket.buffer - short).norm()
        self._errors[bucket] = _CompressionError(lost, bucket.buffer.norm())
        yield from strategy.steps(short, channel)
        bucket.buffer.copy_(short)


class TopKCompressor(_ErrorFeedback):
    """The elements of largest magnitude: an int32 index and an fp16 value each, in one all-gather.

    Pays while n k 6 < 8 N: every rank receives the elements of all.
    """

    name = "topk"

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise UsageError(f"the ratio of elements to send is {ratio}; expected 0 < ratio <= 1")
        super().__init__()
        self.ratio = ratio

    def count_sent(self, num_elements: int) -> int:
        """How many elements of a bucket are sent."""
        return ceil(self.ratio * num_elements)

    def reduce(
        self, bucket: Bucket, channel: GradientChannel, strategy: Strategy = _FLAT
    ) -> Transfer:
        """One all-gather of bytes; the strategy is not used."""
        return Transfer(self._steps(bucket, channel))

    def _steps(self, bucket: Bucket, channel: GradientChannel) -> Steps:
        left_out = self._take_left_out(bucket)
        had = left_out.norm()
        num_sent = self.count_sent(left_out.numel())
        indices = left_out.abs().topk(num_sent, sorted=False).indices
        values = left_out[indices].half()
        payload = torch.cat([indices.int().view(torch.uint8), values.view(torch.uint8)])
        gathered = payload.new_empty(channel.size * payload.numel())
        works = channel.all_gather(gathered, payload)
        left_out[indices] -= values.float()
        _forget_not_finite(left_out)
        self._errors[bucket] = _CompressionError(left_out.norm(), had)
        yield LastWorks(works)
        by_rank = gathered.view(channel.size, -1)
        index_bytes = 4 * num_sent
        all_indices = _view_as(by_rank[:, :index_bytes], torch.int32).long()
        all_values = _view_as(by_rank[:, index_bytes:], torch.float16)
        bucket.buffer.zero_()
        # Rank by rank: no index twice at a time, so the sum has one order.
        for rank_indices, rank_values in zip(all_indices, all_values, strict=True):
            bucket.buffer.index_add_(0, rank_indices, rank_values.to(bucket.buffer.dtype))


class Int8Compressor(_ErrorFeedback):
    """Every rank sums one chunk of all ranks' int8, in float32, and sends the sum as int8.

    int8 is never summed as such: it would overflow. A block of elements shares a scale, its largest
    magnitude over 127 (with 8 bits). `read_error` is that of this rank's gradients; the rounding of
    the sum is kept for the next step, but is not in it.
    """

    name = "int8"

    def __init__(self, block_size: int = 1024, *, bits: int = 8) -> None:
        """With fewer bits values are told apart less finely; a byte is sent all the same."""
        if block_size < 1:
            raise UsageError(f"block_size is {block_size}; expected at least 1")
        if not _LEAST_BITS <= bits <= _MOST_BITS:
            raise UsageError(f"bits is {bits}; expected {_LEAST_BITS} to {_MOST_BITS}")
        super().__init__()
        self.block_size = block_size
        self.num_levels = (1 << (bits - 1)) - 1

    def chunk_shape(self, num_elements: int, num_ranks: int) -> tuple[int, int]:
        """Blocks in a rank's chunk, elements in a block."""
        chunk_size = max(1, ceil(num_elements / num_ranks))
        block_size = min(self.block_size, chunk_size)
        return ceil(chunk_size / block_size), block_size

    def reduce(
        self, bucket: Bucket, channel: GradientChannel, strategy: Strategy = _FLAT
    ) -> Transfer:
        """All-to-all and all-gather; the strategy is not used."""
        return Transfer(self._steps(bucket, channel))

    def _steps(self, bucket: Bucket, channel: GradientChannel) -> Steps:
        num_elements = bucket.buffer.numel()
        shape = self.chunk_shape(num_elements, channel.size)
        chunk_size = shape[0] * shape[1]
        left_out = self._take_left_out(bucket)
        had = left_out.norm()
        padded = left_out.new_zeros(channel.size * chunk_size)
        padded[:num_elements] = left_out
        blocks = padded.view(channel.size, *shape)
        payload = _quantize(blocks, self.num_levels)
        received = torch.empty_like(payload)
        works = channel.all_to_all(received.flatten(), payload.flatten())
        blocks -= _dequantize(payload, shape)
        self._errors[bucket] = _CompressionError(padded.norm(), had)
        yield works
        # One after the other: one order of additions.
        total = torch.zeros_like(blocks[0])
        for quantized in received:
            total += _dequantize(quantized.unsqueeze(0), shape)[0]
        own_payload = _quantize(total.unsqueeze(0), self.num_levels)
        gathered = own_payload.new_empty(channel.size * own_payload.numel())
        works = channel.all_gather(gathered, own_payload.flatten())
        # What the sum loses is missing once, so one rank keeps it: the one that knows.
        blocks[channel.rank] += total - _dequantize(own_payload, shape)[0]
        left_out.copy_(padded[:num_elements])
        _forget_not_finite(left_out)
        yield LastWorks(works)
        everything = _dequantize(gathered.view(channel.size, -1), shape).flatten()
        bucket.buffer.copy_(everything[:num_elements])


def _quantize(blocks: Tensor, num_levels: int = _INT8_LEVELS) -> Tensor:
    """[chunks, blocks, elements] → int8 [chunks, elements and then scales of all blocks]."""
    scales = blocks.abs().amax(-1, keepdim=True) / num_levels
    # Where the scale is nan or inf, so is the decoded value.
    levels = (blocks / torch.where(scales > 0, scales, 1.0)).nan_to_num_(0.0, 0.0, 0.0)
    integers = levels.round_().clamp_(-num_levels, num_levels).to(torch.int8)
    return torch.cat([integers.flatten(1), scales.flatten(1).view(torch.int8)], 1)


def _dequantize(payload: Tensor, shape: tuple[int, int]) -> Tensor:
    """The inverse, but for rounding."""
    num_elements = shape[0] * shape[1]
    integers = payload[:, :num_elements].view(-1, *shape)
    scales = _view_as(payload[:, num_elements:], torch.float32).unsqueeze(-1)
    return integers * scales


@dataclass(slots=True)
class _LowRankState:
    factors: dict[int, Tensor] = field(default_factory=dict)
    """The last step's Q by parameter index. The next step starts from their directions."""
    num_steps: int = 0


class PowerSgdCompressor(_ErrorFeedback):
    """Matrices as products of rank r (arXiv 1905.13727): P = M Q and Q = Mᵀ P are sent.

    A parameter with more than two dimensions is a matrix of its first by all others. Parameters
    with one dimension, and matrices that would not shrink, are summed exactly with P. The first
    `num_exact_steps` of every bucket are not compressed.
    """

    name = "powersgd"

    def __init__(self, rank: int = 4, *, num_exact_steps: int = 0, seed: int = 0) -> None:
        if rank < 1:
            raise UsageError(f"the rank of PowerSGD is {rank}; expected at least 1")
        super().__init__()
        self.rank = rank
        self.num_exact_steps = num_exact_steps
        self.seed = seed
        self._states: WeakKeyDictionary[Bucket, _LowRankState] = WeakKeyDictionary()

    def is_compressed(self, shape: torch.Size) -> bool:
        """Whether a parameter of that shape is sent as factors."""
        if len(shape) < 2 or not shape.numel():
            return False
        num_rows = shape[0]
        return self.rank * (num_rows + shape.numel() // num_rows) < shape.numel()

    def reduce(
        self, bucket: Bucket, channel: GradientChannel, strategy: Strategy = _FLAT
    ) -> Transfer:
        """Two all-reduces; one in exact steps."""
        return Transfer(self._steps(bucket, channel, strategy))

    def _steps(self, bucket: Bucket, channel: GradientChannel, strategy: Strategy) -> Steps:
        state = self._states.setdefault(bucket, _LowRankState())
        state.num_steps += 1
        if state.num_steps <= self.num_exact_steps:
            yield from strategy.steps(bucket.buffer, channel)
            return
        x = self._take_left_out(bucket)
        had = x.norm()
        parts = torch.split(x, [view.numel() for view in bucket.views])
        matrices, plain = {}, []
        for index, (view, part) in enumerate(zip(bucket.views, parts, strict=True)):
            if self.is_compressed(view.shape):
                matrices[index] = part.view(view.shape[0], -1)
            else:
                plain.append(part)
        starts = [self._choose_start(state, index, matrix) for index, matrix in matrices.items()]
        products = [matrix @ q for matrix, q in zip(matrices.values(), starts, strict=True)]
        sent = torch.cat([piece.flatten() for piece in (*products, *plain)])
        for works in strategy.steps(sent, channel):
            yield list(works) if matrices else works  # Q is still to come
        sums = torch.split(sent, [piece.numel() for piece in (*products, *plain)])
        # P is the same on all ranks, and so are its orthogonal columns.
        bases = [
            torch.linalg.qr(summed.view_as(product)).Q
            for summed, product in zip(sums, products, strict=False)
        ]
        own = [matrix.T @ p for matrix, p in zip(matrices.values(), bases, strict=True)]
        sent_q = torch.cat([x.new_empty(0), *(q.flatten() for q in own)])
        for matrix, p, q in zip(matrices.values(), bases, own, strict=True):
            matrix.addmm_(p, q.T, alpha=-1.0)
        for part in plain:
            part.zero_()
        _forget_not_finite(x)
        self._errors[bucket] = _CompressionError(x.norm(), had)
        if matrices:
            yield from strategy.steps(sent_q, channel)
        factors = torch.split(sent_q, [q.numel() for q in own])
        exact = iter(sums[len(products) :])
        low_rank = iter(zip(bases, own, factors, strict=True))
        for index, view in enumerate(bucket.views):
            if index not in matrices:
                view.copy_(next(exact).view_as(view))
                continue
            p, q, summed = next(low_rank)
            state.factors[index] = summed.view_as(q)
            view.copy_((p @ state.factors[index].T).view_as(view))

    def _choose_start(self, state: _LowRankState, index: int, matrix: Tensor) -> Tensor:
        """Orthogonal columns of the last Q; of a random one, the same on all ranks, to begin with
        and wherever the last one was zero or not finite.
        """
        generator = torch.Generator().manual_seed(self.seed + index)
        random = torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix.device)
        last = state.factors.get(index)
        if last is not None:
            lengths = last.norm(dim=0)
            is_usable = (lengths > 0) & lengths.isfinite()
            random = torch.where(is_usable, last / lengths, random)
        start: Tensor = torch.linalg.qr(random).Q
        return start


def _view_as(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes in the middle of others as numbers; copied, since they lie at any address."""
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


def _forget_not_finite(left_out: Tensor) -> None:
    left_out.nan_to_num_(0.0, 0.0, 0.0)
