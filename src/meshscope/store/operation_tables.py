"""Tables of communication and of pipeline actions; `store.schema` says what all have in common."""

from meshscope.store.table import Column, Table, name_column

COLLECTIVES = Table(
    name="collectives",
    meaning="One row per communication operation this rank took part in, written when its end "
    "became known; those that were under way when a process died are added from `now.bin`. "
    "`enqueue_host_mono_ns` is the row's key within the rank. Sizes: `core.operations`.",
    is_detail=True,
    columns=(
        Column(name="kind", word=1, width=8, meaning="see Kind in `core.operations`"),
        Column(name="outcome", word=1, shift=8, width=8, meaning="see Outcome there"),
        Column(name="end_source", word=1, shift=16, width=8, meaning="see EndSource there"),
        Column(name="flags", word=1, shift=24, width=8, meaning="see OperationFlag"),
        Column(
            name="group_id",
            word=1,
            shift=32,
            width=16,
            meaning="which process group: an id in the rank's group list",
        ),
        Column(
            name="phase_id",
            word=1,
            shift=48,
            width=15,
            meaning="the phase it was issued in: an id in the rank's name list; 0 outside of any",
        ),
        Column(
            name="sequence",
            word=2,
            width=32,
            meaning="ordinal from 0 among the operations of its group on this rank; of a send or "
            "recv, among those with the same peer, direction and tag; on devices, where only some "
            "steps may be recorded, step × 2^14 + ordinal in the step, modulo 2^32",
        ),
        Column(
            name="peer",
            word=2,
            shift=32,
            width=31,
            can_be_missing=True,
            is_stored_plus_one=True,
            meaning="global rank of the root or of the other side",
        ),
        Column(
            name="enqueue_host_mono_ns",
            word=3,
            unit="ns",
            meaning="when the program called it on this rank",
        ),
        Column(
            name="start_host_mono_ns",
            word=4,
            unit="ns",
            can_be_missing=True,
            meaning="when this rank was ready for it: the call, or, on a device, when the stream "
            "reached it (device time placed on the host clock)",
        ),
        Column(
            name="end_host_mono_ns",
            word=5,
            unit="ns",
            can_be_missing=True,
            meaning="when it was over on this rank, as `end_source` says",
        ),
        Column(name="size_bytes", word=6, unit="bytes", meaning="the whole array, counted once"),
        Column(
            name="step",
            word=7,
            width=32,
            can_be_missing=True,
            is_stored_plus_one=True,
            meaning="the open step, else the last one",
        ),
        Column(
            name="microbatch",
            word=7,
            shift=32,
            width=16,
            can_be_missing=True,
            is_stored_plus_one=True,
            meaning="microbatch index within the step",
        ),
        Column(name="dtype", word=7, shift=48, width=8, meaning="place in DTYPES"),
        Column(name="tag", word=7, shift=56, width=7, meaning="of a send or recv, at most 127"),
    ),
)

WAITS = Table(
    name="waits",
    meaning="One row per time the program waited for an operation it had started earlier "
    "(`Work.wait`, `wait_tensor`), or was held up by the call that started it. A blocking "
    "operation has none: its whole time is a wait.",
    is_detail=True,
    columns=(
        Column(name="source", word=1, width=8, meaning="see WaitSource"),
        Column(
            name="phase_id",
            word=1,
            shift=48,
            width=15,
            meaning="the phase it happened in: an id in the rank's name list; 0 outside of any",
        ),
        Column(
            name="operation_enqueue_host_mono_ns",
            word=2,
            unit="ns",
            can_be_missing=True,
            meaning="key of the operation in `collectives`; missing when it is not known",
        ),
        Column(name="start_host_mono_ns", word=3, unit="ns", meaning="when the wait began"),
        Column(name="duration_ns", word=4, unit="ns", meaning="how long the host was held up"),
        Column(
            name="device_ns",
            word=5,
            unit="ns",
            can_be_missing=True,
            meaning="how long the device's stream was held up; missing without a device",
        ),
        Column(
            name="device_end_host_mono_ns",
            word=6,
            width=63,
            unit="ns",
            can_be_missing=True,
            is_stored_plus_one=True,
            meaning="when the device's stream went on (device time placed on the host clock); "
            "missing without a device, and in older runs",
        ),
        Column(
            name="step",
            word=7,
            width=32,
            can_be_missing=True,
            is_stored_plus_one=True,
            meaning="the open step, else the last one",
        ),
        Column(
            name="microbatch",
            word=7,
            shift=32,
            width=16,
            can_be_missing=True,
            is_stored_plus_one=True,
            meaning="microbatch index within the step",
        ),
    ),
)

OPERATION_NOTES = Table(
    name="operation_notes",
    meaning="What else is known about single operations: the message of one that failed, the name "
    "of a custom one, metadata the program gave.",
    columns=(
        name_column(1, "the text: an id in the rank's name list"),
        Column(name="code", word=1, shift=16, width=8, meaning="see NoteCode"),
        Column(
            name="operation_enqueue_host_mono_ns",
            word=2,
            unit="ns",
            meaning="key of the operation in `collectives`",
        ),
        Column(name="time_host_mono_ns", word=3, unit="ns", meaning="when it was noted"),
    ),
)

ACTIONS = Table(
    name="actions",
    meaning="One row per pipeline action this rank ran: one microbatch through one stage, forward "
    "or (a part of) backward. Its time is also a phase in `spans`, and on an accelerator in "
    "`device_spans`, with the same begin. Rows are in the order in which actions ended.",
    is_detail=True,
    columns=(
        Column(name="kind", word=1, width=8, meaning="place in ACTION_KINDS"),
        Column(name="flags", word=1, shift=8, width=8, meaning="see ActionFlag"),
        Column(
            name="chunk",
            word=1,
            shift=16,
            width=16,
            meaning="which of the rank's stages this is, from 0 in forward order",
        ),
        Column(
            name="stage",
            word=1,
            shift=32,
            width=31,
            meaning="the stage in the whole model, from 0 in forward order",
        ),
        Column(
            name="step",
            word=2,
            can_be_missing=True,
            meaning="the open step; missing outside of any, as in an evaluation",
        ),
        Column(name="microbatch", word=3, meaning="microbatch index within the step"),
        Column(
            name="begin_host_mono_ns",
            word=4,
            unit="ns",
            meaning="when it began, after the wait for its input",
        ),
        Column(name="duration_ns", word=5, unit="ns", meaning="host time from begin to end"),
        Column(
            name="wait_begin_host_mono_ns",
            word=6,
            unit="ns",
            can_be_missing=True,
            meaning="when this rank began to wait for the action's input; missing when nothing "
            "was to be waited for",
        ),
        Column(
            name="wait_ns",
            word=7,
            unit="ns",
            can_be_missing=True,
            meaning="how long it waited for it, just before the action; missing likewise",
        ),
    ),
)
