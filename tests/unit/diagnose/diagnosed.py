"""Contexts, rules and findings for tests of the diagnosis, over runs of `builders.make_run`."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Thresholds
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Finding
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.rule import Rule
from meshscope.simulate.what_if import Edit
from meshscope.store.read.run import open_run


def context_of(path: Path, **changed: float) -> Context:
    """The run at `path`, with some thresholds changed."""
    return Context(Study(open_run(path).last_attempt), thresholds=Thresholds(changed=changed))


def find(code: str, path: Path, **changed: float) -> list[Finding]:
    """What one rule says about a run."""
    return list(RULES[code]().run(context_of(path, **changed)))


def make_finding(code: str = "ST001", **fields: object) -> Finding:
    """A finding with what a test does not care about."""
    given = {
        "title": "something is slow",
        "severity": Severity.HIGH,
        "summary": "something is slow by 10 ms.",
        "change": "Make it faster.",
        "gain": Unavailable("not priced"),
        **fields,
    }
    return Finding(code=code, **given)


def make_rule(
    code: str,
    find: Callable[[Context], Iterable[Finding]],
    *,
    is_pattern: bool = False,
    resources: Iterable[str] = (),
) -> type[Rule]:
    """A rule whose findings a test gives."""

    class Given(Rule):
        name = code.lower()

        def find(self, context: Context) -> Iterable[Finding]:
            return find(context)

    Given.code = code
    Given.is_pattern = is_pattern
    Given.resources = frozenset(resources)
    return Given


def scale_work(context: Context, name: str, scale: Callable[..., np.ndarray]) -> Edit:
    """An edit: work of the pieces times what `scale` says of them."""
    pieces = context.study.timeline.pieces
    factor = scale(pieces)
    return Edit(name=name, work_ns=((pieces.end_ns - pieces.start_ns) * factor).astype(np.int64))
