"""How much each rank has to do, by what is known of it beforehand: layers, FLOPs, parameters.

Stages of a pipeline do different work, so their times can be compared only in proportion to it. A
rank's parts are what the program declared for all its stages or what the recorder counted in its
model; FLOPs are counted in some steps; parameters are bytes that are trained. What a rank did not
record is NaN. Wrong where a part has no layers, no FLOPs and no parameters, as a loss has.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshscope.analyze.pipeline.stage_work import Parts, PartsSource, check_parts, name_layers
from meshscope.analyze.rank.parameters import read_parameter_bytes
from meshscope.core.unavailable import known
from meshscope.store.read.arrays import Floats
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt


class SizeKind(StrEnum):
    """What ranks are measured by."""

    LAYERS = "layers"
    FLOPS = "FLOPs"
    PARAMETERS = "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    ranks: tuple[int, ...]
    by_kind: dict[SizeKind, Floats]
    """[rank]: positive and known on all ranks; kinds that some rank lacks are not in it."""

    def select(self, ranks: tuple[int, ...]) -> "RankSizes":
        """Of these ranks only; nothing where one of them is not known."""
        if not set(ranks) <= set(self.ranks):
            return RankSizes(ranks=ranks, by_kind={})
        index = [self.ranks.index(rank) for rank in ranks]
        by_kind = {kind: sizes[index] for kind, sizes in self.by_kind.items()}
        return RankSizes(ranks=ranks, by_kind=by_kind)


def read_rank_sizes(attempt: Attempt, flops: Mapping[int, float]) -> RankSizes:
    """`flops`: of a step, by rank, of those that counted them."""
    ranks = tuple(sorted(attempt.ranks))
    found = {
        SizeKind.LAYERS: _read_layers([attempt.ranks[rank] for rank in ranks]),
        SizeKind.FLOPS: [flops.get(rank, np.nan) for rank in ranks],
        SizeKind.PARAMETERS: [_count_parameter_bytes(attempt.ranks[rank]) for rank in ranks],
    }
    sizes = {kind: np.array(values, dtype=np.float64) for kind, values in found.items()}
    by_kind = {kind: one for kind, one in sizes.items() if len(one) and (one > 0).all()}
    return RankSizes(ranks=ranks, by_kind=by_kind)


def _read_layers(recordings: list[Recording]) -> list[float]:
    for source in PartsSource:
        parts = [_read_all_parts(recording, source) for recording in recordings]
        stated = [one for one in parts if one is not None]
        if stated and len(stated) == len(parts):
            return [float(count) for count in name_layers(stated, source).num_layers]
    return []


def _read_all_parts(recording: Recording, source: PartsSource) -> Parts | None:
    """The parts of all stages of a rank, from its last statement."""
    name = "stage_layers" if source is PartsSource.TOLD else "model_layers"
    for fields in (*reversed(recording.updates), recording.header):
        given = fields.get(name)
        stages = list(given.values()) if isinstance(given, dict) else given
        if not isinstance(stages, list) or not stages:
            continue
        parts = [check_parts(one) for one in stages]
        if all(one is not None for one in parts):
            total: Counter[str] = Counter()
            for one in parts:
                total.update(one or {})
            return total
    return None


def _count_parameter_bytes(recording: Recording) -> float:
    size = known(read_parameter_bytes(recording))
    return np.nan if size is None else float(size)
