"""The rules of the two monitors this one is based on, and what replaces them here.

pytscope has 16, torsh four. Each has a counterpart, or a reason why not, and the difference from
the original.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterpart:
    """One rule of another tool."""

    tool: str
    rule: str
    codes: tuple[str, ...]
    """Ours; empty where there is none, with the reason in `difference`."""
    difference: str


COUNTERPARTS: tuple[Counterpart, ...] = (
    Counterpart(
        tool="pytscope",
        rule="TIMING.DATALOADER_BOUND",
        codes=("IN001", "IN002"),
        difference="the loader is timed, not everything between two steps",
    ),
    Counterpart(
        tool="pytscope",
        rule="TIMING.BACKWARD_HEAVY",
        codes=("CP001",),
        difference="own work only: waits for other ranks inside backward do not count, and the "
        "factor leaves room for recomputation",
    ),
    Counterpart(
        tool="pytscope",
        rule="TIMING.OPTIMIZER_HEAVY",
        codes=("CP002",),
        difference="work of the optimizer, without waits for gradients",
    ),
    Counterpart(
        tool="pytscope",
        rule="TIMING.JITTER",
        codes=("TI002", "TI004", "PA001", "PA002"),
        difference="slow steps are separated: at an interval, on one rank, on all",
    ),
    Counterpart(
        tool="pytscope",
        rule="MEMORY.FRAGMENTATION",
        codes=("ME003",),
        difference="at the peak, not at the end of a step where caches are full by design",
    ),
    Counterpart(
        tool="pytscope",
        rule="MEMORY.GROWTH",
        codes=("ME001",),
        difference="a trend with a test and a forecast; one jump is not a leak",
    ),
    Counterpart(
        tool="pytscope",
        rule="CONVERGENCE.DIVERGED",
        codes=("CV001", "CV002"),
        difference="infinite values do not end the analysis",
    ),
    Counterpart(
        tool="pytscope",
        rule="CONVERGENCE.NO_PROGRESS",
        codes=("CV003",),
        difference="a slope with an interval over windows, not the two ends",
    ),
    Counterpart(
        tool="pytscope",
        rule="CROSS.CORRELATED_INSTABILITY",
        codes=("CV006",),
        difference="against the rate expected by chance",
    ),
    Counterpart(
        tool="pytscope",
        rule="DIST.STRAGGLER",
        codes=("ST001", "ST002", "ST003"),
        difference="work among true peers, sets of ranks, exact test over all ranks; works where "
        "ranks wait for each other inside backward",
    ),
    Counterpart(
        tool="pytscope",
        rule="DIST.LOAD_IMBALANCE",
        codes=("ST004", "IM001"),
        difference="priced by a replay with evenly shared work",
    ),
    Counterpart(
        tool="pytscope",
        rule="DIST.COMM_BOUND",
        codes=("CO001", "CO002", "CO003", "LK001"),
        difference="transfer only: a wait belongs to the rank that is waited for",
    ),
    Counterpart(
        tool="pytscope",
        rule="DIST.EXPOSED_COMM",
        codes=("CO001", "CO002"),
        difference="per axis of the mesh, from recorded operations, no trace needed",
    ),
    Counterpart(
        tool="pytscope",
        rule="DIST.PIPELINE_BUBBLE",
        codes=("PP001", "PP002", "PP003", "PP004"),
        difference="against what the executed schedule must cost with these stages",
    ),
    Counterpart(
        tool="pytscope",
        rule="EFFICIENCY.LOW_MFU",
        codes=("CP003",),
        difference="formula and peak are printed; never clamped",
    ),
    Counterpart(
        tool="pytscope",
        rule="EFFICIENCY.RECOVERABLE",
        codes=(),
        difference="no separate rule: every finding says what it saves, by replay, and the largest "
        "comes first",
    ),
    Counterpart(
        tool="torsh",
        rule="Communication",
        codes=("CO001", "CO002", "CO003"),
        difference="exposed time, not the sum of what overlaps",
    ),
    Counterpart(
        tool="torsh",
        rule="Memory",
        codes=("ME002", "ME005"),
        difference="of the device's capacity, not of a configured constant",
    ),
    Counterpart(
        tool="torsh",
        rule="Pipeline",
        codes=("PP001", "PP002", "PP003", "PP004"),
        difference="only where there is a pipeline, per stage and step",
    ),
    Counterpart(
        tool="torsh",
        rule="TensorParallel",
        codes=("CO002",),
        difference="exposed tp transfer of the step; other traffic does not change it",
    ),
)
