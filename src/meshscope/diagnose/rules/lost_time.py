"""What the ledger of lost time shows and no other rule names."""

from collections.abc import Iterable

from meshscope.analyze.rank.stacks import SampledLines, StackSamples
from meshscope.core.unavailable import need
from meshscope.core.verdict.severity import grade
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Estimate, Evidence, Finding
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.views.sampled_stacks import find_lines, list_evidence, write_lines
from meshscope.diagnose.wording import duration, name_ranks, plural, ratio
from meshscope.numerics.chance import MIN_STEPS
from meshscope.simulate.ledger.ledger import Entry, Ledger
from meshscope.simulate.ledger.losses import LossKind
from meshscope.simulate.ledger.peer_cells import Place
from meshscope.store.read.arrays import Bools

_MIN_LOST_RATIO = Threshold(
    name="lost_time_min_ratio",
    default=0.03,
    meaning="share of the step that a loss no other rule names must cost",
)
_MIN_LOST_ERRORS = Threshold(
    name="lost_time_min_errors",
    default=6.0,
    meaning="excess of a rank over its peers, in standard errors over blocks of steps",
)


class UnnamedLoss(Rule):
    """Some ranks take longer than their peers somewhere, and no other rule says why.

    What it finds: ranks that spend more time than their peers in a phase, in no phase or between
    steps, at a cost of `lost_time_min_ratio` of the step or more.

    Why it matters: all others wait for them. Two such losses that hide each other save little when
    one is removed, and much together.

    How it is measured: the ledger of lost time (docs/simulate.md): each loss gets its share of what
    a replay without all of them saves. A rank stands out if its mean excess over the median of
    its peers is `lost_time_min_errors` standard errors or more. The runner drops the finding where
    another one removes the same work.

    What to change: look at what these ranks do there; a stack sampled in that place names the line.

    When it is wrong: if ranks are given different work on purpose.
    """

    code = "LT001"
    name = "lost-time"
    thresholds = (_MIN_LOST_RATIO, _MIN_LOST_ERRORS)

    def find(self, context: Context) -> Iterable[Finding]:
        """One per loss."""
        ledger = need(context.ledger)
        if len(need(context.study.timeline).steps) < MIN_STEPS:
            return
        for entry in ledger.entries:
            loss = entry.loss
            if loss is None or loss.kind is not LossKind.SLOWER or loss.place is None:
                continue
            is_large = entry.share_ns >= context.thresholds[_MIN_LOST_RATIO] * ledger.replayed_ns
            if is_large and loss.num_errors >= context.thresholds[_MIN_LOST_ERRORS]:
                yield _describe(self.code, context, ledger, entry)


def _describe(code: str, context: Context, ledger: Ledger, entry: Entry) -> Finding:
    loss = entry.loss
    assert loss is not None
    assert loss.place is not None
    ranks, place = loss.ranks, loss.place
    share = entry.share_ns / ledger.replayed_ns
    lines = _find_lines(context, ranks, place)
    where = place.name if place.name.startswith(("in ", "between ")) else f"in {place.name}"
    take = "takes" if len(ranks) == 1 else "take"
    unknown = "" if lines.lines else " Nothing recorded names what it does there."
    return Finding(
        code=code,
        title=f"{name_ranks(ranks)} {take} longer {where}",
        severity=grade(share),
        summary=f"{name_ranks(ranks)} {take} {duration(loss.excess_ns)} longer than peers {where}, "
        f"{duration(entry.share_ns)} of a step ({ratio(share)}).{unknown}{write_lines(lines)}",
        ranks=ranks,
        evidence=(
            Evidence(name="excess over peers per step", value=loss.excess_ns, unit="ns"),
            Evidence(name="saved if removed alone", value=entry.alone_ns, unit="ns"),
            Evidence(name="share of what is lost", value=entry.share_ns, unit="ns"),
            *list_evidence(lines),
        ),
        confidence=Confidence(
            level=ConfidenceLevel.MEDIUM,
            text=f"{loss.num_errors:.0f} standard errors over {plural(len(loss.step_ns), 'step')}",
        ),
        change="Look at what these ranks do there, and take it out of the step; recorder.phase(…) "
        "gives it a name.",
        gain=Estimate(
            saved_ns=entry.share_ns,
            step_ns=ledger.replayed_ns,
            basis="its share of a replay without any loss",
        ),
        edit=entry.edit,
    )


def _find_lines(context: Context, ranks: tuple[int, ...], place: Place) -> SampledLines:
    def choose(samples: StackSamples) -> Bools:
        return samples.find_in_phase(place.phase, is_between=place.is_between)

    return find_lines(context.study, ranks, choose)
