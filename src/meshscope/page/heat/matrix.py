"""Cells reduced to a picture's size and quantised: 16 bits a cell, exact to 0.03 %.

A column covers the steps from one edge to the next, a row the ranks from one edge to the next. Of
what it covers a cell has the largest value, so that nothing hot is lost, and the mean. A step that
was recorded and not analysed (warm-up, profiled, left out to save memory) is LEFT_OUT, one that no
rank recorded NOT_RECORDED. Where not every step has values, columns are not equally wide: steps
with values share the columns, and each gap between them has one.
"""

import base64
import gzip
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.page.heat.cells import Cells
from meshscope.store.read.arrays import Bools, Floats, Int64s

NOT_RECORDED = 65535
LEFT_OUT = 65534
LEVELS = 65_000
"""Codes 1 to LEVELS stand for values, evenly in their logarithm; 0 for 0."""
MAX_ROWS = 1024
MAX_COLUMNS = 2048
_RANGE = {"ns": (1e3, 1e12), "bytes": (1.0, 1e15)}
"""Of quantised values by unit: 1 µs to 1,000 s."""

Codes = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A part of all ranks and steps, and the size of its picture."""

    ranks: tuple[int, int] | None = None
    """First and last rank; None for all."""
    steps: tuple[int, int] | None = None
    """First and last step; None for all."""
    num_rows: int = MAX_ROWS
    num_columns: int = MAX_COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matrix:
    """Values of one metric, or of one phase of it, as two layers of codes."""

    metric: str
    phase: str | None
    unit: str
    ranks: tuple[int, ...]
    """Of the rows, ascending."""
    row_edges: tuple[int, ...]
    """Row r covers `ranks[row_edges[r]:row_edges[r + 1]]`."""
    step_edges: tuple[int, ...]
    """Column c covers step numbers from `step_edges[c]` to below `step_edges[c + 1]`."""
    lo: float
    """Code q > 0 stands for lo * (hi / lo) ** ((q - 1) / (levels - 1))."""
    hi: float
    levels: int
    largest: float | None
    """Of all values, not quantised; null where there is none."""
    median: float | None
    p97: float | None
    largest_layer: str
    """Base64 of gzip of uint16, little-endian, row by row: the largest value of what a cell covers,
    0 for zero, 65535 not recorded, 65534 left out."""
    mean_layer: str | None
    """The same of the mean; null where every cell covers one rank and one step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """A matrix before it is packed: what a server sends as it is."""

    cells: Cells
    ranks: tuple[int, ...]
    row_edges: Int64s
    step_edges: Int64s
    largest: Codes
    """[row, column]"""
    mean: Codes | None


def draw_matrix(cells: Cells, recorded: Int64s, window: Window) -> Picture:
    """The picture of a window. `recorded` has the numbers of all steps that any rank recorded."""
    rows = _choose(np.array(cells.ranks), window.ranks)
    columns = _choose(cells.steps, window.steps)
    recorded = recorded[_choose(recorded, window.steps)]
    value = cells.value[rows][:, columns]
    steps = cells.steps[columns]
    row_edges = _split(value.shape[0], window.num_rows)
    edges = find_edges(steps, recorded, window.num_columns)
    start = np.searchsorted(steps, edges[:-1])
    count = np.searchsorted(steps, edges[1:]) - start
    is_recorded = np.searchsorted(recorded, edges[1:]) > np.searchsorted(recorded, edges[:-1])
    none = np.where(is_recorded & (count == 0), LEFT_OUT, NOT_RECORDED).astype(np.uint16)
    is_single = bool((np.diff(row_edges) == 1).all() and (count <= 1).all())
    unit = cells.metric.unit
    highest, mean = _reduce(value, row_edges, start, count)
    return Picture(
        cells=cells,
        ranks=tuple(np.array(cells.ranks)[rows].tolist()),
        row_edges=row_edges,
        step_edges=edges,
        largest=_quantise(highest, none, unit),
        mean=None if is_single else _quantise(mean, none, unit),
    )


def pack_matrix(picture: Picture, *, with_layers: bool = True) -> Matrix:
    """Without layers where they are sent beside it."""
    cells = picture.cells
    lo, hi = _RANGE[cells.metric.unit]
    value = cells.value[np.isfinite(cells.value)]
    stats = np.quantile(value, (0.5, 0.97)).tolist() if value.size else (None, None)
    return Matrix(
        metric=cells.metric.key,
        phase=cells.phase,
        unit=cells.metric.unit,
        ranks=picture.ranks,
        row_edges=tuple(picture.row_edges.tolist()),
        step_edges=tuple(picture.step_edges.tolist()),
        lo=lo,
        hi=hi,
        levels=LEVELS,
        largest=float(value.max()) if value.size else None,
        median=stats[0],
        p97=stats[1],
        largest_layer=pack_codes(picture.largest) if with_layers else "",
        mean_layer=pack_codes(picture.mean) if with_layers and picture.mean is not None else None,
    )


def pack_codes(codes: Codes) -> str:
    packed = gzip.compress(codes.astype("<u2").tobytes(), compresslevel=6, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def _choose(numbers: Int64s, wanted: tuple[int, int] | None) -> slice:
    if wanted is None:
        return slice(0, len(numbers))
    first, last = np.searchsorted(numbers, (wanted[0], wanted[1] + 1)).tolist()
    return slice(first, max(first, last))


def _split(count: int, num_parts: int) -> Int64s:
    """Edges of at most so many parts, as equal as can be."""
    num_parts = max(min(count, num_parts), 1)
    return np.asarray(np.arange(num_parts + 1) * count // num_parts, dtype=np.int64)


def find_edges(steps: Int64s, recorded: Int64s, num_columns: int) -> Int64s:
    """Step numbers at which columns begin, and the end of the last."""
    numbers = np.union1d(steps, recorded)
    if not len(numbers):
        return np.zeros(1, dtype=np.int64)
    runs = _find_runs(numbers, np.isin(numbers, steps))
    # A gap gets one column; the others are shared by the runs of steps with values.
    num_gaps = sum(not has_value for _, _, has_value in runs)
    if len(runs) > num_columns // 2:  # such as memory that is read in every third step
        first, end = int(numbers[0]), int(numbers[-1]) + 1
        return first + _split(end - first, num_columns)
    num_left = max(num_columns - num_gaps, 1)
    width = max(-(-len(steps) // num_left), 1)
    edges: list[Int64s] = []
    for first, last, has_value in runs:
        stride = width if has_value else last - first + 1
        edges.append(np.arange(first, last + 1, stride))
    edges.append(np.array([int(numbers[-1]) + 1]))
    return np.concatenate(edges)


def _find_runs(numbers: Int64s, has_value: Bools) -> list[tuple[int, int, bool]]:
    """First and last number of consecutive steps that are alike; gaps in numbers are runs, too."""
    breaks = np.flatnonzero((np.diff(numbers) > 1) | (has_value[1:] != has_value[:-1])) + 1
    starts = np.concatenate([[0], breaks])
    ends = np.concatenate([breaks, [len(numbers)]]) - 1
    runs: list[tuple[int, int, bool]] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        first, last = int(numbers[start]), int(numbers[end])
        if runs and runs[-1][1] + 1 < first:
            runs.append((runs[-1][1] + 1, first - 1, False))
        runs.append((first, last, bool(has_value[start])))
    return runs


def _reduce(
    value: Floats, row_edges: Int64s, start: Int64s, count: Int64s
) -> tuple[Floats, Floats]:
    """Largest and mean value of each cell, [row, column]; NaN where it has none."""
    shape = (len(row_edges) - 1, len(start))
    highest = np.full(shape, np.nan)
    mean = np.full(shape, np.nan)
    columns = np.flatnonzero(count)
    if not value.size or not len(columns):
        return highest, mean
    is_known = np.isfinite(value)
    at, rows = start[columns], row_edges[:-1]
    # Columns with values follow each other without a gap in `value`.
    low = np.where(is_known, value, -np.inf)
    low = np.maximum.reduceat(np.maximum.reduceat(low, at, axis=1), rows, axis=0)
    total = np.where(is_known, value, 0.0)
    total = np.add.reduceat(np.add.reduceat(total, at, axis=1), rows, axis=0)
    number = is_known.astype(np.float64)
    number = np.add.reduceat(np.add.reduceat(number, at, axis=1), rows, axis=0)
    has_any = number > 0
    highest[:, columns] = np.where(has_any, low, np.nan)
    mean[:, columns] = np.where(has_any, total / np.maximum(number, 1), np.nan)
    return highest, mean


def _quantise(value: Floats, none: Codes, unit: str) -> Codes:
    """Codes of values; `none` has, by column, that of a cell without one."""
    lo, hi = _RANGE[unit]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.log(np.maximum(value, lo) / lo) / np.log(hi / lo)
        code = 1 + np.rint(np.clip(share, 0, 1) * (LEVELS - 1))
        code = np.where(value > 0, code, 0)
    is_known = np.isfinite(value)
    codes = np.where(is_known, np.where(is_known, code, 0), none[None, :])
    return codes.astype(np.uint16)


def restore(codes: Codes, *, lo: float, hi: float) -> Floats:
    """The values that codes stand for; NaN where there is none."""
    value = lo * (hi / lo) ** ((codes.astype(np.float64) - 1) / (LEVELS - 1))
    value = np.where(codes == 0, 0.0, value)
    return np.where(codes > LEVELS, np.nan, value)
