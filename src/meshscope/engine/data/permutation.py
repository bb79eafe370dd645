"""A random order of n things that gives the thing at any index, without keeping the order.

A Feistel network over the smallest 4**k >= n, keyed by blake2b, is a bijection of its 4**k numbers;
one that is not below n is put through again until it is (cycle walking: fewer than four times on
average), which leaves a bijection of 0..n-1. Memory is that of the indices asked for.

Good enough to shuffle with; no cipher.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from meshscope.errors import UsageError

_NUM_ROUNDS = 6
_MAX_SIZE = 1 << 60
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Factors of the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""


class Permutation:
    """A bijection of 0..size-1, other for every key; its name may be anything that has a text."""

    def __init__(self, size: int, *key: int | str) -> None:
        if not 1 <= size <= _MAX_SIZE:
            raise UsageError(f"a permutation of {size} things was asked for, expected 1..2**60")
        self.size = size
        self._half_bits = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)
        digest = blake2b(repr(key).encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def apply(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """The things at the given indices, each in 0..size-1."""
        x = np.asarray(indices, dtype=np.uint64)
        if x.size and int(x.max()) >= self.size:
            raise UsageError(f"place {int(x.max())} of a permutation of {self.size} was asked for")
        x = self._encrypt(x)
        while (outside := x >= self.size).any():
            x[outside] = self._encrypt(x[outside])
        return x.astype(np.int64)

    def _encrypt(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> self._half_bits, x & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for multiplier, shift in zip(_MULTIPLIERS, (30, 27), strict=True):
        x = (x ^ (x >> np.uint64(shift))) * multiplier  # modulo 2**64
    return x ^ (x >> np.uint64(31))
