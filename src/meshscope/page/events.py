"""Moments of a run that explain its curves: one per kind, step and cause, with the ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.rank.phases import order_steps
from meshscope.analyze.study import Study
from meshscope.core.unavailable import known
from meshscope.diagnose.finding import Finding
from meshscope.page.evidence import name_findings
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.read.trace_windows import windows_of

MAX_EVENTS = 2000
_PHASES = ("checkpoint", "eval", "compile")
"""Phases that come now and then."""
_COLLECTION = "gc gen2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a step."""

    kind: str
    """`finding`, `checkpoint`, `eval`, `compile`, `gc`, `fault`, `trace`, `exception`, `nan`."""
    step: int
    """-1 before the first step."""
    last_step: int
    ranks: tuple[int, ...]
    """Empty for all."""
    label: str
    finding: str | None
    """Its id, for a finding."""


def list_events(study: Study, findings: tuple[Finding, ...]) -> tuple[Event, ...]:
    """By step; at most `MAX_EVENTS`, those that come most often last."""
    found = [
        *_list_findings(findings),
        *_list_exceptions(study),
        *_list_nan(study),
        *_list_faults(study),
        *_list_traces(study),
        *_list_phases(study),
    ]
    return tuple(sorted(found[:MAX_EVENTS], key=lambda event: (event.step, event.kind)))


def _list_findings(findings: tuple[Finding, ...]) -> Iterator[Event]:
    for name, one in zip(name_findings(findings), findings, strict=True):
        if one.first_step is not None:
            last = one.first_step if one.last_step is None else one.last_step
            yield Event(
                kind="finding",
                step=one.first_step,
                last_step=last,
                ranks=one.ranks,
                label=one.title,
                finding=name,
            )


def _list_exceptions(study: Study) -> Iterator[Event]:
    for rank in study.ranks:
        text = study.attempt.ranks[rank.rank].exception
        if text is not None:
            step = rank.last_step if isinstance(rank.last_step, int) else -1
            yield _make("exception", step, (rank.rank,), text)


def _list_nan(study: Study) -> Iterator[Event]:
    found = known(study.convergence)
    for name, bad in (
        ()
        if found is None
        else (
            ("loss", found.loss_nonfinite),
            ("gradient norm", found.norm_nonfinite),
        )
    ):
        if bad is not None:
            yield _make("nan", bad.first_step, bad.first_ranks, f"{name} is {bad.first_kind}")


def _list_faults(study: Study) -> Iterator[Event]:
    """Runs of steps in which a fault was injected, one per kind and detail."""
    by_text: dict[str, dict[int, set[int]]] = {}
    for recording in study.attempt:
        if not recording.has_table("faults"):
            continue
        columns = recording.read("faults")
        rows = zip(columns["kind_id"].tolist(), int64_column(columns, "step").tolist(), strict=True)
        for kind, step in rows:
            by_step = by_text.setdefault(recording.name_of(kind), {})
            by_step.setdefault(step, set()).add(recording.rank)
    yield from _join("fault", by_text)


def _list_phases(study: Study) -> Iterator[Event]:
    by_kind: dict[str, dict[int, set[int]]] = {}
    for recording in study.attempt:
        for kind, steps in _read_phases(recording).items():
            for step in steps:
                by_kind.setdefault(kind, {}).setdefault(step, set()).add(recording.rank)
    for kind, by_step in by_kind.items():
        yield from _join(kind, {kind: by_step})


def _read_phases(recording: Recording) -> dict[str, list[int]]:
    """Steps in which a rank was in one of `_PHASES` or collected garbage; a phase between two steps
    belongs to the second."""
    wanted = {
        name_id: "gc" if name == _COLLECTION else name
        for name_id, name in recording.names.items()
        if name in (*_PHASES, _COLLECTION)
    }
    if not wanted or not recording.has_table("spans"):
        return {}
    columns, times = recording.read("spans"), order_steps(recording.read("steps"))
    row = np.flatnonzero(np.isin(columns["name_id"], list(wanted)))
    if not len(row) or not len(times):
        return {}
    start = int64_column(columns, "start_host_mono_ns")[row]
    index = np.minimum(np.searchsorted(times.end_ns, start), len(times) - 1)
    found: dict[str, list[int]] = {}
    pairs = zip(columns["name_id"][row].tolist(), times.step[index].tolist(), strict=True)
    for name_id, step in dict.fromkeys(pairs):
        found.setdefault(wanted[name_id], []).append(step)
    return found


def _list_traces(study: Study) -> Iterator[Event]:
    by_steps: dict[tuple[int, int], set[int]] = {}
    for window in windows_of(study.attempt):
        if window.first_step is not None:
            last = window.first_step if window.last_step is None else window.last_step
            by_steps.setdefault((window.first_step, last), set()).add(window.rank)
    for (first, last), ranks in by_steps.items():
        event = _make("trace", first, tuple(sorted(ranks)), "torch.profiler")
        yield replace(event, last_step=last)


def _join(kind: str, by_label: dict[str, dict[int, set[int]]]) -> Iterator[Event]:
    """Consecutive steps with the same ranks are one event."""
    for label, by_step in by_label.items():
        open_: Event | None = None
        for step, ranks in sorted(by_step.items()):
            named = tuple(sorted(ranks))
            if open_ is not None and open_.last_step + 1 == step and open_.ranks == named:
                open_ = replace(open_, last_step=step)
                continue
            if open_ is not None:
                yield open_
            open_ = _make(kind, step, named, label)
        if open_ is not None:
            yield open_


def _make(kind: str, step: int, ranks: tuple[int, ...], label: str) -> Event:
    return Event(kind=kind, step=step, last_step=step, ranks=ranks, label=label, finding=None)
