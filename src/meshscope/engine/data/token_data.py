"""Batches of tokens, the same for any layout: which samples a step has depends on the step alone.

    data = make_data("file", path="tokens.bin", vocab_size=50304, sequence_length=1024,
                     global_batch_size=64, microbatch_size=4, seed=1, held_out_ratio=0.01)
    batch = data.batch(step, dp_rank, dp)              # [microbatches, microbatch size, S + 1]
    for microbatch in batch:
        inputs, targets = split_tokens(microbatch)

Step k has the positions k * global_batch_size … of an endless row of epochs; each epoch has every
sample once, in a new order. Data-parallel rank d takes the d-th block of the batch, so that
all ranks together have the same samples in the same order for any dp. A run that is resumed starts
at its step; there is no other state.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshscope.engine.data.permutation import Permutation
from meshscope.engine.data.token_sources import SyntheticTokens, TokenFile, TokenSource
from meshscope.errors import UsageError

_DATA_KINDS = ("synthetic", "file")
_SYNTHETIC_HELD_OUT = 1 << 20
"""Samples kept apart of made-up data, when some are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenData:
    """Batches for training and, from samples kept apart, for evaluation."""

    source: TokenSource
    global_batch_size: int
    """Samples in one step, over all data-parallel ranks."""
    microbatch_size: int
    seed: int = 0
    shuffles: bool = True
    """Whether each epoch has a new order; otherwise that of the source."""
    num_held_out: int = 0
    """Samples at the end of the source that training never sees."""

    def __post_init__(self) -> None:
        problems = self.find_problems()
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return self.source.num_samples - self.num_held_out

    @property
    def num_evaluation_batches(self) -> int:
        """Full batches only."""
        return self.num_held_out // self.global_batch_size

    def batch(self, step: int, dp_rank: int = 0, dp: int = 1) -> Tensor:
        """This rank's samples of a step, int64 [microbatches, microbatch size, S + 1]."""
        return self._read(self.find_indices(step, dp_rank, dp))

    def evaluation_batch(self, index: int, dp_rank: int = 0, dp: int = 1) -> Tensor:
        """This rank's samples of a batch for evaluation, in the order of the source."""
        if not 0 <= index < self.num_evaluation_batches:
            raise UsageError(
                f"evaluation batch {index} was asked for, but {self.num_held_out} held-out samples "
                f"make {self.num_evaluation_batches} batches of {self.global_batch_size}"
            )
        return self._read(self.num_samples + self._find_positions(index, dp_rank, dp))

    def find_indices(self, step: int, dp_rank: int = 0, dp: int = 1) -> NDArray[np.int64]:
        """Which samples of the source a rank has in a step, in order."""
        positions = self._find_positions(step, dp_rank, dp)
        epochs, within = positions // self.num_samples, positions % self.num_samples
        if not self.shuffles:
            return within
        indices = np.empty_like(within)
        for epoch in np.unique(epochs):  # a batch may reach over the end of one
            order = Permutation(self.num_samples, "epoch", self.seed, int(epoch))
            indices[epochs == epoch] = order.apply(within[epochs == epoch])
        return indices

    def find_problems(self, dp: int = 1) -> list[str]:
        """Everything that keeps these batches from being made for so many ranks, one each."""
        sizes = {
            "global_batch_size": self.global_batch_size,
            "microbatch_size": self.microbatch_size,
        }
        problems = [f"{name} is {n}, expected at least 1" for name, n in sizes.items() if n < 1]
        if not problems and self.global_batch_size % (dp * self.microbatch_size):
            problems.append(
                f"global_batch_size ({self.global_batch_size}) is no multiple of dp ({dp}) * "
                f"microbatch_size ({self.microbatch_size})"
            )
        if not 0 <= self.num_held_out < self.source.num_samples:
            problems.append(
                f"{self.num_held_out} samples are to be held out of {self.source.num_samples}; "
                "leave some for training"
            )
        return problems

    def _find_positions(self, step: int, dp_rank: int, dp: int) -> NDArray[np.int64]:
        problems = self.find_problems(dp) if dp >= 1 else [f"dp is {dp}, expected at least 1"]
        if not 0 <= dp_rank < dp:
            problems.append(f"dp_rank is {dp_rank}, expected 0..{dp - 1}")
        if step < 0:
            problems.append(f"step is {step}; steps are counted from 0")
        if problems:
            raise UsageError("; ".join(problems))
        size = self.global_batch_size // dp
        begin = step * self.global_batch_size + dp_rank * size
        return np.arange(begin, begin + size, dtype=np.int64)

    def _read(self, indices: NDArray[np.int64]) -> Tensor:
        samples = torch.from_numpy(self.source.read(indices))
        return samples.view(-1, self.microbatch_size, samples.shape[1])


def make_data(
    kind: str,
    *,
    vocab_size: int,
    sequence_length: int,
    global_batch_size: int,
    microbatch_size: int,
    seed: int = 0,
    held_out_ratio: float = 0.0,
    shuffles: bool = True,
    path: Path | str | None = None,
    dtype: str = "uint16",
    noise_ratio: float = 0.1,
) -> TokenData:
    """Data of a kind: "synthetic" (with `noise_ratio`) or "file" (with `path` and `dtype`).

    `held_out_ratio` of the samples, the last ones, are kept for evaluation.
    """
    if not 0.0 <= held_out_ratio < 1.0:
        raise UsageError(f"held_out_ratio is {held_out_ratio}, expected 0..1, less than 1")
    source: TokenSource
    if kind == "synthetic":
        source = SyntheticTokens(vocab_size, sequence_length, seed=seed, noise_ratio=noise_ratio)
        num_held_out = _SYNTHETIC_HELD_OUT if held_out_ratio else 0
    elif kind == "file":
        if path is None:
            raise UsageError('data of kind "file" needs path, which is missing')
        source = TokenFile(path, vocab_size, sequence_length, dtype=dtype)
        num_held_out = round(source.num_samples * held_out_ratio)
    else:
        raise UsageError(f"data kind is {kind!r}, expected one of {', '.join(_DATA_KINDS)}")
    return TokenData(
        source=source,
        global_batch_size=global_batch_size,
        microbatch_size=microbatch_size,
        seed=seed,
        shuffles=shuffles and kind == "file",  # made-up samples are in no order as it is
        num_held_out=num_held_out,
    )


def split_tokens(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [..., S] each, of samples of S + 1 tokens; both are views."""
    return tokens[..., :-1], tokens[..., 1:]


class Prefetch:
    """Reads the batches of coming steps in a thread, while the current one is trained on.

    with Prefetch(lambda step: data.batch(step, dp_rank, dp), first_step=0) as batches:
        batch = batches.take()

    What reading raises is raised by `take`. Leaving ends the thread.
    """

    def __init__(self, read: Callable[[int], Tensor], *, first_step: int, depth: int = 2) -> None:
        if depth < 1:
            raise UsageError(f"depth is {depth}, expected at least 1")
        self._read = read
        self._free_slots = threading.Semaphore(depth)
        self._batches: queue.SimpleQueue[Tensor | BaseException] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._run, args=(first_step,), name="meshscope-prefetch", daemon=True
        )
        self._thread.start()

    def take(self) -> Tensor:
        """The next step's batch; waits for it."""
        if self._is_closed:
            raise UsageError("a batch was asked for after the prefetch was closed")
        found = self._batches.get()
        if isinstance(found, BaseException):
            self._batches.put(found)  # for the next call: the thread has ended
            raise found
        self._free_slots.release()
        return found

    def close(self) -> None:
        """Ends the thread, after the batch it is reading."""
        self._is_closed = True
        self._free_slots.release()
        self._thread.join()

    def _run(self, step: int) -> None:
        while True:
            self._free_slots.acquire()
            if self._is_closed:
                return
            try:
                self._batches.put(self._read(step))
            except BaseException as error:  # noqa: BLE001 - raised again by take
                self._batches.put(error)
                return
            step += 1

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
