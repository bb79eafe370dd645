"""A rule of your own: the pace of a rank must not vary too much.

    meshscope report RUN --rules examples/own_rules.py
    meshscope rules UNSTEADY001 --rules examples/own_rules.py

A rule reads what the report computes, through `context.study`, and gives findings. Codes of rules
outside of meshscope have three to eight letters and three digits. A package offers its rules to
everyone who installs it by an entry point:

    [project.entry-points."meshscope.rules"]
    unsteady = "own_rules"
"""

from collections.abc import Iterable

import numpy as np

from meshscope.core.unavailable import Unavailable, need
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Evidence, Finding
from meshscope.diagnose.rule import Rule

MAX_SPREAD_FACTOR = Threshold(
    name="unsteady_max_spread_factor",
    default=3.0,
    meaning="longest tenth of the periods of a rank over its median",
)


class UnsteadyPace(Rule):
    """Some steps of a rank take several times as long as its median step.

    What it finds: ranks whose 90th percentile of the period is more than
    `unsteady_max_spread_factor` times their median.

    Why it matters: jobs with a deadline are planned by their median.

    How it is measured: periods of the timeline, which start at the end of the step before.

    What to change: look at what happens in the long steps: `meshscope report --section steps`.

    When it is wrong: in runs that evaluate in every tenth step or more often.
    """

    code = "UNSTEADY001"
    name = "unsteady-pace"
    severities = (Severity.MEDIUM, Severity.MEDIUM)
    thresholds = (MAX_SPREAD_FACTOR,)

    def find(self, context: Context) -> Iterable[Finding]:
        work = need(context.study.work)  # without one the rule is silent
        usual = np.median(work.period_ns, axis=1)
        factor = np.quantile(work.period_ns, 0.9, axis=1) / np.maximum(usual, 1)
        worst = int(np.argmax(factor))
        if factor[worst] < context.thresholds[MAX_SPREAD_FACTOR]:
            return
        yield Finding(
            code=self.code,
            title=f"the pace of rank {work.ranks[worst]} is unsteady",
            severity=Severity.MEDIUM,
            summary=f"one in ten steps of rank {work.ranks[worst]} takes {factor[worst]:.1f} times "
            "its median or longer.",
            ranks=(work.ranks[worst],),
            evidence=(Evidence(name="median period", value=float(usual[worst]), unit="ns"),),
            change="Look at what happens in its long steps.",
            gain=Unavailable("how long a steady step would take is not known"),
        )
