"""Tables of what is looked at in a few steps only."""

from meshscope.store.table import Column, Table, name_column

STACKS = Table(
    name="stacks",
    meaning="One row per sample of where the training thread was, taken in a few steps only: while "
    "kernels are sampled, or where time that no phase claims repeats.",
    is_detail=True,
    columns=(
        name_column(
            1,
            "the program's frames, the innermost first, as `file:line function > what it calls < "
            "file:line function …`, those of installed packages with a `~`: an id in the rank's "
            "name list",
        ),
        Column(name="reason", word=1, shift=16, width=8, meaning="see SampleReason"),
        Column(
            name="step",
            word=2,
            can_be_missing=True,
            meaning="the open step, else the last one; -1 before any",
        ),
        Column(name="time_host_mono_ns", word=3, unit="ns", meaning="when it was taken"),
    ),
)


class SampleReason:
    """Values of `stacks.reason`."""

    KERNELS = 1
    """The device's kernels were sampled at the same time."""
    GAP = 2
    """Time that no phase claims came again and again."""
