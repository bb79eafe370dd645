"""What asks for a trace window beside the schedule, and the file by which a person does.

`RUN/trigger` holds JSON: `{"steps": 2, "ranks": "0,3", "first_step": 120}`, all of it optional, so
that `touch RUN/trigger` is enough. A `first_step` lets ranks that see the file at different moments
trace the same steps; one that has passed means at once.
"""

import json
from dataclasses import dataclass

from meshscope.capture.profiling.rank_choice import RankChoice
from meshscope.errors import UsageError

TRIGGER_NAME = "trigger"
MAX_TRIGGER_BYTES = 4096
MAX_WINDOW_STEPS = 1000
"""Most steps in one request; no viewer opens a longer trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRequest:
    """A window that is due."""

    reason: str
    num_steps: int | None = None
    """None: as many as the schedule's `active`."""
    first_step: int | None = None
    """The first step to be in the trace; None: as soon as possible."""
    ranks: RankChoice | None = None
    """None means the ranks of the settings."""


def parse_request(data: bytes) -> WindowRequest:
    """What a trigger file asks for; UsageError when it makes no sense."""
    fields = _parse_object(data) if data.strip() else {}
    unknown = sorted(set(fields) - {"steps", "ranks", "first_step"})
    if unknown:
        raise UsageError(f"{unknown[0][:40]!r} is unknown; expected steps, ranks, first_step")
    ranks = fields.get("ranks")
    if ranks is not None and not isinstance(ranks, str):
        raise UsageError('ranks must be text, such as "all" or "0,3"')
    return WindowRequest(
        reason="a trigger file",
        num_steps=_read_count(fields.get("steps"), "steps", 1, MAX_WINDOW_STEPS),
        first_step=_read_count(fields.get("first_step"), "first_step", 0, 1 << 62),
        ranks=None if ranks is None else RankChoice.parse(ranks),
    )


def format_request(*, num_steps: int, first_step: int | None, ranks: str | None) -> bytes:
    """What `parse_request` reads."""
    fields = {"steps": num_steps, "first_step": first_step, "ranks": ranks}
    known = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(known).encode() + b"\n"


def _parse_object(data: bytes) -> dict[str, object]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise UsageError('it is no JSON object such as {"steps": 2}')
    return fields


def _read_count(value: object, name: str, lowest: int, highest: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise UsageError(f"{name} must be a whole number from {lowest} to {highest}")
    return value
