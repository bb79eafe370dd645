"""The budget's lines over steps, and by rank and step where the run is small."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.analyze.study import Study
from meshscope.core.unavailable import need, or_unavailable
from meshscope.page.heat.cells import Cells, Metric
from meshscope.page.heat.matrix import Matrix, Window, draw_matrix, find_edges, pack_matrix

_MAX_COLUMNS = 400
_MAX_CELLS = 1_000_000
"""Ranks times steps times lines that are sent as they are."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBudget:
    """The budget's lines over steps; the same time as in the report's budget."""

    lines: tuple[str, ...]
    """Names, as in the report's budget."""
    step_edges: tuple[int, ...]
    """Column c covers steps from `step_edges[c]` to below `step_edges[c + 1]`."""
    num_steps: tuple[int, ...]
    """Steps of each column; 0 where they were left out."""
    mean_ns: _Floats
    """[line, column]: per rank and step; 0 where there is no step."""
    wall_ns: _Floats
    """By column, per rank and step: the lines and what none explains."""
    highest_wall_ns: _Floats
    """By column: the longest step of any rank."""
    cells: tuple[Matrix, ...]
    """By line, [rank, step]; empty where that would be too much."""


@or_unavailable
def spread_budget(study: Study) -> StepBudget:
    budget = need(study.budget)
    recorded = study.steps.step
    edges = find_edges(budget.steps, recorded, _MAX_COLUMNS)
    start = np.searchsorted(budget.steps, edges[:-1])
    count = np.searchsorted(budget.steps, edges[1:]) - start
    columns = np.flatnonzero(count)
    per_cell = np.maximum(count[columns] * len(budget.ranks), 1)

    def sum_columns(by_step: _Floats) -> _Floats:
        """[..., column] of [..., step]."""
        found = np.zeros((*by_step.shape[:-1], len(count)))
        sums = np.add.reduceat(by_step, start[columns], axis=-1)
        found[..., columns] = sums / per_cell
        return found

    highest = np.zeros(len(count))
    longest = budget.wall_ns.max(axis=0).astype(np.float64)
    highest[columns] = np.maximum.reduceat(longest, start[columns])
    return StepBudget(
        lines=tuple(line.name for line in budget.lines),
        step_edges=tuple(edges.tolist()),
        num_steps=tuple(count.tolist()),
        mean_ns=sum_columns(budget.time_ns.sum(axis=0).T.astype(np.float64)),
        wall_ns=sum_columns(budget.wall_ns.sum(axis=0).astype(np.float64)),
        highest_wall_ns=highest,
        cells=_pack_lines(study) if budget.time_ns.size <= _MAX_CELLS else (),
    )


def _pack_lines(study: Study) -> tuple[Matrix, ...]:
    budget = need(study.budget)
    window = Window(num_rows=len(budget.ranks), num_columns=study.steps.num_steps + 1)
    return tuple(
        pack_matrix(
            draw_matrix(
                Cells(
                    metric=Metric(key=f"line:{index}", label=line.name, denial=""),
                    phase=None,
                    ranks=budget.ranks,
                    steps=budget.steps,
                    value=np.maximum(budget.time_ns[:, :, index], 0).astype(np.float64),
                ),
                study.steps.step,
                window,
            )
        )
        for index, line in enumerate(budget.lines)
    )
