"""Changes to the stages of a pipeline, priced by replay: move layers, even out, speed one up.

The time of a stage is that of its layers plus its extras (`analyze.stage_work`). Moving a layer
takes its time from one stage and adds it to another, scaled by how slow that one is: a stage
without extras that takes longer per layer than the others is slow and stays so; the time of first
and last stages beyond their layers belongs to embedding, head and loss, and stays there.

Wrong if layers differ in size, or if the memory of a stage has no room for another layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.pipeline.stage_work import StageWork, lower_median
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.simulate.pipeline.pipeline_replay import PipelineReplay, StageFactors
from meshscope.simulate.what_if import Gain

_MIN_WORTH_RATIO = 0.002
"""A move must shorten the pipeline by this share: less is noise of the medians."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMove:
    """`count` layers from one stage to another."""

    count: int
    source: int
    target: int

    def __str__(self) -> str:
        noun = "layer" if self.count == 1 else "layers"
        return f"{self.count} {noun} from stage {self.source} to stage {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveAdvice:
    """The moves that shorten the pipeline most."""

    moves: tuple[LayerMove, ...]
    num_layers: tuple[int, ...]
    """Per stage, afterwards."""
    gain: Gain | Unavailable


@or_unavailable
def layer_factors(work: StageWork, num_layers: tuple[int, ...]) -> dict[int, float]:
    """By stage: its work with that many layers, divided by its work now."""
    layers, layer_ns = need(work.layers), need(work.layer_ns())
    factors = {}
    for stage in work.stages:
        now = layers.num_layers[stage.stage]
        own_ns = layer_ns
        if not layers.extras[stage.stage] and now:
            own_ns = stage.work_ns / now
        change_ns = (num_layers[stage.stage] - now) * own_ns
        after_ns = max(stage.work_ns + change_ns, 0.0)
        factors[stage.stage] = after_ns / stage.work_ns if stage.work_ns > 0 else 1.0
    return factors


@or_unavailable
def _price_layers(replay: PipelineReplay, num_layers: tuple[int, ...]) -> Gain:
    """The saving with another number of layers per stage."""
    factors = spread_factors(replay.work, need(layer_factors(replay.work, num_layers)))
    return need(replay.price(duration_ns=replay.scale_work(factors)))


def spread_factors(work: StageWork, factors: Mapping[int, float]) -> StageFactors:
    """Applies a stage's factor to all kinds of its actions."""
    return {
        (kind, stage.stage): factors[stage.stage]
        for stage in work.stages
        if stage.stage in factors
        for kind in stage.kind_ns
    }


@or_unavailable
def price_move(replay: PipelineReplay, move: LayerMove) -> Gain:
    """The saving of one move; Unavailable if the stage has fewer layers."""
    layers = need(replay.work.layers)
    counts = list(layers.num_layers)
    if not (0 <= move.source < len(counts) and 0 <= move.target < len(counts)):
        raise Missing(f"there are stages 0..{len(counts) - 1}")
    if counts[move.source] < move.count:
        raise Missing(f"stage {move.source} has {counts[move.source]} layers")
    counts[move.source] -= move.count
    counts[move.target] += move.count
    return need(_price_layers(replay, tuple(counts)))


@or_unavailable
def advise_moves(replay: PipelineReplay) -> MoveAdvice:
    """Moves layers one by one, always the move that shortens the pipeline most, while any does.

    Single moves may get stuck where two together would help. If spreading all layers from scratch,
    each to the rank with the least work, gives a shorter pipeline, that is advised. Every stage
    keeps a layer or an extra.
    """
    layers = need(replay.work.layers)
    counts = layers.num_layers
    now_ns = _typical_ns(replay, counts)
    for _ in range(sum(counts)):
        found = _find_best_move(replay, counts)
        if found is None or found[0] > now_ns * (1 - _MIN_WORTH_RATIO):
            break
        now_ns, counts = found
    spread = _spread_layers(replay)
    if _typical_ns(replay, spread) < now_ns * (1 - _MIN_WORTH_RATIO):
        counts = spread
    moves = _list_moves(layers.num_layers, counts)
    if not moves:
        raise Missing("no layer is better placed on another stage")
    return MoveAdvice(moves=moves, num_layers=counts, gain=_price_layers(replay, counts))


def _spread_layers(replay: PipelineReplay) -> tuple[int, ...]:
    """Gives each layer to the pipeline rank that then has the least work, extras included."""
    work = replay.work
    layers = need(work.layers)
    counts = [0 if extras else 1 for extras in layers.extras]
    for _ in range(sum(layers.num_layers) - sum(counts)):
        load = _load_positions(work, tuple(counts))
        stage = min(work.stages, key=lambda stage: (load[stage.position], counts[stage.stage]))
        counts[stage.stage] += 1
    return tuple(counts)


def _load_positions(work: StageWork, counts: tuple[int, ...]) -> list[float]:
    """Work of each pipeline rank with that many layers on each stage."""
    factors = need(layer_factors(work, counts))
    load = [0.0] * work.num_positions
    for stage in work.stages:
        load[stage.position] += stage.work_ns * factors[stage.stage]
    return load


def _find_best_move(
    replay: PipelineReplay, counts: tuple[int, ...]
) -> tuple[float, tuple[int, ...]] | None:
    """The shortest pipeline after one move from the fullest rank's stages."""
    layers = need(replay.work.layers)
    fullest = int(np.argmax(_load_positions(replay.work, counts)))
    best: tuple[float, tuple[int, ...]] | None = None
    for source in replay.work.stages:
        keeps = 0 if layers.extras[source.stage] else 1
        if source.position != fullest or counts[source.stage] <= keeps:
            continue
        for target in replay.work.stages:
            if target.position == fullest:
                continue
            moved = list(counts)
            moved[source.stage] -= 1
            moved[target.stage] += 1
            end_ns = _typical_ns(replay, tuple(moved))
            if best is None or end_ns < best[0]:
                best = end_ns, tuple(moved)
    return best


def _typical_ns(replay: PipelineReplay, counts: tuple[int, ...]) -> float:
    factors = need(layer_factors(replay.work, counts))
    stage_ns = {
        (kind, stage.stage): ns * factors[stage.stage]
        for stage in replay.work.stages
        for kind, ns in stage.kind_ns.items()
    }
    return replay.typical_end_ns(replay.plan.spread(stage_ns))


def _list_moves(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[LayerMove, ...]:
    """The fewest moves that lead from one to the other, in order of stage."""
    give = [(stage, old - new) for stage, (old, new) in _pairs(before, after) if old > new]
    take = [(stage, new - old) for stage, (old, new) in _pairs(before, after) if new > old]
    moves = []
    while give and take:
        (source, spare), (target, room) = give[0], take[0]
        count = min(spare, room)
        moves.append(LayerMove(count=count, source=source, target=target))
        give[0], take[0] = (source, spare - count), (target, room - count)
        give = give[1:] if spare == count else give
        take = take[1:] if room == count else take
    return tuple(moves)


def _pairs(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(zip(before, after, strict=True)))


@or_unavailable
def price_level_position(replay: PipelineReplay, position: int) -> Gain:
    """The saving if one pipeline rank is as fast as the others, per layer if known."""
    factors = need(level_factors(replay.work, (position,)))
    return need(replay.price(duration_ns=replay.scale_work(factors)))


def level_factors(work: StageWork, positions: Sequence[int]) -> StageFactors | Unavailable:
    """Factors for the stages of some pipeline ranks that make each kind of action as fast as on the
    others.

    Per layer if layers are known. Never above 1.
    """
    counts = work.position_layers()
    if isinstance(counts, Unavailable) or not all(counts):
        counts = (1,) * work.num_positions
    kinds = {kind for stage in work.stages for kind in stage.kind_ns}
    others = [other for other in range(work.num_positions) if other not in positions]
    factors = {}
    for kind in kinds:
        load = work.position_kind_ns(kind)
        usual_ns = lower_median(load[other] / counts[other] for other in others)
        for stage in work.stages:
            own_ns, wanted_ns = float(load[stage.position]), usual_ns * counts[stage.position]
            if stage.position in positions:
                factors[kind, stage.stage] = min(wanted_ns / own_ns, 1.0) if own_ns > 0 else 1.0
    return factors


def price_no_communication(replay: PipelineReplay) -> Gain | Unavailable:
    """The saving if outputs arrived at once."""
    action_gaps = replay.action_gaps
    gap_ns = action_gaps.gap_ns - action_gaps.receive_ns
    return replay.price(lag_ns=np.zeros_like(action_gaps.lag_ns), gap_ns=gap_ns)
