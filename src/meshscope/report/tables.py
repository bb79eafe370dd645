"""Tables of a study: what was recorded, and what the report is made of, as columns of numpy.

A `StudyTable` is a dict of arrays, so pandas and polars take it as it is. Arrow is spoken through
DuckDB, which needs none of the packages that read it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from meshscope.analyze.budget.budget_lines import sort_bound_pieces
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable, known
from meshscope.diagnose.finding import Finding
from meshscope.errors import UsageError
from meshscope.store.read.arrays import Int64s

_Array = npt.NDArray[Any]
_Find = Callable[[], Sequence[Finding]]
"""Makes the findings: only one table needs them."""
_Columns = Mapping[str, _Array] | Unavailable


class StudyTable(dict[str, _Array]):
    """Columns by name, all of one length."""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.values()))) if self else 0

    def to_pandas(self) -> Any:
        """A pandas DataFrame; pandas must be installed."""
        return _import("pandas").DataFrame(dict(self))

    def to_polars(self) -> Any:
        """A polars DataFrame; polars must be installed."""
        return _import("polars").DataFrame(_ArrowHolder(self))

    def to_arrow(self) -> Any:
        """A pyarrow Table; pyarrow must be installed."""
        return _import("pyarrow").table(_ArrowHolder(self))

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        """The table as an Arrow stream (PyCapsule interface): any library that reads Arrow can take
        it."""
        con, name = self.connect()
        return con.sql(f"SELECT * FROM {name}").__arrow_c_stream__(requested_schema)

    def connect(self) -> tuple[Any, str]:
        """A DuckDB connection that has the columns as a table, and that table's name."""
        import duckdb

        con = duckdb.connect()
        con.register("columns_", {name: _plain(values) for name, values in self.items()})
        return con, "columns_"


class _ArrowHolder:
    """Only the Arrow side of a table: libraries look for a dict first."""

    def __init__(self, table: StudyTable) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def _plain(values: _Array) -> _Array:
    """As DuckDB takes it: texts as objects."""
    return values.astype(object) if values.dtype.kind == "U" else values


def _import(package: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this needs {package}, which is not installed: pip install {package}; without it a "
            "table is a dict of numpy arrays",
            name=package,
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table that is computed."""

    meaning: str
    build: Callable[[Study, _Find], _Columns]


def build_table(name: str, study: Study, find: _Find) -> StudyTable | Unavailable:
    """One of `REPORT_TABLES`; `find` makes the findings where they are needed."""
    if name not in REPORT_TABLES:
        raise UsageError(f"there is no table {name}; there are {', '.join(REPORT_TABLES)}")
    made = REPORT_TABLES[name].build(study, find)
    return made if isinstance(made, Unavailable) else StudyTable(made)


def _texts(values: Sequence[object]) -> _Array:
    """An array of objects, None for what is missing."""
    found = np.empty(len(values), dtype=object)
    found[:] = list(values)
    return found


def _list_findings(study: Study, find: _Find) -> _Columns:
    findings = find()
    onsets = [known(one.onset) for one in findings]
    gains = [None if isinstance(one.gain, Unavailable) else one.gain for one in findings]
    return {
        "code": _texts([one.code for one in findings]),
        "severity": _texts([one.severity.word for one in findings]),
        "title": _texts([one.title for one in findings]),
        "summary": _texts([one.summary for one in findings]),
        "change": _texts([one.change for one in findings]),
        "ranks": _texts([",".join(map(str, one.ranks)) for one in findings]),
        "first_step": _numbers([one.first_step for one in findings]),
        "last_step": _numbers([one.last_step for one in findings]),
        "onset_step": _numbers([None if one is None else one.step for one in onsets]),
        "onset_unix_ns": _numbers(
            [None if one is None else known(one.start_unix_ns) for one in onsets]
        ),
        "course": _texts([None if one is None else str(one.course) for one in onsets]),
        "saved_ns": _numbers([None if one is None else one.saved_ns for one in gains]),
        "step_ns": _numbers([None if one is None else one.step_ns for one in gains]),
        "not_priced": _texts(
            [one.gain.reason if isinstance(one.gain, Unavailable) else None for one in findings]
        ),
        "confidence": _texts([str(one.confidence.level) for one in findings]),
        "confidence_text": _texts([one.confidence.text for one in findings]),
        "explained_by": _texts([one.explained_by for one in findings]),
    }


def _numbers(values: Sequence[float | None]) -> _Array:
    """NaN for what is missing."""
    return np.array([np.nan if one is None else one for one in values], dtype=np.float64)


def _list_budget(study: Study, _: _Find) -> _Columns:
    budget = study.budget
    if isinstance(budget, Unavailable):
        return budget
    rank, step, line = _grid(budget.ranks, budget.steps, len(budget.lines))
    return {
        "rank": rank,
        "step": step,
        "line": _texts([str(one.share) for one in budget.lines])[line],
        "axis": _texts([one.axis for one in budget.lines])[line],
        "time_ns": budget.time_ns.ravel(),
    }


def _list_work(study: Study, _: _Find) -> _Columns:
    work = study.work
    if isinstance(work, Unavailable):
        return work
    rank, step, phase = _grid(work.ranks, work.steps, len(work.phases))
    return {
        "rank": rank,
        "step": step,
        "phase": _texts(work.phases)[phase],
        "work_ns": work.work_ns.ravel(),
    }


def _grid(ranks: Sequence[int], steps: Int64s, num: int) -> tuple[Int64s, Int64s, Int64s]:
    shape = (len(ranks), len(steps), num)
    rank, step, place = (index.ravel() for index in np.indices(shape))
    return np.array(ranks, dtype=np.int64)[rank], steps[step], place


def _list_job_steps(study: Study, _: _Find) -> _Columns:
    steps = study.steps
    return {
        "step": steps.step,
        "duration_ns": steps.duration_ns,
        "is_warmup": np.arange(len(steps.step)) < steps.num_warmup,
        "is_profiled": steps.is_profiled,
    }


def _list_ranks(study: Study, _: _Find) -> _Columns:
    ranks = study.ranks
    times = [known(one.step_time) for one in ranks]
    return {
        "rank": np.array([one.rank for one in ranks], dtype=np.int64),
        "place": _texts([known(one.label) for one in ranks]),
        "host": _texts([known(one.host) for one in ranks]),
        "state": _texts([str(one.state) for one in ranks]),
        "num_steps": np.array([one.num_steps for one in ranks], dtype=np.int64),
        "step_median_ns": _numbers([None if one is None else one.median_ns for one in times]),
        "peak_rss_bytes": _numbers([known(one.peak_rss_bytes) for one in ranks]),
        "peak_device_bytes": _numbers([known(one.peak_device_bytes) for one in ranks]),
    }


def _list_matches(study: Study, _: _Find) -> _Columns:
    job = study.job
    matches, rows, groups = job.matches, job.operations.rows, job.operations.groups
    if not len(matches):
        return Unavailable("no communication was recorded")
    first = matches.member[matches.first]
    group = matches.group.astype(np.int64)
    arrival, end = job.times.arrival_ns[matches.member], job.times.end_ns[matches.member]
    last = np.full(len(matches), -1, dtype=np.int64)
    last[job.arrivals.match] = np.where(job.arrivals.is_decided, job.arrivals.rank, -1)
    names = _texts([*(one.name for one in groups), None])
    axes = _texts([*(one.axis for one in groups), None])
    return {
        "axis": axes[group],
        "group": names[group],
        "kind": _texts([Kind(kind).label for kind in range(len(Kind))])[rows.kind[first]],
        "sequence": matches.sequence,
        "step": rows.step[first].astype(np.int64),
        "num_ranks": matches.size,
        "is_complete": matches.is_usable,
        "size_bytes": rows.size_bytes[first],
        "first_arrival_ns": np.minimum.reduceat(arrival, matches.first),
        "last_arrival_ns": np.maximum.reduceat(arrival, matches.first),
        "end_ns": np.maximum.reduceat(end, matches.first),
        "last_rank": last,
        "wait_ns": np.add.reduceat(job.row_times.wait_ns[matches.member], matches.first),
    }


def _list_pieces(study: Study, _: _Find) -> _Columns:
    timeline = study.timeline
    if isinstance(timeline, Unavailable):
        return timeline
    pieces = timeline.pieces
    lines, line = sort_bound_pieces(timeline, known(study.device_parts))
    return {
        "rank": pieces.rank.astype(np.int64),
        "step": timeline.steps[pieces.step],
        "start_ns": pieces.start_ns,
        "end_ns": pieces.end_ns,
        "kind": _texts([one.name.lower() for one in PieceKind])[pieces.kind],
        "line": _texts([str(one.share) for one in lines])[line],
        "axis": _texts([one.axis for one in lines])[line],
        "phase": _texts(timeline.phases)[pieces.phase],
    }


REPORT_TABLES: dict[str, ReportTable] = {
    "findings": ReportTable(
        meaning="One row per finding, the most urgent first.", build=_list_findings
    ),
    "budget": ReportTable(
        meaning="Where the time went: one row per rank, step and line; lines add up to the period.",
        build=_list_budget,
    ),
    "work": ReportTable(
        meaning="What each rank worked itself: one row per rank, step and phase.", build=_list_work
    ),
    "pieces": ReportTable(
        meaning="The timeline: who worked, waited or transferred, on the aligned clock.",
        build=_list_pieces,
    ),
    "matches": ReportTable(
        meaning="One row per operation that ranks did together, on the aligned clock; last_rank is "
        "-1 where the clocks do not decide it.",
        build=_list_matches,
    ),
    "job_steps": ReportTable(
        meaning="One row per step: the median of its ranks.", build=_list_job_steps
    ),
    "rank_summaries": ReportTable(
        meaning="One row per rank: where it is, its state, step time and memory.",
        build=_list_ranks,
    ),
}
"""Tables that no rank wrote, by name."""
