"""What is known of a run that is watched: the last moments, the last report, curves of the job."""

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import numpy as np

from meshscope.errors import RunEmpty, RunError
from meshscope.live.follower import Follower
from meshscope.live.moment import Moment
from meshscope.live.run_name import name_run
from meshscope.page.heat.cells import METRICS, Cells
from meshscope.page.run_state import RunState, StateKind
from meshscope.report import format as form
from meshscope.watch.glance import Glance, take_glance

MAX_STEPS = 4096
"""Last steps of which curves are kept."""


@dataclass(slots=True)
class Watched:
    """One run. `poll` and `analyze` may be called from different threads."""

    follower: Follower
    moment: Moment | None = None
    glance: Glance | None = None
    problem: str = ""
    """Why nothing can be read; empty where it can."""
    metric: str = "excess"
    steps: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    """Number and time of the job's last steps."""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    columns: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Own work above peers by step, newer than the report; one value per rank of its cells."""
    read_s: float = 0.0
    """When the last moment was read, on this process's clock."""
    _glanced: str = ""
    """The metric of the last glance."""
    _lock: Lock = field(default_factory=Lock)

    @classmethod
    def of(cls, path: Path) -> "Watched":
        return cls(Follower(path))

    @property
    def name(self) -> str:
        return name_run(self.follower.path)

    @property
    def state(self) -> RunState:
        if self.moment is not None:
            return self.moment.state
        return RunState(kind=StateKind.OPEN, text="Waiting", note=self.problem)

    def poll(self) -> None:
        """Reads what is new. A run in which nothing was recorded yet is a problem that passes."""
        with self._lock:
            self._poll()

    def _poll(self) -> None:
        try:
            moment = self.follower.poll()
        except RunEmpty as error:
            self.problem = form.clean_text(str(error))
            return
        except RunError as error:
            if self.moment is None:
                raise
            self.problem = form.clean_text(str(error))
            return
        if moment.is_other_attempt:
            self.steps.clear()
            self.losses.clear()
            self.columns, self.glance = {}, None
        self.steps.extend(zip(moment.steps.tolist(), moment.job_ns.tolist(), strict=True))
        for points in moment.series:
            if points.key == "loss":
                self.losses.extend(points.value.tolist())
        self.moment, self.problem, self.read_s = moment, "", time.monotonic()

    def analyze(self, *, now: bool = False) -> bool:
        """Makes a report where one is due, else what is new of the heat map; whether anything
        changed."""
        made = self.follower.report(now=now)
        if made is not None:
            self.poll()  # a report may have found that the job is stuck
        last = made or self.follower.last_report
        if last is not None and (made is not None or self._glanced != self.metric):
            metric = self.metric
            self.glance, self._glanced = take_glance(last.report, self.state, metric), metric
            self.columns = {}
            return True
        found = self.follower.excess() if self.glance is not None else None
        if found is None or not len(found.steps):
            return False
        values = found.value.T.tolist()
        new = dict(zip(found.steps.tolist(), map(tuple, values), strict=True))
        self.columns = dict(list({**self.columns, **new}.items())[-MAX_STEPS:])
        return True

    def switch_metric(self) -> None:
        keys = list(METRICS)
        self.metric = keys[(keys.index(self.metric) + 1) % len(keys)]

    @property
    def cells(self) -> Cells | None:
        """The heat map, with steps that came after the report."""
        cells = None if self.glance is None else self.glance.cells
        if cells is None or cells.metric.key != "excess" or not self.columns:
            return cells
        last = int(cells.steps[-1]) if len(cells.steps) else -1
        newer = {
            step: column
            for step, column in sorted(self.columns.items())
            if step > last and len(column) == len(cells.ranks)
        }
        if not newer:
            return cells
        return Cells(
            metric=cells.metric,
            phase=cells.phase,
            ranks=cells.ranks,
            steps=np.concatenate([cells.steps, np.array(list(newer), dtype=np.int64)]),
            value=np.concatenate([cells.value, np.array(list(newer.values())).T], axis=1),
        )
