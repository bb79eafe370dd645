"""A rule about the end of memory: what the recorder wrote down when a device was full, and programs
that ended because an allocation failed."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from meshscope.analyze.memory.memory import Place, RankMemory
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.wording import memory, name_ranks, plural
from meshscope.store.read.recording import Recording

_NO_TIME = Unavailable("the job ended, or would have")
_MAX_CHARACTERS = 500
"""Of the sentence; a longer one was not written by the recorder."""
_NO_MEMORY = re.compile(
    r"^(\w+\.)*(MemoryError|OutOfMemoryError)\b|out of memory|can't allocate memory|"
    r"Cannot allocate memory|std::bad_alloc",
)
"""In the exception of a rank: Python's own, torch's on devices and on hosts, the system's."""


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
    """Memory was full, and an allocation failed.

    What it finds: ranks on which torch found no memory for a tensor while the recorder watched
    (`recorder.watch_out_of_memory()`; the engine does it by itself), and ranks whose program ended
    in an exception that says so (`MemoryError`, `can't allocate memory`), on a host as well.

    Why it matters: unless the program catches the error, the rank ends there, and with it the job.

    How it is measured: torch tells the recorder just before it raises. The recorder writes what the
    device held then, by category, and what was asked for, into the journal and
    `out_of_memory.json`, and a snapshot of the allocator into `out_of_memory.pickle` beside it. Of
    a rank that only left an exception, its text is given, and what the process held by the last
    sample.

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
        """At most one for devices and one for exceptions, each about the rank that was first."""
        recordings = list(context.study.attempt)
        devices = [one for recording in recordings for one in _full_devices(recording)]
        if devices:
            yield self._report_devices(devices)
        seen = {one.rank for one in devices}
        failed = [one for one in recordings if _has_failed(one) and one.rank not in seen]
        if failed:
            yield self._report_failed(context, failed)

    def _report_devices(self, found: list[FullDevice]) -> Finding:
        has_ended = [one for one in found if not one.has_gone_on]
        first = min(has_ended or found, key=lambda one: (one.step is None, one.step or 0, one.rank))
        ranks = tuple(sorted({one.rank for one in found}))
        end = "and ended there" if has_ended else "and went on"
        return Finding(
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
            gain=_NO_TIME,
        )

    def _report_failed(self, context: Context, failed: list[Recording]) -> Finding:
        """Of ranks that left nothing but the exception."""
        first = min(failed, key=lambda one: (last_step(one), one.rank))
        ranks = tuple(sorted(one.rank for one in failed))
        step = last_step(first)
        held = _find_held(context, first)
        is_leaking = held is not None and held.is_leaking
        after = f" after step {step}" if step >= 0 else " before its first step was over"
        return Finding(
            code=self.code,
            title=f"{name_ranks(ranks)} ran out of memory{after}",
            severity=Severity.CRITICAL,
            summary=f"The program of rank {first.rank} ended{after} in "
            f"{_text({'text': first.exception}, 'text')}.{_say_held(held)}",
            ranks=ranks,
            first_step=step if step >= 0 else None,
            last_step=step if step >= 0 else None,
            evidence=(
                Evidence(name="ranks that ended so", value=len(failed)),
                *(
                    ()
                    if held is None
                    else (
                        Evidence(
                            name=f"highest of rank {first.rank} that was sampled",
                            value=held.peak_bytes,
                            unit="bytes",
                        ),
                    )
                ),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.HIGH, text="the program's own exception says so"
            ),
            change="Find what is kept from step to step: memory grew with every step until it was "
            "full."
            if is_leaking
            else "Reduce what uses most: recompute activations or use smaller microbatches, shard "
            "optimizer state, gradients and parameters; look whether the process has a limit of "
            "its own (`ulimit -v`, a control group).",
            gain=_NO_TIME,
        )


def _has_failed(recording: Recording) -> bool:
    return recording.exception is not None and bool(_NO_MEMORY.search(recording.exception))


def last_step(recording: Recording) -> int:
    """-1 before the first."""
    steps = recording.read("steps")["step"]
    return int(steps.max()) if len(steps) else -1


def _find_held(context: Context, recording: Recording) -> RankMemory | None:
    """What was sampled of the memory that was full."""
    sampled = known(context.study.memory)
    place = Place.DEVICE if "CUDA" in (recording.exception or "") else Place.HOST
    ranks = () if sampled is None else sampled.ranks
    return next((o for o in ranks if o.rank == recording.rank and o.place is place), None)


def _say_held(held: RankMemory | None) -> str:
    if held is None:
        return ""
    where = "its device" if held.place is Place.DEVICE else "its process"
    growth = known(held.growth) if held.is_leaking else None
    grew = ""
    if growth is not None:
        grew = f", {memory(growth.per_step)} more with every step from {growth.first_step} on"
    return f" At most {memory(held.peak_bytes)} were seen in {where}{grew}."


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
    last = last_step(recording)
    for line in lines:
        number = line.get("step")
        is_step = isinstance(number, int) and not isinstance(number, bool) and number >= 0
        step = number if is_step and isinstance(number, int) else None
        yield FullDevice(
            rank=recording.rank,
            sentence=_text(line, "text") or "a device was full",
            step=step,
            path=_text(line, "path"),
            has_gone_on=step is not None and last >= step,
        )


def _text(line: Mapping[str, object], name: str) -> str | None:
    """One printable line, or None."""
    value = line.get(name)
    if not isinstance(value, str):
        return None
    shown = "".join(c if c.isprintable() else "?" for c in value[:_MAX_CHARACTERS])
    return shown.rstrip(".") or None
