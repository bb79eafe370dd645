"""FLOPs per step and peak FLOP/s of every rank, from its journal.

FLOPs come from the lines `flops` (counted on the real model, or declared by the program). The peak
comes from the line `peak` (declared or measured) if its dtype is the same, else from the table of
devices by the exact name of the rank's accelerator. A count per microbatch is multiplied by the
microbatches of the rank's median step. Nothing is guessed: a missing dtype, an unknown device or an
implausible number is `Unavailable` with its reason.

Wrong where microbatches differ in shape from the counted one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.core.hardware import find_peak, normalise_dtype
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import TRACE_SOURCE, Attempt

JsonFields = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFlops:
    """What one rank computes in a step."""

    model_flops: float
    hardware_flops: float | Unavailable
    """Including recomputation; `Unavailable` if not declared."""
    source: str
    """Where the FLOPs come from."""
    dtype: str | Unavailable
    """Of most of the computation."""
    peak_flops_per_s: float | Unavailable
    peak_source: str
    """Where the peak comes from; empty without one."""


def read_flops(attempt: Attempt) -> dict[int, RankFlops] | Unavailable:
    """By rank, without ranks that recorded none; `Unavailable` if none did."""
    found: dict[int, RankFlops] = {}
    reasons: list[str] = []
    for recording in attempt:
        one = _read_rank_flops(recording)
        if isinstance(one, Unavailable):
            reasons.append(one.reason)
        else:
            found[recording.rank] = one
    return found or Unavailable(reasons[0] if reasons else "there are no ranks")


@or_unavailable
def _read_rank_flops(recording: Recording) -> RankFlops:
    said = _last(recording.updates, "flops")
    if said is None and recording.header.get("source") == TRACE_SOURCE:
        raise Missing("traces do not contain a model's FLOPs")
    if said is None:
        raise Missing("FLOPs are not known: call Recorder.count_flops(model, batch) or set_flops")
    model = _positive(said.get("model_flops"))
    if model is None:
        raise Missing(f"FLOPs of rank {recording.rank}: the journal's number is not one")
    factor = need(_count_per_step(recording, said))
    hardware = _positive(said.get("hardware_flops"))
    dtype = said.get("dtype")
    is_known = isinstance(dtype, str) and dtype not in ("", "unknown")
    known = normalise_dtype(str(dtype)) if is_known else Unavailable("the dtype was not said")
    peak, peak_source = _find_rank_peak(recording, said, known)
    return RankFlops(
        model_flops=model * factor,
        hardware_flops=Unavailable("what is computed again was not said")
        if hardware is None
        else max(hardware, model) * factor,
        source=str(said.get("source") or "not said"),
        dtype=known,
        peak_flops_per_s=peak,
        peak_source=peak_source,
    )


def _count_per_step(recording: Recording, said: JsonFields) -> float | Unavailable:
    if said.get("per") != "microbatch":
        return 1.0
    counts = int64_column(recording.read("steps"), "num_microbatches")
    counts = counts[counts > 0]
    if not len(counts):
        return Unavailable(
            f"FLOPs of rank {recording.rank} are per microbatch, and its steps say of no microbatch"
        )
    return float(np.median(counts))


def _find_rank_peak(
    recording: Recording, said: JsonFields, dtype: str | Unavailable
) -> tuple[float | Unavailable, str]:
    """The rank's peak for a dtype and its source."""
    if isinstance(dtype, Unavailable):
        return dtype, ""
    declared = _last(recording.updates, "peak")
    rate = _positive(declared.get("flops_per_s")) if declared else None
    if declared is not None and rate is not None and declared.get("dtype") == dtype:
        return rate, str(declared.get("source") or "declared")
    device = said.get("device") or _device_of(recording)
    if not isinstance(device, str):
        return Unavailable(
            f"no peak for {dtype}: the rank computes on the CPU or does not name its device; call "
            "Recorder.measure_peak or set_peak"
        ), ""
    found = find_peak(device, dtype)
    source = "" if isinstance(found, Unavailable) else f"table, {device}, dense {dtype}"
    return found, source


def _device_of(recording: Recording) -> object:
    """Name of the rank's accelerator from its provenance; None if unknown."""
    provenance = _fields(recording.header.get("provenance"))
    devices = _fields(provenance.get("torch")).get("devices")
    if not isinstance(devices, list):
        return None
    names = {_fields(device).get("name") for device in devices}
    return names.pop() if len(names) == 1 else None


def _last(updates: Iterable[JsonFields], name: str) -> JsonFields | None:
    found = None
    for line in updates:
        value = line.get(name)
        if isinstance(value, dict):
            found = value
    return found


def _fields(value: object) -> JsonFields:
    return value if isinstance(value, dict) else {}


def _positive(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number > 0 else None
