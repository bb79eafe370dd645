"""What a launch left behind: which ranks recorded, and which of them ended abnormally.

Read from the journals alone. A rank that was killed has no closing line; one whose program ended
with an uncaught exception has one, and a line before it that names the exception. A rank that
called sys.exit with an error looks like any other: its launcher reports that code.
Standard library only.
"""

import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshscope.capture.launching.launch import SIGNAL_EXIT_BASE, Launch, find_ignored_environment
from meshscope.store.read.tail import list_attempts, list_ranks, read_step_tail
from meshscope.store.write.journal import EXIT_LINE, JOURNAL_NAME, read_journal
from meshscope.store.write.manifest import place_new
from meshscope.store.write.writer import MANIFEST_NAME, attempt_dir_name, rank_dir_name

_MAX_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankEnd:
    """How one rank's last attempt in a launch ended."""

    rank: int
    last_step: int | None
    """Last finished step; None when it finished none."""
    exception: str | None
    """The uncaught exception its program ended with."""
    is_closed: bool
    """False: no closing line, so the process was killed or is still there."""

    @property
    def is_abnormal(self) -> bool:
        """Whether something other than the end of its program ended it."""
        return not self.is_closed or self.exception is not None

    def describe(self) -> str:
        """One line for the terminal."""
        step = "no step finished" if self.last_step is None else f"last step {self.last_step}"
        how = "no closing line: it was killed or could not clean up"
        if self.exception is not None:  # anything may be in it: one line, nothing to act on
            text = " ".join(self.exception.split())
            how = "".join(letter for letter in text if letter.isprintable())
        return f"rank {self.rank} ended abnormally: {step}, {how}"


def find_recording_ranks(launch: Launch) -> list[int]:
    """Ranks that have added an attempt since the launch was prepared."""
    return [
        rank
        for rank in list_ranks(launch.run_dir)
        if len(list_attempts(launch.run_dir / rank_dir_name(rank)))
        > launch.num_earlier_attempts.get(rank, 0)
    ]


def _find_rank_ends(launch: Launch, ranks: Sequence[int]) -> list[_RankEnd]:
    """How each of these ranks ended in the launch's last attempt."""
    ends = []
    for rank in ranks:
        rank_dir = launch.run_dir / rank_dir_name(rank)
        ends.append(_read_end(rank, rank_dir / attempt_dir_name(list_attempts(rank_dir)[-1])))
    return ends


def _read_end(rank: int, attempt_dir: Path) -> _RankEnd:
    try:
        lines, _ = read_journal((attempt_dir / JOURNAL_NAME).read_bytes())
    except OSError:
        lines = []
    tail = read_step_tail(attempt_dir)
    exceptions = [line.get("exception") for line in lines if line["kind"] == EXIT_LINE]
    return _RankEnd(
        rank=rank,
        last_step=tail.last_step if tail else None,
        exception=str(exceptions[-1]) if exceptions else None,
        is_closed=any(line["kind"] == "close" for line in lines),
    )


def describe_outcome(launch: Launch, exit_code: int) -> list[str]:
    """What to tell the user when the command has ended, line by line."""
    lines = [] if exit_code == 0 else [_describe_exit_code(exit_code)]
    ranks = find_recording_ranks(launch)
    if not ranks:
        return [*lines, _explain_nothing_recorded(launch)]
    if exit_code != 0:
        abnormal = [end for end in _find_rank_ends(launch, ranks) if end.is_abnormal]
        # The rank that raised first; ranks that the launcher then killed do not show the cause.
        abnormal.sort(key=lambda end: (end.exception is None, end.rank))
        lines += [end.describe() for end in abnormal[:_MAX_RANKS_SHOWN]]
        if len(abnormal) > _MAX_RANKS_SHOWN:
            lines.append(f"… and {len(abnormal) - _MAX_RANKS_SHOWN} more ranks ended abnormally")
    number = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    further = "" if launch.is_new_run else ", as a further attempt of an existing run"
    return [
        *lines,
        f"recorded {number} in {launch.run_dir}{further}",
        f"to see it: meshscope report {shlex.quote(str(launch.run_dir))}",
    ]


def discard_empty_run(launch: Launch) -> None:
    """Removes a run directory that this launch made and in which no rank has recorded."""
    if not launch.made_run_dir or list_ranks(launch.run_dir):
        return
    manifest = launch.run_dir / MANIFEST_NAME
    try:
        data = manifest.read_bytes()
        manifest.unlink()
        try:
            launch.run_dir.rmdir()
        except OSError:  # something else is in it, a rank of another node perhaps: it stays a run
            place_new(manifest, data)
    except OSError:  # another launcher was quicker
        pass


def _describe_exit_code(exit_code: int) -> str:
    if exit_code > SIGNAL_EXIT_BASE:
        try:
            name = signal.Signals(exit_code - SIGNAL_EXIT_BASE).name
        except ValueError:
            return f"the command ended with exit code {exit_code}"
        return f"the command ended with exit code {exit_code} ({name})"
    return f"the command ended with exit code {exit_code}"


def _explain_nothing_recorded(launch: Launch) -> str:
    if not launch.run_dir.exists():
        return (
            f"nothing is left of the recording: {launch.run_dir} was deleted while the command ran"
        )
    option = find_ignored_environment(launch.command)
    if option is not None:
        return (
            f"nothing was recorded: python {option} ignores PYTHONPATH or sitecustomize, through "
            f"which the recorder is loaded; leave {option} out, or call meshscope.start() in the "
            "program"
        )
    return (
        "nothing was recorded: no Python process below the command imported torch and trained, "
        "or the recorder could not be loaded there because Python was started with -E, -I or -S "
        "or PYTHONPATH did not arrive (ssh, sudo, a container); see docs/launcher.md"
    )
