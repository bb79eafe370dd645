"""Quantiles of a stream of numbers in bounded memory, mergeable over threads, ranks and files.

The first values are kept as they are, and quantiles of them are exact (nearest rank). From
`max_exact` values on they go into buckets whose bounds grow geometrically, so that the middle of a
bucket is at most `RELATIVE_ERROR` away from anything in it (DDSketch: Masson, Rim, Lee, VLDB 2019).
What comes out does not depend on the order of adding and merging.

The number of buckets is bounded: where values of one sign span more than about 17 powers of ten,
the smallest magnitudes share a bucket. A quantile that falls there is not known, and None. Numbers
below the smallest normal float (2e-308) are not resolved either.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RELATIVE_ERROR = 0.01
MAX_EXACT = 256
_MAX_BUCKETS = 2048
"""Per sign: 2048 steps of 2 % span a ratio of 6e17. Nanoseconds up to 19 years have room."""

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GROWTH = math.log(_GROWTH)
_PER_LOG = 1 / _LOG_GROWTH
_LOG_MIDDLE = math.log(2 / (_GROWTH + 1))
"""From a bucket's upper bound to the point with the same relative distance to both bounds."""
_LARGEST_LOG = math.log(sys.float_info.max) - 1e-9
_ROUNDING = 1e-12
"""0.07 * 100 is 7.000000000000001: without this much grace the rank would be 8."""


class QuantileSketch:
    """Counts, sums and quantiles of weighted numbers.

    A weight says how many values one stands for, as when only a sample of them is added.
    """

    __slots__ = (
        "_is_exact",
        "_max_buckets",
        "_max_exact",
        "_negative",
        "_positive",
        "_values",
        "_weights",
        "_zero",
        "count",
        "max",
        "min",
        "sum",
    )

    def __init__(self, *, max_exact: int = MAX_EXACT, max_buckets: int = _MAX_BUCKETS) -> None:
        self.count: float = 0
        """Sum of the weights; an int as long as all weights were."""
        self.sum: float = 0
        """Sum of value times weight."""
        self.min: float | None = None
        self.max: float | None = None
        self._max_exact = max_exact
        self._max_buckets = max_buckets
        self._is_exact = True
        self._values: list[float] = []
        self._weights: list[float] = []
        self._zero: float = 0
        self._positive = _Buckets(max_buckets)
        self._negative = _Buckets(max_buckets)

    @property
    def is_exact(self) -> bool:
        """Whether every value is still kept."""
        return self._is_exact

    @property
    def relative_error(self) -> float:
        """How far a quantile may be from the true one, as a ratio of its magnitude."""
        return 0.0 if self._is_exact else RELATIVE_ERROR

    def add(self, value: float, weight: float = 1) -> None:
        """Adds one value. ValueError unless it is finite and the weight finite and positive."""
        self.add_all((value,), weight)

    def add_all(self, values: Sequence[float], weight: float = 1) -> None:
        """Adds values that all have the same weight; all of them or, on a ValueError, none."""
        if not 0 < weight < math.inf:
            raise ValueError(f"a weight is {weight}; weights are finite and above 0")
        if not all(map(math.isfinite, values)):
            raise ValueError("a value is NaN or infinite; leave it out or count it elsewhere")
        if not values:
            return
        self.count += weight * len(values)
        self.sum += weight * sum(values)
        self._widen(min(values), max(values))
        if self._is_exact and len(self._values) + len(values) <= self._max_exact:
            self._values.extend(values)
            self._weights.extend([weight] * len(values))
            return
        self._leave_exact()
        self._to_buckets(values, weight)

    def merge(self, other: "QuantileSketch") -> None:
        """Takes in all that `other` holds, as if it had been added here."""
        if other.min is None or other.max is None:
            return
        self.count += other.count
        self.sum += other.sum
        self._widen(other.min, other.max)
        if other._is_exact:
            self._take(list(other._values), list(other._weights))
            return
        self._leave_exact()
        self._zero += other._zero
        self._positive.merge(other._positive)
        self._negative.merge(other._negative)

    def quantile(self, q: float) -> float | None:
        """The smallest value that at least a share `q` of the weight does not exceed.

        While exact and unweighted: sorted[ceil(q·n) - 1]. None when there are no values, or when
        it falls where magnitudes had to share a bucket.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"q is {q}; quantiles are asked for between 0 and 1")
        if self.min is None or self.max is None:
            return None
        if q in (0, 1):
            return self.max if q else self.min
        wanted = q * self.count * (1 - _ROUNDING)
        passed: float = 0
        for value, weight in self._ascending():
            passed += weight
            if passed >= wanted:
                return None if value is None else min(max(value, self.min), self.max)
        return self.max

    def to_dict(self) -> dict[str, Any]:
        """Everything, with string keys and JSON's types."""
        found: dict[str, Any] = {
            "relative_error": RELATIVE_ERROR,
            "count": self.count,
            "sum": self.sum,
            "min": self.min,
            "max": self.max,
        }
        if self._is_exact:
            return found | {"values": list(self._values), "weights": list(self._weights)}
        return found | {
            "zero": self._zero,
            "positive": self._positive.to_dict(),
            "negative": self._negative.to_dict(),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], **limits: int) -> "QuantileSketch":
        """What `to_dict` gave; ValueError when it is not that."""
        sketch = cls(**limits)
        try:
            if fields["relative_error"] != RELATIVE_ERROR:
                raise ValueError(f"its relative error is not {RELATIVE_ERROR}")
            sketch._fill(fields)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a quantile sketch of this version: {error!r}") from error
        return sketch

    def _fill(self, fields: Mapping[str, Any]) -> None:
        self.count, self.sum = _read_number(fields["count"]), _read_number(fields["sum"])
        if self.count:
            self._widen(_read_number(fields["min"]), _read_number(fields["max"]))
        if "values" in fields:
            values, weights = list(map(_read_number, fields["values"])), fields["weights"]
            if len(values) != len(weights):
                raise ValueError(f"{len(values)} values have {len(weights)} weights")
            self._take(values, list(map(_read_number, weights)))
            return
        self._is_exact = False
        self._zero = _read_number(fields["zero"])
        self._positive.fill(fields["positive"])
        self._negative.fill(fields["negative"])

    def _widen(self, low: float, high: float) -> None:
        self.min = low if self.min is None or low < self.min else self.min
        self.max = high if self.max is None or high > self.max else self.max

    def _take(self, values: Sequence[float], weights: Sequence[float]) -> None:
        """Values whose sums are counted already: kept if there is room, else into buckets."""
        self._values.extend(values)
        self._weights.extend(weights)
        if not self._is_exact or len(self._values) > self._max_exact:
            self._leave_exact()

    def _leave_exact(self) -> None:
        self._is_exact = False
        for value, weight in zip(self._values, self._weights, strict=True):
            self._to_buckets((value,), weight)
        self._values, self._weights = [], []

    def _to_buckets(self, values: Sequence[float], weight: float) -> None:
        if min(values) > 0:
            self._positive.add_all(values, weight)
            return
        self._positive.add_all([value for value in values if value > 0], weight)
        self._negative.add_all([-value for value in values if value < 0], weight)
        self._zero += weight * sum(value == 0 for value in values)

    def _ascending(self) -> Iterator[tuple[float | None, float]]:
        """Values and their weights from the lowest up; None for a value that is not known."""
        if self._is_exact:
            yield from sorted(zip(self._values, self._weights, strict=True))
            return
        for magnitude, weight in reversed(self._negative.ascending()):
            yield (None if magnitude is None else -magnitude), weight
        if self._zero:
            yield 0.0, self._zero
        yield from self._positive.ascending()


class _Buckets:
    """Weights of magnitudes of one sign: bucket k holds growth^(k-1) < magnitude ≤ growth^k.

    When there are too many, the lowest joins the next. What is left are the highest keys that were
    ever added, in any order.
    """

    __slots__ = ("_floor", "_max_buckets", "_weights")

    def __init__(self, max_buckets: int) -> None:
        self._weights: dict[int, float] = {}
        self._max_buckets = max_buckets
        self._floor: int | None = None
        """The key that also holds everything below it, once there had to be one."""

    def add_all(self, magnitudes: Sequence[float], weight: float) -> None:
        keys = [math.ceil(x * _PER_LOG) for x in map(math.log, magnitudes)]
        weights = self._weights
        for key in keys if self._floor is None else [max(key, self._floor) for key in keys]:
            weights[key] = weights.get(key, 0) + weight
        if len(weights) > self._max_buckets:
            self._join_lowest()

    def add(self, key: int, weight: float) -> None:
        key = key if self._floor is None else max(key, self._floor)
        self._weights[key] = self._weights.get(key, 0) + weight
        if len(self._weights) > self._max_buckets:
            self._join_lowest()

    def _join_lowest(self) -> None:
        lowest_first = sorted(self._weights)
        num_surplus = len(lowest_first) - self._max_buckets
        self._raise_floor(lowest_first[num_surplus])

    def merge(self, other: "_Buckets") -> None:
        self._raise_floor(other._floor)
        for key, weight in list(other._weights.items()):
            self.add(key, weight)

    def _raise_floor(self, floor: int | None) -> None:
        """Joins all below `floor` to it; what another no longer tells apart is so here, too."""
        if floor is None or (self._floor is not None and floor <= self._floor):
            return
        self._floor = floor
        below = [key for key in self._weights if key < floor]
        if below:
            joined = sum(self._weights.pop(key) for key in below)
            self._weights[floor] = self._weights.get(floor, 0) + joined

    def ascending(self) -> list[tuple[float | None, float]]:
        """Middle and weight of each bucket; no middle for the one that holds all below it."""
        return [
            (None if key == self._floor else _middle(key), weight)
            for key, weight in sorted(self._weights.items())
        ]

    def to_dict(self) -> dict[str, Any]:
        weights = {str(key): weight for key, weight in sorted(self._weights.items())}
        return {"floor": self._floor, "weights": weights}

    def fill(self, fields: Mapping[str, Any]) -> None:
        self._floor = None if fields["floor"] is None else int(fields["floor"])
        for key, weight in fields["weights"].items():
            self.add(int(key), _read_number(weight))


def _middle(key: int) -> float:
    return math.exp(min(key * _LOG_GROWTH + _LOG_MIDDLE, _LARGEST_LOG))


def _read_number(value: object) -> float:
    """A number from a file; bool and text are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return value
