"""The types of the communication part of the JSON document; `docs/report.md` defines the numbers.

Times of a sum are added up over ranks (rank-nanoseconds); `per_rank_step` holds the same as means
per step and rank. Statistics are over the operations of the steps after warm-up.
"""

import msgspec

from meshscope.report.values import Absent, RankRange


class TimeSums(msgspec.Struct, frozen=True, kw_only=True):
    """Operations and their time, added up over ranks.

    `span_ns = wait_ns + transfer_ns + unsplit_ns` and `span_ns = exposed_wait_ns +
    exposed_transfer_ns + exposed_unsplit_ns + overlapped_ns`, exactly.
    """

    num_operations: int
    """A collective counts once, a send and its recv are two."""
    num_rank_operations: int
    """Operations times the ranks that recorded them."""
    num_inexact_ends: int
    """Of these, with an end that is only an upper bound: they were shorter than it says."""
    size_bytes: int
    """Of the operations; a message counts in its send and in its recv."""
    span_ns: int
    """From a rank's arrival at an operation to its end."""
    wait_ns: int
    """From a rank's arrival until everyone it depends on had arrived."""
    transfer_ns: int
    """From then to the end."""
    queued_ns: int
    """The part of transfer behind an earlier operation of the same group."""
    unsplit_ns: int
    """Span of operations not found on all ranks: waiting and transfer cannot be told apart."""
    exposed_ns: int
    """Time in which operations held their ranks up; a moment counts once on a rank."""
    exposed_wait_ns: int
    exposed_transfer_ns: int
    exposed_unsplit_ns: int
    exposed_late_ns: int
    """Held up before the arrival or after the end: not part of the span."""
    overlapped_ns: int
    """Span that held nobody up: hidden behind computation or behind another operation."""


class RankStepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The same as means per step and rank, over all ranks and steps after warm-up."""

    wait_ns: float | Absent
    transfer_ns: float | Absent
    queued_ns: float | Absent
    unsplit_ns: float | Absent
    exposed_ns: float | Absent
    exposed_wait_ns: float | Absent
    exposed_transfer_ns: float | Absent
    exposed_unsplit_ns: float | Absent
    exposed_late_ns: float | Absent
    overlapped_ns: float | Absent
    exposed_ratio: float | Absent
    """Exposed time, of the steps' wall clock; operations after a step count to it, so it may be
    above 1."""


class AxisTimes(msgspec.Struct, frozen=True, kw_only=True):
    """All operations along one axis."""

    axis: str
    """`dp`, `dp+cp`, a name of a mesh's dim, `world` (all ranks) or `other`."""
    num_groups: int
    """Process groups with more than one rank that lie along it."""
    total: TimeSums
    per_rank_step: RankStepTimes


class AxisKindTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of one kind along one axis."""

    axis: str
    kind: str
    total: TimeSums
    per_rank_step: RankStepTimes


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """All operations of one rank; each counts in full, size included."""

    rank: int
    total: TimeSums
    per_rank_step: RankStepTimes


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A process group."""

    axis: str
    axis_source: str
    """`description`, `layout`, `world` or `none`: where the axis is known from."""
    ranks: list[RankRange]
    name: str
    description: str
    backend: str


class LastArriverFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How often a rank was the last to arrive, and what that cost."""

    axis: str
    """`all` adds up the rank's axes."""
    rank: int
    num_last: int
    num_operations: int
    """Operations of its groups in which everyone waits for everyone and the last is known."""
    expected_last: float
    """How often it would be last if ranks were alike."""
    num_steps_worst: int
    """Steps in which it cost its group more than any other rank."""
    num_steps: int
    p_value: float | Absent
    """Chance of at least `num_steps_worst` if ranks were alike."""
    is_beyond_chance: bool
    """The p-value, times the number of ranks, is below 1 %, in at least 10 steps."""
    cost_ns: int
    """Time in which everyone else was there and only it was missing, each moment once."""
    caused_wait_ns: int
    """What all ranks together waited in these operations, each operation by itself."""
    phase: str | Absent
    """In which it was late, by cost."""


class BandwidthFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How fast operations of one kind and similar size along one axis were."""

    axis: str
    kind: str
    num_ranks: int
    """Of the groups; 2 for messages."""
    is_across_hosts: bool
    size_bucket_bytes: int
    """Sizes from here to below four times as much."""
    num_operations: int
    num_samples: int
    """Ranks and operations with an exact end."""
    median_size_bytes: float
    median_transfer_ns: float
    """From the last arrival to the end, without the queue."""
    algorithm_bytes_per_s: float | Absent
    """Size over transfer time, the median over samples."""
    bus_bytes_per_s: float | Absent
    """The same times nccl-tests' factor for the kind and number of ranks."""
    uncertainty_ns: float | Absent
    """Of the clocks, in a single transfer time; 0 on one host."""


class FitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """transfer = latency + size · ns_per_byte, for one kind along one axis."""

    axis: str
    kind: str
    num_ranks: int
    is_across_hosts: bool
    num_sizes: int | Absent
    min_size_bytes: int | Absent
    max_size_bytes: int | Absent
    num_samples: int | Absent
    latency_ns: float | Absent
    """α; negative where large sizes are disproportionately slow."""
    latency_low_ns: float | Absent
    latency_high_ns: float | Absent
    ns_per_byte: float | Absent
    """β."""
    ns_per_byte_low: float | Absent
    """95 % interval, from the spread of the slopes between pairs of transfers."""
    ns_per_byte_high: float | Absent
    bus_bytes_per_s: float | Absent
    """Of a transfer so large that latency does not count."""


class MessageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Messages from one rank to another."""

    source: int
    target: int
    num_messages: int
    size_bytes: int
    """Of all of them together."""
    is_across_hosts: bool | Absent
    mean_latency_ns: float | Absent
    """From when both sides were there to the end of the recv."""
    mean_wait_ns: float | Absent
    """How long the recv waited for the send."""
    uncertainty_ns: float | Absent
    """Of the clocks; 0 on one host."""


class SlowOperationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An operation that took its ranks much time."""

    kind: str
    group: GroupFacts
    sequence: int
    """Its number in the group, from 0."""
    size_bytes: int | Absent
    dtype: str | Absent
    step: int | Absent
    phase: str | Absent
    total_ns: int
    """Waiting and transfer of all ranks together."""
    wait_ns: int
    max_transfer_ns: int
    """Of the rank with the longest."""
    last_rank: int | Absent
    """The last to arrive."""
    gap_ns: int | Absent
    """How long after the second-to-last."""


class ClockFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A clock against the reference clock, which is that of `reference_rank`."""

    host: str | Absent
    ranks: list[RankRange]
    """Ranks whose times it gives."""
    method: str
    """What the offset was found from."""
    offset_ns: int | Absent
    """What it shows less what the reference shows, at `reference_host_mono_ns`."""
    drift_ppm: float | Absent
    """How many millionths faster it runs."""
    uncertainty_ns: int | Absent
    """How far its aligned times may be off, over the whole recorded time."""
    unevenness_ns: int
    """Most that was taken off beyond offset and drift."""
    num_operations: int
    """Operations and messages the offset rests on."""


class SideFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What some ranks say an operation is."""

    ranks: list[RankRange]
    kind: str
    size_bytes: int | Absent
    dtype: str | Absent
    root: int | None
    """Null for kinds without one, or where none was recorded."""
    step: int | Absent
    phase: str | Absent


class DesynchronisationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The first operation of a group, or of a pair of ranks, of which ranks disagree."""

    group: GroupFacts
    sequence: int
    sides: list[SideFacts]
    num_untrusted: int
    """Operations from there on, this one included: they count as not split, and take no part in who
    was late, in bandwidths and among the slowest."""


class FailureFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An operation that ended with an error or timed out on one rank."""

    rank: int
    kind: str
    outcome: str
    """`error` or `timeout`."""
    group: GroupFacts | None
    """Null when the group is not known."""
    sequence: int
    step: int | Absent
    phase: str | Absent
    message: str | Absent


class PartialGroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A group of which some members recorded no operation: one of them may have been the last."""

    group: GroupFacts
    missing_ranks: list[RankRange]


class ShiftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A rank whose recorder began to count later or earlier than the others'."""

    group: GroupFacts
    rank: int
    shift: int
    """Added to the rank's sequence numbers in the group."""


class CommunicationHealthFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what was recorded the numbers rest on."""

    num_rank_operations: int
    """Operations of every rank, warm-up included; the counts below are of these unless they say
    otherwise."""
    num_recognised: int
    """Of a kind this version knows, or timed by the program itself."""
    num_matched: int
    """Operations found on all ranks that recorded any of the group; a message counts once."""
    num_unmatched: int
    """Operations that were not, or are not trusted."""
    num_stopped: int
    """Of the unmatched, those a rank lacks because it had stopped, or had not begun to record."""
    num_lost: int
    """Of the unmatched, those a rank lacks in the middle."""
    num_untrusted: int
    """Of the unmatched, those from a disagreement on."""
    num_ambiguous: int
    """Of the unmatched, those a rank recorded twice under one number."""
    num_single_rank: int
    """Of groups with one rank; left out."""
    num_unknown_group: int
    """Of groups whose members are not known; they cannot be matched."""
    num_left_out: int
    """Left out of the statistics: in a warm-up step, or before the first step."""
    num_unfinished: int
    """Entered and not left."""
    num_unseen: int
    """Whose end nobody looked at."""
    num_failed: int
    num_inexact_ends: int
    """Whose end is only an upper bound."""
    num_engine_outside_steps: int
    """Issued by backward's engine before the first step: their exposed time is not known and counts
    as overlapped."""
    num_clock_errors: int
    """That end 10 ms or more before they can have begun, by the aligned clocks."""
    num_damaged: int
    """Operations and waits left out because their times cannot be."""
    num_bad_ends: int
    """Whose end is before the start or too late to be true; they count as without an end."""
    num_unknown_waits: int
    """Waits for operations that are not known."""
    unknown_wait_ns: int
    num_partial_groups: int
    partial_groups: list[PartialGroupFacts]
    """At most the first 64."""
    num_shifts: int
    shifts: list[ShiftFacts]
    """At most the first 64."""


class CommunicationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Communication of the attempt."""

    first_step: int | Absent
    """Statistics are over the operations of this step and later ones."""
    num_rank_steps: int
    """Finished steps after warm-up, counted on every rank: what `per_rank_step` divides by."""
    num_steps_left_out: int
    """Steps after warm-up that were not read, because the run has too many operations; the rest
    of the section is about stretches of steps spread over the run."""
    total: TimeSums
    per_rank_step: RankStepTimes
    axes: list[AxisTimes]
    """Longest exposed first."""
    kinds: list[AxisKindTimes]
    """Longest exposed first."""
    ranks: list[RankTimes]
    last_arrivers: list[LastArriverFacts]
    """Those beyond chance first, then the costliest; at most 4096."""
    num_last_arrivers: int
    num_undecided: int
    """Operations of which the last to arrive is not known: clocks are not that exact."""
    bandwidth: list[BandwidthFacts]
    """By axis, kind and size."""
    fits: list[FitFacts]
    messages: list[MessageFacts]
    """Most bytes first; at most 4096 pairs of ranks."""
    num_message_pairs: int
    slowest: list[SlowOperationFacts]
    """At most 20, longest first."""
    reference_rank: int
    """The rank whose clock the others are compared with."""
    reference_host_mono_ns: int
    """The moment of the clocks' offsets, on that clock."""
    clocks: list[ClockFacts]
    """Empty when all ranks share one clock."""
    clock_problems: list[str]
    desynchronisations: list[DesynchronisationFacts]
    """At most 64."""
    num_desynchronised: int
    failures: list[FailureFacts]
    """At most the first 20; `health` has their number."""
    health: CommunicationHealthFacts
