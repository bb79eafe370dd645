"""How long each pipeline stage takes for a microbatch, and what it is made of.

Times are WORK, the part of an action that nothing held up, so a stage that waits for its
tensor-parallel peers is not slow. Per rank it is the median over steps and microbatches, per stage
the lower median over its ranks, so that one straggler does not make a stage slow.

Parts are what the program declared (`Recorder.set_stage_layers`) or what the recorder counted in
the model. Layers are parts of the most common kind; all others (embedding, head, loss) are extras.
The time of a layer comes from stages without extras, or else from the stage with the least time per
layer; what a stage takes beyond its layers belongs to its extras. Wrong where layers differ in
size.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshscope.analyze.pipeline.action_replay import list_actions
from meshscope.analyze.pipeline.pipeline_times import PipelineTimes
from meshscope.core.schedule import ActionKind
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.store.read.arrays import Floats
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt

Parts = Mapping[str, int]
"""Number of parts by kind."""

_MAX_PARTS = 1 << 20
_QUIET = 0.25
_NOT_TOLD = (
    "what each stage holds was not recorded: call Recorder.set_stage_layers, or attach the model"
)


class PartsSource(StrEnum):
    """Where a stage's parts come from."""

    TOLD = "set_stage_layers"
    COUNTED = "counted in the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    source: PartsSource
    kind: str
    """What is counted as a layer: a class or "layer"."""
    num_layers: tuple[int, ...]
    """Per stage."""
    extras: tuple[tuple[str, ...], ...]
    """Per stage: the kinds of other parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One stage; all its ranks do the same work on other data."""

    stage: int
    position: int
    """Its pipeline rank."""
    ranks: tuple[int, ...]
    kind_ns: Mapping[ActionKind, float]
    """Work of one microbatch, by kind of action."""
    quiet_ns: float
    """The same of lower quartiles, all kinds together: the work when undisturbed."""

    @property
    def work_ns(self) -> float:
        """Work of one microbatch, forward and backward."""
        return sum(self.kind_ns.values())

    @property
    def forward_ns(self) -> float:
        return self.kind_ns[ActionKind.FORWARD]

    @property
    def backward_ns(self) -> float:
        """B, or I and W."""
        return self.work_ns - self.forward_ns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageWork:
    """All stages of a run's pipelines."""

    stages: tuple[StageTime, ...]
    num_positions: int
    layers: StageLayers | Unavailable
    longest_ratio: Floats
    """Per pipeline rank: the share of steps in which it worked longest."""

    @property
    def position_work_ns(self) -> Floats:
        """Per pipeline rank: work of one microbatch through all its stages."""
        total = np.zeros(self.num_positions)
        for stage in self.stages:
            total[stage.position] += stage.work_ns
        return total

    @property
    def position_quiet_ns(self) -> Floats:
        """The same, of lower quartiles."""
        total = np.zeros(self.num_positions)
        for stage in self.stages:
            total[stage.position] += stage.quiet_ns
        return total

    def position_kind_ns(self, kind: ActionKind) -> Floats:
        """Per pipeline rank: the part in actions of one kind."""
        total = np.zeros(self.num_positions)
        for stage in self.stages:
            total[stage.position] += stage.kind_ns.get(kind, 0.0)
        return total

    @or_unavailable
    def position_layers(self) -> tuple[int, ...]:
        """Per pipeline rank: layers it holds."""
        layers, counts = need(self.layers), [0] * self.num_positions
        for stage in self.stages:
            counts[stage.position] += layers.num_layers[stage.stage]
        return tuple(counts)

    @or_unavailable
    def layer_ns(self) -> float:
        """Work of one layer for one microbatch."""
        layers = need(self.layers)
        per_layer = {
            stage.stage: stage.work_ns / layers.num_layers[stage.stage]
            for stage in self.stages
            if layers.num_layers[stage.stage]
        }
        if not per_layer:
            raise Missing("no stage holds a layer")
        plain = [value for stage, value in per_layer.items() if not layers.extras[stage]]
        return lower_median(plain) if plain else min(per_layer.values())


def lower_median(values: Iterable[float]) -> float:
    """The middle value; the smaller of two middle values."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def measure_stage_work(times: PipelineTimes, attempt: Attempt) -> StageWork:
    schedule = times.schedule
    actions = list_actions(schedule)
    stages = []
    for stage, position in enumerate(schedule.stage_ranks):
        by_rank = _rank_quantiles(times, stage, position, 0.5)
        quiet = _rank_quantiles(times, stage, position, _QUIET)
        kinds_here = {action.kind for action in actions if action.stage == stage}
        stages.append(
            StageTime(
                stage=stage,
                position=position,
                ranks=tuple(sorted(by_rank)),
                kind_ns={
                    kind: lower_median(medians[kind] for medians in by_rank.values())
                    for kind in sorted(kinds_here)
                },
                quiet_ns=lower_median(sum(kinds.values()) for kinds in quiet.values()),
            )
        )
    return StageWork(
        stages=tuple(stages),
        num_positions=schedule.num_ranks,
        layers=_find_stage_layers(times, attempt),
        longest_ratio=_count_longest(times),
    )


def _count_longest(times: PipelineTimes) -> Floats:
    """Per pipeline rank: the share of runs in which the sum of its actions' work is largest."""
    lengths = [len(row) for row in times.schedule.actions]
    edges = np.cumsum([0, *lengths[:-1]])
    total = np.add.reduceat(times.work_ns, edges, axis=0)
    shares: Floats = np.bincount(total.argmax(axis=0), minlength=len(lengths)) / times.num_runs
    return shares


def _rank_quantiles(
    times: PipelineTimes, stage: int, position: int, quantile: float
) -> dict[int, dict[ActionKind, float]]:
    """Per global rank and kind: a quantile of the work of one microbatch."""
    actions = list_actions(times.schedule)
    found: dict[int, dict[ActionKind, float]] = {}
    for kind in ActionKind:
        rows = [i for i, a in enumerate(actions) if a.stage == stage and a.kind is kind]
        if not rows:
            continue
        work = times.work_ns[rows]
        for index in np.unique(times.chain).tolist():
            rank = times.chains[index][position]
            own = work[:, times.chain == index]
            found.setdefault(rank, {})[kind] = float(np.quantile(own, quantile))
    return found


def _find_stage_layers(times: PipelineTimes, attempt: Attempt) -> StageLayers | Unavailable:
    """What the stages hold, if the ranks of each stage recorded it and agree."""
    schedule = times.schedule
    for source in PartsSource:
        parts = [
            _agreed_parts(attempt, times.ranks_of(position), stage, source)
            for stage, position in enumerate(schedule.stage_ranks)
        ]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            return name_layers(known, source)
    return Unavailable(_NOT_TOLD)


def name_layers(parts: list[Parts], source: PartsSource) -> StageLayers:
    total: Counter[str] = Counter()
    for stage in parts:
        total.update(stage)
    # Ties go to the kind that most stages hold: the other may be a pair of ends.
    holders = Counter(kind for stage in parts for kind in stage)
    layer = max(total, key=lambda kind: (total[kind], holders[kind], kind), default="layer")
    return StageLayers(
        source=source,
        kind=layer,
        num_layers=tuple(stage.get(layer, 0) for stage in parts),
        extras=tuple(
            tuple(sorted(kind for kind, number in stage.items() if kind != layer and number))
            for stage in parts
        ),
    )


def _agreed_parts(
    attempt: Attempt, ranks: tuple[int, ...], stage: int, source: PartsSource
) -> Parts | None:
    found: list[Parts] = []
    for rank in ranks:
        recording = attempt.ranks.get(rank)
        parts = None if recording is None else read_parts(recording, stage, source)
        if parts is not None:
            found.append(parts)
    return found[0] if found and all(parts == found[0] for parts in found) else None


def read_parts(recording: Recording, stage: int, source: PartsSource) -> Parts | None:
    """A rank's last readable statement; None if there is none."""
    for fields in (*reversed(recording.updates), recording.header):
        if source is PartsSource.TOLD:
            told = fields.get("stage_layers")
            given = told.get(str(stage)) if isinstance(told, dict) else None
        else:
            models = fields.get("model_layers")
            # It is not known which of several models is this stage.
            is_one = isinstance(models, list) and len(models) == 1
            given = models[0] if is_one and isinstance(models, list) else None
        parts = check_parts(given)
        if parts is not None:
            return parts
    return None


def check_parts(given: object) -> Parts | None:
    if not isinstance(given, dict):
        return None
    parts = {
        kind: number
        for kind, number in given.items()
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= _MAX_PARTS
    }
    return parts if len(parts) == len(given) and parts else None
