"""The verdict of `analyze.hang` as one JSON document. Text is what the run has; JSON escapes it."""

import json

from meshscope.hang.flight_recorder import GroupRecord
from meshscope.hang.hang import Culprit, Hang, StuckOperation
from meshscope.hang.hang_rules import Held
from meshscope.hang.rank_states import Operation, RankState
from meshscope.hang.stacks import Frame
from meshscope.report.hang import describe_place, list_evidence, make_sentence

DOCUMENT_VERSION = 1


def encode_hang(hang: Hang, *, run: str, attempt: int, shows_all_ranks: bool) -> str:
    """The verdict as one JSON object; times are unix nanoseconds, sequences count from 0."""
    ranks = sorted(hang.states) if shows_all_ranks else _named_ranks(hang)
    document = {
        "version": DOCUMENT_VERSION,
        "run": run,
        "attempt": attempt,
        "asked_unix_ns": hang.asked_unix_ns,
        "kind": hang.kind.value,
        "is_stuck": hang.is_stuck,
        "is_certain": hang.is_certain,
        "sentence": make_sentence(hang),
        "age_ns": hang.age_ns,
        "culprits": [_culprit_document(hang, culprit) for culprit in hang.culprits],
        "operation": _stuck_document(hang.operation) if hang.operation is not None else None,
        "waiting": [_held_document(held) for held in hang.waiting],
        "cascade": [_held_document(held) for held in hang.cascade],
        "first_error": _operation_document(hang.first_error) if hang.first_error else None,
        "num_ranks_with_errors": hang.num_errors,
        "others": [
            {"kind": cause.kind.value, "ranks": list(cause.ranks), "age_ns": cause.age_ns}
            for cause in hang.others
        ],
        "waiting_stack": None
        if hang.waiting_frames is None
        else {
            "rank": hang.waiting_frames[0],
            "frames": [_frame_document(frame) for frame in hang.waiting_frames[1]],
        },
        "last_operation_unix_ns": hang.last_operation_unix_ns,
        "ranks": [_state_document(hang, hang.states[rank]) for rank in ranks],
        "notes": list(hang.notes),
    }
    return json.dumps(document, indent=2) + "\n"


def _named_ranks(hang: Hang) -> list[int]:
    named = {culprit.rank for culprit in hang.culprits}
    return sorted(named | {held.rank for held in (*hang.waiting, *hang.cascade)})


def _culprit_document(hang: Hang, culprit: Culprit) -> dict[str, object]:
    return {
        "rank": culprit.rank,
        "reason": culprit.reason.value,
        "evidence": list_evidence(hang, culprit),
        "stack": [_frame_document(frame) for frame in culprit.frames],
        "flight_recorder": [_record_document(record) for record in culprit.flight],
    }


def _stuck_document(operation: StuckOperation) -> dict[str, object]:
    return {
        "kind": operation.kind.label,
        "group": operation.group.name,
        "group_description": operation.group.description,
        "axis": operation.axis,
        "sequence": operation.sequence,
        "source": operation.source,
        "destination": operation.destination,
        "ranks": list(operation.ranks),
        "entered": list(operation.entered),
        "missing": list(operation.missing),
        "kinds": {kind.label: list(ranks) for kind, ranks in operation.kinds.items()},
        "size_bytes": operation.size_bytes,
        "since_unix_ns": operation.since_unix_ns,
    }


def _held_document(held: Held) -> dict[str, object]:
    return {
        "rank": held.rank,
        "operation": _operation_document(held.operation),
        "waited_ns": held.waited_ns,
        "waits_for": list(held.missing),
        "is_certain": held.is_certain,
    }


def _operation_document(operation: Operation) -> dict[str, object]:
    meeting = operation.meeting
    return {
        "rank": operation.rank,
        "kind": operation.kind.label,
        "group": meeting.group.name,
        "axis": meeting.group.axis,
        "sequence": meeting.sequence,
        "peer": operation.peer if operation.peer >= 0 else None,
        "size_bytes": operation.size_bytes,
        "is_async": operation.is_async,
        "outcome": operation.outcome.label,
        "message": operation.message,
        "phase": operation.phase,
        "step": operation.step,
        "entered_unix_ns": operation.entered_unix_ns,
        "ended_unix_ns": operation.ended_unix_ns,
    }


def _state_document(hang: Hang, state: RankState) -> dict[str, object]:
    last = state.recent[-1] if state.recent else None
    return {
        "rank": state.rank,
        "place": describe_place(hang, state.rank),
        "host": state.host,
        "pid": state.process.pid,
        "process": state.process.life.value,
        "process_detail": state.process.reason or state.process.system_call,
        "has_recorded": state.directory is not None,
        "is_closed": state.is_closed,
        "exception": state.exception,
        "step": state.step,
        "phase": state.phase.name if state.phase else None,
        "phase_since_unix_ns": state.phase.since_unix_ns if state.phase else None,
        "last_sign_unix_ns": state.last_sign_unix_ns,
        "in_flight": [_operation_document(operation) for operation in state.in_flight],
        "last_operation": _operation_document(last) if last is not None else None,
    }


def _frame_document(frame: Frame) -> dict[str, object]:
    return {"file": frame.file, "line": frame.line, "function": frame.function}


def _record_document(record: GroupRecord) -> dict[str, object]:
    return {
        "group": record.group,
        "sequence": record.sequence,
        "name": record.name,
        "state": record.state,
        "is_over": record.is_over,
        "place": record.place,
    }
