"""Results of a replay: slowdown, attribution, critical path, edits.

Every answer stands below the fidelity of its replay. In JSON times are ns per
step and ratios in 0..1.
"""

from collections.abc import Iterator, Mapping, Sequence

from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.encode import Shape
from meshscope.report.section import Blank, Headline, Line, Part, Section, Tone
from meshscope.simulate.critical_path import CriticalPath, PathShare
from meshscope.simulate.run_edits import PricedEdit
from meshscope.simulate.simulation import PricedPath, PricedShare, Simulation
from meshscope.simulate.straggler.slowdown import Share, Slowdown
from meshscope.simulate.what_if import Fidelity, Gain

DOCUMENT = ("meshscope-simulate", 2)
"""Name and version of the JSON document: a `Simulation`."""
SHAPES = {
    Simulation: Shape(renamed={"num_left_out": "num_steps_left_out"}),
    Fidelity: Shape(
        dropped=("num_steps",),
        derived=("is_enough",),
        renamed={"measured_ns": "measured_step_ns", "replayed_ns": "replayed_step_ns"},
    ),
    Slowdown: Shape(
        dropped=("fidelity",),
        derived=("slowdown", "waste_ratio"),
        renamed={"ideal_ns": "ideal_step_ns", "worst_share": "worst_workers_share"},
    ),
    Share: Shape(renamed={"removed": "removed_ratio", "added_alone": "added_alone_ratio"}),
    PricedPath: Shape(inlined=("path",)),
    CriticalPath: Shape(dropped=("num_steps",)),
    PricedShare: Shape(inlined=("share",)),
    PricedEdit: Shape(renamed={"text": "edit"}),
}
MAX_ROWS = 8
"""Rows of a table that are shown at most."""


def make_simulation_section(simulation: Simulation) -> Section:
    """The fidelity; then edits if there are any, else the slowdown and the path."""
    parts = [_show_head(simulation), _show_fidelity(simulation.fidelity), Blank()]
    if simulation.edits:
        parts += _list_edits(simulation.edits)
    else:
        parts += _list_slowdown(simulation.slowdown)
        if simulation.critical_path is not None:
            parts += [Blank(), *_list_path(simulation.critical_path)]
    return Section(key="simulate", title="", parts=tuple(parts))


def _say(text: str) -> Part:
    return Headline(text, Tone.PLAIN)


def _show_head(simulation: Simulation) -> Part:
    left_out = f", {simulation.num_left_out:,} left out" if simulation.num_left_out else ""
    steps = form.plural(simulation.num_steps, "step")
    name = form.clean_text(simulation.name)
    return _say(f"{name}: {form.plural(simulation.num_ranks, 'rank')}, {steps} replayed{left_out}")


def _show_fidelity(fidelity: Fidelity | Unavailable) -> Part:
    if isinstance(fidelity, Unavailable):
        return _say(f"not replayed: {form.clean_text(fidelity.reason)}")
    measured, replayed = form.duration(fidelity.measured_ns), form.duration(fidelity.replayed_ns)
    line = f"step {measured} measured, {replayed} replayed: "
    error = form.ratio(fidelity.error_ratio)
    if fidelity.unexplained_ratio < 0.005:
        return _say(f"{line}{error} off")
    share = form.ratio(fidelity.unexplained_ratio)
    return _say(
        f"{line}in {share} of their time ranks were held up by what is not modelled and was kept "
        f"as it was; {error} off without that"
    )


def _list_edits(edits: Sequence[PricedEdit]) -> Iterator[Part]:
    width = max(len(form.clean_text(edit.text)) for edit in edits)
    for edit in edits:
        gain = form.or_reason(edit.gain, _show_gain)
        yield _say(f"{form.clean_text(edit.text):<{width}}  {gain}")


def _show_gain(gain: Gain) -> str:
    after = form.duration(gain.step_ns - gain.saved_ns)
    verb = "saves" if gain.saved_ns >= 0 else "costs"
    amount = form.duration(abs(gain.saved_ns))
    return f"{verb} {amount} a step ({form.ratio(abs(gain.saved_ratio))}): {after}"


def _list_slowdown(slowdown: Slowdown | Unavailable) -> Iterator[Part]:
    if isinstance(slowdown, Unavailable):
        yield _say(f"slowdown {form.or_reason(slowdown, str)}")
        return
    yield _say(
        f"slowdown {slowdown.slowdown:.4f}: {form.duration(slowdown.step_ns)} a step, "
        f"{form.duration(slowdown.ideal_ns)} if all were even; {form.ratio(slowdown.waste_ratio)} "
        f"wasted"
    )
    yield _show_slowdowns("type", slowdown.by_type)
    for axis, found in slowdown.by_axis.items():
        yield _show_slowdowns(axis, {str(index): one for index, one in found.items()})
    yield _show_slowdowns("worker", {f"rank {r}": one for r, one in slowdown.by_worker.items()})
    worst = form.name_ranks(slowdown.worst_workers)
    yield Line(f"M_W, worst workers ({worst}): {form.or_reason(slowdown.worst_share, _show_share)}")
    yield Line(f"M_S, last stage: {form.or_reason(slowdown.last_stage_share, _show_share)}")


def _show_slowdowns(what: str, found: Mapping[str, float]) -> Part:
    shown = [
        f"{form.clean_text(name)} {value:.4f}" for name, value in list(found.items())[:MAX_ROWS]
    ]
    more = len(found) - len(shown)
    return Line(f"by {what}: {', '.join(shown)}" + (f" and {more} more" if more > 0 else ""))


def _show_share(share: Share) -> str:
    if not (0.0 <= share.removed <= 1.0 and 0.0 <= share.added_alone <= 1.0):
        return (
            f"no share: ranks are uneven in turn, so none is the cause ({share.removed:.4f} of the "
            f"excess goes if they are made even, {share.added_alone:.4f} stays if only they are "
            "uneven)"
        )
    return (
        f"{share.removed:.4f} of the excess goes if they are made even, {share.added_alone:.4f} "
        f"stays if only they are uneven"
    )


def _list_path(priced: PricedPath) -> Iterator[Part]:
    path = priced.path
    step_ns = path.total_ns / max(1, path.num_steps)
    yield _say(
        f"critical path over ranks, {form.duration(step_ns)} a step, "
        f"changes rank {path.num_rank_changes:,} times"
    )
    said: set[str] = set()
    for one in priced.shares[:MAX_ROWS]:
        gain = _show_gain_once(one.gain_without, said)
        yield Line(f"{form.ratio(one.share.ratio):>6}  {_name_share(one.share)}{gain}")
    slack = [
        f"{one.rank}: {form.duration(one.slack_ns)}"
        for one in sorted(path.ranks, key=lambda one: one.slack_ns)[:MAX_ROWS]
    ]
    yield Line(f"slack by rank: {', '.join(slack)}")


def _show_gain_once(gain: Gain | Unavailable | None, said: set[str]) -> str:
    """Gives each reason, a long line, only once."""
    if gain is None:
        return ""
    text = form.or_reason(gain, _show_gain)
    if isinstance(gain, Unavailable):
        text = "n/a, likewise" if gain.reason in said else text
        said.add(gain.reason)
    return f"  without it: {text}"


def _name_share(share: PathShare) -> str:
    parts = [f"rank {share.rank}", str(share.kind), share.phase, share.axis, share.operation]
    return " ".join(form.clean_text(part) for part in parts if part)
