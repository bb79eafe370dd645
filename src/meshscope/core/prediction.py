"""What was predicted of a run before it began: stored with it, to be held against it later.

    recorder.session.add_prediction(prediction.as_fields())
    read_prediction(fields)     # of a rank's recording

It is never changed after the start, and nothing of the run goes into it but what `calibrated_on`
names. Lines of time are those of `LINES`; they sum to the step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.core.unavailable import Missing, Unavailable, or_unavailable

LINES = ("compute", "bubble", "tp", "dp", "pp", "other")
"""`other` is the update of weights and what a step takes once."""
_MAX_FITTED = 32
_MAX_STAGES = 1024
_MAX_CHARACTERS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTime:
    step_ns: float
    interval_ratio: float
    """Nine of ten steps are expected within this share of it."""
    lines_ns: Mapping[str, float]
    calibrated_on: str
    """What the constants come from, in words."""
    fitted: tuple[str, ...] = ()
    """What was fitted, each in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    time: PredictedTime | Unavailable
    memory_bytes: Mapping[int, Mapping[str, int]]
    """Tensors of a rank at its fullest, by pipeline rank and category."""

    def as_fields(self) -> dict[str, object]:
        """Plain values, for a rank's journal."""
        time = self.time
        shown: dict[str, object] = {
            "memory_bytes": {str(rank): dict(parts) for rank, parts in self.memory_bytes.items()}
        }
        if isinstance(time, Unavailable):
            return {**shown, "no_time": time.reason}
        return {
            **shown,
            "step_ns": time.step_ns,
            "interval_ratio": time.interval_ratio,
            "calibrated_on": time.calibrated_on,
            "lines_ns": dict(time.lines_ns),
            "fitted": list(time.fitted),
        }


def read_prediction(fields: Mapping[str, object]) -> Prediction:
    """Of a recording's fields; what is not of its kind is as if it were not there."""
    memory: dict[int, dict[str, int]] = {}
    for rank, parts in list(_open(fields.get("memory_bytes")).items())[:_MAX_STAGES]:
        if rank.isascii() and rank.isdecimal() and len(rank) <= 4:
            sizes = {part: _read_number(size) for part, size in _open(parts).items()}
            memory[int(rank)] = {
                part: int(size) for part, size in sizes.items() if size is not None
            }
    return Prediction(time=_read_time(fields), memory_bytes=memory)


@or_unavailable
def _read_time(fields: Mapping[str, object]) -> PredictedTime:
    step_ns, width = (_read_number(fields.get(key)) for key in ("step_ns", "interval_ratio"))
    if not step_ns or width is None:
        reason = fields.get("no_time")
        raise Missing(reason if isinstance(reason, str) and reason else "no step was predicted")
    lines = {name: _read_number(_open(fields.get("lines_ns")).get(name)) for name in LINES}
    fitted = fields.get("fitted")
    return PredictedTime(
        step_ns=step_ns,
        interval_ratio=width,
        lines_ns={name: value for name, value in lines.items() if value is not None},
        calibrated_on=str(fields.get("calibrated_on", "not said"))[:_MAX_CHARACTERS],
        fitted=tuple(
            text[:_MAX_CHARACTERS]
            for text in (fitted if isinstance(fitted, list) else [])[:_MAX_FITTED]
            if isinstance(text, str)
        ),
    )


def _open(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _read_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None
