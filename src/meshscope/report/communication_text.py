"""The section on communication: what it took, who others waited for, what cannot be trusted.

Its head is always shown; the tables in full only when asked for, and in JSON. Imported only for
runs that communicate.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import compress

from rich.text import Text

from meshscope.analyze.communication.last_arrivers import ALL_AXES
from meshscope.numerics.chance import MIN_STEPS
from meshscope.report import format as form
from meshscope.report.communication_facts import (
    BandwidthFacts,
    CommunicationFacts,
    CommunicationHealthFacts,
    DesynchronisationFacts,
    FailureFacts,
    GroupFacts,
    LastArriverFacts,
    SideFacts,
)
from meshscope.report.communication_tables import (
    arrival_columns,
    axis_columns,
    bandwidth_columns,
    clock_columns,
    fit_columns,
    kind_columns,
    message_columns,
    name_kind,
    rank_columns,
    slow_columns,
)
from meshscope.report.screen import Column, ScreenWriter
from meshscope.report.values import Absent, RankRange, list_ranges

MAX_AXIS_ROWS = 6
MAX_SLOW_ROWS = 3
MAX_BANDWIDTH_ROWS = 4
MIN_DATA_RATIO = 0.01
"""Largest sizes that carry less of the data than the first line's are not among them."""
MAX_LATE_RANKS = 3
MIN_COST_RATIO = 0.01
"""Late ranks that cost less of what the costliest does are not named beside it."""
MAX_FINDINGS = 2
"""Disagreements, failures and problems of clocks in the head of the section, each."""
MAX_SIDES = 4
"""Of a disagreement."""
MAX_ROWS = 16
"""Ranks and pairs of ranks in the tables in full."""
_MORE = "(--communication)"


def describe_alarms(facts: CommunicationFacts) -> list[str]:
    """What must be said first, if anything: sentences."""
    alarms = []
    health = facts.health
    if not health.num_recognised and health.num_rank_operations:
        alarms.append(
            f"None of the {form.plural(health.num_rank_operations, 'communication operation')} "
            "that were recorded is of a kind this version knows: what is said about communication "
            "is next to nothing."
        )
    if facts.desynchronisations:
        first = facts.desynchronisations[0]
        alarms.append(
            f"Ranks disagree on what they communicate, first in operation #{first.sequence} of "
            f"{_name_group(first.group)}: see Communication."
        )
    return alarms


def write_communication(
    out: ScreenWriter, facts: CommunicationFacts, *, without: str, has_profiled: bool = False
) -> None:
    """The whole section; `without` says what is left out of the statistics."""
    is_full = out.screen.shows_all_communication
    out.section("Communication", _describe_basis(facts, without))
    _write_findings(out, facts, is_full=is_full)
    _write_times(out, facts, is_full=is_full)
    out.facts(_describe_arrivals(facts))
    if is_full:
        _write_kinds_and_ranks(out, facts)
        _write_arrivals(out, facts)
    _write_slowest(out, facts, is_full=is_full)
    if is_full:
        _write_bandwidth(out, facts)
        _write_messages(out, facts)
        _write_clocks(out, facts)
    else:
        _write_table(out, bandwidth_columns(_pick_largest(facts.bandwidth), "largest sizes"))
    out.blank()
    out.facts(_describe_rest(facts, is_full=is_full, has_profiled=has_profiled))


def _describe_basis(facts: CommunicationFacts, without: str) -> str:
    reason = facts.per_rank_step.exposed_ns
    if isinstance(reason, Absent):
        return f"times per rank, because {form.clean_text(reason.unavailable)}"
    left_out = facts.num_steps_left_out
    part = f", {form.plural(left_out, 'step')} of a long run not read" if left_out else ""
    return f"times per step and rank{without}{part}"


# --- findings -------------------------------------------------------------------------------------


def _write_findings(out: ScreenWriter, facts: CommunicationFacts, *, is_full: bool) -> None:
    limit = None if is_full else MAX_FINDINGS
    shown = facts.desynchronisations[:limit]
    for found in shown:
        out.line(_describe_desynchronisation(found), "red")
    if facts.num_desynchronised > len(shown):
        more = form.plural(facts.num_desynchronised - len(shown), "more disagreement")
        out.line(f"and {more}{'' if is_full else ' ' + _MORE}", "red")
    failures = facts.failures[:limit]
    for failure in failures:
        out.line(_describe_failure(failure), "red")
    if facts.health.num_failed > len(failures):
        more = form.plural(facts.health.num_failed - len(failures), "more failed operation")
        out.line(f"and {more}{'' if is_full else ' ' + _MORE}", "red")


def _describe_desynchronisation(found: DesynchronisationFacts) -> str:
    sizes = {side.size_bytes for side in found.sides if not isinstance(side.size_bytes, Absent)}
    is_exact = len({form.memory(size) for size in sizes}) < len(sizes)
    sides = [_describe_side(side, is_exact=is_exact) for side in found.sides[:MAX_SIDES]]
    if len(found.sides) > MAX_SIDES:
        sides.append(f"and {len(found.sides) - MAX_SIDES} more (see --json)")
    untrusted = form.plural(found.num_untrusted, "operation")
    return (
        f"Ranks disagree on operation #{found.sequence} of {_name_group(found.group)}: "
        f"{'; '.join(sides)}. {untrusted} from there on not trusted."
    )


def _describe_side(side: SideFacts, *, is_exact: bool) -> str:
    """One side of a disagreement; sizes to the byte where they would else look the same."""
    what = [f"{_name_ranges(side.ranks)} {side.kind}"]
    if not isinstance(side.size_bytes, Absent):
        what.append(f"{side.size_bytes:,} B" if is_exact else form.memory(side.size_bytes))
    what += [form.clean_text(side.dtype)] if not isinstance(side.dtype, Absent) else []
    what += [f"root {side.root}"] if side.root is not None else []
    return " ".join(what) + _describe_place(side.step, side.phase)


def _describe_failure(failure: FailureFacts) -> str:
    group = "an unknown group" if failure.group is None else _name_group(failure.group)
    how = "timed out" if failure.outcome == "timeout" else "failed"
    where = _describe_place(failure.step, failure.phase)
    text = f"rank {failure.rank}: {failure.kind} #{failure.sequence} of {group} {how}{where}"
    if isinstance(failure.message, Absent):
        return text
    return f"{text}: {form.clean_text(failure.message)}"


def _describe_place(step: int | Absent, phase: str | Absent) -> str:
    """` (step 3, backward)`."""
    parts = [] if isinstance(step, Absent) else [f"step {step}"]
    parts += [] if isinstance(phase, Absent) else [form.clean_text(phase, 40)]
    return f" ({', '.join(parts)})" if parts else ""


def _name_group(group: GroupFacts) -> str:
    """`the dp group of ranks 0-3`."""
    if group.axis == "world":
        return f"the group of all {form.plural(len(list_ranges(group.ranks)), 'rank')}"
    known = "" if group.axis == "other" else f"{form.clean_text(group.axis, 40)} "
    described = form.clean_text(group.description, 40)
    is_telling = described and group.axis_source != "description" and described != "undefined"
    text = f" ({described})" if is_telling else ""
    return f"the {known}group of {_name_ranges(group.ranks)}{text}"


def _name_ranges(ranges: Sequence[RankRange]) -> str:
    return form.name_ranks(list_ranges(ranges))


# --- tables ---------------------------------------------------------------------------------------


def _write_table(out: ScreenWriter, columns: Sequence[Column]) -> None:
    """A table that stands by itself; nothing when it has no rows."""
    if columns[0].cells:
        out.blank()
        out.table(columns)


def _write_times(out: ScreenWriter, facts: CommunicationFacts, *, is_full: bool) -> None:
    if facts.axes:
        out.table(axis_columns(facts, None if is_full else MAX_AXIS_ROWS))
        if len(facts.axes) > MAX_AXIS_ROWS and not is_full:
            more = len(facts.axes) - MAX_AXIS_ROWS
            out.line(f"and {form.plural(more, 'more axis', 'more axes')} {_MORE}", "dim")
        return
    num_rows = form.plural(facts.health.num_rank_operations, "operation")
    out.line(f"none of the {num_rows} recorded is in a step after warm-up", "yellow")


def _write_kinds_and_ranks(out: ScreenWriter, facts: CommunicationFacts) -> None:
    if not facts.axes:
        return
    _write_table(out, kind_columns(facts))
    ranks = facts.ranks
    if len(ranks) > MAX_ROWS and not out.screen.shows_all_ranks:
        ranks = sorted(ranks, key=lambda one: (one.total.wait_ns, one.rank))[:MAX_ROWS]
    _write_table(out, rank_columns(ranks))
    if len(ranks) < len(facts.ranks):
        hidden = form.plural(len(facts.ranks) - len(ranks), "rank")
        out.line(f"those that waited least; {hidden} not shown (--all-ranks)", "dim")


def _write_arrivals(out: ScreenWriter, facts: CommunicationFacts) -> None:
    num_axes = Counter(entry.rank for entry in facts.last_arrivers if entry.axis != ALL_AXES)
    entries = [e for e in facts.last_arrivers if e.axis != ALL_AXES or num_axes[e.rank] > 1]
    shown = entries if out.screen.shows_all_ranks else entries[:MAX_ROWS]
    _write_table(out, arrival_columns(shown))
    if len(shown) < len(entries):
        out.line(f"and {form.count(len(entries) - len(shown))} more (--all-ranks)", "dim")


def _write_slowest(out: ScreenWriter, facts: CommunicationFacts, *, is_full: bool) -> None:
    _write_table(out, slow_columns(facts.slowest if is_full else facts.slowest[:MAX_SLOW_ROWS]))


def _write_bandwidth(out: ScreenWriter, facts: CommunicationFacts) -> None:
    _write_table(out, bandwidth_columns(facts.bandwidth, "bandwidth"))
    fitted = [fit for fit in facts.fits if not isinstance(fit.latency_ns, Absent)]
    _write_table(out, fit_columns(fitted))
    refused: dict[str, list[str]] = {}
    for fit in facts.fits:
        if isinstance(fit.latency_ns, Absent):
            refused.setdefault(form.or_reason(fit.latency_ns, str), []).append(name_kind(fit))
    if refused and not fitted:
        out.blank()
    for reason, names in refused.items():
        out.line(f"α + β · size {reason}: {', '.join(names)}", "dim")


def _pick_largest(rows: Sequence[BandwidthFacts]) -> list[BandwidthFacts]:
    """The largest sizes of each axis and kind, the most data first."""
    largest: dict[tuple[str, str, int, bool], BandwidthFacts] = {}
    for row in rows:
        key = (row.axis, row.kind, row.num_ranks, row.is_across_hosts)
        if key not in largest or row.size_bucket_bytes > largest[key].size_bucket_bytes:
            largest[key] = row
    order = sorted(largest.values(), key=_count_bytes, reverse=True)
    is_much = [_count_bytes(row) >= MIN_DATA_RATIO * _count_bytes(order[0]) for row in order]
    return list(compress(order, is_much))[:MAX_BANDWIDTH_ROWS]


def _count_bytes(row: BandwidthFacts) -> float:
    return row.median_size_bytes * row.num_operations


def _write_messages(out: ScreenWriter, facts: CommunicationFacts) -> None:
    shown = facts.messages[:MAX_ROWS]
    _write_table(out, message_columns(shown))
    if facts.num_message_pairs > len(shown):
        more = form.plural(facts.num_message_pairs - len(shown), "more pair")
        out.line(f"and {more} of ranks with less data (see --json)", "dim")


def _write_clocks(out: ScreenWriter, facts: CommunicationFacts) -> None:
    _write_table(out, clock_columns(facts.clocks))


# --- sentences ------------------------------------------------------------------------------------

Fact = tuple[str, str | Text]


def _describe_arrivals(facts: CommunicationFacts) -> list[Fact]:
    """Who others wait for, one line each; else why nobody is named."""
    entries = [entry for entry in facts.last_arrivers if entry.axis != ALL_AXES]
    late = [entry for entry in entries if entry.is_beyond_chance]
    if late:
        most_ns = max(entry.cost_ns for entry in late)
        costly = [entry for entry in late if entry.cost_ns >= MIN_COST_RATIO * most_ns]
        lines = [describe_late_rank(entry) for entry in costly[:MAX_LATE_RANKS]]
        if len(late) > len(lines):
            lines.append(f"and {len(late) - len(lines)} that cost less {_MORE}")
        return [("" if n else "Late", Text(line, style="yellow")) for n, line in enumerate(lines)]
    num_decided = sum(entry.num_last for entry in entries)
    if not num_decided:
        text = "n/a: of no operation is it known who arrived last"
    elif max(entry.num_steps for entry in entries) < MIN_STEPS:
        text = f"n/a: fewer than {MIN_STEPS} steps to tell a late rank from chance"
    else:
        known = form.plural(num_decided, "operation")
        text = f"no rank was the last more often than by chance, in {known}"
    if facts.num_undecided:
        unknown = form.plural(facts.num_undecided, "operation")
        text += f"; in {unknown} arrivals are closer together than the clocks can tell"
    return [("Late", text)]


def _describe_rest(facts: CommunicationFacts, *, is_full: bool, has_profiled: bool) -> list[Fact]:
    """Messages, clocks, and how much of what was recorded all this rests on."""
    shown: list[Fact] = []
    if facts.messages and not is_full:
        shown.append(("Messages", _describe_messages(facts)))
    if facts.clocks:
        shown.append(("Clocks", _describe_clocks(facts)))
    problems = facts.clock_problems if is_full else facts.clock_problems[:MAX_FINDINGS]
    shown += [("", Text(form.clean_text(problem), style="yellow")) for problem in problems]
    if len(problems) < len(facts.clock_problems):
        shown.append(("", f"and {len(facts.clock_problems) - len(problems)} more {_MORE}"))
    shown.append(("Health", _describe_health(facts.health, has_profiled=has_profiled)))
    return [*shown, *_describe_groups(facts.health, is_full=is_full)]


def describe_late_rank(entry: LastArriverFacts) -> str:
    """Who others wait for, how often, what it costs and where it is late."""
    rank, axis = f"rank {entry.rank}", form.clean_text(entry.axis, 40)
    times = f"{form.count(entry.num_last)} of {form.count(entry.num_operations)}"
    if entry.num_last > entry.expected_last:
        chance = f"({form.expected(entry.expected_last)} expected by chance)"
        text = f"{rank} arrived last in {times} {axis} operations {chance} and cost"
    else:  # late for a few operations of every step, early for the rest
        by_chance = entry.num_steps * entry.expected_last / max(entry.num_operations, 1)
        chance = f"({form.expected(by_chance)} expected by chance)"
        steps = f"{form.count(entry.num_steps_worst)} of {form.plural(entry.num_steps, 'step')}"
        text = (
            f"{rank} held its {axis} group up most in {steps} {chance}: it arrived last in {times} "
            "operations and cost"
        )
    late = ""
    if not isinstance(entry.phase, Absent):
        late = f"; it is late in {form.clean_text(entry.phase, 40)}"
    cost, waited = form.duration(entry.cost_ns), form.duration(entry.caused_wait_ns)
    return f"{text} {cost}; others waited {waited}{late}"


def _describe_messages(facts: CommunicationFacts) -> str:
    first = facts.messages[0]
    pairs = form.plural(facts.num_message_pairs, "pair")
    return (
        f"{pairs} of ranks; most data {first.source} → {first.target}: "
        f"{form.plural(first.num_messages, 'message')}, {form.memory(first.size_bytes)}, "
        f"mean wait {form.or_dash(first.mean_wait_ns, form.duration)}, "
        f"mean latency {form.or_dash(first.mean_latency_ns, form.duration)}"
    )


def _describe_clocks(facts: CommunicationFacts) -> str:
    text = f"{form.plural(len(facts.clocks), 'clock')}, "
    known = [c.uncertainty_ns for c in facts.clocks if not isinstance(c.uncertainty_ns, Absent)]
    if known:
        text += f"aligned with that of rank {facts.reference_rank} to within "
        text += form.duration(max(known))
    lost = [clock for clock in facts.clocks if isinstance(clock.uncertainty_ns, Absent)]
    if lost:
        ranks = _name_ranges([part for clock in lost for part in clock.ranks])
        text += f"; those of {ranks} are not aligned"
    return text


def _describe_health(health: CommunicationHealthFacts, *, has_profiled: bool) -> Text:
    """How much was recognised and matched, always; then whatever is not as it should be."""
    is_all_known = health.num_recognised == health.num_rank_operations
    text = Text(
        f"recognised {form.count(health.num_recognised)} of "
        f"{form.plural(health.num_rank_operations, 'rank-operation')}",
        style="" if is_all_known else "yellow" if health.num_recognised else "bold red",
    )
    matched = form.plural(health.num_matched, "operation")
    text.append(f"; {matched} matched on all ranks{_unmatched(health)}")
    steps = "warm-up, profiled steps" if has_profiled else "warm-up"
    rest = [
        (health.num_left_out, f"rank-operations left out ({steps}, or before the first step)"),
        (health.num_single_rank, "of groups with one rank"),
        (health.num_unknown_group, "of groups whose members are not known"),
        (health.num_failed, "failed"),
        (health.num_unfinished, "entered and not left (see meshscope hang)"),
        (health.num_unseen, "whose end nobody looked at"),
        (health.num_inexact_ends, "with an end that is an upper bound"),
        (health.num_engine_outside_steps, "of backward before the first step, taken as overlapped"),
        (health.num_clock_errors, "with ends that contradict the clocks"),
        (health.num_damaged, "damaged and left out"),
        (health.num_bad_ends, "with an end that cannot be"),
        (
            health.num_unknown_waits,
            f"waits ({form.duration(health.unknown_wait_ns)}) for operations that are not known",
        ),
    ]
    text.append("".join(f"; {form.count(count)} {what}" for count, what in rest if count))
    return text


def _unmatched(health: CommunicationHealthFacts) -> str:
    if not health.num_unmatched:
        return ""
    parts = [
        (health.num_stopped, "where a rank had stopped or not begun"),
        (health.num_lost, "missing on a rank in the middle"),
        (health.num_untrusted, "after a disagreement"),
        (health.num_ambiguous, "under one number twice"),
    ]
    why = ", ".join(f"{form.count(count)} {what}" for count, what in parts if count)
    return f", {form.count(health.num_unmatched)} not{f' ({why})' if why else ''}"


def _describe_groups(health: CommunicationHealthFacts, *, is_full: bool) -> list[Fact]:
    limit = None if is_full else MAX_FINDINGS
    lines = [
        f"of {_name_group(one.group)}, {_name_ranges(one.missing_ranks)} recorded no operation"
        for one in health.partial_groups[:limit]
    ]
    if health.num_partial_groups > len(lines):
        lines.append(f"and {health.num_partial_groups - len(lines)} more groups like that")
    shifts = [
        f"numbers of rank {one.rank} in {_name_group(one.group)} moved by {one.shift:+d}"
        for one in health.shifts[:limit]
    ]
    if health.num_shifts > len(shifts):
        shifts.append(f"and numbers in {health.num_shifts - len(shifts)} more groups")
    return [("", Text(line, style="yellow")) for line in (*lines, *shifts)]
