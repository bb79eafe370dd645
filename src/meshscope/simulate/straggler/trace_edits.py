"""Prices the edits of a command line, on a straggler trace.

Phases are the trace's operation types; ideal is even (`straggler_replay`). A trace has no schedule
or layers that could be changed.
"""

from collections.abc import Iterable

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.errors import UsageError
from meshscope.ingest.straggler.straggler_dependencies import AXIS_OF_TYPE, COMMUNICATION
from meshscope.simulate.edit_text import EditKind, WantedEdit
from meshscope.simulate.run_edits import PricedEdit
from meshscope.simulate.straggler.straggler_replay import StragglerReplay
from meshscope.store.read.arrays import Bools


def price_trace_edits(replay: StragglerReplay, wanted: list[WantedEdit]) -> list[PricedEdit]:
    """In the order given; UsageError if the trace does not have what an edit names."""
    fidelity = replay.fidelity()
    found = []
    for one in wanted:
        chosen = _choose(replay, one)
        if isinstance(chosen, Unavailable):
            found.append(PricedEdit(text=one.text, gain=chosen))
            continue
        if one.factor is None:
            durations = replay.even(chosen)
        else:
            factor = 1 / one.factor if one.kind is EditKind.BANDWIDTH else one.factor
            durations = np.where(chosen, replay.measured_s * factor, replay.measured_s)
        found.append(PricedEdit(text=one.text, gain=replay.price(durations, fidelity)))
    return found


def _choose(replay: StragglerReplay, wanted: WantedEdit) -> Bools | Unavailable:
    """Operations [operation, step, dp], or a shape that broadcasts to it."""
    trace = replay.trace
    optypes = [one.optype for one in trace.operations]
    if wanted.kind is EditKind.RANKS:
        _check(wanted, "rank", trace.ranks.reshape(-1).tolist())
        return replay.is_worker(wanted.numbers)
    if wanted.kind is EditKind.AXIS:
        return _choose_along(replay, wanted)
    if wanted.kind is EditKind.PHASE:
        if wanted.name not in optypes:
            known = ", ".join(dict.fromkeys(optypes))
            raise UsageError(f"edit {wanted.text!r}: the trace has no such type; it has {known}")
        return _make_mask(optype == wanted.name for optype in optypes)
    if wanted.kind is EditKind.COMPUTE:
        return _make_mask(optype not in COMMUNICATION for optype in optypes)
    if wanted.kind is EditKind.BANDWIDTH:
        along = [AXIS_OF_TYPE.get(optype, "") for optype in optypes]
        if wanted.name and wanted.name not in along:
            known = ", ".join(sorted(set(along) - {""}))
            raise UsageError(f"edit {wanted.text!r}: the trace has transfers along {known} only")
        return _make_mask(axis == wanted.name if wanted.name else axis != "" for axis in along)
    return Unavailable("a straggler trace does not say what another schedule or layer split needs")


def _choose_along(replay: StragglerReplay, wanted: WantedEdit) -> Bools | Unavailable:
    trace = replay.trace
    if wanted.name == "pp":
        _check(wanted, "stage", list(range(trace.num_stages)))
        return _make_mask(one.stage in wanted.numbers for one in trace.operations)
    if wanted.name == "dp":
        _check(wanted, "dp rank", list(trace.dp_ranks))
        return np.isin(trace.dp_ranks, wanted.numbers)[None, None, :]
    return Unavailable(f"a straggler trace has no ranks along {wanted.name}")


def _check(wanted: WantedEdit, noun: str, known: list[int]) -> None:
    missing = [number for number in wanted.numbers if number not in known]
    if missing:
        raise UsageError(
            f"edit {wanted.text!r}: the trace has no {noun} {missing[0]}; it has {min(known)} to "
            f"{max(known)}"
        )


def _make_mask(flags: Iterable[bool]) -> Bools:
    return np.array(list(flags), dtype=np.bool_)[:, None, None]
