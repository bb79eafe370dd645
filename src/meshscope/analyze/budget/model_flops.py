"""FLOPs per step and peak FLOP/s of every rank, from its journal.

FLOPs come from the lines `flops` (counted on the real model, or declared by the program). The peak
comes from the line `peak` (declared or measured) if its dtype is the same, else from the table of
devices by the exact name of the rank's accelerator. A count per microbatch is multiplied by the
microbatches of the rank's median step. Nothing is guessed: a missing dtype, an unknown device or an
implausible number is `Unavailable` with its reason.

What a person gave, with `meshscope run` (line `given_flops`) or to the study, stands above all of
it. It is of the whole job: each rank gets an equal part, which changes no sum.

Wrong where microbatches differ in shape from the counted one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.core.config.given_flops import GivenFlops
from meshscope.core.hardware import find_peak, normalise_dtype
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt

JsonFields = Mapping[str, object]

_GIVEN = "given"
_NO_RECOMPUTATION = "what is computed again was not said"
_NO_DTYPE = "no peak: the dtype was not said; give the peak with --peak-tflops"


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


def read_flops(
    attempt: Attempt, given: GivenFlops | None = None
) -> dict[int, RankFlops] | Unavailable:
    """By rank, without ranks that recorded none; `Unavailable` if none did.

    `given` now stands above what was given at the launch."""
    num_ranks = max(attempt.world_size, len(attempt.ranks), 1)
    found: dict[int, RankFlops] = {}
    reasons: list[str] = []
    for recording in attempt:
        stated = _merge_given(given or GivenFlops(), _last(recording.updates, "given_flops"))
        one = _read_rank_flops(recording, stated, num_ranks)
        if isinstance(one, Unavailable):
            reasons.append(one.reason)
        else:
            found[recording.rank] = one
    return found or Unavailable(reasons[0] if reasons else "there are no ranks")


def _merge_given(now: GivenFlops, at_launch: JsonFields | None) -> GivenFlops:
    """What was given now, and where nothing was, at the launch."""
    said = at_launch or {}
    return GivenFlops(
        flops_per_step=now.flops_per_step or _positive(said.get("flops_per_step")),
        peak_flops_per_s=now.peak_flops_per_s or _positive(said.get("peak_flops_per_s")),
    )


@or_unavailable
def _read_rank_flops(recording: Recording, given: GivenFlops, num_ranks: int) -> RankFlops:
    said = _last(recording.updates, "flops")
    model, hardware, source = need(_find_rank_flops(recording, said or {}, given, num_ranks))
    dtype = (said or {}).get("dtype")
    is_known = isinstance(dtype, str) and dtype not in ("", "unknown")
    known = normalise_dtype(str(dtype)) if is_known else Unavailable(_NO_DTYPE)
    peak, peak_source = _find_rank_peak(recording, said or {}, known)
    if given.peak_flops_per_s is not None:
        peak, peak_source = given.peak_flops_per_s, _GIVEN
    return RankFlops(
        model_flops=model,
        hardware_flops=hardware,
        source=source,
        dtype=known,
        peak_flops_per_s=peak,
        peak_source=peak_source,
    )


@or_unavailable
def _find_rank_flops(
    recording: Recording, said: JsonFields, given: GivenFlops, num_ranks: int
) -> tuple[float, float | Unavailable, str]:
    """The model's FLOPs of a step, those with recomputation, and where they come from."""
    if given.flops_per_step is not None:
        return given.flops_per_step / num_ranks, Unavailable(_NO_RECOMPUTATION), _GIVEN
    if not said and recording.is_from_trace:
        raise Missing("traces do not contain a model's FLOPs; give them with --flops-per-step")
    if not said:
        raise Missing(
            f"FLOPs are not known: {_say_why_uncounted(recording)}; give --flops-per-step, or call "
            "Recorder.count_flops or set_flops"
        )
    model = _positive(said.get("model_flops"))
    if model is None:
        raise Missing(f"FLOPs of rank {recording.rank}: the journal's number is not one")
    factor = need(_count_per_step(recording, said))
    hardware = _positive(said.get("hardware_flops"))
    return (
        model * factor,
        Unavailable(_NO_RECOMPUTATION) if hardware is None else max(hardware, model) * factor,
        str(said.get("source") or "not said"),
    )


def _say_why_uncounted(recording: Recording) -> str:
    refusal = _last(recording.updates, "flop_refusal") or {}
    num_events = _positive(refusal.get("num_events"))
    if num_events is None:
        return "no step was counted"
    num_operators = round(num_events / 2, -3)
    return f"a step runs about {num_operators:,.0f} operators, too many to note in one"


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
            f"no peak for {dtype}: the rank computes on the CPU or does not name its device; give "
            "it with --peak-tflops, or call Recorder.measure_peak or set_peak"
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
