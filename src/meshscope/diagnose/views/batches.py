"""Whether ranks are given different amounts of data: larger batches, or longer sequences.

A rank with more to compute looks like a slow one, and nothing on its host will make it faster.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.stragglers.sequence_imbalance import SAMPLES, TOKENS
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.peer_work import PeerWork
from meshscope.core.unavailable import need
from meshscope.diagnose.finding import Evidence
from meshscope.store.read.arrays import Floats

_MIN_MORE_RATIO = 0.1
"""More samples, or tokens of a sample, than peers have, to be called more."""
_MIN_EXPLAINED_RATIO = 0.5
"""Of what a rank works longer, for more data to be the cause."""
_SAME_SIZE = (
    "Give all ranks batches of the same size: look at how its sampler splits the data, at the last "
    "batch (drop_last) and at what filters samples."
)
_SAME_LENGTH = (
    "Give all ranks sequences of the same total length: sort by length, or pack them, before they "
    "are dealt out."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreData:
    """What one rank has more of than its peers."""

    what: str
    """`its batches are larger`, `its sequences are longer`."""
    unit: str
    own: float
    """Per step or sample."""
    peers: float
    change: str

    @property
    def text(self) -> str:
        return f" Its peers have {self.peers:.0f} {self.unit}, it has {self.own:.0f}."

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        return (
            Evidence(name=f"{self.unit} of the rank", value=self.own),
            Evidence(name=f"{self.unit} of its peers", value=self.peers),
        )


def _read_data(study: Study) -> tuple[Floats, Floats]:
    """Samples of a step and tokens of a sample, [step, rank]; NaN where not counted."""
    counts = need(study.input_counts)
    samples, tokens = (
        np.where(counts[name] > 0, counts[name], np.nan) for name in (SAMPLES, TOKENS)
    )
    return samples, tokens / samples


def find_more_data(
    study: Study, rank: int, peers: tuple[int, ...], longer_ratio: float
) -> MoreData | None:
    """Why a rank works longer than its peers by `longer_ratio`, if its data explains it."""
    work, (samples, lengths) = need(study.peer_work), need(study.get(_read_data))
    for values, what, unit, change in (
        (samples, "its batches are larger", "samples a step", _SAME_SIZE),
        (lengths, "its sequences are longer", "tokens a sample", _SAME_LENGTH),
    ):
        own, usual = _compare(values, work, rank, peers)
        more_ratio = own / usual - 1.0 if usual > 0 else 0.0
        # Not so where it is not known: nothing is above a NaN.
        if more_ratio >= max(_MIN_MORE_RATIO, _MIN_EXPLAINED_RATIO * longer_ratio):
            return MoreData(what=what, unit=unit, own=own, peers=usual, change=change)
    return None


def _compare(
    values: Floats, work: PeerWork, rank: int, peers: tuple[int, ...]
) -> tuple[float, float]:
    """Medians over steps of a rank and of its peers' means."""
    others = [work.ranks.index(peer) for peer in peers if peer != rank]
    own = values[:, work.ranks.index(rank)]
    usual = values[:, others].mean(axis=1) if others else np.full(len(own), np.nan)
    is_known = np.isfinite(own) & np.isfinite(usual)
    if not is_known.any():
        return float("nan"), float("nan")
    return float(np.median(own[is_known])), float(np.median(usual[is_known]))


def vary_batches(study: Study) -> bool:
    """Whether peers have batches of different numbers of samples in the same step."""
    work, (samples, _) = need(study.peer_work), need(study.get(_read_data))
    variations = [
        samples[:, list(group.indices)].std(axis=1) / samples[:, list(group.indices)].mean(axis=1)
        for group in work.groups
    ]
    found = np.concatenate(variations) if variations else np.empty(0)
    found = found[np.isfinite(found)]
    return bool(len(found)) and float(np.median(found)) >= _MIN_MORE_RATIO
