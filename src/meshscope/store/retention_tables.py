"""What is left of steps whose records were thinned, and the rule that says which were.

Writer and readers share this rule; docs/store.md explains it.
"""

from meshscope.store.table import Column, Table

WINDOW_STEPS = 32
"""Steps that are kept or thinned together."""
AGGREGATE_STEPS = 512
"""Steps that share a row of `aggregates`."""
NUM_FIRST_KEPT = 4
"""Noteworthy windows that stay whatever comes after them."""
NO_DURATION = 255
"""`aggregates.bucket` of operations whose duration is not known."""

DETAIL_TABLES = ("collectives", "waits", "spans", "device_spans", "actions")
"""Single operations and spans: thinned first."""
STEP_TABLES = (
    "steps", "phases", "scalars", "memory", "allocator", "operation_notes", "kernels", "hardware",
    "stacks",
)  # fmt: skip
"""What a step, or a second, leaves: thinned when it has grown to a part of the size by itself."""
THINNED_TABLES = DETAIL_TABLES + STEP_TABLES
"""A table's place in this list is its number in `aggregates.source`: only ever append."""
SEGMENTED_TABLES = (*THINNED_TABLES, "aggregates")
"""Those that may have several files."""

KEPT_WINDOWS = Table(
    name="kept_windows",
    meaning="One row per noteworthy window of steps in a run that is thinned: all its records are "
    "kept while its ordinal is below 4 or a multiple of 2 to the power of `noteworthy_level` (in "
    "the header of a thinned file).",
    columns=(
        Column(name="first_step", word=1, meaning="of the window"),
        Column(name="ordinal", word=2, meaning="among the rank's noteworthy windows, from 0"),
        Column(name="reason", word=3, meaning="see KeptReason"),
    ),
)

AGGREGATES = Table(
    name="aggregates",
    meaning="Exact sums of the records of steps that are not among the newest, thinned or not, in "
    "runs with a size limit. One row per table, kind, group, phase, block of steps and bucket of "
    "durations; rows with equal keys add up.",
    columns=(
        Column(name="source", word=1, width=8, meaning="of which table: place in THINNED_TABLES"),
        Column(
            name="kind",
            word=1,
            shift=8,
            width=8,
            meaning="of `collectives` and `actions`: the kind; of `waits`: the source; of `spans` "
            "and `phases`: 1 for phases of the training thread, else 0",
        ),
        Column(
            name="bucket",
            word=1,
            shift=16,
            width=8,
            meaning="of the duration: 4 · n + q for those from 2^n · (1 + q / 4) ns on; 0 up to "
            "1 ns, 255 when there is none",
        ),
        Column(
            name="span_level",
            word=1,
            shift=24,
            width=8,
            meaning="the block has 512 · 2^n steps; more than 0 once sums themselves took too much",
        ),
        Column(
            name="group_id",
            word=1,
            shift=32,
            width=16,
            meaning="of `collectives`: an id in the rank's group list",
        ),
        Column(
            name="phase_id",
            word=1,
            shift=48,
            width=15,
            meaning="an id in the rank's name list: the phase, or the span's name below 32768",
        ),
        Column(name="first_step", word=2, meaning="of the block"),
        Column(
            name="round",
            word=3,
            meaning="of thinning, from 1; a row counts once its table's thinned file is of it",
        ),
        Column(name="num_records", word=4, meaning="how many"),
        Column(name="total_ns", word=5, unit="ns", meaning="sum of their durations"),
        Column(
            name="total_bytes",
            word=6,
            unit="bytes",
            meaning="of `collectives`: sum of sizes; of `steps`: of input tokens",
        ),
        Column(
            name="total_self_ns",
            word=7,
            unit="ns",
            meaning="of `spans` and `phases`: sum of self times",
        ),
    ),
)


class KeptReason:
    """Bits of `kept_windows.reason`."""

    FIRST = 1
    """The first steps."""
    SLOW = 2
    """A step took much longer than those before."""
    FLAGGED = 4
    """A step was aborted, or its update skipped."""
    FAILED = 8
    """An operation failed or timed out."""
    SHIFT = 16
    """Steps became slower or faster here, and stayed so for a window."""
    NEIGHBOUR = 32
    """Something noteworthy happened just across its border."""


def is_kept(window: int, ordinal: int | None, level: int, noteworthy_level: int) -> bool:
    """Whether a decided window keeps its records; `ordinal` is None where it is not noteworthy."""
    if window % (1 << level) == 0:
        return True
    if ordinal is None:
        return False
    return ordinal < NUM_FIRST_KEPT or ordinal % (1 << noteworthy_level) == 0


def bucket_of(duration_ns: int) -> int:
    """The quarter octave of a duration, by its highest bit and the two below it."""
    if duration_ns <= 1:
        return 0
    octave = duration_ns.bit_length() - 1
    quarter = (duration_ns >> (octave - 2)) & 3 if octave >= 2 else (duration_ns << 1) & 2
    return 4 * octave + quarter
