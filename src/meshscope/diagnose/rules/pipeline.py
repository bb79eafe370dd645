"""Rules about the stages of pipelines: uneven ones, a slow one, slow handovers between them."""

from collections.abc import Iterable

import numpy as np

from meshscope.analyze.pipeline.stage_verdict import StageCause, StageVerdict
from meshscope.core.operations import POINT_TO_POINT
from meshscope.core.schedule import ActionKind
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.views.pipeline_view import (
    MIN_GAIN_RATIO,
    PipelineView,
    Priced,
    bubble_evidence,
    describe_confidence,
    pipeline_view,
)
from meshscope.diagnose.wording import capitalize, duration, name_ranks, plural, ratio
from meshscope.simulate.pipeline.pipeline_edits import (
    MoveAdvice,
    advise_moves,
    layer_factors,
    level_factors,
    price_no_communication,
    spread_factors,
)
from meshscope.simulate.what_if import Edit

_MIN_STAGE_EXCESS_RATIO = Threshold(
    name="pipeline_min_stage_excess_ratio",
    default=0.10,
    meaning="by how much a stage must take longer than the others",
)
_MIN_LONGEST_RATIO = Threshold(
    name="pipeline_min_longest_ratio",
    default=0.8,
    meaning="share of steps in which a stage must have worked longest",
)
_MIN_HANDOVER_RATIO = Threshold(
    name="pipeline_min_handover_ratio",
    default=0.20,
    meaning="share of the step that outputs on their way must cost",
)


def _stands_out(context: Context, view: PipelineView) -> bool:
    """Whether the stage takes enough longer, in nearly all steps, and not by jitter."""
    verdict, parts = view.verdict, view.analysis.bubble.parts
    return (
        verdict.excess_ratio >= context.thresholds[_MIN_STAGE_EXCESS_RATIO]
        and verdict.longest_ratio >= context.thresholds[_MIN_LONGEST_RATIO]
        and parts.imbalance_ns > parts.stragglers_ns
    )


def _name_stages(verdict: StageVerdict) -> str:
    """`stage 1`, `stages 1 and 5`."""
    if len(verdict.stages) == 1:
        return f"stage {verdict.stages[0]}"
    return "stages " + " and ".join(map(str, verdict.stages))


def _stage_evidence(view: PipelineView) -> tuple[Evidence, ...]:
    work, verdict = view.analysis.work, view.verdict
    found = [
        Evidence(name=f"work of {_name_stages(verdict)}", value=verdict.work_ns, unit="ns"),
        Evidence(name="work of the other stages", value=verdict.others_ns, unit="ns"),
    ]
    for kind, word in ((ActionKind.FORWARD, "forward"), (ActionKind.BACKWARD, "backward")):
        load = work.position_kind_ns(kind)
        if load.any():
            found.append(
                Evidence(name=f"of which {word}", value=float(load[verdict.position]), unit="ns")
            )
    if not isinstance(work.layers, Unavailable):
        counts = ", ".join(map(str, work.layers.num_layers))
        found.append(Evidence(name=f"layers by stage ({work.layers.source})", value=counts))
    return tuple(found)


def _compare(verdict: StageVerdict) -> str:
    return (
        f"{_name_stages(verdict)} ({name_ranks(verdict.ranks)}) "
        f"{'takes' if len(verdict.stages) == 1 else 'take'} {duration(verdict.work_ns)} for a "
        f"microbatch, {ratio(verdict.excess_ratio)} longer than the others "
        f"({duration(verdict.others_ns)})"
    )


class UnevenStages(Rule):
    """One stage of the pipeline has more to do than the others.

    What it finds: a stage that takes `pipeline_min_stage_excess_ratio` longer for a microbatch than
    the others, in `pipeline_min_longest_ratio` of the steps, because it holds more layers, or
    layers and something besides (embedding, head and loss). If the contents of stages are not
    known, a stage that takes longer for any reason.

    Why it matters: every microbatch goes through all stages, so the pipeline runs at the pace of
    the longest, and all other ranks wait for it.

    How it is measured: work per microbatch is the median over steps and microbatches, without waits
    inside actions, then the lower median over the ranks of a stage. Lower quartiles must agree, and
    the bubble's part of unequal stages must exceed that of stragglers and jitter. Layers are those
    the program declared (`Recorder.set_stage_layers`) or the recorder counted. The gain is a replay
    of all recorded steps with layers moved; the moves are found one by one.

    What to change: move the layers that the finding names to the stages it names.

    When it is wrong: layers of one class that differ in size; a stage that has no memory for more
    layers.
    """

    code = "PP002"
    name = "uneven-stages"
    thresholds = (_MIN_STAGE_EXCESS_RATIO, _MIN_LONGEST_RATIO)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one: the stage with the most work."""
        view = need(context.study.get(pipeline_view))
        verdict = view.verdict
        if not _stands_out(context, view):
            return
        if verdict.cause is StageCause.UNKNOWN:
            yield from self._find_unknown(context, view)
        elif verdict.cause in (StageCause.UNEVEN, StageCause.EXTRAS):
            yield from self._find_uneven(context, view, need(advise_moves(view.replay)))

    def _find_uneven(
        self, context: Context, view: PipelineView, advice: MoveAdvice
    ) -> Iterable[Finding]:
        verdict = view.verdict
        factors = need(layer_factors(view.analysis.work, advice.num_layers))
        spread = spread_factors(view.analysis.work, factors)
        priced = view.price(context, spread, "layers moved")
        if priced.saved_ratio < MIN_GAIN_RATIO:
            return
        moves = ", ".join(str(move) for move in advice.moves)
        holds = f"{verdict.num_layers} layers, the others {verdict.others_layers:g}"
        if verdict.extras:
            holds += f", and {', '.join(verdict.extras)}"
        is_uneven = verdict.cause is StageCause.UNEVEN
        what = "holds more layers than the others" if is_uneven else "does more than its layers"
        yield Finding(
            code=self.code,
            title=f"{_name_stages(verdict)} {what}",
            severity=severity_of(priced.gain),
            summary=f"{capitalize(_compare(verdict))}; it holds {holds}.",
            ranks=verdict.ranks,
            evidence=(*_stage_evidence(view), *bubble_evidence(view)),
            confidence=describe_confidence(
                view, "assumes layers of equal size", ConfidenceLevel.HIGH
            ),
            change=f"Move {moves}.",
            gain=priced.gain,
            edit=priced.edit,
        )

    def _find_unknown(self, context: Context, view: PipelineView) -> Iterable[Finding]:
        verdict = view.verdict
        priced = _price_level(context, view)
        if priced is None or priced.saved_ratio < MIN_GAIN_RATIO:
            return
        yield Finding(
            code=self.code,
            title=f"{_name_stages(verdict)} takes longer than the others",
            severity=severity_of(priced.gain),
            summary=f"{capitalize(_compare(verdict))}; its number of layers was not recorded.",
            ranks=verdict.ranks,
            evidence=(*_stage_evidence(view), *bubble_evidence(view)),
            confidence=describe_confidence(
                view,
                "whether the stage holds more or is slow is not known",
                ConfidenceLevel.MEDIUM,
            ),
            change=(
                f"Move layers away from {_name_stages(verdict)} if it holds more than the others, "
                f"otherwise look at the hardware of {name_ranks(verdict.ranks)}; "
                f"Recorder.set_stage_layers lets the next report distinguish the two."
            ),
            gain=priced.gain,
            edit=priced.edit,
        )


class SlowStage(Rule):
    """One stage of the pipeline takes longer for the same work.

    What it finds: a stage that takes `pipeline_min_stage_excess_ratio` longer for a microbatch than
    the others, on all its ranks (at least half of them), although it holds no more layers. The cost
    of an embedding, a head and a loss in forward and backward does not count as slow (see PP002).

    Why it matters: the pipeline runs at the pace of its slowest stage.

    How it is measured: as for PP002. The gain is a replay of all recorded steps with this stage's
    work, forward and backward, at the others' time per layer.

    What to change: look at what the ranks of the stage share: a host, a slot, a clock limit,
    another job; or at what only this stage does in its forward or backward.

    When it is wrong: a stage whose layers are larger than the others' is called slow.
    """

    code = "PP003"
    name = "slow-stage"
    thresholds = (_MIN_STAGE_EXCESS_RATIO, _MIN_LONGEST_RATIO)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one: the stage with the most work."""
        view = need(context.study.get(pipeline_view))
        verdict = view.verdict
        if not _stands_out(context, view) or verdict.cause is not StageCause.SLOW:
            return
        priced = _price_level(context, view)
        if priced is None or priced.saved_ratio < MIN_GAIN_RATIO:
            return
        verb = "is" if len(verdict.stages) == 1 else "are"
        yield Finding(
            code=self.code,
            title=f"{_name_stages(verdict)} {verb} slow{_name_direction(view)}",
            severity=severity_of(priced.gain),
            summary=(
                f"{capitalize(_compare(verdict))}, with "
                f"{plural(_as_int(verdict.num_layers), 'layer')} against "
                f"{_as_int(verdict.others_layers)}."
            ),
            ranks=verdict.ranks,
            evidence=(*_stage_evidence(view), *bubble_evidence(view)),
            confidence=describe_confidence(
                view, "assumes layers of equal size", ConfidenceLevel.HIGH
            ),
            change=(
                f"Find out what slows {name_ranks(verdict.ranks)} down: the host, the device, or "
                f"what only {_name_stages(verdict)} does."
            ),
            gain=priced.gain,
            edit=priced.edit,
        )


def _as_int(value: float | Unavailable) -> int:
    return int(known(value) or 0)


def _name_direction(view: PipelineView) -> str:
    """` in forward` if all of its extra time is there; empty if it is in both."""
    work, position = view.analysis.work, view.verdict.position
    forward = work.position_kind_ns(ActionKind.FORWARD)
    backward = work.position_work_ns - forward
    others = [i for i in range(work.num_positions) if i not in view.verdict.positions]
    more_forward = float(forward[position] - np.median(forward[others]))
    more_backward = float(backward[position] - np.median(backward[others]))
    if more_forward >= 4 * max(more_backward, 0):
        return " in forward"
    return " in backward" if more_backward >= 4 * max(more_forward, 0) else ""


def _price_level(context: Context, view: PipelineView) -> Priced | None:
    factors = level_factors(view.analysis.work, view.verdict.positions)
    if isinstance(factors, Unavailable):
        return None
    return view.price(context, factors, f"{_name_stages(view.verdict)} as fast as the others")


class SlowHandovers(Rule):
    """Pipeline ranks wait for outputs that exist but have not arrived yet.

    What it finds: outputs that take long from the end of one stage's action to the start of the
    next stage's: without this time, `pipeline_min_handover_ratio` of the step would be saved.

    Why it matters: transfer time adds to filling and draining the pipeline and, if a schedule
    leaves no slack, to every microbatch.

    How it is measured: if a rank waited for its input, the time from the end of the action that
    made it to the start of the one that uses it: the transfer, and everything around it on both
    sides. The gain is a replay of all recorded steps without it.

    What to change: send earlier and receive ahead (asynchronous sends and receives), send less
    (half precision), place neighbouring stages on one node.

    When it is wrong: if ranks wake up late because the machine is overloaded, that time is part of
    it. The rules on links report a single slow link.
    """

    code = "PP004"
    name = "slow-handovers"
    thresholds = (_MIN_HANDOVER_RATIO,)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        view = need(context.study.get(pipeline_view))
        if not view.analysis.bubble.action_gaps.is_lag_seen:
            return
        gain = need(price_no_communication(view.replay))
        if gain.saved_ratio < context.thresholds[_MIN_HANDOVER_RATIO]:
            return
        action_gaps = view.analysis.bubble.action_gaps
        lags = action_gaps.typical_lag_ns[action_gaps.plan.remote >= 0, 0]
        yield Finding(
            code=self.code,
            title="transfers between stages are slow",
            severity=severity_of(gain),
            summary=(
                f"outputs are used {duration(float(np.median(lags)))} after they are made "
                f"(median over stages; the slowest {duration(float(lags.max()))}); this costs "
                f"{ratio(gain.saved_ratio)} of the step."
            ),
            evidence=(
                Evidence(name="lag, median", value=float(np.median(lags)), unit="ns"),
                Evidence(name="lag of the slowest stage", value=float(lags.max()), unit="ns"),
                *bubble_evidence(view),
            ),
            confidence=describe_confidence(
                view, "lags show only where a rank waited", ConfidenceLevel.MEDIUM
            ),
            change=(
                "Receive ahead and send without waiting, send less, or place stages that follow "
                "each other on one node."
            ),
            gain=gain,
            edit=_hide_messages(view),
        )


def _hide_messages(view: PipelineView) -> Edit | None:
    """Messages between stages take no time: what a slow link or others have in common with it."""
    communication = view.timeline.communication
    if communication is None:
        return None
    is_message = np.isin(communication.operations.rows.kind, [int(one) for one in POINT_TO_POINT])
    transfer = np.where(is_message, 0, communication.row_times.transfer_ns)
    return Edit(name="messages between stages at once", transfer_ns=transfer)
