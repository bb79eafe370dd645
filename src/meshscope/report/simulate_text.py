"""Text and JSON of `meshscope simulate`: slowdown, attribution, critical path, edits.

Every answer stands below the fidelity of the replay that it comes from.
"""

import json
from collections.abc import Mapping, Sequence

from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.values import as_text
from meshscope.simulate.critical_path import CriticalPath, PathShare
from meshscope.simulate.run_edits import PricedEdit
from meshscope.simulate.simulation import PathGain, Simulation
from meshscope.simulate.straggler.slowdown import Share, Slowdown
from meshscope.simulate.what_if import Fidelity, Gain

DOCUMENT_VERSION = 1
MAX_ROWS = 8
"""Rows of a table that are shown at most."""


def render_simulation(simulation: Simulation, *, is_unicode: bool = True) -> str:
    """All that is known, for people."""
    lines = [
        f"{form.clean_text(simulation.name)}: {simulation.num_ranks} ranks, "
        f"{form.plural(simulation.num_steps, 'step')} replayed"
        + (f", {simulation.num_left_out:,} left out" if simulation.num_left_out else "")
    ]
    lines += _write_fidelity(simulation.fidelity)
    if simulation.edits:
        lines += ["", *_write_edits(simulation.edits)]
    else:
        lines += ["", *_write_slowdown(simulation.slowdown)]
        if simulation.path is not None:
            lines += ["", *_write_path(simulation.path, simulation.path_gains)]
    text = "\n".join(lines) + "\n"
    return text if is_unicode else form.to_ascii(text)


def _write_fidelity(fidelity: Fidelity | Unavailable) -> list[str]:
    if isinstance(fidelity, Unavailable):
        return [f"not replayed: {form.clean_text(fidelity.reason)}"]
    line = (
        f"step {form.duration(fidelity.measured_ns)} measured, "
        f"{form.duration(fidelity.replayed_ns)} replayed: {form.ratio(fidelity.error_ratio)} off"
    )
    if fidelity.unexplained_ratio >= 0.005:
        share = form.ratio(fidelity.unexplained_ratio)
        line += f"; in {share} of their time ranks were held up by what is not modelled"
    return [line]


def _write_edits(edits: Sequence[PricedEdit]) -> list[str]:
    width = max(len(form.clean_text(edit.text)) for edit in edits)
    return [f"{form.clean_text(edit.text):<{width}}  {_show_gain(edit.gain)}" for edit in edits]


def _show_gain(gain: Gain | Unavailable) -> str:
    if isinstance(gain, Unavailable):
        return f"n/a: {form.clean_text(gain.reason)}"
    after = form.duration(gain.step_ns - gain.saved_ns)
    verb = "saves" if gain.saved_ns >= 0 else "costs"
    amount = form.duration(abs(gain.saved_ns))
    return f"{verb} {amount} a step ({form.ratio(abs(gain.saved_ratio))}): {after}"


def _write_slowdown(slowdown: Slowdown | Unavailable) -> list[str]:
    if isinstance(slowdown, Unavailable):
        return [f"slowdown n/a: {form.clean_text(slowdown.reason)}"]
    lines = [
        f"slowdown {slowdown.slowdown:.4f}: {form.duration(slowdown.step_ns)} a step, "
        f"{form.duration(slowdown.ideal_ns)} if all were even; {form.ratio(slowdown.waste_ratio)} "
        f"wasted"
    ]
    lines.append(_write_slowdowns("by type", slowdown.by_type))
    for axis, found in slowdown.by_axis.items():
        lines.append(_write_slowdowns(f"by {axis}", {str(at): s for at, s in found.items()}))
    workers = {f"rank {rank}": s for rank, s in slowdown.by_worker.items()}
    lines.append(_write_slowdowns("by worker", workers))
    worst = form.name_ranks(slowdown.worst_workers)
    lines.append(f"  M_W, worst workers ({worst}): {_show_share(slowdown.worst_share)}")
    lines.append(f"  M_S, last stage: {_show_share(slowdown.last_stage_share)}")
    return lines


def _write_slowdowns(title: str, found: Mapping[str, float]) -> str:
    shown = [
        f"{form.clean_text(name)} {value:.4f}" for name, value in list(found.items())[:MAX_ROWS]
    ]
    more = len(found) - len(shown)
    return f"  {title}: {', '.join(shown)}" + (f" and {more} more" if more > 0 else "")


def _show_share(share: Share | Unavailable) -> str:
    if isinstance(share, Unavailable):
        return f"n/a: {form.clean_text(share.reason)}"
    return (
        f"{share.removed:.4f} of the excess goes if they are made even, {share.added_alone:.4f} "
        f"stays if only they are uneven"
    )


def _write_path(path: CriticalPath, gains: Sequence[PathGain]) -> list[str]:
    step_ns = path.total_ns / max(1, path.num_steps)
    lines = [
        f"critical path over ranks, {form.duration(step_ns)} a step, "
        f"changes rank {path.num_rank_changes:,} times"
    ]
    by_share = {id(gain.share): gain.gain for gain in gains}
    said: set[str] = set()
    for share in path.shares[:MAX_ROWS]:
        gain = by_share.get(id(share))
        if isinstance(gain, Unavailable) and gain.reason in said:
            priced = "  without it: n/a, likewise"  # a reason is a long line
        else:
            priced = "" if gain is None else f"  without it: {_show_gain(gain)}"
        if isinstance(gain, Unavailable):
            said.add(gain.reason)
        lines.append(f"  {form.ratio(share.ratio):>6}  {_name_share(share)}{priced}")
    slack = [
        f"{one.rank}: {form.duration(one.slack_ns)}"
        for one in sorted(path.ranks, key=lambda one: one.slack_ns)[:MAX_ROWS]
    ]
    lines.append(f"  slack by rank: {', '.join(slack)}")
    return lines


def _name_share(share: PathShare) -> str:
    parts = [f"rank {share.rank}", str(share.kind), share.phase, share.axis, share.operation]
    return " ".join(form.clean_text(part) for part in parts if part)


def encode_simulation(simulation: Simulation) -> str:
    """One JSON object; times in ns per step, ratios in 0..1."""
    document = {
        "version": DOCUMENT_VERSION,
        "name": as_text(simulation.name),
        "num_ranks": simulation.num_ranks,
        "num_steps": simulation.num_steps,
        "num_steps_left_out": simulation.num_left_out,
        "fidelity": _encode_fidelity(simulation.fidelity),
        "slowdown": _encode_slowdown(simulation.slowdown),
        "critical_path": None
        if simulation.path is None
        else _encode_path(simulation.path, simulation.path_gains),
        "edits": [
            {"edit": as_text(edit.text), "gain": _encode_gain(edit.gain)}
            for edit in simulation.edits
        ],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


Document = dict[str, object]


def _encode_missing(missing: Unavailable) -> Document:
    return {"unavailable": as_text(missing.reason)}


def _encode_fidelity(fidelity: Fidelity | Unavailable) -> Document:
    if isinstance(fidelity, Unavailable):
        return _encode_missing(fidelity)
    return {
        "error_ratio": fidelity.error_ratio,
        "measured_step_ns": fidelity.measured_ns,
        "replayed_step_ns": fidelity.replayed_ns,
        "unexplained_ratio": fidelity.unexplained_ratio,
        "is_enough": fidelity.is_enough,
    }


def _encode_gain(gain: Gain | Unavailable) -> Document:
    if isinstance(gain, Unavailable):
        return _encode_missing(gain)
    return {
        "saved_ns": gain.saved_ns,
        "saved_ratio": gain.saved_ratio,
        "step_ns": gain.step_ns,
        "fidelity_ratio": gain.fidelity_ratio,
    }


def _encode_slowdown(slowdown: Slowdown | Unavailable) -> Document:
    if isinstance(slowdown, Unavailable):
        return _encode_missing(slowdown)
    return {
        "slowdown": slowdown.slowdown,
        "waste_ratio": slowdown.waste_ratio,
        "step_ns": slowdown.step_ns,
        "ideal_step_ns": slowdown.ideal_ns,
        "by_type": {as_text(name): value for name, value in slowdown.by_type.items()},
        "by_axis": {
            axis: {str(at): value for at, value in found.items()}
            for axis, found in slowdown.by_axis.items()
        },
        "by_worker": {str(rank): value for rank, value in slowdown.by_worker.items()},
        "worst_workers": list(slowdown.worst_workers),
        "worst_workers_share": _encode_share(slowdown.worst_share),
        "last_stage_share": _encode_share(slowdown.last_stage_share),
    }


def _encode_share(share: Share | Unavailable) -> Document:
    if isinstance(share, Unavailable):
        return _encode_missing(share)
    return {"removed_ratio": share.removed, "added_alone_ratio": share.added_alone}


def _encode_path(path: CriticalPath, gains: Sequence[PathGain]) -> Document:
    by_share = {id(gain.share): gain.gain for gain in gains}
    return {
        "total_ns": path.total_ns,
        "num_rank_changes": path.num_rank_changes,
        "shares": [
            {
                "rank": share.rank,
                "kind": str(share.kind),
                "phase": as_text(share.phase),
                "axis": as_text(share.axis),
                "operation": share.operation,
                "total_ns": share.total_ns,
                "ratio": share.ratio,
                "gain_without": _encode_gain(by_share[id(share)])
                if id(share) in by_share
                else None,
            }
            for share in path.shares
        ],
        "ranks": [
            {"rank": one.rank, "slack_ns": one.slack_ns, "path_ratio": one.path_ratio}
            for one in path.ranks
        ],
    }
