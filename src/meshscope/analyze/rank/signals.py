"""The training signals a rank logged: loss, gradient norm, learning rate.

A value that the program logged is shown as it was; nothing is averaged over ranks. NaN and Inf are
counted, and first and last are the first and last finite values.

A loss that the recorder took from backward (`backward_loss`) is one value a step, as the program
means it where that is known: times what it was divided by, where that is the number of the step's
microbatches or where the model returned the loss itself; added up over microbatches, where the
model was told the tokens of the whole step; otherwise the mean of what backward was called on.
Several backward calls of one forward are one microbatch: their losses add up. `source` says which.
With several optimizers each has its own signals, numbered from 2 on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Bools, Floats, Int64s
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.schema import ScalarFlag

SIGNAL_NAMES: dict[str, tuple[str, ...]] = {
    "loss": ("loss", "backward_loss"),
    "grad_norm": ("grad_norm",),
    "lr": ("lr",),
}
"""Signal to the scalars that may hold it, best first."""

BACKWARD_LOSS = "backward_loss"
OWN_LOSS = "own_loss"
"""What the engine logs beside the job's loss: the mean over this rank's own microbatches."""
SECOND_LOSS = f"{BACKWARD_LOSS} 2"
_NUMBERED = frozenset((BACKWARD_LOSS, "grad_norm", "lr"))
"""What the recorder takes of each of several optimizers: from the second on with its number."""
_MAX_NUMBER = 99
_MAX_TEXT = 80
_LOGGED = "logged by the program"
_ROOT = "what backward was called on"
_SHARED_NAME = "the recorder and the program log it under one name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One training signal of one rank."""

    name: str
    """The scalar it was read from, such as `backward_loss`."""
    optimizer: str
    """`Adam of Generator`, where the rank has several; else empty."""
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

    step: Int64s
    value: Floats
    source: str = ""
    """Where a loss comes from and how it is known to be one; empty for other scalars."""


def read_scalars(recording: Recording, wanted: frozenset[str]) -> dict[str, ScalarSeries]:
    """The wanted scalars that the rank logged at least once, with those of further optimizers."""
    ids: dict[str, list[int]] = {}
    for name_id, text in recording.names.items():
        if text in wanted or split_number(text)[0] in wanted:
            ids.setdefault(text, []).append(name_id)
    if not ids:
        return {}
    columns = recording.read("scalars")
    is_there = np.bincount(columns["name_id"], minlength=1) > 0
    ids = {text: found for text, own in ids.items() if (found := _keep_used(own, is_there))}
    usual = _count_microbatches(recording) if BACKWARD_LOSS in ids else 1
    series = {text: _select(columns, text, name_ids, usual) for text, name_ids in ids.items()}
    return {text: found for text, found in series.items() if len(found.step)}


def _keep_used(name_ids: list[int], is_used: Bools) -> list[int]:
    return [one for one in name_ids if one < len(is_used) and is_used[one]]


def split_number(name: str) -> tuple[str, int]:
    """`lr 2` is the rate of the second optimizer; ("", 0) for what is no such name."""
    base, _, number = name.rpartition(" ")
    is_numbered = base in _NUMBERED and number.isdecimal() and 1 < int(number[:4]) <= _MAX_NUMBER
    return (base, int(number)) if is_numbered else ("", 0)


def _count_microbatches(recording: Recording) -> int:
    """Of most steps."""
    counts = int64_column(recording.read("steps"), "num_microbatches")
    return int(np.median(counts)) if len(counts) else 1


def _select(columns: Columns, name: str, name_ids: list[int], usual: int) -> ScalarSeries:
    mask = columns["name_id"] == name_ids[0]
    for name_id in name_ids[1:]:
        mask |= columns["name_id"] == name_id
    is_all = bool(mask.all())
    rows = columns if is_all else {text: column[mask] for text, column in columns.items()}
    if name.startswith(BACKWARD_LOSS):
        return _restore_loss(rows, usual)
    values: Floats = rows["value"].astype(np.float64, copy=False)
    source = _LOGGED if name == "loss" else ""
    return ScalarSeries(step=int64_column(rows, "step"), value=values, source=source)


def _restore_loss(rows: Columns, usual: int) -> ScalarSeries:
    """The loss as the program means it: see the module's docstring.

    `usual`: microbatches of most steps. One that a loader's end cut short is divided alike.
    """
    value, flags = _floats(rows, "value"), _floats(rows, "flags").astype(np.int64)
    is_loss = flags & ScalarFlag.GRADIENT == 0
    if is_loss.any():  # else the program calls torch.autograd.grad alone
        rows = {text: column[is_loss] for text, column in rows.items()}
        value, flags = value[is_loss], flags[is_loss]
    step, index = np.unique(int64_column(rows, "step"), return_inverse=True)
    if not len(step):
        return ScalarSeries(step=step, value=value)
    is_further = flags & ScalarFlag.FURTHER != 0
    counts = np.maximum(np.bincount(index, weights=~is_further).astype(np.int64), 1)
    divisor = _floats(rows, "divisor")
    is_added = flags & ScalarFlag.NORMALIZED != 0
    is_returned = (flags & ScalarFlag.RETURNED != 0) & (divisor != 0)
    common = int(np.bincount(counts).argmax())
    is_shared = (divisor > 1) & (
        (divisor == counts[index]) | (divisor == usual) | (divisor == common)
    )
    factor = np.where(~is_added & (is_returned | is_shared), divisor, 1.0)
    weight = np.where(is_added, 1.0, 1.0 / counts[index])
    with np.errstate(over="ignore", invalid="ignore"):
        parts: Floats = value * factor * weight
        restored: Floats = np.bincount(index, weights=parts, minlength=len(step)).astype(np.float64)
    last = np.flatnonzero(index == len(step) - 1)[-1]
    source = _describe_loss(
        is_added=bool(is_added[last]),
        is_returned=bool(is_returned[last]),
        divisor=float(factor[last]),
        num_microbatches=int(counts[-1]),
        is_unscaled=bool(flags[last] & ScalarFlag.UNSCALED),
        has_further=bool(is_further[last]),
    )
    return ScalarSeries(step=step, value=restored, source=source)


def _floats(rows: Columns, name: str) -> Floats:
    """A column; zeros where the recording is older than it."""
    column = rows.get(name)
    return np.zeros(len(rows["step"])) if column is None else column.astype(np.float64, copy=False)


def _describe_loss(
    *,
    is_added: bool,
    is_returned: bool,
    divisor: float,
    num_microbatches: int,
    is_unscaled: bool,
    has_further: bool,
) -> str:
    text = "what the model returned as its loss" if is_returned and not is_added else _ROOT
    if is_unscaled:
        text += ", before the gradient scaler"
    if has_further:
        text += ", added up over backward calls of one forward"
    if is_added and num_microbatches > 1:
        return f"{text}, added up over {num_microbatches} microbatches (normalised by all tokens)"
    if not is_returned and divisor > 1:
        text += f", times {divisor:g}: the program divided it by its microbatches"
    elif num_microbatches > 1:
        text += f", mean of {num_microbatches} microbatches"
    return text


def choose_scalars(scalars: Mapping[str, ScalarSeries]) -> dict[str, str]:
    """Loss, gradient norm and learning rate, and `loss 2` and so on, to the scalar of each."""
    found: dict[str, str] = {}
    for signal, names in SIGNAL_NAMES.items():
        name = next((name for name in names if name in scalars), None)
        if name is None:
            continue
        found[signal] = name
        others = sorted((split_number(other)[1], other) for other in scalars)
        found |= {f"{signal} {n}": other for n, other in others if other == f"{name} {n}"}
    return found


def find_signals(recording: Recording, scalars: Mapping[str, ScalarSeries]) -> dict[str, Signal]:
    """Loss, gradient norm and learning rate, as far as the rank has them."""
    chosen, owners = choose_scalars(scalars), _read_optimizers(recording)
    return {
        signal: _summarize(recording.rank, name, scalars[name], owners)
        for signal, name in chosen.items()
    }


def _read_optimizers(recording: Recording) -> dict[int, str]:
    """What each optimizer is called, if there are several."""
    found: dict[int, str] = {}
    for update in recording.updates:
        line = update.get("optimizer")
        if isinstance(line, dict) and isinstance(line.get("number"), int):
            kind, model = str(line.get("class"))[:_MAX_TEXT], str(line.get("model", ""))[:_MAX_TEXT]
            found[line["number"]] = f"{kind} of {model}" if model else kind
    return found if len(found) > 1 else {}


def _summarize(rank: int, name: str, series: ScalarSeries, owners: dict[int, str]) -> Signal:
    finite = np.flatnonzero(np.isfinite(series.value))
    num_values = len(series.value)
    none = Unavailable(f"none of its {num_values} values is finite")
    is_own = name != "loss"  # else the program's, of whatever it is
    return Signal(
        name=name,
        optimizer=owners.get(split_number(name)[1] or 1, "") if is_own else "",
        source=series.source or Unavailable(_SHARED_NAME),
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
    further = sorted({name for signals in per_rank for name in signals} - SIGNAL_NAMES.keys())
    for name in (*SIGNAL_NAMES, *further):
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
