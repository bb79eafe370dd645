"""Rules about work that is uneven because of the data."""

from collections.abc import Iterable

from meshscope.analyze.stragglers.load_imbalance import measure_load_imbalance
from meshscope.analyze.stragglers.sequence_imbalance import MIN_CORRELATION, SequenceImbalance
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import known, need
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.relief import even_load, even_microbatches
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.views.batches import vary_batches
from meshscope.diagnose.wording import count, ratio

_MIN_SEQUENCE_CORRELATION = Threshold(
    name="sequence_min_correlation",
    default=MIN_CORRELATION,
    minimum=MIN_CORRELATION,
    meaning="Pearson's r of forward and backward of the same data; at least 0.9 (OSDI'25) where "
    "they vary by less than a fifth",
)


class SequenceLengthRule(Rule):
    """Forward and backward are long together: sequences have uneven lengths.

    What it finds: microbatches, or steps of a rank, that take longer in forward and in backward by
    the same factor.

    Why it matters: in every step all ranks wait for the one with the longest batch, and in a
    pipeline a long microbatch holds up every stage.

    How it is measured: Pearson's r of forward and backward, each relative to what its rank and
    stage usually take, is at least `sequence_min_correlation`, 0.9 (OSDI'25) where they vary by
    less than a fifth, and both vary by a tenth or more. If tokens were counted, their correlation
    with work is given; if batches differ in their number of samples, that is named instead. The
    gain is replayed with the mean over microbatches and replicas.

    What to change: sort batches by length or pack sequences so that each rank and microbatch has
    the same cost; attention grows with the square of single sequences, so equal tokens may not be
    enough.

    When it is wrong: if another program on a host slows forward and backward of some steps alike,
    or clocks change over the run.
    """

    code = "IM001"
    name = "sequence-length-imbalance"
    thresholds = (_MIN_SEQUENCE_CORRELATION,)

    def find(self, context: Context) -> Iterable[Finding]:
        found, timeline = need(context.study.sequence_imbalance), need(context.study.timeline)
        stragglers = known(context.study.stragglers)
        if not found.is_found:
            return
        if found.correlation < context.thresholds[_MIN_SEQUENCE_CORRELATION]:
            return
        # A rank that became slow is long in both phases too, for the steps since.
        if stragglers is not None and stragglers.fail_slow_sets:
            return
        yield _describe(self.code, found, timeline, context)


def _describe(code: str, found: SequenceImbalance, timeline: Timeline, context: Context) -> Finding:
    work = known(context.study.peer_work)
    is_piped = found.unit == "microbatch"
    load = None if work is None else measure_load_imbalance(work)
    edit = even_microbatches(timeline) if is_piped or work is None else even_load(timeline, work)
    gain = context.price_edit(edit)
    tokens = known(found.token_correlation)
    is_size = known(context.study.get(vary_batches)) is True
    with_tokens = "" if tokens is None else f", r of tokens and work {tokens:.2f}"
    evidence = [
        Evidence(name="r of forward and backward", value=found.correlation),
        Evidence(name="variation", value=found.variation_ratio, unit="ratio"),
        Evidence(name="pairs", value=found.num_pairs),
    ]
    if tokens is not None:
        evidence.append(Evidence(name="r of tokens and work", value=tokens))
    return Finding(
        code=code,
        title="batches have uneven sizes" if is_size else "sequences have uneven lengths",
        severity=severity_of(gain, otherwise=None if load is None else load.lost_ratio),
        summary=f"Forward and backward of the same {found.unit} vary together, r = "
        f"{found.correlation:.2f}, by {ratio(found.variation_ratio)}{with_tokens}: the data "
        "determines the work of each rank.",
        evidence=tuple(evidence),
        confidence=Confidence(
            level=ConfidenceLevel.MEDIUM,
            text=f"r = {found.correlation:.2f} over {count(found.num_pairs)} {found.unit} pairs",
        ),
        change="Give all ranks batches of the same size in a step."
        if is_size
        else "Sort batches by length, or pack sequences so that each batch costs the same.",
        gain=gain,
        edit=edit,
    )
