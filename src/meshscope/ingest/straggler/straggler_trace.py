"""Reads the open straggler-trace form: one row per operation, in a Parquet file.

Columns: `dp_rank`, `stage`, `rank`, `step`, `optype`, `start_ts` and `duration` in seconds,
`seq_id` (index among the operations of its type in the step on that rank), `mc` and `gmc` (model
chunk on the rank and in the model). The form comes with the OSDI'25 study of stragglers.

A step is kept when every operation that most steps have is there once on every dp rank, with times
that can be; the others are counted. Tensor-parallel ranks are not in the form: one stands for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshscope.errors import RunError, RunNotFound
from meshscope.store.read.arrays import Bools, Floats, Int64s
from meshscope.store.read.files import fetched, find_files, is_file, is_folder

Columns = Mapping[str, npt.NDArray[np.generic]]

_INTEGER_COLUMNS = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "gmc")
_TIME_COLUMNS = ("start_ts", "duration")
MAX_ROWS = 50_000_000
MAX_CELLS = 200_000_000
"""Operations x steps x dp ranks: what a dense table of them may hold."""
_MAX_SECONDS = 1e9
_HINT = "the form is described in docs/simulate.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOperation:
    """One operation of a step, the same in all steps and on all dp ranks."""

    optype: str
    sequence: int
    """Place among those of its type on its stage."""
    stage: int
    chunk: int
    """Model chunk on the rank; -1 where it has none."""
    global_chunk: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StragglerTrace:
    """The operations of the kept steps. Times are in seconds, on the trace's own clock."""

    name: str
    num_stages: int
    num_chunks: int
    dp_ranks: tuple[int, ...]
    ranks: Int64s
    """[stage, dp]: which rank that is."""
    steps: Int64s
    operations: tuple[TraceOperation, ...]
    begin_s: Floats
    """[operation, step, dp], counted from the first begin of the step."""
    duration_s: Floats
    """[operation, step, dp]."""
    num_left_out: int
    """Steps that lack an operation, have one twice, or times that cannot be."""

    @property
    def end_s(self) -> Floats:
        """[operation, step, dp]."""
        return self.begin_s + self.duration_s

    @property
    def num_workers(self) -> int:
        return self.ranks.size


def find_trace_file(path: Path) -> Path | None:
    """The trace at `path` or in that folder; None where there is none."""
    if is_file(path):
        return path if path.suffix == ".parquet" else None
    if not is_folder(path):
        return None
    found = find_files(path, "trace-*.parquet")
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:5])
        raise RunError(f"{path} has {len(found)} traces ({names}); give one of the files")
    return found[0] if found else None


def load_straggler_trace(path: Path) -> StragglerTrace:
    """Reads a Parquet file of this form; RunError where it is none."""
    return make_straggler_trace(_read_columns(path), name=path.stem)


def make_straggler_trace(columns: Columns, *, name: str) -> StragglerTrace:
    """Puts the rows of a trace into dense tables by operation, step and dp rank."""
    table = {column: _to_integers(columns, column, name) for column in _INTEGER_COLUMNS}
    begin, duration = (_to_seconds(columns, column, name) for column in _TIME_COLUMNS)
    steps, step = np.unique(table["step"], return_inverse=True)
    dp_ranks, dp = np.unique(table["dp_rank"], return_inverse=True)
    num_stages = int(table["stage"].max()) + 1
    if table["stage"].min() < 0 or num_stages > len(table["stage"]):
        raise RunError(f"{name}: `stage` must count from 0, got {table['stage'].min()}; {_HINT}")
    operations, operation = _number_operations(table, columns["optype"])
    shape = (len(operations), len(steps), len(dp_ranks))
    if np.prod([float(size) for size in shape]) > MAX_CELLS:
        raise RunError(
            f"{name}: {shape[0]} operations x {shape[1]} steps x {shape[2]} dp ranks are too many; "
            f"cut the trace to fewer steps"
        )
    is_good = np.isfinite(begin) & np.isfinite(duration) & (duration >= 0)
    is_good &= (np.abs(begin) < _MAX_SECONDS) & (duration < _MAX_SECONDS)
    cell = np.ravel_multi_index((operation, step, dp), shape)
    count = np.bincount(cell, minlength=int(np.prod(shape))).reshape(shape)
    bad = np.bincount(cell[~is_good], minlength=int(np.prod(shape))).reshape(shape)
    used, kept = _choose_steps(count, bad, name)
    begins, durations = np.zeros(shape).ravel(), np.zeros(shape).ravel()
    begins[cell], durations[cell] = begin, duration
    begins = begins.reshape(shape)[np.ix_(used, kept)]
    durations = durations.reshape(shape)[np.ix_(used, kept)]
    return StragglerTrace(
        name=name,
        num_stages=num_stages,
        num_chunks=max(1, int(table["mc"].max()) + 1),
        dp_ranks=tuple(dp_ranks.tolist()),
        ranks=_find_ranks(table, dp, num_stages, len(dp_ranks), name),
        steps=steps[kept],
        operations=tuple(operations[index] for index in used.tolist()),
        begin_s=begins - begins.min(axis=(0, 2), keepdims=True),
        duration_s=durations,
        num_left_out=len(steps) - len(kept),
    )


def _read_columns(path: Path) -> Columns:
    import duckdb

    if not is_file(path):
        raise RunNotFound(f"{path} is not there; give a trace-*.parquet file or a run directory")
    try:
        with duckdb.connect() as connection:
            relation = connection.read_parquet(str(fetched(path)))
            needed = (*_INTEGER_COLUMNS, *_TIME_COLUMNS, "optype")
            missing = [column for column in needed if column not in relation.columns]
            if missing:
                raise RunError(
                    f"{path} is no straggler trace: it has no column {', '.join(missing)}; {_HINT}"
                )
            picked = relation.project(", ".join(f'"{column}"' for column in needed))
            return dict(picked.limit(MAX_ROWS).fetchnumpy())
    except (duckdb.Error, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"{path} cannot be read as Parquet: {first}") from error


def _to_integers(columns: Columns, column: str, name: str) -> Int64s:
    values = columns[column]
    if not len(values):
        raise RunError(f"{name} has no rows; record at least one step")
    if np.ma.isMaskedArray(values):
        values = values.astype(np.float64).filled(-1.0)  # type: ignore[attr-defined]
    if values.dtype.kind not in "iuf":
        raise RunError(f"{name}: `{column}` must hold whole numbers, not {values.dtype}; {_HINT}")
    numbers = np.nan_to_num(values.astype(np.float64), nan=-1.0, posinf=-1.0, neginf=-1.0)
    return np.clip(numbers, -1, 1 << 53).astype(np.int64)


def _to_seconds(columns: Columns, column: str, name: str) -> Floats:
    values = columns[column]
    if np.ma.isMaskedArray(values):
        values = values.astype(np.float64).filled(np.nan)  # type: ignore[attr-defined]
    if values.dtype.kind not in "iuf":
        raise RunError(f"{name}: `{column}` must hold seconds, not {values.dtype}; {_HINT}")
    return values.astype(np.float64)


def _number_operations(
    table: Mapping[str, Int64s], optypes: npt.NDArray[np.generic]
) -> tuple[list[TraceOperation], Int64s]:
    """The operations a step can have, and which one each row is."""
    names, optype = np.unique(np.asarray(optypes).astype(str), return_inverse=True)
    keys = np.stack([table["stage"], optype, table["seq_id"]])
    _, first, operation = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    found = [
        TraceOperation(
            optype=str(names[optype[row]]),
            sequence=int(table["seq_id"][row]),
            stage=int(table["stage"][row]),
            chunk=int(table["mc"][row]),
            global_chunk=int(table["gmc"][row]),
        )
        for row in first.tolist()
    ]
    return found, operation.reshape(-1)


def _choose_steps(count: Int64s, bad: Int64s, name: str) -> tuple[Int64s, Int64s]:
    """Operations that most steps have, and the steps that have each of them once everywhere."""
    is_there: Bools = np.logical_or.reduce(count > 0, axis=2)
    used = np.flatnonzero(2 * is_there.sum(axis=1) > is_there.shape[1])
    part = count[used]
    is_whole = np.logical_and.reduce(part == 1, axis=(0, 2)) & (bad.sum(axis=(0, 2)) == 0)
    kept = np.flatnonzero(is_whole)
    if not len(kept) or not len(used):
        raise RunError(
            f"{name}: none of its {count.shape[1]} steps has every operation once on all "
            f"{count.shape[2]} dp ranks with times that can be; give a trace that was not cut"
        )
    return used, kept


def _find_ranks(
    table: Mapping[str, Int64s], dp: Int64s, num_stages: int, num_dp: int, name: str
) -> Int64s:
    ranks = np.full((num_stages, num_dp), -1, dtype=np.int64)
    ranks[table["stage"], dp] = table["rank"]
    if (ranks < 0).any():
        stage, index = np.argwhere(ranks < 0)[0].tolist()
        raise RunError(
            f"{name}: stage {stage} has no rank at the {index}th dp rank; every stage must have "
            f"all {num_dp}"
        )
    return ranks
