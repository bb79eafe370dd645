"""Messages that one kernel sends and receives at once (`batch_isend_irecv`).

The host records each message when it is asked for; the kernel is launched when the batch ends, and
names none of them. So a kernel of messages that has no record of its own gets those of its thread
which have no kernel of theirs, from the batch before it up to its launch.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_steps import find_launches
from meshscope.store.read.arrays import Int32s, Int64s, find_true

POINT_TO_POINT = "send_recv"
"""The kind of kernels that carry messages between two ranks."""


def find_batches(
    trace: Trace, picked: Int64s, operator_of: Int32s, kinds: Sequence[str]
) -> dict[int, list[int]]:
    """By place in `picked` the rows of the messages' records, for kernels that carry several."""
    is_message = np.array([kind == POINT_TO_POINT for kind in kinds], dtype=np.bool_)
    if not is_message.any():
        return {}
    is_record = _message_names(trace)[trace.text_argument("Collective name")]
    open_places = find_true(is_message & ~is_record[picked])
    operator = operator_of[picked[open_places]]
    open_places = open_places[~((operator >= 0) & is_record[operator])]
    is_record &= trace.events.category == int(Category.CPU_OP)
    is_record[operator_of[operator_of >= 0]] = False  # has a kernel of its own
    records = find_true(is_record)
    if not len(records) or not len(open_places):
        return {}
    return _assign(trace, records, picked, open_places)


def _message_names(trace: Trace) -> npt.NDArray[np.bool_]:
    """Per string whether it names one message; the last for no string."""
    is_one = [text[:8].lower() in ("send", "recv") for text in trace.strings]
    return np.array([*is_one, False], dtype=np.bool_)


def _assign(trace: Trace, records: Int64s, picked: Int64s, places: Int64s) -> dict[int, list[int]]:
    """Each record to the next launch on its thread."""
    events = trace.events
    launch = find_launches(trace)[picked[places]]
    places, launch = places[launch >= 0], launch[launch >= 0]
    order = np.argsort(events.begin_ns[launch], kind="stable")
    places, launch = places[order], launch[order]
    found: dict[int, list[int]] = {}
    for track in np.unique(events.track[launch]).tolist():
        own = find_true(events.track[launch] == track)
        asked = records[events.track[records] == track]
        at = np.searchsorted(events.begin_ns[launch[own]], events.begin_ns[asked], side="left")
        for place, row in zip(at.tolist(), asked.tolist(), strict=True):
            if place < len(own):
                found.setdefault(int(places[own[place]]), []).append(row)
    return found
