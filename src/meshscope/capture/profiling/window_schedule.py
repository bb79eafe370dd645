"""When trace windows are due: a number of steps passed over, then cycles of wait, warm-up, active.

One profiler step is one training step. Steps are counted from the first one this process finished,
so that a resumed job has its windows as well. A window begins where a step ends, which is why the
first step of a process is in none.
"""

from dataclasses import dataclass

from meshscope.errors import UsageError

MAX_STEPS = 1_000_000_000
FIELDS = ("skip", "wait", "warmup", "active", "repeat")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSchedule:
    """The cycle of windows, as torch.profiler.schedule has it."""

    skip: int = 5
    """Steps skipped at the start, once."""
    wait: int = 1
    """Steps passed over in every cycle."""
    warmup: int = 1
    """Steps profiled and thrown away: the first ones pay for setting the profiler up."""
    active: int = 1
    """Steps that are in the trace."""
    repeat: int = 1
    """Cycles; 0 goes on to the end."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}; expected {lowest} to {MAX_STEPS}"
            for name in FIELDS
            if not (lowest := int(name == "active")) <= (value := getattr(self, name)) <= MAX_STEPS
        ]
        if not problems and not self.skip + self.wait:
            problems = ["skip and wait are both 0, but windows begin where a step ends; skip 1"]
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def cycle_steps(self) -> int:
        """Steps from one window to the next."""
        return self.wait + self.warmup + self.active

    def is_begin(self, num_finished: int) -> bool:
        """Whether a window (its warm-up, if it has one) begins after so many finished steps."""
        cycle, index = divmod(num_finished - self.skip, self.cycle_steps)
        return cycle >= 0 and index == self.wait and (not self.repeat or cycle < self.repeat)

    def is_over(self, num_finished: int) -> bool:
        """Whether no window begins any more."""
        return bool(self.repeat) and num_finished - self.skip >= self.repeat * self.cycle_steps
