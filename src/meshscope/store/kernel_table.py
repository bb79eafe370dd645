"""The table of kernel samples; `store.schema` says what all tables have in common."""

from enum import IntEnum

from meshscope.store.table import Column, Table, name_column


class KernelKind(IntEnum):
    """What a row of `kernels` is."""

    COMPUTE = 0
    COMMUNICATION = 1
    """A kernel of a communication library."""
    COPY = 2
    """Between memories."""
    FILL = 3
    """A memory set."""
    SYNCHRONISATION = 4
    """A call of the host that waited for the device; not work of the device."""
    UNLAUNCHED = 5
    """A long call of the host's runtime that neither launches nor waits, such as an allocation."""


KERNELS = Table(
    name="kernels",
    meaning="One row per piece of work an accelerator did in a kernel sample: a few steps in which "
    "torch's profiler watched the device alone. Calls of the host that waited for the device, or "
    "kept it in the runtime for long, have rows too.",
    is_detail=True,
    columns=(
        name_column(1, "the kernel's or call's name: an id in the rank's name list"),
        Column(name="kind", word=1, shift=16, width=8, meaning="see KernelKind"),
        Column(
            name="launch_thread",
            word=1,
            shift=24,
            width=8,
            meaning="which thread called: numbered from 0 in order of appearance in the sample",
        ),
        Column(
            name="stream",
            word=1,
            shift=32,
            width=31,
            meaning="the device's stream, as the driver numbers it; 0 of a call",
        ),
        Column(name="start_host_mono_ns", word=2, unit="ns", meaning="when it began"),
        Column(name="duration_ns", word=3, unit="ns", meaning="begin to end"),
        Column(
            name="launch_host_mono_ns",
            word=4,
            unit="ns",
            can_be_missing=True,
            meaning="when the host began the call that launched it; missing when it is not known",
        ),
        Column(
            name="launch_ns",
            word=5,
            unit="ns",
            can_be_missing=True,
            meaning="how long that call took",
        ),
        Column(name="sample", word=6, width=32, meaning="number of the kernel sample on this rank"),
        Column(
            name="is_graph",
            word=6,
            shift=32,
            width=1,
            meaning="1: launched by a call that launches a whole graph",
        ),
        Column(
            name="size_bytes",
            word=7,
            unit="bytes",
            can_be_missing=True,
            meaning="what a copy or fill moved, where torch says it",
        ),
    ),
)
