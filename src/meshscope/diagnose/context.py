"""What rules may read: the study of one attempt, thresholds, and what a change would save.

Rules read analyses through `context.study` only, so that no analysis is made twice and the inputs
of a rule are easy to see. An analysis of one subject needs no attribute there: its rules call
`context.study.get(build)` with a function of the study, and share what it returns.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.core.verdict.thresholds import Thresholds

if TYPE_CHECKING:
    from meshscope.simulate.ledger.ledger import Ledger
    from meshscope.simulate.what_if import Edit, Gain, Replay


class Context:
    def __init__(self, study: Study, *, thresholds: Thresholds | None = None) -> None:
        self.study = study
        self.thresholds = thresholds or Thresholds()

    @cached_property
    def replay(self) -> "Replay | Unavailable":
        """The run as a graph that can be timed again with other durations."""
        return self.study.get(_replay)

    @cached_property
    def ledger(self) -> "Ledger | Unavailable":
        """The way from the measured step to the best one."""
        return self.study.get(_ledger)

    def price(self, edits: "Sequence[Edit]") -> "list[Gain | Unavailable]":
        """What each edit would save, all in one replay; never raises."""

        def pricing(study: Study) -> "list[Gain | Unavailable]":
            return need(self.replay).price(edits)

        gains = self.study.make(pricing)
        return [gains for _ in edits] if isinstance(gains, Unavailable) else gains

    def price_edit(self, edit: "Edit | Unavailable") -> "Gain | Unavailable":
        return edit if isinstance(edit, Unavailable) else self.price([edit])[0]


def _ledger(study: Study) -> "Ledger":
    from meshscope.analyze.pipeline.stage_sizes import read_rank_sizes
    from meshscope.simulate.ledger.ledger import open_ledger

    flops = {rank: one.model_flops for rank, one in (known(study.flops) or {}).items()}
    sizes = read_rank_sizes(study.attempt, flops)
    return need(open_ledger(need(study.get(_replay)), sizes))


def _replay(study: Study) -> "Replay":
    from meshscope.simulate.what_if import build_replay

    return need(build_replay(need(study.timeline)))
