"""Which steps of a long run are read in full, so that they fit in memory.

A run that fits is taken whole. A longer run is sampled by windows of consecutive steps, spread over
the run, the last one longest: they show early events as well as the present. Events between two
windows are not seen; `Timeline.num_left_out` counts those steps, `timeline.run_weights` says what
stands for them.
"""

from dataclasses import dataclass

_MIN_WINDOW_STEPS = 5
"""Shorter windows lose too much at their borders."""
_FEWEST_WINDOWS = 8
_MOST_WINDOWS = 64
_USUAL_WINDOW_STEPS = 128
_LAST_SHARE = 0.4
"""Share of the steps in the last window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """The most a timeline may hold."""

    max_rank_steps: int = 200_000
    """Ranks times steps."""
    max_rows: int = 2_000_000
    """Recorded rows of phases, operations, waits and actions, all ranks together."""
    num_windows: int | None = None
    """The most windows of consecutive steps; None: by how many steps are kept."""

    def count_windows(self, num_kept: int) -> int:
        """Many windows miss less between them, long ones show more of how steps follow another."""
        if self.num_windows is not None:
            return self.num_windows
        return max(_FEWEST_WINDOWS, min(num_kept // _USUAL_WINDOW_STEPS, _MOST_WINDOWS))


def choose_windows(first: int, last: int, num_kept: int, num_windows: int) -> list[tuple[int, int]]:
    """Windows of step numbers (both ends included) between `first` and `last`, in order."""
    num_steps = last - first + 1
    if num_kept >= num_steps:
        return [(first, last)] if num_steps > 0 else []
    num_kept = max(num_kept, 1)
    count = max(1, min(num_windows, num_kept // _MIN_WINDOW_STEPS))
    if count == 1:
        return [(last - num_kept + 1, last)]
    last_length = max(int(num_kept * _LAST_SHARE), num_kept // count)
    length = max((num_kept - last_length) // (count - 1), 1)
    stride = (num_steps - last_length) / (count - 1)
    starts = [first + int(index * stride) for index in range(count - 1)]
    windows = [(start, start + length - 1) for start in starts]
    windows.append((last - last_length + 1, last))
    return _join_touching(windows)


def _join_touching(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined = windows[:1]
    for start, end in windows[1:]:
        if start <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
