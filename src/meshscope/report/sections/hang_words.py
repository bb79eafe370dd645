"""The verdict on a hang in one sentence, and what is known about its culprits.

Text from a run (hosts, names, messages, frames) is shown without control characters.
"""

import signal
from collections.abc import Callable, Sequence

from meshscope.core.layout import Axis
from meshscope.core.operations import POINT_TO_POINT, Kind
from meshscope.core.unavailable import known
from meshscope.hang.flight_recorder import GroupRecord
from meshscope.hang.hang import Culprit, Hang, StuckOperation
from meshscope.hang.hang_rules import Held, Reason, VerdictKind, classify_error
from meshscope.hang.processes import Life, ProcessState
from meshscope.hang.rank_states import Operation, RankState
from meshscope.hang.stacks import Frame, pick_telling_frames
from meshscope.report.format import (
    clean_text,
    duration,
    memory,
    moment,
    name_ranks,
    place,
    plural,
)

MAX_CULPRITS = 4
"""Culprits whose evidence is shown."""
MAX_MESSAGE = 160


def describe_operation(operation: StuckOperation) -> str:
    """`all_reduce #12 of the tp group (ranks 4-5, mesh_tp), 4.00 MiB`."""
    size = f", {memory(operation.size_bytes)}" if operation.size_bytes else ""
    if operation.destination is not None:
        return f"{_describe_message(operation)}{size}"
    return f"{operation.kind.label} #{operation.sequence} of {_describe_group(operation)}{size}"


def _describe_message(operation: StuckOperation) -> str:
    source = "any rank" if (operation.source or 0) < 0 else f"rank {operation.source}"
    along = "" if operation.axis in ("world", "other") else f" along {clean_text(operation.axis)}"
    return f"message #{operation.sequence} from {source} to rank {operation.destination}{along}"


def _describe_group(operation: StuckOperation) -> str:
    group = operation.group
    if operation.axis == "world":
        return f"all {len(group.ranks)} ranks"
    axis = "" if operation.axis == "other" else f"{clean_text(operation.axis, 40)} "
    text = clean_text(group.description, 40)
    described = f", {text}" if text and text != "undefined" else ""
    return f"the {axis}group ({name_ranks(group.ranks)}{described})"


def name_operation(operation: Operation) -> str:
    """`all_reduce #12 tp`, for a cell of a table."""
    meeting = operation.meeting
    if operation.kind in POINT_TO_POINT:
        way = "to" if operation.kind is Kind.SEND else "from"
        peer = "any" if operation.peer < 0 else operation.peer
        return f"{operation.kind.label} #{meeting.sequence} {way} {peer}"
    return f"{operation.kind.label} #{meeting.sequence} {clean_text(meeting.group.axis, 20)}"


def make_sentence(hang: Hang) -> str:
    """The verdict in one sentence."""
    makers: dict[VerdictKind, Callable[[Hang], str]] = {
        VerdictKind.DEAD: _say_dead,
        VerdictKind.STOPPED: _say_stopped,
        VerdictKind.MISSING: _say_missing,
        VerdictKind.TRANSFER: _say_transfer,
        VerdictKind.CYCLE: _say_cycle,
        VerdictKind.MOVING: _say_moving,
        VerdictKind.FINISHED: _say_finished,
    }
    return makers[hang.kind](hang)


def _who(hang: Hang) -> str:
    """`Rank 5 (dp1.tp1)`."""
    ranks = [culprit.rank for culprit in hang.culprits]
    text = name_ranks(ranks)
    if len(ranks) == 1 and (label := describe_place(hang, ranks[0])):
        text = f"{text} ({label})"
    return text[0].upper() + text[1:]


def describe_place(hang: Hang, rank: int) -> str:
    """`dp1.tp1`, along the axes in use; empty when the layout is not known."""
    layout = known(hang.layout)
    if layout is None or rank >= layout.world_size:
        return ""
    return place(layout.label(rank), {str(axis): layout.degree(axis) for axis in Axis})


def _have(culprits: Sequence[Culprit], one: str, several: str) -> str:
    return one if len(culprits) == 1 else several


def _say_dead(hang: Hang) -> str:
    culprits = hang.culprits
    reasons = {culprit.reason for culprit in culprits}
    if reasons == {Reason.RAISED}:
        error = _own_error(culprits[0])
        text = f"{_who(hang)} failed first: {error}"
    elif reasons == {Reason.LOST}:
        text = (
            f"{_who(hang)} {_have(culprits, 'is', 'are')} lost: neither an error nor an end was "
            "recorded there while others lost their connections"
        )
    elif reasons <= {Reason.KILLED, Reason.LOST, Reason.NEVER_RECORDED}:
        text = (
            f"{_who(hang)} died: {_have(culprits, 'its process is', 'their processes are')} gone "
            f"and {_have(culprits, 'its recording has', 'their recordings have')} no end"
        )
    else:
        text = f"{_who(hang)} failed: " + "; ".join(
            f"rank {culprit.rank} {culprit.reason.value}" for culprit in culprits[:MAX_CULPRITS]
        )
    return f"{text}{_say_who_waits(hang)}."


def _own_error(culprit: Culprit) -> str:
    if culprit.state.exception:
        return clean_text(culprit.state.exception, MAX_MESSAGE)
    failures = [o for o in culprit.state.failures if o.message]
    return clean_text(failures[0].message, MAX_MESSAGE) if failures else "with an error"


def _say_who_waits(hang: Hang) -> str:
    """`; ranks 0-2 wait for it in … since 0.7 s`."""
    if hang.operation is None:
        return "; no rank waits for it yet" if len(hang.culprits) == 1 else ""
    where = describe_operation(hang.operation)
    waiting, failed, num_behind = _count_held(hang)
    parts = []
    if waiting:
        it = "it" if len(hang.culprits) == 1 else "them"
        parts.append(f"{_say_waiting(hang, waiting, f' for {it} in {where}')}")
    if failed:
        parts.append(f"{name_ranks(failed)} failed in {where if not waiting else 'it'}")
    return _join(parts, num_behind)


def _count_held(hang: Hang) -> tuple[list[int], list[int], int]:
    """Ranks that wait in the verdict's operation, that failed in it, and how many more are held."""
    waiting: list[int] = []
    failed: list[int] = []
    for held in hang.waiting:
        if hang.operation is not None and _is_in(held, hang.operation):
            (failed if held.is_over else waiting).append(held.rank)
    num_behind = len(hang.waiting) + len(hang.cascade) - len(waiting) - len(failed)
    return sorted(waiting), sorted(failed), num_behind


def _is_in(held: Held, operation: StuckOperation) -> bool:
    meeting = held.operation.meeting
    if meeting.group is not operation.group or meeting.sequence != operation.sequence:
        return False
    if operation.destination is None:
        return not meeting.is_message
    return (meeting.source, meeting.destination) == (operation.source, operation.destination)


def _join(parts: Sequence[str], num_behind: int) -> str:
    behind = (
        f"{plural(num_behind, 'more rank')} {'is' if num_behind == 1 else 'are'} held up behind"
    )
    parts = [*parts, behind] if num_behind else list(parts)
    return "; " + ", ".join(parts) if parts else ""


def _say_waiting(hang: Hang, ranks: Sequence[int], what: str = "") -> str:
    """`ranks 0-2 wait for it in … since 0.7 s`; of ranks that are gone, that they did."""
    if all(hang.states[rank].has_ended for rank in ranks):
        return f"{name_ranks(ranks)} waited{what}"
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}{what}{_since(hang)}"


def _since(hang: Hang) -> str:
    return f" since {duration(hang.age_ns)}" if hang.age_ns is not None else ""


def _say_stopped(hang: Hang) -> str:
    traced = any(culprit.state.process.is_traced for culprit in hang.culprits)
    how = "by a debugger" if traced else "by a signal, and goes on at SIGCONT"
    if len(hang.culprits) > 1:
        how = "and go on at SIGCONT"
    is_are = _have(hang.culprits, "is", "are")
    return f"{_who(hang)} {is_are} stopped {how}{_say_who_waits(hang)}."


def _say_missing(hang: Hang) -> str:
    culprits, operation = hang.culprits, hang.operation
    reasons = {culprit.reason for culprit in culprits}
    where = describe_operation(operation) if operation is not None else "an operation"
    if reasons == {Reason.LEFT}:
        text = f"{_who(hang)} ended without an error before {where}"
    elif reasons == {Reason.NEVER_RECORDED}:
        have = _have(culprits, "has", "have")
        text = f"{_who(hang)} {have} recorded nothing, and never entered {where}"
    elif reasons == {Reason.LATE}:
        text = f"{_who(hang)} had not entered {where} when it timed out"
    else:
        text = f"{_who(hang)} {_have(culprits, 'has', 'have')} not entered {where}"
    return f"{text}{_say_waits_only(hang)}.{_say_doubt(hang)}"


def _say_waits_only(hang: Hang) -> str:
    waiting, failed, num_behind = _count_held(hang)
    parts = []
    if waiting:
        parts.append(_say_waiting(hang, waiting))
    if failed:
        parts.append(f"{name_ranks(failed)} failed there")
    return _join(parts, num_behind)


def _say_doubt(hang: Hang) -> str:
    if hang.is_certain:
        return ""
    return (
        " It holds handles of operations that others have not entered, and may itself be waiting "
        "for one of them."
    )


def _say_transfer(hang: Hang) -> str:
    if hang.operation is None:
        return "An operation does not finish."
    where = describe_operation(hang.operation)
    if hang.first_error is not None:
        error = hang.first_error
        what = (
            "timed out"
            if not error.message
            else f"ended in an error ({classify_error(error.message)})"
        )
        return (
            f"It was {where} that {what}, first on rank {error.rank}; every rank had entered it, "
            "and none was seen to die."
        )
    since = f" for {duration(hang.age_ns)}" if hang.age_ns is not None else ""
    if not hang.is_certain:
        return (
            f"No rank has recorded anything{since}, and all have entered what is under way: a "
            f"transfer is stuck, or all ranks compute; the oldest handle is of {where}."
        )
    return (
        f"All {len(hang.operation.ranks)} ranks are in {where}, and it has not finished{since}: it "
        "is the transfer that is stuck."
    )


def _say_cycle(hang: Hang) -> str:
    operation = hang.operation
    if operation is not None and len(operation.kinds) > 1:
        sides = ", ".join(
            f"{name_ranks(ranks)} {kind.label}" for kind, ranks in operation.kinds.items()
        )
        return (
            f"Ranks disagree on operation #{operation.sequence} of {_describe_group(operation)}: "
            f"{sides}; it can never finish."
        )
    sides = "; ".join(
        f"rank {held.rank} in {name_operation(held.operation)} for {_list_missing(held)}"
        for held in hang.waiting[:MAX_CULPRITS]
    )
    return f"{_who(hang)} wait for each other{_since(hang)}: {sides}."


def _list_missing(held: Held) -> str:
    return name_ranks(held.missing) if held.missing else "its end"


def _say_moving(hang: Hang) -> str:
    if hang.operation is not None and hang.age_ns is not None:
        waiting, _, _ = _count_held(hang)
        where = describe_operation(hang.operation)
        verb = "has" if len(waiting) == 1 else "have"
        if not hang.culprits:
            return (
                f"Nothing hangs yet: {name_ranks(waiting)} {verb} been in {where} for "
                f"{duration(hang.age_ns)}, longer than usual; all of its ranks have entered it."
            )
        missing = [culprit.rank for culprit in hang.culprits]
        if not waiting:  # a circle: everybody in it is both
            return (
                f"Nothing hangs yet: {name_ranks(missing)} have waited for each other for "
                f"{duration(hang.age_ns)}, longer than usual, in {where} and elsewhere."
            )
        return (
            f"Nothing hangs yet: {name_ranks(waiting)} {verb} waited {duration(hang.age_ns)} in "
            f"{where}, longer than usual, for {name_ranks(missing)}."
        )
    if hang.last_operation_unix_ns is None:
        return "Nothing hangs: no rank waits for another; no operation has been recorded."
    age_ns = max(0, hang.asked_unix_ns - hang.last_operation_unix_ns)
    return (
        f"Nothing hangs: no rank waits unusually long; the last operation was {duration(age_ns)} "
        "ago."
    )


def _say_finished(hang: Hang) -> str:
    recorded = sum(state.directory is not None for state in hang.states.values())
    missing = len(hang.states) - recorded
    text = f"The job is over: {'all ' if not missing else ''}{plural(recorded, 'rank')} ended"
    return f"{text}{f', {missing} recorded nothing' if missing else ''}; nothing hangs."


# --- evidence -------------------------------------------------------------------------------------


def list_evidence(hang: Hang, culprit: Culprit) -> list[str]:
    """What is known about a culprit, one fact per line."""
    state = culprit.state
    if state.directory is None:
        return ["it has no folder in the run: it never began to record"]
    facts = [_describe_process(state)]
    now_ns = hang.asked_unix_ns
    if state.is_closed:
        when = f" {say_ago(now_ns, state.closed_unix_ns)}" if state.closed_unix_ns else ""
        facts.append(f"its program ended{when}")
        if state.exception:
            facts.append(f"with {clean_text(state.exception, MAX_MESSAGE)}")
    elif state.last_sign_unix_ns is not None:
        facts.append(f"last sign of life {say_ago(now_ns, state.last_sign_unix_ns)}")
    step = f", step {state.step}" if state.step is not None else ""
    if state.phase is not None:
        since = duration(max(0, now_ns - state.phase.since_unix_ns))
        facts.append(f"in phase {clean_text(state.phase.name, 60)} since {since}{step}")
    elif step:
        after = f"after {clean_text(state.last_phase, 60)}" if state.last_phase else "in no phase"
        facts.append(f"{after}{step}")
    for operation in state.in_flight[:2]:
        handle = " (a handle it holds)" if operation.is_async else ""
        age = duration(max(0, state.looked_unix_ns - operation.entered_unix_ns))
        since = f"in {name_operation(operation)} since {age}"
        where = f"ended in {name_operation(operation)}" if state.has_ended else since
        facts.append(f"{where}{handle}")
    done = [o for o in state.recent if not o.is_failed and o.ended_unix_ns is not None]
    if done:
        last = max(done, key=lambda o: o.ended_unix_ns or 0)
        facts.append(f"last finished {name_operation(last)} {say_ago(now_ns, last.ended_unix_ns)}")
    elif not state.in_flight:
        facts.append("it has finished no operation")
    facts += [f"flight recorder: {describe_record(record)}" for record in culprit.flight[:2]]
    if state.problem:
        facts.append(f"its recording: {clean_text(state.problem, MAX_MESSAGE)}")
    if culprit.frames:
        facts.append(f"stack: {describe_frames(culprit.frames)}")
    return facts


def say_ago(now_ns: int, then_ns: int | None) -> str:
    """`1.2 s ago`; the moment itself where that is more than a day."""
    age_ns = now_ns - (then_ns or 0)
    return (
        f"{duration(age_ns)} ago" if 0 <= age_ns < 86_400 * 10**9 else f"at {moment(then_ns or 0)}"
    )


def _describe_process(state: RankState) -> str:
    process = state.process
    where = f" on {clean_text(state.host, 60)}" if state.host else ""
    if process.pid is None:
        return f"process: not known, {process.reason}"
    return f"process {process.pid}{where}: {_describe_life(process)}"


def _describe_life(process: ProcessState) -> str:
    if process.life is Life.UNKNOWN:
        return f"not known, {process.reason}"
    if process.life is Life.DEAD:
        return f"gone, {process.reason}" if process.reason else "gone"
    if process.life is Life.ZOMBIE:
        return f"{_describe_end(process.exit_signal)}, not yet collected by its parent (zombie)"
    if process.life is Life.STOPPED:
        return "stopped by a debugger" if process.is_traced else "stopped by a signal"
    inside = f" in {process.system_call}" if process.system_call else ""
    return f"{process.life.value}{inside}{f', {process.reason}' if process.reason else ''}"


def _describe_end(exit_signal: int | None) -> str:
    if not exit_signal:
        return "ended" if exit_signal is None else "ended by itself"
    try:
        return f"ended by {signal.Signals(exit_signal).name}"
    except ValueError:
        return f"ended by signal {exit_signal}"


def describe_frames(frames: Sequence[Frame]) -> str:
    """`data.py:88 in load ← train.py:120 in main`."""
    return " ← ".join(_describe_frame(frame) for frame in pick_telling_frames(tuple(frames)))


def _describe_frame(frame: Frame) -> str:
    name = clean_text(frame.file.rpartition("/")[2] or frame.file, 60)
    line = "?" if frame.line is None else frame.line
    return f"{name}:{line} in {clean_text(frame.function, 60)}"


def describe_record(record: GroupRecord) -> str:
    """`nccl:all_reduce #3 is its last of this group, over, called at train.py:88 in step`."""
    over = "over" if record.is_over else clean_text(record.state, 20) or "not over"
    where = f", called at {clean_text(record.place, 100)}" if record.place else ""
    return (
        f"{clean_text(record.name, 60)} #{record.sequence} is its last of this group, {over}{where}"
    )
