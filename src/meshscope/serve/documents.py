"""JSON that only the dashboard has: its list of runs, and one summary per run."""

from dataclasses import dataclass

from meshscope.core.unavailable import Unavailable

RUNS = ("meshscope-runs", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstFinding:
    """The most urgent finding of a run."""

    severity: str
    code: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What the report of a run says, in a few numbers."""

    step_ns: float | Unavailable
    """Period of a step: median over steps, gaps included."""
    tokens_per_s: float | Unavailable
    """Of the job."""
    mfu_ratio: float | Unavailable
    loss: float | Unavailable
    """The last one."""
    worst: WorstFinding | None
    """Null: nothing was found."""
    is_complete: bool
    """Every rank is there, finished and undamaged, and no error was caught."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run in a line; what could not be read is null and `problem` says why."""

    id: str
    """In addresses; the same as long as the folder is the same."""
    name: str
    folder: str
    """Where it is, below the folder that is served."""
    state: str
    """`live`, `open` (no end written: running or killed), `stuck`, `finished`, `failed` or
    `unreadable`."""
    state_text: str
    problem: str | None
    started_unix_ns: int | None
    num_attempts: int | None
    num_ranks: int | None
    world_size: int | None
    layout: str | Unavailable | None
    device: str | Unavailable | None
    num_steps: int | None
    """Finished steps of the last attempt, on its first rank."""
    last_step_unix_ns: int | None
    """When that rank finished its last step, by its host's clock."""
    spark_ns: tuple[float, ...]
    """Step time of that rank over the run, in at most 40 buckets: medians."""
    summary: RunSummary | Unavailable
    """Of the last report; not known until somebody asked for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsPageDocument:
    """All runs, the newest first."""

    runs: tuple[RunRow, ...]
