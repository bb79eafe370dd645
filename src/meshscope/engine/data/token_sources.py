"""Where training samples come from: made up by a rule that can be learned, or from a file of ids.

A sample is a row of `sequence_length` + 1 tokens: the inputs, and one more so that the targets are
the inputs moved by one. Any sample can be read by its index, on any rank, without the ones before.
"""

from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshscope.engine.data.permutation import Permutation
from meshscope.errors import UsageError

Tokens = NDArray[np.int64]

_TOKEN_DTYPES = ("uint16", "uint32")
_SCAN_TOKENS = 1 << 22


class TokenSource(Protocol):
    """Samples by index."""

    vocab_size: int
    sequence_length: int
    num_samples: int

    def read(self, indices: NDArray[np.int64]) -> Tokens:
        """The samples of the given indices, [len(indices), sequence_length + 1]."""


class SyntheticTokens:
    """Samples of a Markov chain: after each token mostly the same one follows, fixed by the seed.

    With probability `noise_ratio` the next token is drawn from the whole vocabulary instead. So the
    loss of a model begins near log(vocab_size) and can fall to `best_loss`, which is known.
    """

    def __init__(
        self,
        vocab_size: int,
        sequence_length: int,
        *,
        seed: int = 0,
        noise_ratio: float = 0.1,
        num_samples: int = 1 << 40,
    ) -> None:
        problems = _find_size_problems(vocab_size, sequence_length)
        if not 0.0 <= noise_ratio <= 1.0:
            problems.append(f"noise_ratio is {noise_ratio}, expected 0..1")
        if num_samples < 1:
            problems.append(f"num_samples is {num_samples}, expected at least 1")
        if problems:
            raise UsageError("; ".join(problems))
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.num_samples = num_samples
        self.noise_ratio = noise_ratio
        self._seed = seed
        tokens = np.arange(vocab_size)
        self._following = Permutation(vocab_size, "following", seed).apply(tokens)

    @property
    def best_loss(self) -> float:
        """What the cross-entropy of no model can be below on average, in nats for each token."""
        other = self.noise_ratio / self.vocab_size
        usual = 1.0 - self.noise_ratio + other
        return -sum(
            count * p * log(p) for count, p in ((1, usual), (self.vocab_size - 1, other)) if p > 0
        )

    def read(self, indices: NDArray[np.int64]) -> Tokens:
        """Each sample has a separate generator, keyed by seed and index."""
        length = self.sequence_length + 1
        drawn = np.empty((len(indices), length), dtype=np.int64)
        is_drawn = np.empty((len(indices), length), dtype=bool)
        for row, index in enumerate(indices):
            key = np.array([self._seed % 2**64, int(index)], dtype=np.uint64)
            generator = np.random.Generator(np.random.Philox(key=key))
            drawn[row] = generator.integers(0, self.vocab_size, length)
            is_drawn[row] = generator.random(length) < self.noise_ratio
        samples = drawn.copy()
        for at in range(1, length):
            follows = self._following[samples[:, at - 1]]
            samples[:, at] = np.where(is_drawn[:, at], drawn[:, at], follows)
        return samples


class TokenFile:
    """Samples from one long row of token ids on disk, which is mapped and never read as a whole.

    The file is a `.npy` of one dimension, or ids alone, little-endian, of the given dtype (as
    Megatron's and nanoGPT's `.bin` without header). Sample i begins at token
    i * sequence_length; the last of its tokens is the first of the next.
    """

    def __init__(
        self, path: Path | str, vocab_size: int, sequence_length: int, *, dtype: str = "uint16"
    ) -> None:
        self.path = Path(path)
        problems = _find_size_problems(vocab_size, sequence_length)
        if dtype not in _TOKEN_DTYPES:
            problems.append(f"dtype is {dtype!r}, expected one of {', '.join(_TOKEN_DTYPES)}")
        if problems:
            raise UsageError("; ".join(problems))
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self._tokens = _map_tokens(self.path, np.dtype(dtype).newbyteorder("<"))
        self.num_tokens = len(self._tokens)
        self.num_samples = (self.num_tokens - 1) // sequence_length
        if self.num_samples < 1:
            raise UsageError(
                f"{self.path} has {self.num_tokens} tokens, but one sample needs "
                f"{sequence_length + 1} (sequence_length + 1); give more, or lower sequence_length"
            )

    def read(self, indices: NDArray[np.int64]) -> Tokens:
        """Raises UsageError when an id is not of the vocabulary."""
        length = self.sequence_length + 1
        samples = np.empty((len(indices), length), dtype=np.int64)
        for row, index in enumerate(indices):
            begin = int(index) * self.sequence_length
            samples[row] = self._tokens[begin : begin + length]
            self._require_known(samples[row], begin)
        return samples

    def check_all(self) -> None:
        """Reads the whole file; raises UsageError at the first id that is not of the vocabulary."""
        for begin, block in self._blocks():
            self._require_known(block, begin)

    def _blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        for begin in range(0, self.num_tokens, _SCAN_TOKENS):
            yield begin, self._tokens[begin : begin + _SCAN_TOKENS]

    def _require_known(self, tokens: NDArray[Any], begin: int) -> None:
        if not len(tokens) or (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            return
        index = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
        raise UsageError(
            f"token {begin + index} of {self.path} is {int(tokens[index])}, but vocab_size is "
            f"{self.vocab_size}; raise vocab_size, or see whether the file has another dtype"
        )


def _map_tokens(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not path.is_file():
        raise UsageError(f"there is no token file {path}; give the path of a .npy or of raw ids")
    if path.suffix == ".npy":
        return _map_npy(path)
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        raise UsageError(f"{path} is empty; write token ids into it")
    if size_bytes % dtype.itemsize:
        raise UsageError(
            f"{path} has {size_bytes} bytes, which is no multiple of the {dtype.itemsize} of "
            f"{dtype.name}; it is cut off, or has another dtype"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _map_npy(path: Path) -> NDArray[Any]:
    try:
        tokens: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"{path} cannot be read as .npy ({error}); write it anew") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise UsageError(
            f"{path} has {tokens.dtype} of shape {tokens.shape}; expected integers in one dimension"
        )
    return tokens


def _find_size_problems(vocab_size: int, sequence_length: int) -> list[str]:
    problems = []
    if vocab_size < 1:
        problems.append(f"vocab_size is {vocab_size}, expected at least 1")
    if sequence_length < 1:
        problems.append(f"sequence_length is {sequence_length}, expected at least 1")
    return problems
