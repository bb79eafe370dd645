"""The training signals a rank logged: loss, gradient norm, learning rate.

A value is shown as it was logged; nothing is averaged over ranks. NaN and Inf are counted, and
first and last are the first and last finite values.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.read.recording import Recording

SIGNAL_NAMES: dict[str, tuple[str, ...]] = {
    "loss": ("loss", "backward_loss"),
    "grad_norm": ("grad_norm",),
    "lr": ("lr",),
}
"""Signal to the scalars that may hold it, best first."""

_SOURCES = {
    "loss": "logged by the program",
    "backward_loss": "what backward was called on",
}
"""Where a scalar comes from, if its name says so."""
_SHARED_NAME = "the recorder and the program log it under one name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One training signal of one rank."""

    name: str
    """The scalar it was read from, such as `backward_loss`."""
    source: str | Unavailable
    """Where it comes from, if its name says so: the recorder takes `lr` and `grad_norm` itself."""
    rank: int
    num_values: int
    num_nonfinite: int
    first: float | Unavailable
    """First finite value."""
    last: float | Unavailable
    """Last finite value."""
    last_step: int | Unavailable
    """The step `last` was logged in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarSeries:
    """One scalar of one rank, in the order in which it was logged."""

    step: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]


def read_scalars(recording: Recording, wanted: frozenset[str]) -> dict[str, ScalarSeries]:
    """The wanted scalars that the rank logged at least once."""
    ids: dict[str, list[int]] = {}
    for name_id, text in recording.names.items():
        if text in wanted:
            ids.setdefault(text, []).append(name_id)
    if not ids:
        return {}
    columns = recording.read("scalars")
    series = {text: _select(columns, name_ids) for text, name_ids in ids.items()}
    return {text: found for text, found in series.items() if len(found.step)}


def _select(columns: Columns, name_ids: list[int]) -> ScalarSeries:
    mask = columns["name_id"] == name_ids[0]
    for name_id in name_ids[1:]:
        mask |= columns["name_id"] == name_id
    values: npt.NDArray[np.float64] = columns["value"][mask].astype(np.float64, copy=False)
    return ScalarSeries(step=int64_column(columns, "step")[mask], value=values)


def find_signals(rank: int, scalars: dict[str, ScalarSeries]) -> dict[str, Signal]:
    """Loss, gradient norm and learning rate, as far as the rank has them."""
    signals: dict[str, Signal] = {}
    for signal, names in SIGNAL_NAMES.items():
        name = next((name for name in names if name in scalars), None)
        if name is not None:
            signals[signal] = _summarize(rank, name, scalars[name])
    return signals


def _summarize(rank: int, name: str, series: ScalarSeries) -> Signal:
    finite = np.flatnonzero(np.isfinite(series.value))
    num_values = len(series.value)
    none = Unavailable(f"none of its {num_values} values is finite")
    return Signal(
        name=name,
        source=_SOURCES.get(name, Unavailable(_SHARED_NAME)),
        rank=rank,
        num_values=num_values,
        num_nonfinite=num_values - len(finite),
        first=float(series.value[finite[0]]) if len(finite) else none,
        last=float(series.value[finite[-1]]) if len(finite) else none,
        last_step=int(series.step[finite[-1]]) if len(finite) else none,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSignal:
    """A signal of the job: that of the lowest rank that has it."""

    shown: Signal
    num_ranks: int
    """Ranks that logged it."""
    num_nonfinite: int
    """Values that are NaN or infinite, over all ranks."""
    nonfinite_ranks: tuple[int, ...]


def merge_signals(per_rank: list[dict[str, Signal]]) -> dict[str, JobSignal | Unavailable]:
    merged: dict[str, JobSignal | Unavailable] = {}
    for name in SIGNAL_NAMES:
        found = [signals[name] for signals in per_rank if name in signals]
        if not found:
            merged[name] = Unavailable(f"no rank logged {' or '.join(SIGNAL_NAMES[name])}")
            continue
        bad = tuple(signal.rank for signal in found if signal.num_nonfinite)
        merged[name] = JobSignal(
            shown=next((s for s in found if not isinstance(s.last, Unavailable)), found[0]),
            num_ranks=len(found),
            num_nonfinite=sum(signal.num_nonfinite for signal in found),
            nonfinite_ranks=bad,
        )
    return merged
