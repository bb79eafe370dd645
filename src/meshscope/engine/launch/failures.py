"""Why a rank ended: one line for people, the traceback in a file, and whether it was the cause.

When a rank dies, all that wait for it raise within milliseconds (gloo: "Connection closed by peer",
TORCH.md H), and those errors name a port, not a rank. They are consequences, and tell only that
another rank is gone. The cause is the earliest failure that is none. If all are, a rank hangs:
a rank that has not failed at all is then the suspect.

Each rank writes `rank_<r>.txt` into the attempt's folder: a line of JSON for the launcher, then the
traceback. Wrong where a program itself raises a RuntimeError with such words in it.
"""

import json
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from meshscope.errors import LayoutError, UsageError
from meshscope.store.write.access import make_folder

_MAX_SUMMARY_CHARACTERS = 300

# Of gloo, NCCL and the store, in torch 2.11 to 2.15; all in lower case.
_CONSEQUENCES = re.compile(
    r"connection closed by peer|connection reset by peer|connection refused|broken pipe"
    r"|socket closed|connection was closed|failed to recv|recv, got|timed out waiting"
    r"|wait timeout|remote process exited|peer process|connectfullmesh|application timeout caused"
    r"|watchdog|communicator was aborted|store .*(?:closed|timed? ?out)|pair is not connected"
)
_SOURCE_PLACE = re.compile(r"\[?[^\s\[\]]+\.(?:cc|cpp|h|hpp|cu):\d+\]?:?\s*")
"""Where in torch's sources: of no use in one line."""
_TIMEOUTS = re.compile(r"timed? ?out|timeout")


def note_step(step: int) -> None:
    """Tells the launcher which step this rank is in, should it end there. Costs next to nothing."""
    _step_keeper.keep(step)


class _StepKeeper:
    """Holds the current step, in memory shared with our launcher if there is one."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.share: Callable[[int], None] | None = None

    def keep(self, step: int) -> None:
        self.step = step
        if self.share is not None:
            self.share(step)


_step_keeper = _StepKeeper()


def share_steps(share: Callable[[int], None] | None) -> None:
    """Sets where `note_step` writes, and forgets the last step."""
    _step_keeper.step = None
    _step_keeper.share = share


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    rank: int
    summary: str
    time_unix_ns: int
    """When it was noticed: by the rank itself, or by the launcher where it could not."""
    step: int | None = None
    """The step it was in; None before the first, or when not known."""
    is_consequence: bool = False
    """Whether it only reports that another rank is gone or late."""
    is_timeout: bool = False
    """Whether it is a timeout of a wait for a rank that may still be there."""
    is_abort: bool = False
    """Whether a library called abort(), which gloo may do when a peer leaves."""
    is_permanent: bool = False
    """Whether starting again would end the same way."""
    path: str | None = None
    """Path of the traceback."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: causes first, then by time."""
        return (2 if self.is_consequence else int(self.is_abort)), self.time_unix_ns


def describe_error(error: BaseException) -> str:
    """Type and message in one line."""
    text = _SOURCE_PLACE.sub("", " ".join(str(error).split()))
    shown = "".join(letter for letter in text if letter.isprintable())
    if len(shown) > _MAX_SUMMARY_CHARACTERS:
        shown = shown[: _MAX_SUMMARY_CHARACTERS - 1] + "…"
    name = type(error).__name__
    return f"{name}: {shown}" if shown else name


def is_consequence(error: BaseException) -> bool:
    """Whether the error, or what it was raised from, reports another rank's end."""
    return any(
        isinstance(each, RuntimeError | ConnectionError | TimeoutError)
        and _CONSEQUENCES.search(str(each).lower()) is not None
        for each in _chain(error)
    )


def find_failure(error: BaseException, rank: int) -> RankFailure:
    """Describes an error of this rank."""
    follows = is_consequence(error)
    return RankFailure(
        rank=rank,
        summary=describe_error(error),
        time_unix_ns=time.time_ns(),
        step=_step_keeper.step,
        is_consequence=follows,
        is_timeout=follows and any(_TIMEOUTS.search(str(each).lower()) for each in _chain(error)),
        is_permanent=isinstance(error, UsageError | LayoutError),
    )


def find_exit_failure(rank: int, exit_code: int, step: int | None) -> RankFailure:
    """The failure of a rank that left no traceback: killed, aborted, or gone by `os._exit`."""
    is_abort = exit_code == -signal.SIGABRT
    return RankFailure(
        rank=rank,
        summary=_describe_exit(exit_code),
        time_unix_ns=time.time_ns(),
        step=step,
        is_abort=is_abort,
    )


def _describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        return f"was ended by signal {-exit_code}"
    hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )
    return found


# --- files ---------------------------------------------------------------------------------------


def attempt_folder(run_dir: Path, attempt: int) -> Path:
    """Folder for the tracebacks of one attempt."""
    return run_dir / "failures" / f"attempt_{attempt}"


def write_failure(folder: Path, failure: RankFailure, error: BaseException) -> RankFailure:
    """Writes the failure and its traceback to the folder; returns the failure with its path."""
    path = folder / f"rank_{failure.rank}.txt"
    text = "".join(traceback.format_exception(error))
    try:
        for part in (folder.parents[1], folder.parent, folder):
            make_folder(part)
        path.write_text(f"{json.dumps(asdict(failure))}\n\n{text}", encoding="utf-8")
    except OSError:  # a full disk may be why it failed: the exit code still tells
        return failure
    return read_failure(folder, failure.rank) or failure


def read_failure(folder: Path, rank: int) -> RankFailure | None:
    """Reads a rank's failure; None when there is none that can be read."""
    path = folder / f"rank_{rank}.txt"
    try:
        head = path.read_text(encoding="utf-8").partition("\n")[0]
        return RankFailure(**{**json.loads(head), "path": str(path)})
    except (OSError, ValueError, TypeError):
        return None


# --- all ranks together --------------------------------------------------------------------------


def find_first(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure that caused the others: the earliest that is no consequence."""
    return min(failures, key=lambda failure: failure.order)


def explain(
    failures: Sequence[RankFailure],
    *,
    label: Callable[[int], str],
    still_running: Sequence[int] = (),
) -> str:
    """One line: which rank was first, where it stands, at which step, what, and where to read on.

    `still_running` are those that had to be killed: where every failure is a timeout, they hang.
    """
    first = find_first(failures)
    if first.is_timeout and still_running:
        names = ", ".join(f"rank {rank} ({label(rank)})" for rank in sorted(still_running)[:4])
        more = f" and {len(still_running) - 4} more" if len(still_running) > 4 else ""
        text = (
            f"{names}{more} did not go on, and rank {first.rank} ({label(first.rank)}) waited in "
            f"vain{_at_step(first)}: {first.summary}"
        )
    else:
        text = f"rank {first.rank} ({label(first.rank)}) failed{_at_step(first)}: {first.summary}"
        num_alike = sum(failure.summary == first.summary for failure in failures) - 1
        num_after = len(failures) - 1 - num_alike + len(still_running)
        if num_alike:
            text += f"; {num_alike} more failed alike"
        if num_after and not first.is_consequence:
            text += f"; {num_after} ended because of it"
    return text + (f"; traceback in {first.path}" if first.path else "; it left no traceback")


def _at_step(failure: RankFailure) -> str:
    return "" if failure.step is None else f" in step {failure.step}"
