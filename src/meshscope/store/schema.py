"""Every table, column, unit and meaning in a run directory, and the version they belong to.

A record is 64 bytes: eight little-endian 64-bit words. Word 0 is the checksum (see `table_file`);
words 1-7 are the table's. Small fields share a word (`bits`). Times are int64 nanoseconds and
their names carry the clock: `_host_mono_ns` is CLOCK_MONOTONIC of the rank's host, `_unix_ns` the
wall clock, `_device_ns` an accelerator's own time line. A quantity that cannot be negative is -1
when it is missing; missing is never 0.
"""

from dataclasses import dataclass

from meshscope.store.hardware_table import CLOCK_LIMITS as CLOCK_LIMITS
from meshscope.store.hardware_table import HARDWARE as HARDWARE
from meshscope.store.hardware_table import ClockLimit as ClockLimit
from meshscope.store.kernel_table import KERNELS as KERNELS
from meshscope.store.kernel_table import KernelKind as KernelKind
from meshscope.store.operation_tables import ACTIONS as ACTIONS
from meshscope.store.operation_tables import COLLECTIVES as COLLECTIVES
from meshscope.store.operation_tables import OPERATION_NOTES as OPERATION_NOTES
from meshscope.store.operation_tables import WAITS as WAITS
from meshscope.store.retention_tables import AGGREGATES as AGGREGATES
from meshscope.store.retention_tables import KEPT_WINDOWS as KEPT_WINDOWS
from meshscope.store.sample_tables import STACKS as STACKS
from meshscope.store.sample_tables import SampleReason as SampleReason
from meshscope.store.table import MISSING as MISSING
from meshscope.store.table import NUM_WORDS as NUM_WORDS
from meshscope.store.table import RECORD_BYTES as RECORD_BYTES
from meshscope.store.table import Column as Column
from meshscope.store.table import Table as Table
from meshscope.store.table import name_column

SCHEMA_VERSION = 2
"""Raised whenever a column changes meaning or place; a reader refuses what is newer than itself."""

STEPS = Table(
    name="steps",
    meaning="One row per finished training step; a later row with the same step replaces an "
    "earlier one (a second optimizer that stepped in the same iteration extends it).",
    columns=(
        Column(name="step", word=1, meaning="step index, from 0, never reused within an attempt"),
        Column(name="start_host_mono_ns", word=2, unit="ns", meaning="when the step began"),
        Column(name="end_host_mono_ns", word=3, unit="ns", meaning="when the step ended"),
        Column(
            name="num_microbatches",
            word=4,
            width=32,
            meaning="outermost backward passes in the step; 0 when none was seen",
        ),
        Column(name="flags", word=4, shift=32, width=16, meaning="see StepFlag"),
        Column(
            name="recorder_ns",
            can_be_missing=True,
            word=5,
            unit="ns",
            meaning="time spent inside the recorder during the step, measured on one step in "
            "17 (16 in older recordings); -1 on the others",
        ),
        Column(
            name="input_tokens",
            can_be_missing=True,
            word=6,
            meaning="elements of the two-dimensional integer inputs of the step's training "
            "forward passes on this rank; -1 when there were none",
        ),
        Column(
            name="input_samples",
            word=7,
            meaning="first dimension of the model's first input, of the first training forward "
            "before each backward; 0 when it has none",
        ),
    ),
)

SPANS = Table(
    name="spans",
    meaning="One row per finished phase or detail span. Phases of a rank's training thread nest "
    "and their self times partition the time line; detail spans do not take time from phases.",
    is_detail=True,
    columns=(
        name_column(1, "which phase or span: an id in the rank's name list"),
        Column(name="depth", word=1, shift=16, width=8, meaning="enclosing phases, 0 outermost"),
        Column(name="flags", word=1, shift=24, width=8, meaning="see SpanFlag"),
        Column(
            name="thread", word=1, shift=32, width=16, meaning="0 is the training thread, then 1, 2"
        ),
        Column(name="start_host_mono_ns", word=2, unit="ns", meaning="when it began"),
        Column(name="duration_ns", word=3, unit="ns", meaning="host time from begin to end"),
        Column(name="self_ns", word=4, unit="ns", meaning="duration less the phases nested in it"),
        Column(
            name="microbatch",
            can_be_missing=True,
            word=5,
            meaning="microbatch index within the step, or -1",
        ),
    ),
)


def _stamp_columns(name: str, word: int) -> tuple[Column, Column]:
    return (
        Column(
            name=f"{name}_start_host_mono_ns",
            word=word,
            unit="ns",
            meaning=f"when {name} began; 0 when it did not occur",
        ),
        Column(
            name=f"{name}_end_host_mono_ns", word=word + 1, unit="ns", meaning=f"when {name} ended"
        ),
    )


PHASES = Table(
    name="phases",
    meaning="The usual phases of a step in one record: those that came in this order, once, not "
    "nested and in microbatch 0. Readers show them as rows of `spans` (depth 0, thread 0, self "
    "time equal to duration); any other phase is written there at once. A step has no record, one, "
    "or, after a pause or a phase that came again, several.",
    columns=(
        *_stamp_columns("data", 1),
        *_stamp_columns("forward", 3),
        *_stamp_columns("backward", 5),
        Column(
            name="optimizer_gap_ns",
            word=7,
            shift=32,
            width=31,
            unit="ns",
            meaning="from the end of backward to the begin of optimizer; without a backward, or "
            "when it does not fit, optimizer is a row of `spans`",
        ),
        Column(
            name="optimizer_ns",
            word=7,
            width=32,
            unit="ns",
            meaning="duration of optimizer; 0 with a gap of 0 when it did not occur",
        ),
    ),
)

DEVICE_SPANS = Table(
    name="device_spans",
    meaning="One row per phase whose begin and end were also marked on the accelerator's stream. "
    "Begin and end are when the stream reached the marks: idle time of the device between them "
    "is included.",
    is_detail=True,
    columns=(
        name_column(1, "which phase: an id in the rank's name list"),
        Column(name="device_index", word=1, shift=16, width=16, meaning="accelerator ordinal"),
        Column(
            name="host_start_host_mono_ns",
            word=2,
            unit="ns",
            meaning="start_host_mono_ns of the host span this belongs to (the join key)",
        ),
        Column(
            name="start_device_ns",
            word=3,
            unit="ns",
            meaning="begin on the device time line, counted from the rank's first device mark",
        ),
        Column(name="duration_ns", word=4, unit="ns", meaning="begin to end on the device"),
        Column(
            name="offset_min_ns",
            word=5,
            unit="ns",
            meaning="host_mono minus device time is at least this (the device cannot reach a mark "
            "before the host issued it)",
        ),
        Column(
            name="offset_max_ns",
            word=6,
            unit="ns",
            meaning="host_mono minus device time is at most this (the mark had been reached when "
            "the host saw it)",
        ),
        Column(
            name="microbatch",
            can_be_missing=True,
            word=7,
            meaning="microbatch index within the step, or -1",
        ),
    ),
)

SCALARS = Table(
    name="scalars",
    meaning="One row per logged number.",
    columns=(
        name_column(1, "what was logged: an id in the rank's name list"),
        Column(
            name="step",
            can_be_missing=True,
            word=2,
            meaning="the open step, else the last one; -1 before any",
        ),
        Column(name="time_host_mono_ns", word=3, unit="ns", meaning="when it was logged"),
        Column(name="value", word=4, is_float=True, meaning="the number, NaN and Inf included"),
        Column(
            name="microbatch",
            can_be_missing=True,
            word=5,
            meaning="microbatch index within the step, or -1",
        ),
        Column(
            name="divisor",
            word=6,
            is_float=True,
            meaning="by what the program had divided the number, as far as the recorder saw it "
            "(backward_loss); 0 when by nothing",
        ),
        Column(name="flags", word=7, width=8, meaning="see ScalarFlag"),
    ),
)

MEMORY = Table(
    name="memory",
    meaning="Memory of the process and its accelerator, read at a step's end: at every one, as far "
    "as a reading costs at most a thousandth of the time between two, else about once a second.",
    columns=(
        Column(name="step", word=1, meaning="the step that had just ended"),
        Column(name="time_host_mono_ns", word=2, unit="ns", meaning="when it was read"),
        Column(
            name="rss_bytes",
            can_be_missing=True,
            word=3,
            unit="bytes",
            meaning="resident set of the process",
        ),
        Column(
            name="allocated_bytes",
            can_be_missing=True,
            word=4,
            unit="bytes",
            meaning="tensors on the device, or -1",
        ),
        Column(
            name="reserved_bytes",
            can_be_missing=True,
            word=5,
            unit="bytes",
            meaning="taken from the device by the caching allocator, or -1",
        ),
        Column(
            name="peak_allocated_bytes",
            can_be_missing=True,
            word=6,
            unit="bytes",
            meaning="highest allocated_bytes since the allocator's peak was last reset, or -1",
        ),
        Column(
            name="peak_reserved_bytes",
            can_be_missing=True,
            word=7,
            unit="bytes",
            meaning="likewise, reserved, or -1",
        ),
    ),
)

ALLOCATOR = Table(
    name="allocator",
    meaning="What the caching allocator of the accelerator and its driver say, one row per row of "
    "`memory` (same step and time) while an accelerator is in use.",
    is_detail=True,
    columns=(
        Column(name="step", word=1, meaning="the step that had just ended"),
        Column(name="time_host_mono_ns", word=2, unit="ns", meaning="when it was read"),
        Column(
            name="active_bytes",
            can_be_missing=True,
            word=3,
            unit="bytes",
            meaning="in blocks that are in use, or freed but still needed by a stream",
        ),
        Column(
            name="inactive_split_bytes",
            can_be_missing=True,
            word=4,
            unit="bytes",
            meaning="in free blocks that are parts of a segment in use: taken, and of use only to "
            "requests that fit into a hole",
        ),
        Column(
            name="device_free_bytes",
            can_be_missing=True,
            word=5,
            unit="bytes",
            meaning="free on the device, whoever uses the rest",
        ),
        Column(
            name="device_total_bytes",
            can_be_missing=True,
            word=6,
            unit="bytes",
            meaning="of the whole device",
        ),
        Column(
            name="num_alloc_retries",
            word=7,
            width=32,
            can_be_missing=True,
            is_stored_plus_one=True,
            meaning="allocations so far that succeeded only after the cache was emptied",
        ),
        Column(
            name="num_ooms",
            word=7,
            shift=32,
            width=31,
            can_be_missing=True,
            is_stored_plus_one=True,
            meaning="allocations so far that failed",
        ),
    ),
)

CLOCKS = Table(
    name="clocks",
    meaning="Readings of the wall clock against the monotonic one, at start and then once a "
    "minute at a step's end.",
    columns=(
        Column(name="time_host_mono_ns", word=1, unit="ns", meaning="midpoint of the two reads"),
        Column(name="time_unix_ns", word=2, unit="ns", meaning="wall clock between them"),
        Column(
            name="uncertainty_ns", word=3, unit="ns", meaning="half the time between the two reads"
        ),
    ),
)

FAULTS = Table(
    name="faults",
    meaning="One row per fault that was injected on this rank on purpose: the truth that a "
    "diagnosis is to find. A later row with the same kind and begin replaces an earlier one (the "
    "end of a fault that was written down when it began).",
    columns=(
        Column(
            name="kind_id", word=1, width=16, meaning="what was done: an id in the rank's name list"
        ),
        Column(
            name="detail_id",
            word=1,
            shift=16,
            width=16,
            meaning="how and how much, as text: an id in the rank's name list; 0 when not said",
        ),
        Column(
            name="step", word=2, can_be_missing=True, meaning="the step in which it began, or -1"
        ),
        Column(name="begin_host_mono_ns", word=3, unit="ns", meaning="when it began"),
        Column(
            name="end_host_mono_ns",
            word=4,
            unit="ns",
            can_be_missing=True,
            meaning="when it ended; missing when it did not: it goes on, or ended the process",
        ),
    ),
)

DEVICE_GAPS = Table(
    name="device_gaps",
    meaning="One row per stretch in which an accelerator had nothing to do, with why; only in runs "
    "made of profiler traces, which have the calls that launched its work. The parts sum to the "
    "gap; a gap whose next work has no launching call in the trace has 0 everywhere but in "
    "`unknown_ns`.",
    is_detail=True,
    columns=(
        Column(
            name="step",
            word=1,
            width=32,
            can_be_missing=True,
            is_stored_plus_one=True,
            meaning="of the work that ends the gap",
        ),
        Column(
            name="unknown_ns",
            word=1,
            shift=32,
            width=31,
            unit="ns",
            meaning="cause not known; at most 2.1 s",
        ),
        Column(name="start_host_mono_ns", word=2, unit="ns", meaning="when it began"),
        Column(name="host_ns", word=3, unit="ns", meaning="the host was at something else"),
        Column(
            name="synchronising_ns",
            word=4,
            unit="ns",
            meaning="the host had waited for the device, and launched more only after that",
        ),
        Column(
            name="communicating_ns",
            word=5,
            unit="ns",
            meaning="the host was inside a collective's call",
        ),
        Column(name="launch_ns", word=6, unit="ns", meaning="the launch was on its way"),
        Column(
            name="dependency_ns",
            word=7,
            unit="ns",
            meaning="the work was launched, and waited for other work",
        ),
    ),
)

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        STEPS,
        PHASES,
        SPANS,
        DEVICE_SPANS,
        SCALARS,
        MEMORY,
        ALLOCATOR,
        CLOCKS,
        COLLECTIVES,
        WAITS,
        OPERATION_NOTES,
        ACTIONS,
        KERNELS,
        FAULTS,
        DEVICE_GAPS,
        HARDWARE,
        STACKS,
        KEPT_WINDOWS,
        AGGREGATES,
    )
}


class StepFlag:
    """Bits of `steps.flags`."""

    ABORTED = 1
    """The step's block was left by an exception."""
    EXPLICIT = 2
    """The boundaries were given by the program, not inferred from the optimizer."""
    SKIPPED = 4
    """The gradient scaler skipped the optimizer update (non-finite gradients)."""
    UNWATCHED = 8
    """Communication of this step was not recorded, to keep the cost of recording small."""
    THINNED = 16
    """Operations and spans of this step were thinned to keep the run small. Never stored: readers
    set it."""
    WITHOUT_OPERATIONS = UNWATCHED | THINNED
    """No analysis may take what is left of such a step's operations for all of them."""


class SpanFlag:
    """Bits of `spans.flags`."""

    ABORTED = 1
    """Left by an exception, or closed by the recorder because its end never came."""
    DETAIL = 2
    """A named span inside a phase: not part of the partition of the time line."""
    GIVEN = 4
    """A duration that the program measured itself, put where it was told of. With DETAIL it is a
    phase only where it overlaps none that was measured."""


class ScalarFlag:
    """Bits of `scalars.flags`: what the recorder knows of a loss that backward was called on, and
    whether a value is a counter's."""

    RETURNED = 1
    """Times its divisor it is the loss that the model returned under that name."""
    NORMALIZED = 2
    """The model was told the tokens of the whole step: its losses add up over microbatches."""
    UNSCALED = 4
    """The value is what a gradient scaler was given, not what it made of it."""
    GRADIENT = 8
    """torch.autograd.grad was called on it: a penalty, or a loss without a backward."""
    COUNT = 16
    """The value is to be added to others of its name: a counter."""
    FURTHER = 32
    """A further backward of the same forward, which the one before had kept the graph for: it adds
    to that one's loss."""


class OperationFlag:
    """Bits of `collectives.flags`."""

    ASYNC = 1
    """It returned a handle at once; the others held the caller, or the device's stream, up."""
    ENGINE = 2
    """Issued by torch itself inside backward (a reducer): no handle reaches the program."""
    DEVICE = 4
    """Ran on an accelerator's stream: start and end are device times placed on the host clock."""
    COALESCED = 8
    """One of a batch that was launched as a whole; its end is the batch's."""
    MANUAL = 16
    """Timed by the program itself, not seen in torch."""


class WaitSource:
    """Values of `waits.source`."""

    WORK = 1
    """`Work.wait`."""
    TENSOR = 2
    """`wait_tensor` of the functional collectives."""
    CALL = 3
    """The call itself, of one that gives a handle: torch returned late (over 100 µs)."""
    UNQUEUED = 4
    """No wait: the operation ran with nothing beside it, and nothing was queued behind it. Only
    traces of a profiler tell."""
    STREAM = 5
    """The device's main stream was made to wait for another, on which the operation runs."""


class ActionFlag:
    """Bits of `actions.flags`."""

    ABORTED = 1
    """Left by an exception."""


ACTION_KINDS = ("F", "B", "I", "W")
"""Forward, whole backward, gradient of the input, gradient of the weights, as in `core.schedule`.
A kind is written as its place in this list: only ever append."""


class NoteCode:
    """Values of `operation_notes.code`."""

    ERROR = 1
    """The message of an operation that failed."""
    NAME = 2
    """The name of a custom operation, or torch's name of one this version does not know."""
    METADATA = 3
    """A JSON object the program gave."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a phase name means to the analyses."""

    name: str
    name_id: int
    meaning: str


ROLES: tuple[Role, ...] = (
    Role("data", 1, "waiting for the next batch"),
    Role("forward", 2, "the model's forward pass"),
    Role("backward", 3, "the backward pass, recomputation of checkpointed parts included"),
    Role("optimizer", 4, "the optimizer's step"),
    Role("clip", 5, "gradient clipping"),
    Role("eval", 6, "forward passes without training"),
    Role("comm", 7, "communication the program timed as a phase of its own"),
    Role("checkpoint", 8, "saving or loading state"),
    Role("logging", 9, "writing metrics"),
    Role("compute", 10, "forward and backward together, where a framework hides the split"),
    Role("pipeline wait", 11, "waiting for what another pipeline stage makes"),
    Role("compile", 12, "torch.compile making code, for the first time or again"),
)
"""Built-in phase names have the same id in every rank, so that readers need no translation."""

BUILTIN_NAMES: dict[str, int] = {role.name: role.name_id for role in ROLES}
FIRST_CUSTOM_NAME_ID = 64
MAX_NAME_ID = 0xFFFF

MAX_DETAIL_BYTES = 4 << 30
"""A detail table stops at this size by default and counts what it drops; steps go on."""
LIMIT_WORDS = "the table reached its limit"
"""How the journal begins to say that a detail table did."""
