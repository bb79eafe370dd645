"""Communication: its time, the ranks that others waited for, and what cannot be trusted.

The head is always shown, the full tables only on request and in JSON. Imported only for runs that
communicate.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress

from meshscope.analyze.communication.bandwidth import BandwidthRow, LatencyFit
from meshscope.analyze.communication.communication import CommunicationHealth
from meshscope.analyze.communication.last_arrivers import ALL_AXES, LastArriver
from meshscope.analyze.job.group_axes import JobGroup
from meshscope.analyze.job.matching import Desynchronisation, OperationSide
from meshscope.analyze.job.operations import Failure
from meshscope.core.operations import Outcome
from meshscope.core.unavailable import Unavailable, known
from meshscope.numerics.chance import MIN_STEPS
from meshscope.report import format as form
from meshscope.report.run.communication import CommunicationFacts, CommunicationHealthFacts
from meshscope.report.run.report import Detail
from meshscope.report.section import (
    Blank,
    Cell,
    Column,
    Line,
    Part,
    Section,
    Table,
    Tone,
    make_facts,
)
from meshscope.report.sections.run.communication_tables import (
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

_MAX_AXIS_ROWS = 6
MAX_SLOW_ROWS = 3
_MAX_BANDWIDTH_ROWS = 4
_MIN_DATA_RATIO = 0.01
"""Sizes that carry less than this share of the first line's data are left out."""
_MAX_LATE_RANKS = 3
_MIN_COST_RATIO = 0.01
"""Late ranks that cost less than this share of the costliest are not named."""
MAX_FINDINGS = 2
"""Disagreements, failures and clock problems in the head of the section, each."""
_MAX_SIDES = 4
"""Of a disagreement."""
MAX_ROWS = 16
"""Ranks and pairs of ranks in the full tables."""
_MORE = "(--communication)"


def describe_alarms(facts: CommunicationFacts) -> list[str]:
    """Sentences that come first, if any."""
    alarms = []
    health = facts.health.found
    if not health.num_recognised and health.num_rank_operations:
        alarms.append(
            f"None of the {form.plural(health.num_rank_operations, 'communication operation')} "
            "is of a kind that this version knows: the report can say little about communication."
        )
    if facts.found.desynchronisations:
        first = facts.found.desynchronisations[0]
        alarms.append(
            f"Ranks disagree on what they communicate, first in operation #{first.sequence} of "
            f"{_name_group(first.group)} (--section communication)."
        )
    return alarms


def describe_communication(
    facts: CommunicationFacts, detail: Detail, *, without: str, has_profiled: bool = False
) -> Section:
    """The whole section; `without` names what statistics leave out."""
    is_full = detail.shows_all_communication
    parts: list[Part] = [
        *_list_findings(facts, is_full=is_full),
        *_list_times(facts, is_full=is_full),
        make_facts(_describe_arrivals(facts)),
    ]
    if is_full:
        parts += _list_kinds_and_ranks(facts, detail)
        parts += _list_arrivals(facts, detail)
    slowest = facts.found.slowest
    parts += _list_table(slow_columns(slowest if is_full else slowest[:MAX_SLOW_ROWS]))
    bandwidth = facts.found.bandwidth
    if is_full:
        parts += _list_table(bandwidth_columns(bandwidth, "bandwidth"))
        parts += _list_fits(facts)
        parts += _list_messages(facts)
        parts += _list_table(clock_columns(facts.clocks))
    else:
        parts += _list_table(bandwidth_columns(_pick_largest(bandwidth), "largest sizes"))
    rest = _describe_rest(facts, is_full=is_full, has_profiled=has_profiled)
    return Section(
        key="communication",
        title="Communication",
        note=_describe_basis(facts, without),
        parts=(*parts, Blank(), make_facts(rest)),
    )


def _describe_basis(facts: CommunicationFacts, without: str) -> str:
    if isinstance(facts.per_rank_step, Unavailable):
        return f"times per rank, because {form.clean_text(facts.per_rank_step.reason)}"
    left_out = facts.num_steps_left_out
    part = f", {form.plural(left_out, 'step')} of a long run not read" if left_out else ""
    return f"times per step and rank{without}{part}"


# --- findings -------------------------------------------------------------------------------------


def _list_findings(facts: CommunicationFacts, *, is_full: bool) -> list[Part]:
    found = facts.found
    limit = None if is_full else MAX_FINDINGS
    disagreements, failures = found.desynchronisations[:limit], facts.failures[:limit]
    more = "" if is_full else f" {_MORE}"
    lines = [_describe_desynchronisation(one) for one in disagreements]
    if found.num_desynchronised > len(disagreements):
        num_more = found.num_desynchronised - len(disagreements)
        lines.append(f"and {form.plural(num_more, 'more disagreement')}{more}")
    lines += [_describe_failure(failure) for failure in failures]
    if found.health.num_failed > len(failures):
        num_more = found.health.num_failed - len(failures)
        lines.append(f"and {form.plural(num_more, 'more failed operation')}{more}")
    return [Line(line, Tone.ALARM) for line in lines]


def _describe_desynchronisation(found: Desynchronisation) -> str:
    sizes = {size for side in found.sides if (size := known(side.size_bytes)) is not None}
    is_exact = len({form.memory(size) for size in sizes}) < len(sizes)
    sides = [_describe_side(side, is_exact=is_exact) for side in found.sides[:_MAX_SIDES]]
    if len(found.sides) > _MAX_SIDES:
        sides.append(f"and {len(found.sides) - _MAX_SIDES} more (see --json)")
    untrusted = form.plural(found.num_untrusted, "operation")
    return (
        f"Ranks disagree on operation #{found.sequence} of {_name_group(found.group)}: "
        f"{'; '.join(sides)}. {untrusted} from there on not trusted."
    )


def _describe_side(side: OperationSide, *, is_exact: bool) -> str:
    """One side of a disagreement; sizes in bytes if they would otherwise look the same."""
    what = [f"{form.name_ranks(side.ranks)} {side.kind.label}"]
    size, dtype = known(side.size_bytes), known(side.dtype)
    what += [] if size is None else [f"{size:,} B" if is_exact else form.memory(size)]
    what += [] if dtype is None else [form.clean_text(dtype)]
    what += [f"root {side.root}"] if side.root is not None else []
    return " ".join(what) + _describe_where(side.step, side.phase)


def _describe_failure(failure: Failure) -> str:
    group = "an unknown group" if failure.group is None else _name_group(failure.group)
    how = "timed out" if failure.outcome is Outcome.TIMEOUT else "failed"
    where = _describe_where(failure.step, failure.phase)
    what = f"{failure.kind.label} #{failure.sequence}"
    text = f"rank {failure.rank}: {what} of {group} {how}{where}"
    message = known(failure.message)
    return text if message is None else f"{text}: {form.clean_text(message)}"


def _describe_where(step: int | Unavailable, phase: str | Unavailable) -> str:
    """` (step 3, backward)`."""
    parts = [] if known(step) is None else [f"step {step}"]
    parts += [] if (name := known(phase)) is None else [form.clean_text(name, 40)]
    return f" ({', '.join(parts)})" if parts else ""


def _name_group(group: JobGroup) -> str:
    """`the dp group of ranks 0-3`."""
    if group.axis == "world":
        return f"the group of all {form.plural(len(group.ranks), 'rank')}"
    axis = "" if group.axis == "other" else f"{form.clean_text(group.axis, 40)} "
    described = form.clean_text(group.description, 40)
    is_telling = described and group.axis_source != "description" and described != "undefined"
    text = f" ({described})" if is_telling else ""
    return f"the {axis}group of {form.name_ranks(group.ranks)}{text}"


# --- tables ---------------------------------------------------------------------------------------


def _list_table(columns: Sequence[Column]) -> list[Part]:
    """A separate table; nothing without rows."""
    return [Blank(), Table(tuple(columns))] if columns[0].cells else []


def _list_times(facts: CommunicationFacts, *, is_full: bool) -> list[Part]:
    if not facts.axes:
        num_rows = form.plural(facts.found.health.num_rank_operations, "operation")
        text = f"none of the {num_rows} recorded is in a step after warm-up"
        return [Line(text, Tone.NOTICE)]
    parts: list[Part] = [Table(tuple(axis_columns(facts, None if is_full else _MAX_AXIS_ROWS)))]
    if len(facts.axes) > _MAX_AXIS_ROWS and not is_full:
        more = form.plural(len(facts.axes) - _MAX_AXIS_ROWS, "more axis", "more axes")
        parts.append(Line(f"and {more} {_MORE}", Tone.QUIET))
    return parts


def _list_kinds_and_ranks(facts: CommunicationFacts, detail: Detail) -> list[Part]:
    if not facts.axes:
        return []
    ranks = list(facts.ranks)
    if len(ranks) > MAX_ROWS and not detail.shows_all_ranks:
        ranks = sorted(ranks, key=lambda one: (one.total.wait_ns, one.rank))[:MAX_ROWS]
    parts = [*_list_table(kind_columns(facts)), *_list_table(rank_columns(ranks))]
    if len(ranks) < len(facts.ranks):
        hidden = form.plural(len(facts.ranks) - len(ranks), "rank")
        text = f"those that waited least; {hidden} not shown (--all-ranks)"
        parts.append(Line(text, Tone.QUIET))
    return parts


def _list_arrivals(facts: CommunicationFacts, detail: Detail) -> list[Part]:
    num_axes = Counter(entry.rank for entry in facts.last_arrivers if entry.axis != ALL_AXES)
    entries = [e for e in facts.last_arrivers if e.axis != ALL_AXES or num_axes[e.rank] > 1]
    shown = entries if detail.shows_all_ranks else entries[:MAX_ROWS]
    parts = _list_table(arrival_columns(shown))
    if len(shown) < len(entries):
        more = f"and {form.count(len(entries) - len(shown))} more (--all-ranks)"
        parts.append(Line(more, Tone.QUIET))
    return parts


def _list_fits(facts: CommunicationFacts) -> list[Part]:
    fitted = [fit for fit in facts.found.fits if isinstance(fit, LatencyFit)]
    refused: dict[str, list[str]] = {}
    for fit in facts.found.fits:
        if not isinstance(fit, LatencyFit):
            refused.setdefault(form.or_reason(fit.reason, str), []).append(name_kind(fit))
    parts = _list_table(fit_columns(fitted))
    if refused and not fitted:
        parts.append(Blank())
    parts += [
        Line(f"α + β · size {reason}: {', '.join(names)}", Tone.QUIET)
        for reason, names in refused.items()
    ]
    return parts


def _pick_largest(rows: Sequence[BandwidthRow]) -> list[BandwidthRow]:
    """The largest sizes of each axis and kind, the most data first."""
    largest: dict[tuple[str, int, int, bool], BandwidthRow] = {}
    for row in rows:
        key = (row.axis, row.kind, row.num_ranks, row.is_across_hosts)
        if key not in largest or row.size_bucket_bytes > largest[key].size_bucket_bytes:
            largest[key] = row
    order = sorted(largest.values(), key=_count_bytes, reverse=True)
    is_much = [_count_bytes(row) >= _MIN_DATA_RATIO * _count_bytes(order[0]) for row in order]
    return list(compress(order, is_much))[:_MAX_BANDWIDTH_ROWS]


def _count_bytes(row: BandwidthRow) -> float:
    return row.median_size_bytes * row.num_operations


def _list_messages(facts: CommunicationFacts) -> list[Part]:
    shown = facts.messages[:MAX_ROWS]
    parts = _list_table(message_columns(shown))
    if facts.num_message_pairs > len(shown):
        more = form.plural(facts.num_message_pairs - len(shown), "more pair")
        parts.append(Line(f"and {more} of ranks with less data (see --json)", Tone.QUIET))
    return parts


# --- sentences ------------------------------------------------------------------------------------

_Fact = tuple[str, str | Cell]


def _describe_arrivals(facts: CommunicationFacts) -> list[_Fact]:
    """Late ranks, one per line; else why none is named."""
    entries = [entry for entry in facts.last_arrivers if entry.axis != ALL_AXES]
    late = [entry for entry in entries if entry.is_beyond_chance]
    if late:
        most_ns = max(entry.cost_ns for entry in late)
        costly = [entry for entry in late if entry.cost_ns >= _MIN_COST_RATIO * most_ns]
        lines = [_describe_late_rank(entry) for entry in costly[:_MAX_LATE_RANKS]]
        if len(late) > len(lines):
            lines.append(f"and {len(late) - len(lines)} that cost less {_MORE}")
        return _name_first("Late", lines)
    num_decided = sum(entry.num_last for entry in entries)
    if not num_decided:
        text = "n/a: of no operation is it known who arrived last"
    elif max(entry.num_steps for entry in entries) < MIN_STEPS:
        text = f"n/a: fewer than {MIN_STEPS} steps to tell a late rank from chance"
    else:
        decided = form.plural(num_decided, "operation")
        text = f"no rank was the last more often than by chance, in {decided}"
    if facts.found.num_undecided:
        unknown = form.plural(facts.found.num_undecided, "operation")
        text += f"; in {unknown} arrivals are closer together than the clocks can tell"
    return [("Late", text)]


def _name_first(name: str, lines: Iterable[str]) -> list[_Fact]:
    """Lines that need attention, the first under a name."""
    return [("" if index else name, Cell(line, Tone.NOTICE)) for index, line in enumerate(lines)]


def _describe_rest(facts: CommunicationFacts, *, is_full: bool, has_profiled: bool) -> list[_Fact]:
    """Messages, clocks, and how much was recognised and matched."""
    shown: list[_Fact] = []
    if facts.messages and not is_full:
        shown.append(("Messages", _describe_messages(facts)))
    if facts.clocks:
        shown.append(("Clocks", _describe_clocks(facts)))
    problems = facts.clock_problems if is_full else facts.clock_problems[:MAX_FINDINGS]
    shown += _name_first("", map(form.clean_text, problems))
    if len(problems) < len(facts.clock_problems):
        shown.append(("", f"and {len(facts.clock_problems) - len(problems)} more {_MORE}"))
    shown.append(("Health", _describe_health(facts.health, has_profiled=has_profiled)))
    return [*shown, *_describe_groups(facts.health, is_full=is_full)]


def _describe_late_rank(entry: LastArriver) -> str:
    """How often a rank was last, what that cost, and where it is late."""
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
    phase = known(entry.phase)
    late = "" if phase is None else f"; it is late in {form.clean_text(phase, 40)}"
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
    unsure = [ns for clock in facts.clocks if (ns := known(clock.uncertainty_ns)) is not None]
    if unsure:
        text += f"aligned with that of rank {facts.reference_rank} to within "
        text += form.duration(max(unsure))
    lost = [clock for clock in facts.clocks if known(clock.uncertainty_ns) is None]
    if lost:
        ranks = form.name_ranks([rank for clock in lost for rank in clock.ranks])
        text += f"; those of {ranks} are not aligned"
    return text


def _describe_health(health: CommunicationHealthFacts, *, has_profiled: bool) -> Cell:
    """How much was recognised and matched; then everything unusual."""
    found = health.found
    rank_operations = form.plural(found.num_rank_operations, "rank-operation")
    matched = form.plural(found.num_matched, "operation")
    text = f"recognised {form.count(found.num_recognised)} of {rank_operations}"
    text += f"; {matched} matched on all ranks{_describe_unmatched(found)}"
    steps = "warm-up, profiled steps" if has_profiled else "warm-up"
    rest = [
        (found.num_warmup, f"rank-operations left out ({steps}, or before the first step)"),
        (found.num_single_rank, "of groups with one rank"),
        (found.num_unknown_group, "of groups whose members are not known"),
        (found.num_failed, "failed"),
        (found.num_unfinished, "entered and not left (see meshscope hang)"),
        (found.num_unseen, "whose end nobody looked at"),
        (found.num_inexact_ends, "with an end that is an upper bound"),
        (found.num_engine_outside_steps, "of backward before the first step, taken as overlapped"),
        (found.num_clock_errors, "with ends that contradict the clocks"),
        (found.num_damaged, "damaged and left out"),
        (found.num_bad_ends, "with an end that cannot be"),
        (
            found.num_unknown_waits,
            f"waits ({form.duration(found.unknown_wait_ns)}) for operations that are not known",
        ),
    ]
    text += "".join(f"; {form.count(count)} {what}" for count, what in rest if count)
    if found.num_recognised == found.num_rank_operations:
        return Cell(text)
    return Cell(text, Tone.NOTICE if found.num_recognised else Tone.CRITICAL)


def _describe_unmatched(health: CommunicationHealth) -> str:
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


def _describe_groups(health: CommunicationHealthFacts, *, is_full: bool) -> list[_Fact]:
    limit = None if is_full else MAX_FINDINGS
    lines = [
        f"of {_name_group(one.group)}, {form.name_ranks(one.missing_ranks)} recorded no operation"
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
    return _name_first("", (*lines, *shifts))
