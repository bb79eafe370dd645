"""Shows how far a running job is, read from the run it is writing.

At a terminal the status stands in the last row, kept free by a scroll region, so that whatever the
job prints scrolls above it undisturbed. Elsewhere it is a plain line every ten seconds.
"""

import os
import shutil
from typing import TextIO

from meshscope.core.unit_text import count, duration, plural, rate
from meshscope.store.read.tail import LiveView, RunTail

_TERMINAL_TICK_S = 0.5
_PLAIN_TICK_S = 10.0

_SAVE, _RESTORE, _CLEAR_LINE, _CLEAR_BELOW = "\x1b7", "\x1b8", "\x1b[2K", "\x1b[J"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def describe_progress(view: LiveView, total_steps: int | None) -> str:
    """One line: step, ranks, step time, tokens, time left; unknown values are left out."""
    if not view.num_ranks:
        return "waiting for the first step"
    ranks = f"{plural(view.num_ranks, 'rank')} recording"
    if view.last_step is None:
        return f"first step under way, {ranks}"
    num_done = view.last_step + 1
    done = plural(num_done, "step")
    if total_steps is not None:
        done = f"{count(num_done)} of {plural(total_steps, 'step')}"
    parts = [f"{done} done", ranks]
    if view.mean_step_ns is not None:
        parts.append(f"{duration(view.mean_step_ns)} per step")
        if view.tokens_per_s is not None:
            parts.append(f"{rate(view.tokens_per_s, 'tokens')} per rank")
        if total_steps is not None and num_done < total_steps:
            parts.append(f"{duration((total_steps - num_done) * view.mean_step_ns)} left")
    return ", ".join(parts)


class PlainProgress:
    """A line every few seconds, for logs."""

    tick_s = _PLAIN_TICK_S

    def __init__(self, tail: RunTail, stream: TextIO, total_steps: int | None) -> None:
        self._tail = tail
        self._stream = stream
        self._total_steps = total_steps

    def update(self) -> None:
        text = describe_progress(self._tail.look(), self._total_steps)
        self._stream.write(f"meshscope: {text}\n")
        self._stream.flush()

    def __enter__(self) -> "PlainProgress":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to undo."""


class StatusLine:
    """The last row of a terminal; it is given back at the end of the block."""

    tick_s = _TERMINAL_TICK_S

    def __init__(self, tail: RunTail, stream: TextIO, total_steps: int | None) -> None:
        self._tail = tail
        self._stream = stream
        self._total_steps = total_steps
        self._size: os.terminal_size | None = None

    def __enter__(self) -> "StatusLine":
        self.update()
        return self

    def update(self) -> None:
        """Draws the status, in a new row if the terminal was resized."""
        size = shutil.get_terminal_size()
        if size.lines < 3:
            return
        reserve = ""
        if size != self._size:
            self._size = size
            # Setting the region moves the cursor home, hence saved and restored around it. The
            # new line makes room when the cursor stood in the last row.
            reserve = f"\n{_SAVE}\x1b[1;{size.lines - 1}r{_RESTORE}\x1b[1A"
        text = " meshscope: " + describe_progress(self._tail.look(), self._total_steps)
        from rich.cells import set_cell_size  # not where there is no terminal: a launch is quick

        text = set_cell_size(text, max(1, min(len(text), size.columns - 1)))
        self._write(
            f"{reserve}{_SAVE}\x1b[{size.lines};1H{_CLEAR_LINE}{_BOLD}{text}{_PLAIN}{_RESTORE}"
        )

    def _write(self, text: str) -> None:
        # One write, so that the job's output cannot come in between.
        self._stream.write(text)
        self._stream.flush()

    def __exit__(self, *error: object) -> None:
        if self._size is None:
            return
        try:
            self._write(f"{_SAVE}\x1b[r{_RESTORE}{_CLEAR_BELOW}")
        except OSError:  # the terminal is gone
            pass
