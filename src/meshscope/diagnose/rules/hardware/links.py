"""Rules about links between ranks."""

from collections.abc import Iterable

from meshscope.analyze.communication.late_handover import LateHandover, find_late_handovers
from meshscope.analyze.communication.links import SlowLink, find_slow_links, shorten_transfers
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.wording import duration, name_ranks, p_value, plural, ratio
from meshscope.simulate.what_if import Edit, Gain

_MIN_LINK_COST_RATIO = Threshold(
    name="link_min_cost_ratio",
    default=0.02,
    meaning="share of the step that the extra time of a slow link's operations must be",
)
_MAX_LINKS = 8
"""Findings at most; the costliest."""


def _slow_links(study: Study) -> list[SlowLink]:
    return find_slow_links(need(study.timeline))


def _late_handovers(study: Study) -> list[LateHandover]:
    """Axes whose operations some ranks start late."""
    return find_late_handovers(need(study.timeline))


def _period_ns(timeline: Timeline) -> float:
    return float((timeline.period_end_ns - timeline.period_start_ns).mean())


class SlowLinkRule(Rule):
    """Operations over one link, or along one axis, take longer than over similar ones.

    What it finds: a pair of ranks, a group, or a whole axis whose transfers take half as long again
    as those of other links of the same axis, kind and size (a whole axis: five times what the other
    axes of the job show to be possible); and ranks that enter operations of an axis late.

    Why it matters: collectives move at the pace of their slowest link, and a pipeline at that of
    its slowest hop.

    How it is measured: transfers from the last arrival to the end, without queues. For each link
    the time that nine in ten operations exceed is compared with the lower quartile of the links; a
    sign test over steps is corrected for all links. The gain is a replay in which these operations
    take the usual time. Late handover: work right before operations of the axis that is not there
    elsewhere.

    What to change: look at the cable, the adapter and the switch port between these ranks, at what
    else uses them, and at how ranks were placed on hosts.

    When it is wrong: if links are meant to differ. An axis whose links are all slow is judged only
    if another axis of the same reach (inside hosts, across hosts) exists. A link that is slow for a
    small part of the run is not seen.
    """

    code = "LK001"
    name = "slow-link"
    thresholds = (_MIN_LINK_COST_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        """One per link or axis."""
        timeline = need(context.study.timeline)
        limit_ns = context.thresholds[_MIN_LINK_COST_RATIO] * _period_ns(timeline)
        found = known(context.study.get(_slow_links)) or []
        links = [link for link in found if link.cost_ns >= limit_ns][:_MAX_LINKS]
        edits = [
            Edit(
                name=f"{_name_link(link)} as fast as others",
                transfer_ns=shorten_transfers(timeline, link),
            )
            for link in links
        ]
        for link, edit, gain in zip(links, edits, context.price(edits), strict=True):
            yield self._report_slow(link, edit, gain, timeline)
        handovers = known(context.study.get(_late_handovers)) or []
        late = [one for one in handovers if one.cost_ns >= limit_ns]
        edits = [
            Edit(name=f"{one.axis} operations started in time", work_ns=one.new_work_ns)
            for one in late
        ]
        for one, edit, gain in zip(late, edits, context.price(edits), strict=True):
            yield self._report_late(one, edit, gain, timeline)

    def _report_slow(
        self, link: SlowLink, edit: Edit, gain: Gain | Unavailable, timeline: Timeline
    ) -> Finding:
        part = link.parts[0]
        share = link.cost_ns / _period_ns(timeline)
        kind = part.times.link_class.kind
        what = "messages" if kind is Kind.RECV else kind.label
        # Of a whole axis it is what other axes, or any network, show possible: a bound.
        where = "they should take no more than" if link.is_whole_axis else "elsewhere they take"
        return Finding(
            code=self.code,
            title=f"{_name_link(link)} is slow",
            severity=severity_of(gain, otherwise=share),
            summary=f"{what} of {part.times.size_bytes:,.0f} bytes over {_name_link(link)} take "
            f"{duration(part.times.floor_ns)} or more in nine of ten cases; {where} "
            f"{duration(part.usual_ns)}.",
            ranks=link.ranks,
            evidence=(
                Evidence(name="axis", value=link.axis),
                Evidence(
                    name="transfer that nine in ten exceed", value=part.times.floor_ns, unit="ns"
                ),
                Evidence(
                    name="possible at least" if link.is_whole_axis else "the same on other links",
                    value=part.usual_ns,
                    unit="ns",
                ),
                Evidence(name="operations compared", value=len(part.times.match)),
                Evidence(
                    name="extra time per step, if none is hidden", value=link.cost_ns, unit="ns"
                ),
            ),
            confidence=_confidence(link),
            change="Look at the cable, adapter and switch port between these ranks, and at what "
            "else uses them.",
            gain=gain,
            edit=edit,
        )

    def _report_late(
        self, late: LateHandover, edit: Edit, gain: Gain | Unavailable, timeline: Timeline
    ) -> Finding:
        share = late.cost_ns / _period_ns(timeline)
        ending = "s" if len(late.ranks) == 1 else ""
        return Finding(
            code=self.code,
            title=f"{name_ranks(late.ranks)} start{ending} {late.axis} operations late",
            severity=severity_of(gain, otherwise=share),
            summary=f"{name_ranks(late.ranks)} spend{ending} {duration(late.delay_ns)} before a "
            f"{late.axis} operation without recorded work, {late.num_per_step:.3g} times per step, "
            f"{ratio(share)} of the step.",
            ranks=late.ranks,
            evidence=(
                Evidence(name="axis", value=late.axis),
                Evidence(name="delay before an operation", value=late.delay_ns, unit="ns"),
                Evidence(name="usual time before an operation", value=late.usual_ns, unit="ns"),
                Evidence(name="delays per rank and step", value=late.num_per_step),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.MEDIUM,
                text=f"nine in ten operations over {plural(late.num_steps, 'step')}; an action "
                "that has more to compute looks the same",
            ),
            change="Look at what happens between the last gradient and the call: copies into "
            "buffers, registration of memory, a throttled sender.",
            gain=gain,
            edit=edit,
        )


def _name_link(link: SlowLink) -> str:
    if link.is_whole_axis:
        return f"the whole {link.axis} axis"
    return f"the {link.axis} link of {name_ranks(link.ranks)}"


def _confidence(link: SlowLink) -> Confidence:
    part = link.parts[0]
    if link.is_whole_axis:
        return Confidence(
            level=ConfidenceLevel.MEDIUM,
            text=f"in all {plural(part.num_steps, 'step')}; other axes may use other links",
        )
    return Confidence(
        level=ConfidenceLevel.HIGH,
        text=f"{p_value(part.p_value)}: slower in {part.num_slow_steps} of "
        f"{plural(part.num_steps, 'step')}, corrected for all links",
        p_value=part.p_value,
    )
