"""The verdict on a hang in one sentence, and facts about its culprits.

Text from a run (hosts, names, messages, frames) is shown without control characters.
"""

import signal
from collections.abc import Callable, Iterator, Sequence

from meshscope.core.layout import Axis
from meshscope.core.operations import POINT_TO_POINT, Kind
from meshscope.core.unavailable import known
from meshscope.hang.flight_recorder import GroupRecord
from meshscope.hang.hang import Culprit, Hang, StuckOperation
from meshscope.hang.hang_rules import Reason, VerdictKind, classify_error
from meshscope.hang.processes import Life, ProcessState
from meshscope.hang.rank_states import Operation, RankState
from meshscope.hang.stacks import Frame, pick_telling_frames
from meshscope.hang.wait_graph import Wait
from meshscope.report.format import (
    begin_sentence,
    clean_text,
    duration,
    memory,
    moment,
    name_ranks,
    plural,
    position,
)

MAX_CULPRITS = 4
"""Culprits whose evidence is shown."""
MAX_MESSAGE = 160


def _describe_operation(operation: StuckOperation) -> str:
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
    if len(ranks) == 1 and (label := describe_position(hang, ranks[0])):
        text = f"{text} ({label})"
    return text[0].upper() + text[1:]


def describe_position(hang: Hang, rank: int) -> str:
    """`dp1.tp1`, along the axes in use; empty when the layout is not known."""
    layout = known(hang.layout)
    if layout is None or rank >= layout.world_size:
        return ""
    return position(layout.label(rank), {str(axis): layout.degree(axis) for axis in Axis})


def _have(hang: Hang, one: str, several: str) -> str:
    return one if len(hang.culprits) == 1 else several


def _say_dead(hang: Hang) -> str:
    reasons = {culprit.reason for culprit in hang.culprits}
    if reasons == {Reason.RAISED}:
        what = f"failed first: {_own_error(hang.culprits[0])}"
    elif reasons == {Reason.LOST}:
        what = (
            f"{_have(hang, 'is', 'are')} lost: neither an error nor an end was recorded there "
            "while others lost their connections"
        )
    elif reasons <= {Reason.KILLED, Reason.LOST, Reason.NEVER_RECORDED}:
        process = _have(hang, "its process is", "their processes are")
        recording = _have(hang, "its recording has", "their recordings have")
        what = f"died: {process} gone and {recording} no end"
    else:
        shown = hang.culprits[:MAX_CULPRITS]
        what = "failed: " + "; ".join(f"rank {one.rank} {one.reason.value}" for one in shown)
    return f"{_who(hang)} {what}{_say_who_waits(hang)}."


def _own_error(culprit: Culprit) -> str:
    messages = (failure.message for failure in culprit.state.failures if failure.message)
    error = culprit.state.exception or next(messages, "")
    return clean_text(error, MAX_MESSAGE) if error else "with an error"


def _say_stopped(hang: Hang) -> str:
    traced = any(culprit.state.process.is_traced for culprit in hang.culprits)
    how = "by a debugger" if traced else "by a signal, and goes on at SIGCONT"
    what = _have(hang, f"is stopped {how}", "are stopped and go on at SIGCONT")
    return f"{_who(hang)} {what}{_say_who_waits(hang)}."


def _say_missing(hang: Hang) -> str:
    reasons = {culprit.reason for culprit in hang.culprits}
    where = "an operation" if hang.operation is None else _describe_operation(hang.operation)
    have = _have(hang, "has", "have")
    if reasons == {Reason.LEFT}:
        what = f"ended without an error before {where}"
    elif reasons == {Reason.NEVER_RECORDED}:
        what = f"{have} recorded nothing, and never entered {where}"
    elif reasons == {Reason.LATE}:
        what = f"had not entered {where} when it timed out"
    else:
        what = f"{have} not entered {where}"
    doubt = (
        " It holds handles of operations that others have not entered, and may itself be waiting "
        "for one of them."
    )
    waits = _say_held(hang, "", "there")
    return f"{_who(hang)} {what}{waits}.{'' if hang.is_certain else doubt}"


def _say_who_waits(hang: Hang) -> str:
    """`; ranks 0-2 wait for it in … since 0.7 s`."""
    if hang.operation is None:
        return _have(hang, "; no rank waits for it yet", "") if len(hang.states) > 1 else ""
    where = _describe_operation(hang.operation)
    is_said = bool(_count_held(hang)[0])
    waits = f" for {_have(hang, 'it', 'them')} in {where}"
    return _say_held(hang, waits, "in it" if is_said else f"in {where}")


def _say_held(hang: Hang, waits: str, failed_where: str) -> str:
    """Waiting and failed ranks, and the number of ranks behind them."""
    waiting, failed, num_behind = _count_held(hang)
    parts = []
    if waiting:
        parts.append(_say_waiting(hang, waiting, waits))
    if failed:
        parts.append(f"{name_ranks(failed)} failed {failed_where}")
    if num_behind:
        are = "is" if num_behind == 1 else "are"
        parts.append(f"{plural(num_behind, 'more rank')} {are} held up behind")
    return "; " + ", ".join(parts) if parts else ""


def _count_held(hang: Hang) -> tuple[list[int], list[int], int]:
    """Ranks that wait in the verdict's operation, that failed in it, and the number of others."""
    inside = [held for held in hang.waiting if hang.operation and _is_in(held, hang.operation)]
    waiting = sorted(held.rank for held in inside if not held.is_over)
    failed = sorted(held.rank for held in inside if held.is_over)
    return waiting, failed, len(hang.waiting) + len(hang.cascade) - len(inside)


def _is_in(held: Wait, operation: StuckOperation) -> bool:
    meeting = held.operation.meeting
    if meeting.group is not operation.group or meeting.sequence != operation.sequence:
        return False
    if operation.destination is None:
        return not meeting.is_message
    return (meeting.source, meeting.destination) == (operation.source, operation.destination)


def _say_waiting(hang: Hang, ranks: Sequence[int], what: str) -> str:
    """`ranks 0-2 wait for it in … since 0.7 s`; in the past tense if they are gone."""
    if all(hang.states[rank].has_ended for rank in ranks):
        return f"{name_ranks(ranks)} waited{what}"
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}{what}{_say_age(hang)}"


def _say_age(hang: Hang, word: str = "since") -> str:
    return f" {word} {duration(hang.age_ns)}" if hang.age_ns is not None else ""


def _say_transfer(hang: Hang) -> str:
    if hang.operation is None:
        return "An operation does not finish."
    where = _describe_operation(hang.operation)
    if hang.first_error is not None:
        error = hang.first_error
        kind = classify_error(error.message) if error.message else ""
        what = f"ended in an error ({kind})" if kind else "timed out"
        return (
            f"It was {where} that {what}, first on rank {error.rank}; every rank had entered it, "
            "and none was seen to die."
        )
    since = _say_age(hang, "for")
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
        f"rank {held.rank} in {name_operation(held.operation)} for "
        f"{name_ranks(held.missing) if held.missing else 'its end'}"
        for held in hang.waiting[:MAX_CULPRITS]
    )
    return f"{_who(hang)} wait for each other{_say_age(hang)}: {sides}."


def _say_moving(hang: Hang) -> str:
    if hang.operation is not None and hang.age_ns is not None:
        return f"Nothing hangs yet: {_say_long_wait(hang.operation, hang.age_ns, hang)}."
    resting = [state.rank for state in hang.states.values() if state.is_resting]
    if resting:
        return (
            f"Not known: operations of the current step were not recorded on {name_ranks(resting)}."
        )
    if hang.last_operation_unix_ns is None:
        return "Nothing hangs: no rank waits for another; no operation has been recorded."
    age = duration(max(0, hang.asked_unix_ns - hang.last_operation_unix_ns))
    return f"Nothing hangs: no rank waits unusually long; the last operation was {age} ago."


def _say_long_wait(operation: StuckOperation, age_ns: int, hang: Hang) -> str:
    waiting, _, _ = _count_held(hang)
    where, age = _describe_operation(operation), duration(age_ns)
    who = f"{name_ranks(waiting)} {'has' if len(waiting) == 1 else 'have'}"
    if not hang.culprits:
        return (
            f"{who} been in {where} for {age}, longer than usual; all of its ranks have entered it"
        )
    missing = name_ranks([culprit.rank for culprit in hang.culprits])
    if not waiting:  # a circle: everybody in it is both
        return (
            f"{missing} have waited for each other for {age}, longer than usual, in {where} and "
            "elsewhere"
        )
    return f"{who} waited {age} in {where}, longer than usual, for {missing}"


def _say_finished(hang: Hang) -> str:
    recorded = sum(state.directory is not None for state in hang.states.values())
    missing = len(hang.states) - recorded
    text = f"The job is over: {'all ' if not missing else ''}{plural(recorded, 'rank')} ended"
    return f"{text}{f', {missing} recorded nothing' if missing else ''}; nothing hangs."


# --- what to do -----------------------------------------------------------------------------------

_ADVICE = {
    Reason.KILLED: "Look for who ended {who}: the kernel's log (out of memory), the scheduler, "
    "os._exit in the program, and the end of the rank's own output; the others wait for nothing "
    "and can be ended.",
    Reason.LOST: "Look whether the host of {who} is up and reachable, and at the end of the rank's "
    "own output; the others wait for nothing and can be ended.",
    Reason.RAISED: "Fix the error of {who}, which came first; the others' errors follow from it.",
    Reason.STOPPED: "Let {who} go on: end the debugger, or send SIGCONT.",
    Reason.NOT_ENTERED: "Look at the stack of {who}: it says what is done instead of entering the "
    "operation. Usual causes: a branch that only some ranks take, different numbers of batches, a "
    "data loader or file system that does not answer.",
    Reason.LATE: "Find out what {who} did before the operation timed out: the stack and the last "
    "phase say it. A longer timeout helps only if it would have come.",
    Reason.LEFT: "Find out why the program of {who} ended before the others': usually fewer "
    "batches, or a condition that only holds there.",
    Reason.NEVER_RECORDED: "Look at the launcher's output of {who}: it did not start, or not under "
    "the recorder.",
    Reason.IN_CIRCLE: "Make {who} call these operations in the same order.",
    Reason.MISMATCH: "Make all ranks of the group call the same operation: {who} came by another "
    "branch.",
}
_ADVICE_SHARED = (
    "Each of {who} has the same operations under way, in another order: two threads use the group "
    "at once. Give one of them a group of its own, such as "
    "dcp.async_save(…, process_group=dist.new_group(backend='gloo'))."
)
_ADVICE_TRANSFER = (
    "All ranks have called it: look at the network between their hosts, and at what the backend "
    "says with its debug output (NCCL_DEBUG=INFO); end the job and start it from a checkpoint."
)


def advise(hang: Hang) -> str:
    """What to do about it; empty where nothing hangs."""
    if not hang.is_stuck:
        return ""
    if not hang.culprits:
        return _ADVICE_TRANSFER
    first = hang.culprits[0].reason
    named = [culprit for culprit in hang.culprits if culprit.reason is first]
    is_shared = first is Reason.MISMATCH and _is_shared([culprit.state for culprit in named])
    advice = _ADVICE_SHARED if is_shared else _ADVICE[first]
    if len(hang.states) == 1:
        advice = advice.partition("; the others")[0].removesuffix(".") + "."
    return advice.format(who=name_ranks([culprit.rank for culprit in named]))


def _is_shared(states: Sequence[RankState]) -> bool:
    """Whether ranks have several operations of a group under way, all the same ones: no branch
    brought them there, only the order in which a rank's threads came."""
    found = {
        tuple(sorted((one.group_name, one.kind) for one in state.in_flight)) for state in states
    }
    several = found.pop() if len(found) == 1 else ()
    return len(several) > len({group for group, _ in several})


def say_when(hang: Hang) -> str:
    """`Step 4, in forward, since 2026-01-05 09:30 UTC.`: where the first named rank is, and since
    when others wait; empty where neither is known."""
    state = hang.culprits[0].state if hang.culprits else None
    parts = []
    if state is not None and state.step is not None:
        parts.append(f"step {state.step}")
    if state is not None and state.phase is not None:
        parts.append(f"in {clean_text(state.phase.name, 60)}")
    if hang.age_ns is not None:
        parts.append(f"since {moment(hang.asked_unix_ns - hang.age_ns)}")
    elif hang.operation is not None and hang.operation.since_unix_ns:
        parts.append(f"since {moment(hang.operation.since_unix_ns)}")
    return begin_sentence(f"{', '.join(parts)}.") if parts else ""


# --- evidence -------------------------------------------------------------------------------------


def list_evidence(hang: Hang, culprit: Culprit) -> list[str]:
    """Facts about a culprit, one per line."""
    state = culprit.state
    if state.directory is None:
        return ["it has no folder in the run: it never began to record"]
    facts = [
        _describe_process(state),
        *_list_signs(state, hang.asked_unix_ns),
        *_list_operations(state, hang.asked_unix_ns),
        *(f"flight recorder: {describe_record(record)}" for record in culprit.flight[:2]),
    ]
    if state.problem:
        facts.append(f"its recording: {clean_text(state.problem, MAX_MESSAGE)}")
    if culprit.frames:
        facts.append(f"stack: {describe_frames(culprit.frames)}")
    return facts


def _list_signs(state: RankState, now_ns: int) -> Iterator[str]:
    """When it ended or was last seen, and its phase and step."""
    if state.is_closed:
        when = f" {say_ago(now_ns, state.closed_unix_ns)}" if state.closed_unix_ns else ""
        yield f"its program ended{when}"
        if state.exception:
            yield f"with {clean_text(state.exception, MAX_MESSAGE)}"
    elif state.last_sign_unix_ns is not None:
        yield f"last sign of life {say_ago(now_ns, state.last_sign_unix_ns)}"
    step = f", step {state.step}" if state.step is not None else ""
    if state.phase is not None:
        since = duration(max(0, now_ns - state.phase.since_unix_ns))
        yield f"in phase {clean_text(state.phase.name, 60)} since {since}{step}"
    elif step:
        after = f"after {clean_text(state.last_phase, 60)}" if state.last_phase else "in no phase"
        yield f"{after}{step}"


def _list_operations(state: RankState, now_ns: int) -> Iterator[str]:
    """Its current and its last finished operations."""
    for operation in state.in_flight[:2]:
        handle = " (a handle it holds)" if operation.is_async else ""
        age = duration(max(0, state.looked_unix_ns - operation.entered_unix_ns))
        name = name_operation(operation)
        yield (f"ended in {name}" if state.has_ended else f"in {name} since {age}") + handle
    done = [o for o in state.recent if not o.is_failed and o.ended_unix_ns is not None]
    if done:
        last = max(done, key=lambda o: o.ended_unix_ns or 0)
        yield f"last finished {name_operation(last)} {say_ago(now_ns, last.ended_unix_ns)}"
    elif not state.in_flight:
        yield "it has finished no operation"


def say_ago(now_ns: int, then_ns: int | None) -> str:
    """`1.2 s ago`; the time itself if that is more than a day."""
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
