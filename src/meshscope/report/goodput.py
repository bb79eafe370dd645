"""What became of the time that a run was given, over all its launches: parts that sum to the whole.

By the first rank of each launch that finished a step, on its host's wall clock:

    start-up   from the launch to its first step; all of a launch without one
    useful     in steps that no later launch did again
    rework     in steps that a later launch did again: it went back to a checkpoint
    waiting    between steps, and after the last one until the recording ends; where steps of a very
               long run were thinned away, they are taken to have been like those around them
    restart    between the end of a launch and the next one

Wrong by what clocks of hosts differ where launches were on different ones, and where a program
counts its steps anew after a restart: all steps before it are rework then. What a step itself
loses is no part of this: `meshscope report` has it.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import last_sign_of_life_ns
from meshscope.store.read.run import Attempt, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Wall clock of one rank; the parts sum to `allocated_ns`."""

    allocated_ns: int
    """From the first launch to the last sign of life."""
    useful_ns: int
    startup_ns: int
    waiting_ns: int
    rework_ns: int
    restart_ns: int
    rank_ns: int
    """The allocation of all ranks together, each launch by its own number of ranks."""

    @property
    def useful_ratio(self) -> float:
        return self.useful_ns / self.allocated_ns if self.allocated_ns > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Launch:
    start_ns: int
    end_ns: int
    world_size: int
    number: Int64s
    step_start_ns: Int64s
    step_end_ns: Int64s


def measure_goodput(run: Run) -> Goodput | Unavailable:
    launches = [_read_launch(attempt) for attempt in run.attempts]
    if any(launch is None for launch in launches):
        return Unavailable("a launch does not say when it began")
    parts = dict.fromkeys(("useful", "startup", "waiting", "rework", "restart", "rank"), 0)
    known = [launch for launch in launches if launch is not None]
    now = known[0].start_ns
    for index, launch in enumerate(known):
        begin = max(launch.start_ns, now)
        parts["restart"] += begin - now
        parts["rank"] += (begin - now) * known[max(index - 1, 0)].world_size
        redone_from = min(
            (int(later.number.min()) for later in known[index + 1 :] if len(later.number)),
            default=np.iinfo(np.int64).max,
        )
        now = max(launch.end_ns, begin)
        parts["rank"] += (now - begin) * launch.world_size
        for name, taken in _split(launch, begin, now, redone_from).items():
            parts[name] += taken
    return Goodput(
        allocated_ns=now - known[0].start_ns,
        **{f"{name}_ns": taken for name, taken in parts.items()},
    )


def _split(launch: _Launch, begin: int, end: int, redone_from: int) -> dict[str, int]:
    """One launch, every moment once: where steps overlap, the earlier one has it."""
    start = np.clip(launch.step_start_ns, begin, end)
    stop = np.clip(launch.step_end_ns, begin, end)
    order = np.argsort(start, kind="stable")
    start, stop, number = start[order], stop[order], launch.number[order]
    if not len(number):
        return {"startup": end - begin}
    before = np.concatenate(([begin], np.maximum.accumulate(stop)[:-1]))
    taken = np.maximum(stop - np.maximum(start, before), 0)
    taken[:-1] += _estimate_missing(number, start, before, taken)
    is_redone = number >= redone_from
    in_steps, startup = int(taken.sum()), int(start[0]) - begin
    return {
        "startup": startup,
        "useful": int(taken[~is_redone].sum()),
        "rework": int(taken[is_redone].sum()),
        "waiting": end - begin - startup - in_steps,
    }


def _estimate_missing(number: Int64s, start: Int64s, before: Int64s, taken: Int64s) -> Int64s:
    """Per step except the last: time in steps that are not there any more, until the next one."""
    between = np.maximum(start[1:] - before[1:], 0)
    num_missing = np.maximum(np.diff(number) - 1, 0)
    gaps = between[num_missing == 0]
    step_ns, gap_ns = float(taken.mean()), float(gaps.mean()) if len(gaps) else 0.0
    in_steps, in_gaps = num_missing * step_ns, (num_missing + 1) * gap_ns
    found: Int64s = (between * (in_steps / np.maximum(in_steps + in_gaps, 1.0))).astype(np.int64)
    return found


def _read_launch(attempt: Attempt) -> _Launch | None:
    recordings = [one for one in attempt if one.start_unix_ns]
    if not recordings:
        return None
    first = next((one for one in recordings if one.count_rows("steps")), recordings[0])
    steps = first.read("steps")
    offset_ns = first.unix_offset_ns
    return _Launch(
        start_ns=first.start_unix_ns,
        end_ns=last_sign_of_life_ns(first),
        world_size=attempt.world_size,
        number=int64_column(steps, "step"),
        step_start_ns=int64_column(steps, "start_host_mono_ns") + offset_ns,
        step_end_ns=int64_column(steps, "end_host_mono_ns") + offset_ns,
    )
