"""A rule about the end of memory: what the recorder wrote down when a device was full."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.wording import name_ranks, plural
from meshscope.store.read.recording import Recording

_MAX_CHARACTERS = 500
"""Of the sentence; a longer one was not written by the recorder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullDevice:
    rank: int
    sentence: str
    step: int | None
    """The step under way; None where there was none."""
    path: str | None
    """Of the report, relative to the run."""
    has_gone_on: bool
    """Whether the rank finished that step after all."""


class OutOfMemory(Rule):
    """A device was full, and an allocation failed.

    What it finds: ranks on which torch found no memory for a tensor while the recorder watched
    (`recorder.watch_out_of_memory()`; the engine does it by itself).

    Why it matters: unless the program catches the error, the rank ends there, and with it the job.

    How it is measured: torch tells the recorder just before it raises. The recorder writes what the
    device held then, by category, and what was asked for, into the journal and
    `out_of_memory.json`, and a snapshot of the allocator into `out_of_memory.pickle` beside it.

    What to change: start with what holds most. Activations: recompute, or smaller microbatches.
    Optimizer state, gradients and parameters: shard them over data-parallel ranks. Much reserved in
    pieces that are not in use: expandable segments.

    When it is wrong: if the program provokes it, to find the largest batch; then the rank goes on,
    and the finding is MEDIUM. Activations are separated only if the step was profiled.
    """

    code = "ME006"
    name = "out-of-memory"
    severities = (Severity.MEDIUM, Severity.CRITICAL)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one, for all such ranks; it describes the one that was full first."""
        found = [one for recording in context.study.attempt for one in _full_devices(recording)]
        if not found:
            return
        has_ended = [one for one in found if not one.has_gone_on]
        first = min(has_ended or found, key=lambda one: (one.step is None, one.step or 0, one.rank))
        ranks = tuple(sorted({one.rank for one in found}))
        end = "and ended there" if has_ended else "and went on"
        yield Finding(
            code=self.code,
            title=f"{name_ranks(ranks)} ran out of device memory",
            severity=Severity.CRITICAL if has_ended else Severity.MEDIUM,
            summary=f"Rank {first.rank} ran out of memory{_where(first)} {end}: {first.sentence}. "
            f"{_files(first)}",
            ranks=ranks,
            first_step=first.step,
            evidence=(
                Evidence(name="failed allocations", value=len(found)),
                Evidence(name="ranks that ended there", value=len({o.rank for o in has_ended})),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.HIGH,
                text=f"torch reported it {plural(len(found), 'time')}, just before it raised",
            ),
            change="Reduce what uses most: recompute activations or use smaller "
            "microbatches, shard optimizer state, gradients and parameters; with much reserved and "
            "not in use, expandable segments.",
            gain=Unavailable("the job ended, or would have"),
        )


def _where(one: FullDevice) -> str:
    return "" if one.step is None else f", in step {one.step},"


def _files(one: FullDevice) -> str:
    if one.path is None:
        return "The path of its report was not recorded."
    snapshot = PurePosixPath(one.path.replace(".json", ".pickle", 1))
    return f"{one.path} lists what it held, `meshscope snapshot` reads {snapshot}."


def _full_devices(recording: Recording) -> Iterable[FullDevice]:
    lines = [line for line in recording.health if line.get("cause") == "memory"]
    if not lines:
        return
    steps = recording.read("steps")["step"]
    last_step = int(steps.max()) if len(steps) else -1
    for line in lines:
        number = line.get("step")
        is_step = isinstance(number, int) and not isinstance(number, bool) and number >= 0
        step = number if is_step and isinstance(number, int) else None
        yield FullDevice(
            rank=recording.rank,
            sentence=_text(line, "text") or "a device was full",
            step=step,
            path=_text(line, "path"),
            has_gone_on=step is not None and last_step >= step,
        )


def _text(line: Mapping[str, object], name: str) -> str | None:
    """One printable line, or None."""
    value = line.get(name)
    if not isinstance(value, str):
        return None
    shown = "".join(c if c.isprintable() else "?" for c in value[:_MAX_CHARACTERS])
    return shown.rstrip(".") or None
