"""Steps and tokens per second, gaps included.

A rank's rate is over its wall clock from its first step's start to its last step's end. Tokens
are the scalar `tokens` the program logged, each value taken as tokens since the value before,
else the step table's `input_tokens`, which the recorder counts from the model's integer inputs.
The job's tokens/s is the sum over the ranks at tp 0 and pp 0: tensor-parallel ranks and pipeline
stages work on the same tokens, the other axes on different ones.

Wrong when a program logs the job's tokens on every rank rather than the rank's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from meshscope.analyze.rank.phases import StepTimes
from meshscope.analyze.rank.signals import ScalarSeries
from meshscope.core.layout import Axis, Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.read.rank_ranges import abbreviate_ranks

TOKEN_SOURCES: dict[str, str] = {
    "tokens": "logged by the program as tokens",
    "input_tokens": "counted by the recorder from the model's integer inputs",
}
"""Sources of token counts, best first: a scalar, then a column of the step table."""
_MAX_LACKING_LISTED = 1000
"""The most ranks without tokens to list; a header may claim a million ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRate:
    """Tokens per second of one rank, or of the job."""

    tokens_per_s: float
    source: str
    """One of TOKEN_SOURCES."""
    num_steps: int
    """Steps that have a value."""
    num_nonfinite: int
    """Values left out because they are NaN or infinite."""
    num_ranks: int = 1
    """Ranks summed."""


RankTokens = Mapping[str, TokenRate]
"""Per entry of TOKEN_SOURCES that the rank has."""


def measure_steps_per_s(steps: StepTimes) -> float | Unavailable:
    """Finished steps over the time from the first one's start to the last one's end."""
    span_ns = stepping_ns(steps)
    return len(steps) * 1e9 / span_ns if span_ns > 0 else Unavailable("no step finished")


def stepping_ns(steps: StepTimes) -> int:
    """From the first step's start to the last step's end; 0 without steps."""
    return int(steps.end_ns[-1]) - int(steps.start_ns[0]) if len(steps) else 0


def measure_tokens(
    steps: StepTimes, step_table: Columns, logged: ScalarSeries | None
) -> RankTokens:
    """The rank's token rates; `logged` is its scalar `tokens`."""
    span_ns = stepping_ns(steps)
    rates: dict[str, TokenRate] = {}
    for name, series in (("tokens", logged), ("input_tokens", _count_inputs(step_table))):
        if series is None or span_ns <= 0:
            continue
        in_steps = (series.step >= steps.step.min()) & (series.step <= steps.step.max())
        finite = in_steps & np.isfinite(series.value)
        num_logged = _count_distinct(series.step[finite])
        if num_logged:
            with np.errstate(
                over="ignore", invalid="ignore"
            ):  # absurd values: the report names inf
                total = float(series.value[finite].sum())
            rates[name] = TokenRate(
                tokens_per_s=total * 1e9 / span_ns,
                source=TOKEN_SOURCES[name],
                num_steps=num_logged,
                num_nonfinite=int(np.count_nonzero(in_steps)) - int(np.count_nonzero(finite)),
            )
    return rates


def pick_rank_tokens(rates: RankTokens) -> TokenRate | Unavailable:
    """The logged rate, else the one the recorder counted."""
    for name in TOKEN_SOURCES:
        if name in rates:
            return rates[name]
    return Unavailable("the rank logged no tokens and its model has no integer inputs")


def sum_tokens(
    per_rank: Mapping[int, RankTokens], layout: Layout | Unavailable, world_size: int
) -> TokenRate | Unavailable:
    if world_size == 1:
        return pick_rank_tokens(per_rank.get(0, {}))
    if isinstance(layout, Unavailable):
        return Unavailable(f"which ranks share tokens is not known: {layout.reason}")
    counted = [rank for rank in sorted(per_rank) if _is_counted(layout, rank)]
    num_counted = layout.world_size // (layout.tp * layout.pp)
    for name in TOKEN_SOURCES:
        rates = [per_rank[rank][name] for rank in counted if name in per_rank[rank]]
        if len(rates) == num_counted:
            return TokenRate(
                tokens_per_s=sum(rate.tokens_per_s for rate in rates),
                source=TOKEN_SOURCES[name],
                num_steps=max(rate.num_steps for rate in rates),
                num_nonfinite=sum(rate.num_nonfinite for rate in rates),
                num_ranks=len(rates),
            )
    if sum(1 for rank in counted if per_rank[rank]) == num_counted:
        return Unavailable("some ranks log tokens and others have only input_tokens")
    lacking = _list_lacking(per_rank, layout)
    ranks = f"rank {lacking}" if lacking.isdigit() else f"ranks {lacking}"
    return Unavailable(f"no tokens were logged or counted on {ranks}")


def _is_counted(layout: Layout, rank: int) -> bool:
    """Whether the rank is at tp 0 and pp 0."""
    return all(
        rank // layout.stride(axis) % layout.degree(axis) == 0 for axis in (Axis.TP, Axis.PP)
    )


def _list_lacking(per_rank: Mapping[int, RankTokens], layout: Layout) -> str:
    """The first ranks that should have counted tokens and did not."""
    lacking = (
        rank
        for rank in range(layout.world_size)
        if not per_rank.get(rank) and _is_counted(layout, rank)
    )
    text = abbreviate_ranks(islice(lacking, _MAX_LACKING_LISTED))
    is_cut = next(lacking, None) is not None
    return text if not is_cut or text.endswith("…") else f"{text} …"


def _count_inputs(step_table: Columns) -> ScalarSeries:
    counts = int64_column(step_table, "input_tokens")
    is_counted = counts >= 0
    return ScalarSeries(
        step=int64_column(step_table, "step")[is_counted],
        value=counts[is_counted].astype(np.float64),
    )


def _count_distinct(steps: Int64s) -> int:
    if len(steps) and bool((steps[1:] >= steps[:-1]).all()):  # as a rank logs them
        return 1 + int(np.count_nonzero(steps[1:] != steps[:-1]))
    return len(np.unique(steps))
