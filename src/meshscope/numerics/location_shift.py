"""By how much one series of times lies above another: Hodges–Lehmann shift, interval, p value.

The shift is the median of all differences b − a. Its interval comes from a moving-block bootstrap:
both series are drawn anew out of blocks of neighbours, because steps resemble their neighbours,
with a block length that follows from the autocorrelation (n^(1/3) times the AR(1) rule of Carlstein
and of Politis and White). What the draws scatter, made larger by √(n/(n − block)) for what blocks
of a short series hide, times a Student quantile with as many degrees of freedom as there are
blocks, gives one interval. Blocks of a short series see too little of a slow memory; so a second
one is made by turning Mann and Whitney's test around (Moses), with the variance made larger by the
autocorrelation, and of the two the further end counts on each side. The p value is of that test.

Three to seven values a side say nothing of their autocorrelation: the interval is Student's, with
the degrees of freedom of the shorter side, as if neighbours were correlated by 0.7.

It describes these two recordings. Neither contains what another launch on other hosts would give,
and no interval made of them does.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.core.unavailable import Unavailable
from meshscope.numerics.chance import student_tail
from meshscope.numerics.trend import autocorrelation, normal_tail
from meshscope.store.read.arrays import Floats

MIN_VALUES = 3
"""On each side; with fewer no interval is given."""
MIN_BLOCK_VALUES = 8
"""On each side; with fewer nothing is drawn in blocks."""
_FEW_CORRELATION = 0.7
"""Of neighbours, where there are too few of them to tell."""
_MAX_VALUES = 1000
"""On each side; longer series are thinned to this many at equal distances."""
NUM_DRAWS = 300
SEED = 20_240_229
"""Of the draws: the same recordings give the same answer."""
_Z_95 = 1.959964
_NUM_HALVINGS = 36
"""Of the range in which the median difference lies: to 1.5e-11 of it."""
_MAX_PAIRS_AT_ONCE = 2500
"""Differences of one draw, up to which those of all draws are made at once: 6 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """How far series b lies above series a, in their unit."""

    shift: float
    low: float
    """Lower end of the 95 % interval."""
    high: float
    p_value: float
    """How likely a difference of ranks as large as this is if there is none (two-sided)."""
    num_a: int
    num_b: int
    block: int
    """Steps that were drawn together, the longer of the two sides; 0: too few to draw any."""

    @property
    def is_certain(self) -> bool:
        """Whether 0 lies outside the interval."""
        return self.low > 0 or self.high < 0


def measure_shift(a: Floats, b: Floats) -> Shift | Unavailable:
    """The shift from `a` to `b`, both in order of time."""
    a, b = _clean(a), _clean(b)
    if min(len(a), len(b)) < MIN_VALUES:
        return Unavailable(
            f"a comparison takes {MIN_VALUES} steps on each side, here are {len(a)} and {len(b)}"
        )
    if min(len(a), len(b)) < MIN_BLOCK_VALUES:
        return _measure_few(a, b)
    num_a, num_b = len(a), len(b)
    a, b = _thin(a), _thin(b)
    shift = hodges_lehmann(a, b)
    rho_a, rho_b = autocorrelation(a), autocorrelation(b)
    block_a, block_b = block_length(rho_a, len(a)), block_length(rho_b, len(b))
    draws = _draw_shifts(a, b, block_a, block_b)
    # A level that was not met again scatters too little: short series hide their slow changes.
    scale = math.sqrt(max(len(a) / (len(a) - block_a), len(b) / (len(b) - block_b)))
    degrees = len(a) // block_a + len(b) // block_b - 2
    reach = float(np.std(draws, ddof=1)) * scale * student_quantile(degrees)
    inflation = _inflate_both(rho_a, rho_b, len(a), len(b))
    low, high = _moses_interval(np.sort(a), np.sort(b), inflation)
    return Shift(
        shift=shift,
        low=min(low, shift - reach),
        high=max(high, shift + reach),
        p_value=_mann_whitney(a, b, inflation),
        num_a=num_a,
        num_b=num_b,
        block=max(block_a, block_b),
    )


def _measure_few(a: Floats, b: Floats) -> Shift:
    shift, error = hodges_lehmann(a, b), _find_few_error(a, b)
    reach, degrees = reach_few(a, b), min(len(a), len(b)) - 1
    chance = 2 * student_tail(abs(shift) / error, degrees) if error > 0 else float(shift == 0)
    return Shift(
        shift=shift,
        low=shift - reach,
        high=shift + reach,
        p_value=min(1.0, chance),
        num_a=len(a),
        num_b=len(b),
        block=0,
    )


def reach_few(a: Floats, b: Floats) -> float:
    """Half of the 95 % interval of a difference of means, of few values a side."""
    degrees = min(len(a), len(b)) - 1
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, degrees) > 0.025 else (low, middle)
    return high * _find_few_error(a, b)


def _find_few_error(a: Floats, b: Floats) -> float:
    scale = (1 + _FEW_CORRELATION) / (1 - _FEW_CORRELATION)
    return math.sqrt(scale * sum(float(np.var(one, ddof=1)) / len(one) for one in (a, b)))


def hodges_lehmann(a: Floats, b: Floats) -> float:
    """The median of all differences b − a, by halving the range it can lie in."""
    return _difference_at(np.sort(a), np.sort(b), 0.5)


def _difference_at(
    a: Floats, b: Floats, ratio: float, *, num_halvings: int = _NUM_HALVINGS
) -> float:
    """The difference b − a of sorted series below which `ratio` of all of them lie."""
    low, high = float(b[0] - a[-1]), float(b[-1] - a[0])
    wanted = len(a) * len(b) * ratio
    for _ in range(num_halvings):
        middle = (low + high) / 2
        # Pairs with b − a < middle, that is a > b − middle.
        num_below = len(a) * len(b) - int(np.searchsorted(a, b - middle, side="right").sum())
        if num_below < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def block_length(rho: float, count: int) -> int:
    """Steps to draw together: n^(1/3) (2ρ / (1 − ρ²))^(2/3), at least 1 and at most a quarter."""
    optimal: float = (2 * rho / (1 - rho * rho)) ** (2 / 3) * count ** (1 / 3)
    return max(1, min(math.ceil(optimal), count // 4))


def _draw_shifts(a: Floats, b: Floats, block_a: int, block_b: int) -> Floats:
    random = np.random.default_rng(SEED)
    drawn_a = a[draw_blocks(random, len(a), block_a, NUM_DRAWS)]
    drawn_b = b[draw_blocks(random, len(b), block_b, NUM_DRAWS)]
    if len(a) * len(b) <= _MAX_PAIRS_AT_ONCE:
        differences = drawn_b[:, :, None] - drawn_a[:, None, :]
        return np.asarray(np.median(differences.reshape(NUM_DRAWS, -1), axis=1), dtype=np.float64)
    pairs = zip(np.sort(drawn_a, axis=1), np.sort(drawn_b, axis=1), strict=True)
    return np.array([_difference_at(x, y, 0.5, num_halvings=20) for x, y in pairs])


def draw_blocks(
    random: np.random.Generator, count: int, block: int, num_draws: int
) -> npt.NDArray[np.int64]:
    """Rows of positions in 0..count: blocks of neighbours, each beginning anywhere."""
    num_blocks = -(-count // block)
    starts = random.integers(0, count - block + 1, size=(num_draws, num_blocks))
    positions = starts[:, :, None] + np.arange(block)
    return np.asarray(positions.reshape(num_draws, -1)[:, :count], dtype=np.int64)


def student_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t, by Fisher's expansion about the normal one."""
    nu, z = max(degrees, 2), _Z_95
    return (
        z
        + (z**3 + z) / (4 * nu)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * nu**3)
    )


def _moses_interval(a: Floats, b: Floats, inflation: float) -> tuple[float, float]:
    """Of sorted series: the shifts that Mann and Whitney's test would not reject at 5 %."""
    num_pairs = len(a) * len(b)
    spread = math.sqrt(num_pairs * (len(a) + len(b) + 1) / 12 * inflation)
    reach = min((_Z_95 * spread + 0.5) / num_pairs, 0.5)
    return _difference_at(a, b, 0.5 - reach), _difference_at(a, b, 0.5 + reach)


def _mann_whitney(a: Floats, b: Floats, inflation: float) -> float:
    num_a, num_b = len(a), len(b)
    both = np.concatenate([a, b])
    values, inverse, ties = np.unique(both, return_inverse=True, return_counts=True)
    if len(values) == 1:
        return 1.0
    ends = np.cumsum(ties)
    ranks = (ends - (ties - 1) / 2)[inverse]
    total = num_a + num_b
    u = float(ranks[num_a:].sum()) - num_b * (num_b + 1) / 2
    tied = float((ties**3.0 - ties).sum()) / (total * (total - 1))
    variance = num_a * num_b / 12 * (total + 1 - tied)
    distance = abs(u - num_a * num_b / 2) - 0.5
    return min(1.0, 2 * normal_tail(max(distance, 0.0) / math.sqrt(variance * inflation)))


def _inflate_both(rho_a: float, rho_b: float, num_a: int, num_b: int) -> float:
    """Of the variance of a difference of two means: each side brings its own autocorrelation."""
    sides = ((rho_a, num_b), (rho_b, num_a))
    return sum(share * (1 + rho) / (1 - rho) for rho, share in sides) / (num_a + num_b)


def _clean(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _thin(values: Floats) -> Floats:
    if len(values) <= _MAX_VALUES:
        return values
    return values[np.linspace(0, len(values) - 1, _MAX_VALUES).astype(np.int64)]
