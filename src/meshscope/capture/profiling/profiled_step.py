"""Chooses the step whose memory is profiled by default: warm, and in no trace window."""

from meshscope.capture.profiling.window_schedule import WindowSchedule

NUM_COLD_STEPS = 2
"""Steps passed over: optimizer states, buckets and libraries' caches are made in them."""


def choose_step(schedule: WindowSchedule | None, num_steps: int) -> int:
    """The first of so many steps, counted from 0, that is warm and in no window, nor after one,
    where its trace is written; else the first warm one there is."""
    warm = range(min(NUM_COLD_STEPS, num_steps - 1), num_steps)
    if schedule is None:
        return warm[0]
    length = schedule.warmup + schedule.active + 1
    for step in warm[: schedule.skip + 2 * schedule.cycle_steps + length]:
        begins = range(max(step - length + 1, 0), step + 1)
        if not any(schedule.is_begin(begin) for begin in begins):
            return step
    return warm[0]
