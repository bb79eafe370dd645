"""A rule about a loss that rises for a while."""

from collections.abc import Iterable

from meshscope.analyze.training.loss_rises import LossRise, find_rises
from meshscope.core.unavailable import need
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.rules.convergence import NOT_TIME


class LossRises(Rule):
    """The loss rises for a while, and comes back.

    What it finds: steps in a row whose loss is 20 % and six times the noise above that of the steps
    before, until it comes back; and a learning rate that was raised at once just before.

    Why it matters: what was learned is unlearned, and learned again, or not quite. The cause is
    known if the rate changed: it was too high at once.

    How it is measured: three values in a row above the median of the eight before, by the effect
    and by the scatter of their differences. A rate counts if one value is 1.3 times the one before
    and its neighbours do not rise as well, up to five steps before the loss does. Rates are sampled
    in short steps: the finding says between which it changed.

    What to change: raise the rate over some hundred steps (warm-up), or less; clip gradients.
    Without a change of the rate look at the data of these steps.

    When it is wrong: if the data or the task changes on purpose in these steps. It is LOW where the
    rate did not change.
    """

    code = "CV008"
    name = "loss-rises"
    severities = (Severity.LOW, Severity.MEDIUM)

    def find(self, context: Context) -> Iterable[Finding]:
        """One per rise with a change of the rate; else one, of the largest."""
        rises = find_rises(need(context.study.convergence))
        tied = [rise for rise in rises if rise.rate is not None]
        for rise in tied or sorted(rises, key=lambda one: one.before - one.during)[:1]:
            yield self._report(rise)

    def _report(self, rise: LossRise) -> Finding:
        rate = rise.rate
        cause = "" if rate is None else " after the learning rate was raised"
        how = ""
        if rate is not None:
            when = f"in step {rate.first_step}"
            if rate.last_step + 1 < rate.first_step:
                when = f"between steps {rate.last_step} and {rate.first_step}"
            how = f" The learning rate went from {rate.before:.3g} to {rate.after:.3g} {when}."
        return Finding(
            code=self.code,
            title=f"the loss rises in steps {rise.first_step} to {rise.last_step}{cause}",
            severity=Severity.LOW if rate is None else Severity.MEDIUM,
            summary=f"The loss is {rise.during:.4g} in steps {rise.first_step} to "
            f"{rise.last_step} (median), and was {rise.before:.4g} before.{how}",
            first_step=rise.first_step,
            last_step=rise.last_step,
            evidence=(
                Evidence(name="loss before", value=rise.before),
                Evidence(name="loss in these steps, median", value=rise.during),
                *(
                    ()
                    if rate is None
                    else (Evidence(name="learning rate, times", value=rate.after / rate.before),)
                ),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.MEDIUM,
                text="20 % and six times the noise above the level before, and back again",
            ),
            change="Look at the data of these steps."
            if rate is None
            else "Raise the learning rate over some hundred steps, or less; clip gradients.",
            gain=NOT_TIME,
        )
