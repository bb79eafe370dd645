"""Compares a recording with what the same run timed by hand: one cell per question."""

import json
import time
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kinds import Kind
from launching import Outcome

import meshscope
from meshscope.store.read.recording import Recording
from meshscope.store.schema import SpanFlag

_TOLERANCE_RATIO = 0.03
_TOLERANCE_NS = 200_000
"""Of one occurrence of a phase: the program's call and ours around what is timed."""
TOLERANCE = (
    "the median over steps of recorded less by hand, in the same run: 3 %, or 0.2 ms an "
    "occurrence; for the optimizer also what the recording says it cost itself in a step"
)
_NUM_FIRST = 3
"""Steps that are left out of times: they include what happens once."""
_NUM_TRIES = 6
_SMALL_RATIO = 0.01
"""Of the time of all phases: a phase below it that nobody timed by hand is no matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An answer."""

    is_good: bool
    text: str
    is_unknown: bool = False
    """The report says that it does not know, and the catalogue that it cannot."""


def _good(text: str = "yes") -> Cell:
    return Cell(is_good=True, text=text)


def _bad(text: str) -> Cell:
    return Cell(is_good=False, text=text)


def judge(kind: Kind, bare: Outcome, recorded: Outcome, run: Path) -> dict[str, Cell]:
    """All cells of a kind's row."""
    cells = {"output": _judge_output(bare, recorded)}
    questions: dict[str, Callable[[Kind, Outcome, Any], Cell]] = {
        "steps": _judge_steps,
        "phases": _judge_phases,
        "layout": _judge_layout,
        "tokens": _judge_tokens,
        "samples": _judge_samples,
        "loss": _judge_loss,
        "findings": _judge_findings,
    }
    try:
        study = _open(run)
        for name, question in questions.items():
            cells[name] = question(kind, recorded, study)
    except meshscope.errors.MeshscopeError as error:
        cells |= {name: _bad(str(error)) for name in questions if name not in cells}
    return cells


def _open(run: Path) -> Any:
    """The run; ranks that the program's main process did not wait for get a moment to end."""
    for _ in range(_NUM_TRIES):
        study = meshscope.study(run)
        if not study.study.health.unfinished_ranks:
            break
        time.sleep(0.5)
    return study


def _judge_output(bare: Outcome, recorded: Outcome) -> Cell:
    if bare.return_code != recorded.return_code:
        said = bare.errors if bare.return_code else recorded.errors
        return _bad(f"rc {bare.return_code} → {recorded.return_code}: {said[-2000:]}")
    if bare.return_code:
        return _bad(f"rc {bare.return_code} also without us: {bare.errors[-300:]}")
    if bare.output != recorded.output:
        return _bad(f"{bare.output[-100:]!r} → {recorded.output[-100:]!r}")
    if "meshscope/" in recorded.errors:
        at = recorded.errors.index("meshscope/")
        return _bad(f"a message from our files: {recorded.errors[max(at - 100, 0) : at + 200]}")
    return _good()


def _judge_steps(kind: Kind, outcome: Outcome, study: Any) -> Cell:
    ranks = {recording.rank: recording for recording in study.study.attempt}
    if len(outcome.by_hand) != kind.world_size or sorted(ranks) != sorted(outcome.by_hand):
        return _bad(f"ranks {sorted(ranks)} of {sorted(outcome.by_hand)}")
    counts = {rank: len(one.read("steps")["step"]) for rank, one in ranks.items()}
    expected = {rank: len(timed["steps"]) for rank, timed in outcome.by_hand.items()}
    if counts != expected:
        return _bad(f"{counts} of {expected}")
    if unfinished := study.study.health.unfinished_ranks:
        return _bad(f"ranks {unfinished} are said not to have ended")
    return _good(str(counts[0]))


# --- phases -------------------------------------------------------------------------------

_Phases = Mapping[str, Sequence[tuple[int, int]]]
"""Begin and own duration of each occurrence, by phase. Both sides read the monotonic clock."""


def _judge_phases(kind: Kind, outcome: Outcome, study: Any) -> Cell:
    wrong: list[str] = []
    worst = 0.0
    for recording in study.study.attempt:
        timed = outcome.by_hand.get(recording.rank, {"phases": {}, "steps": []})
        by_hand: _Phases = timed["phases"]
        ends_ns = [int(step["end_ns"]) for step in timed["steps"]]
        found = _read_phases(recording)
        total_ns = sum(sum(own_ns for _, own_ns in one) for one in found.values())
        for phase in by_hand:
            if " and " in phase:  # timed as one, where the program has no place between them
                found[phase] = [one for part in phase.split(" and ") for one in found.pop(part, [])]
        for phase in {**by_hand, **found}:
            pairs = _pair(by_hand.get(phase, ()), found.get(phase, ()), ends_ns)
            if phase not in by_hand:
                extra_ns = sum(got for _, got in pairs)
                if extra_ns > _SMALL_RATIO * total_ns and phase not in kind.extra:
                    wrong.append(f"{phase} {extra_ns / 1e6:.1f} ms, by hand none")
            else:
                occurrences = max(len(by_hand[phase]), len(found.get(phase, ())))
                per_step = max(round(occurrences / max(len(pairs), 1)), 1)
                tolerance_ns = per_step * _TOLERANCE_NS
                if "optimizer" in phase:  # the step is written down before its call returns
                    tolerance_ns += _read_own_ns(recording)
                problem, error = _compare(pairs, tolerance_ns)
                worst = max(worst, error)
                wrong += [f"{phase} {problem}"] if problem else []
    if wrong:
        return _bad("; ".join(dict.fromkeys(wrong)))
    return _good(f"{worst:.1%}")


def _read_phases(recording: Recording) -> dict[str, list[tuple[int, int]]]:
    """Phases of the training thread."""
    spans = recording.read("spans")
    chosen = (spans["thread"] == 0) & (spans["flags"] & SpanFlag.DETAIL == 0)
    columns = (
        spans[name][chosen].tolist() for name in ("name_id", "start_host_mono_ns", "self_ns")
    )
    found: dict[str, list[tuple[int, int]]] = {}
    for name_id, start_ns, self_ns in zip(*columns, strict=True):
        found.setdefault(recording.name_of(name_id), []).append((start_ns, self_ns))
    return found


def _read_own_ns(recording: Recording) -> int:
    """What the recording says of its own work in a step after the first."""
    own_ns = recording.read("steps")["recorder_ns"][1:]
    return int(own_ns.max()) if len(own_ns) and own_ns.max() > 0 else 0


def _pair(
    by_hand: Sequence[tuple[int, int]], recorded: Sequence[tuple[int, int]], ends_ns: list[int]
) -> list[tuple[int, int]]:
    """Time by hand and time recorded in each step in which the phase occurred.

    A step here is what lies between two ends of steps by hand: what else runs on the machine, and
    what comes between steps, is in both sides.
    """
    totals: dict[int, list[int]] = {}
    for side, occurrences in enumerate((by_hand, recorded)):
        for start_ns, own_ns in occurrences:
            totals.setdefault(bisect(ends_ns, start_ns), [0, 0])[side] += own_ns
    return [(expected, got) for _, (expected, got) in sorted(totals.items())]


def _compare(pairs: list[tuple[int, int]], tolerance_ns: int) -> tuple[str, float]:
    """What is wrong with a phase, and its relative error: the median over the steps."""
    if not any(got for _, got in pairs):
        return f"{sum(expected for expected, _ in pairs) / 1e6:.1f} ms not seen", 1.0
    pairs = pairs[_NUM_FIRST:] if len(pairs) > 2 * _NUM_FIRST else pairs
    expected_ns = median(expected for expected, _ in pairs)
    error_ns = median(got - expected for expected, got in pairs)
    error = abs(error_ns) / max(expected_ns, 1)
    if abs(error_ns) > max(tolerance_ns, _TOLERANCE_RATIO * expected_ns):
        return f"{(expected_ns + error_ns) / 1e6:.2f} ms, by hand {expected_ns / 1e6:.2f}", error
    return "", error if _TOLERANCE_RATIO * expected_ns > tolerance_ns else 0.0


# --- layout, throughput -------------------------------------------------------------------


def _judge_layout(kind: Kind, outcome: Outcome, study: Any) -> Cell:
    if kind.world_size == 1:
        return _good("one rank")
    layout = _read_document(study)["layout"]
    degrees = {axis: size for axis, size in layout["degrees"].items() if size > 1}
    if degrees != dict(kind.layout):
        return _bad(f"{degrees or 'unknown'}, not {dict(kind.layout)}")
    return _good(f"{layout['text']}: {layout['source']}")


def _judge_tokens(kind: Kind, outcome: Outcome, study: Any) -> Cell:
    return _judge_rate(kind, outcome, study, "tokens")


def _judge_samples(kind: Kind, outcome: Outcome, study: Any) -> Cell:
    return _judge_rate(kind, outcome, study, "samples")


def _judge_rate(kind: Kind, outcome: Outcome, study: Any, unit: str) -> Cell:
    """Tokens or samples per second of all replicas."""
    found = _read_document(study).get(unit)
    rate = found.get(f"{unit}_per_s") if isinstance(found, Mapping) else None
    num_sharing = kind.layout.get("tp", 1) * kind.layout.get("pp", 1)
    rates = [_find_rate(recording, outcome, unit) for recording in study.study.attempt]
    expected = sum(rates) / num_sharing
    if not expected:
        return _good("none") if rate is None else _bad(f"{rate:.0f}/s, by hand none")
    if not isinstance(rate, (int, float)):
        text = f"not known, by hand {expected:.0f}/s"
        return Cell(is_good=False, is_unknown=unit in kind.unknown, text=text)
    if abs(rate / expected - 1) > _TOLERANCE_RATIO:
        return _bad(f"{rate:.0f}/s, by hand {expected:.0f}/s")
    return _good(f"{rate:.0f}/s")


def _find_rate(recording: Recording, outcome: Outcome, unit: str) -> float:
    """What one rank counted by hand, over the time of its steps."""
    steps = recording.read("steps")
    counted = outcome.by_hand.get(recording.rank, {"steps": []})["steps"]
    total = sum(step.get(unit, 0) for step in counted)
    if not total or not len(steps["step"]):
        return 0.0
    return 1e9 * total / int(steps["end_host_mono_ns"].max() - steps["start_host_mono_ns"].min())


def _read_document(study: Any) -> dict[str, Any]:
    return json.loads(study.report(with_diagnosis=False).to_json())


# --- loss, findings -----------------------------------------------------------------------


def _judge_loss(kind: Kind, outcome: Outcome, study: Any) -> Cell:
    """Every loss of the program is a series that the report shows, with the program's values."""
    ranks = [one["steps"] for one in outcome.by_hand.values() if "loss" in str(one["steps"][:1])]
    if not ranks:
        return _bad("no rank has a loss by hand")
    series = _list_losses(_read_document(study))
    wrong = []
    for name in [name for name in ranks[0][0] if name.startswith("loss")]:
        # Of replicas the report shows the median: of two that is the mean, as frameworks have it.
        values = zip(*([step[name] for step in steps] for steps in ranks), strict=True)
        by_hand = {number: median(several) for number, several in enumerate(values)}
        reasons = [_find_difference(by_hand, found) for found in series]
        if all(reasons):
            wrong.append(f"{name}: {min(reasons, key=len) if reasons else 'not recorded'}")
    return _bad("; ".join(wrong)) if wrong else _good(f"{len(series)} series")


def _list_losses(document: Mapping[str, Any]) -> list[dict[int, float]]:
    """What the report says of each loss, by step."""
    found = []
    for name, signal in document["signals"].items():
        if name.startswith("loss") and "last_step" in signal:
            found.append({int(signal["last_step"]): float(signal["last"])})
    main = document["training"]["loss"]
    if found and "points" in main:
        found[0] |= {int(point["step"]): float(point["value"]) for point in main["points"]}
    return found


def _find_difference(by_hand: dict[int, float], found: dict[int, float]) -> str:
    """Why a recorded series is not the program's; empty when it is."""
    strange = sorted(set(found) - set(by_hand))
    if strange:
        return f"has step {strange[0]}"
    for step, value in sorted(found.items()):
        if abs(value - by_hand[step]) > 1e-3 * max(abs(by_hand[step]), 1e-2):
            return f"{value:.4g} in step {step}, by hand {by_hand[step]:.4g}"
    if max(found) != max(by_hand):
        return f"ends with step {max(found)} of {max(by_hand)}"
    return ""


def _judge_findings(kind: Kind, outcome: Outcome, study: Any) -> Cell:
    above = [f"{f.code} {f.severity.word}" for f in study.findings if f.severity.word != "low"]
    return _bad("; ".join(above)) if above else _good("none")
