"""The words on the screens, one definition each. `meshscope glossary` shows them and
`docs/generate.py` writes docs/glossary.md from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

INTRODUCTION = (
    "The words on the screens, one definition each. Unless a row says otherwise, a time is "
    "a mean per step and rank over the steps after warm-up, in nanoseconds in JSON."
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A word on a screen."""

    word: str
    meaning: str
    unit: str = ""
    """Unit and clock; empty where it has none."""


GLOSSARY: Mapping[str, tuple[Entry, ...]] = {
    "Clocks and times": (
        Entry(
            "step",
            "One training step of one rank: from its first batch or forward to the end of "
            "its optimizer update. The job's step is the median over ranks.",
            "time, host clock of the rank; gaps excluded",
        ),
        Entry(
            "period (start to start)",
            "From the start of a step to the start of the next one on the same rank, gaps "
            "included. This is the pace of the job. In the budget a period runs from the "
            "end of one step to the end of the next.",
            "time, host clock of the rank",
        ),
        Entry(
            "wall clock",
            "All the time a rank spent on a step. In the budget this is the period. Under "
            '"Where a step\'s time goes" it is the step without the gap.',
            "time, host clock; the device's stream where phases have device marks",
        ),
        Entry(
            "gap",
            "The time between the end of a step and the start of the next: logging, "
            "evaluation, checkpoints, schedulers.",
            "time, host clock",
        ),
        Entry(
            "warm-up",
            "First steps that statistics leave out; 1 by default if more than 3 steps finished.",
            "steps",
        ),
        Entry(
            "device time",
            "From when the device's stream reached the first mark of a phase to when it "
            "reached the last. Idle time in between is included.",
            "time, device stream",
        ),
        Entry(
            "aligned clock",
            "The clock of the lowest rank. Times of other hosts are converted to it; the "
            "report states the error.",
            "host clock of the lowest rank",
        ),
    ),
    "Where the time goes": (
        Entry(
            "phase",
            "A named part of a step: data, forward, backward, clip, optimizer, compile, or a name "
            "from the program. Between steps: eval, checkpoint. Nested phases are not counted "
            "twice.",
            "time, host clock",
        ),
        Entry(
            "compile",
            "torch.compile making code, for the first time or again because a guard failed.",
            "time, host clock",
        ),
        Entry(
            "sampled stack",
            "Where the training thread was at one moment, by the program's own lines; taken in a "
            "few steps only. Shares of samples say where time goes, not how long it takes.",
            "samples",
        ),
        Entry(
            "data",
            "The phase in which a rank fetches its next batch, as recorded on the host.",
            "time, host clock",
        ),
        Entry(
            "input stall",
            "The budget line for fetching data: work in the phase data, in gaps too.",
            "time, aligned clock",
        ),
        Entry(
            "unattributed",
            "The part of a step that no phase covers. It is code without a name, not idle time.",
            "time, host clock",
        ),
        Entry(
            "other",
            "The budget line for work that no phase covers: unattributed time without the "
            "waits in it.",
            "time, aligned clock",
        ),
        Entry(
            "residual",
            "The part of the wall clock that no budget line covers. It is 0 unless the "
            "recording is damaged.",
            "time, aligned clock",
        ),
        Entry(
            "work",
            "The time in which no operation holds the rank up.",
            "time, aligned clock",
        ),
        Entry(
            "kernel sample",
            "A few steps in which torch's profiler watched a device's kernels. They say what the "
            "device did in these steps; the other steps are estimated from them.",
            "",
        ),
        Entry(
            "in phases, not split",
            "The device's stream was in a phase, and no kernel sample says what it did: compute, "
            "communication or nothing. It is a bound, not a measurement.",
            "time, device stream",
        ),
        Entry(
            "idle, host-bound",
            "The device had nothing to do because its host was at something else, or was just "
            "launching.",
            "time, device",
        ),
        Entry(
            "idle, synchronising",
            "The device had nothing to do because its host had waited for it before it launched "
            "more.",
            "time, device",
        ),
        Entry(
            "idle, other stream",
            "Work was launched, and waited for other work of the device; gaps between kernels too.",
            "time, device",
        ),
        Entry(
            "MFU, HFU",
            "Model FLOPs divided by peak FLOP/s and period. HFU also counts recomputed FLOPs.",
            "ratio",
        ),
    ),
    "Communication": (
        Entry(
            "wait",
            "From a rank's arrival at an operation to the arrival of the last rank it "
            "depends on. Somebody else was late.",
            "time, aligned clock",
        ),
        Entry(
            "transfer",
            "From the end of the wait to the end of the operation.",
            "time, aligned clock",
        ),
        Entry(
            "not split",
            "Time in an operation whose wait and transfer cannot be separated: a member's "
            "record is missing.",
            "time, aligned clock",
        ),
        Entry(
            "exposed",
            "Communication that held the rank up. Each moment counts once. In traces: the time in "
            "which a communication kernel runs and no other kernel or fill of the rank does; "
            "copies hide none.",
            "time, aligned clock or device stream",
        ),
        Entry(
            "exposed, not waited for",
            "Exposed communication that nothing waited for: the host was late, or kernels beside "
            "it had gaps between them. Only traces tell it apart.",
            "time, device stream",
        ),
        Entry(
            "overlapped",
            "Communication that did not hold the rank up, because computation or another "
            "operation ran at the same time.",
            "time, aligned clock",
        ),
        Entry(
            "axis",
            "The dimension of the mesh that a process group spans: dp, tp, pp, cp, ep; else "
            "`world` or `other`.",
            "name",
        ),
        Entry(
            "algbw, busbw",
            "Bytes of an operation divided by its transfer time. busbw is scaled so that it "
            "compares with the speed of a link.",
            "bytes/s, powers of 1000",
        ),
    ),
    "Pipeline and stragglers": (
        Entry(
            "bubble",
            "The share of a pipeline's time in which a rank runs no action, over the total "
            "(not over the ideal).",
            "ratio, or time on the aligned clock",
        ),
        Entry(
            "stage, microbatch",
            "A part of the model on one pipeline rank; a part of the batch that passes through it.",
            "index from 0",
        ),
        Entry(
            "peers",
            "Ranks that do the same work: same coordinates except dp.",
            "ranks",
        ),
        Entry(
            "straggler",
            "A rank that works longer than its peers in more steps than chance explains.",
            "rank",
        ),
        Entry(
            "late",
            "The last rank to arrive at an operation that all others wait in.",
            "rank",
        ),
    ),
    "Hardware": (
        Entry(
            "SM clock",
            "The clock of a device's multiprocessors: the median of the readings in which the "
            "device was not idle, beside the highest clock of the product.",
            "MHz",
        ),
        Entry(
            "held back by",
            "What the driver names as the reason for lower clocks: power cap, heat, a power brake "
            "or slowdown by the hardware, clocks that someone set; and in which share of readings.",
            "ratio of readings",
        ),
        Entry(
            "energy/step, energy a token",
            "What devices used in steady steps, gaps included, divided by steps or by tokens. "
            "A device that several ranks share counts once.",
            "joules, by the driver's counter",
        ),
    ),
    "Findings": (
        Entry(
            "finding",
            "What one rule found: cause, ranks, steps, evidence, change, saving.",
        ),
        Entry(
            "severity",
            "low, medium, high or critical: by the saving as a share of the step (3, 10, 30 "
            "%), or set by the rule where time is not what is lost.",
        ),
        Entry(
            "saves (price, gain)",
            "How much shorter a step would be without the cause: the difference of two "
            "replays of the run. Savings of several findings do not add up.",
            "time per step",
        ),
        Entry(
            "replay",
            "The recorded run computed again from its work, transfers and dependencies. Its "
            "error against the clock is stated.",
            "time per step",
        ),
        Entry(
            "confidence (Sure)",
            "How certain it is that the cause exists: high, medium or low. It says nothing "
            "about the saving.",
        ),
        Entry(
            "explained by",
            "The finding is a symptom of the one named after it.",
        ),
        Entry(
            "n/a",
            "Not known, with the reason. It never means 0.",
        ),
    ),
    "Traces of torch.profiler": (
        Entry(
            "period (of a device's step)",
            "From the end of one step's device work to the end of the next one's, whatever the "
            "device ran in it. Periods follow each other and sum to the device's time.",
            "time, clock of the trace",
        ),
        Entry(
            "category",
            "What a kernel is for, by its name or the operator that launched it. A fused kernel "
            "counts for one thing in its name.",
            "sum over events; what ran at once counts twice",
        ),
        Entry(
            "roofline",
            "The time that a device would need for an operator at its dense peak, or to move its "
            "inputs and outputs once at its memory's bandwidth, whichever is longer, over the "
            "time it took.",
            "ratio",
        ),
        Entry(
            "coverage",
            "The share of device time whose FLOPs or bytes are known from recorded shapes; "
            "without communication and copies between host and device.",
            "ratio",
        ),
    ),
}
