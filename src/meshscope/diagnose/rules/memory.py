"""Rules about memory: what grows, what is nearly full, what is taken and not used.

Memory costs no time until it runs out, so severity depends on how near that is, or, if the
recording does not say how much memory there is, on what is known.
"""

from collections.abc import Iterable

from meshscope.analyze.memory.memory import (
    AllocatorState,
    Forecast,
    PeerSkew,
    Place,
    RankMemory,
    forecast_device,
    forecast_host,
)
from meshscope.analyze.memory.retry_cost import RetryCost
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.core.verdict.advice import CRITICAL_RATIO, NEAR_RATIO, NEED_LESS_MEMORY, grade_memory
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Estimate, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.wording import (
    be,
    count,
    duration,
    memory,
    name_ranks,
    p_value,
    plural,
    ratio,
)
from meshscope.numerics.growth import Growth

_MIN_LEAK_BYTES = Threshold(
    name="leak_min_rise_bytes",
    default=16 << 20,
    meaning="growth over the recorded steps below which nothing is called a leak",
)
_LEAK_CRITICAL_S = Threshold(
    name="leak_critical_seconds",
    default=3600,
    meaning="memory that is full within this long is critical",
)
_LEAK_HIGH_S = Threshold(
    name="leak_high_seconds",
    default=7 * 86400,
    meaning="memory that is full within this long is high; a run of a week should end by itself",
)
_MIN_UNUSED_RATIO = Threshold(
    name="fragmentation_min_unused_ratio",
    default=0.2,
    meaning="share of the reserved memory that was not in use at the peak",
)
_FRAGMENTATION_FULL_RATIO = Threshold(
    name="fragmentation_full_ratio",
    default=0.85,
    meaning="share of the device that is reserved, from which holes matter",
)
_MIN_HOLLOWING_BYTES = Threshold(
    name="fragmentation_min_growth_bytes",
    default=128 << 20,
    meaning="growth over the recorded steps below which unused reservations are called level",
)
_MIN_SKEW_RATIO = Threshold(
    name="memory_skew_min_ratio",
    default=0.2,
    meaning="by which a rank's peak must exceed the median of its peers",
)
_MIN_SKEW_BYTES = Threshold(
    name="memory_skew_min_bytes",
    default=128 << 20,
    meaning="the same excess, in bytes",
)
_SKEW_FULL_RATIO = Threshold(
    name="memory_skew_full_ratio",
    default=0.8,
    meaning="share of its memory that the rank must use for a skew to limit the job",
)

_MAX_FORECAST_RATIO = 100.0
"""Of the steps in which memory was seen to grow: a forecast beyond is no reason for CRITICAL."""
_UNCERTAIN = "; the lower end of its pace is nearly level, as of caches and pools that fill"
NOT_TIME = Unavailable("memory costs no time until it runs out")


class MemoryLeak(Rule):
    """Memory grows with every step, and will run out.

    What it finds: ranks whose resident set, or whose allocation on the device, grows all the time
    by at least `leak_min_rise_bytes` over the run. LOW where the lower end of the pace's interval
    gives less.

    Why it matters: the job ends when memory does, hours or days later, and the work since the last
    checkpoint is lost.

    How it is measured: samples at the ends of steps after the first tenth, the lowest of neighbours
    if there are many. A Theil-Sen slope within four windows of the run, a Mann-Kendall test within
    them, residuals with their autocorrelation, growth from every window to the next, and a second
    half that grows at least 0.6 times as fast as the first: a jump is not a leak, and neither is a
    warm-up. What a process grew by while torch.compile made code is taken out. The forecast divides
    what is left of the host's (or control group's) memory by the growth of all ranks on it; on a
    device, what the process has reserved and what is free, less its highest allocation, by the
    rank's own growth.

    What to change: look for what is kept from step to step: losses or outputs with their graphs
    (`.item()` or `.detach()` them), lists of metrics, caches without a limit, hooks that are added
    again, data loader workers that copy. `tracemalloc`, or a memory snapshot of the device, names
    the line.

    When it is wrong: if something is released at an interval longer than the recording, or if a
    cache grows to a limit the recording did not reach. Growth in a few large jumps is not called a
    leak. The forecast is too long where several growing processes share a device.
    """

    code = "ME001"
    resources = frozenset({"memory"})
    name = "memory-leak"
    severities = (Severity.MEDIUM, Severity.CRITICAL)
    thresholds = (_MIN_LEAK_BYTES, _LEAK_CRITICAL_S, _LEAK_HIGH_S)

    def find(self, context: Context) -> Iterable[Finding]:
        """One for each host whose ranks grow, one for each rank whose device fills."""
        found = need(context.study.memory)
        least = context.thresholds[_MIN_LEAK_BYTES]
        leaking = [
            rank
            for rank in found.ranks
            if rank.is_leaking
            and (growth := known(rank.growth)) is not None
            and growth.rise >= least
        ]
        for host in dict.fromkeys(r.host for r in leaking if r.place is Place.HOST):
            here = [r for r in leaking if r.place is Place.HOST and r.host == host]
            yield self._report(context, here, forecast_host(found, host, context.study.step_ns))
        for rank in leaking:
            if rank.place is Place.DEVICE:
                yield self._report(context, [rank], forecast_device(rank, context.study.step_ns))

    def _report(
        self, context: Context, ranks: list[RankMemory], forecast: Forecast | Unavailable
    ) -> Finding:
        growths = [growth for r in ranks if (growth := known(r.growth)) is not None]
        numbers = tuple(rank.rank for rank in ranks)
        place = ranks[0].place
        per_step = sum(growth.per_step for growth in growths)
        worst_p = max(growth.p_value for growth in growths) * len(context.study.attempt.ranks)
        least = context.thresholds[_MIN_LEAK_BYTES]
        is_certain = all(_find_least_rise(growth) >= least for growth in growths)
        what = "process" if place is Place.HOST else "device"
        together = " together" if len(ranks) > 1 else ""
        return Finding(
            code=self.code,
            title=f"{what} memory of {name_ranks(numbers)} grows with every step",
            severity=self._grade(context, forecast, growths) if is_certain else Severity.LOW,
            summary=f"{name_ranks(numbers).capitalize()} {be(numbers)} growing by "
            f"{memory(per_step)} a step{together}, {memory(sum(g.rise for g in growths))} over "
            f"the {plural(growths[0].last_step - growths[0].first_step, 'step')} analysed"
            f"{'' if self._is_over(context, ranks) else _describe_forecast(forecast)}.",
            ranks=numbers,
            first_step=min(growth.first_step for growth in growths),
            last_step=max(growth.last_step for growth in growths),
            evidence=(
                *(
                    Evidence(
                        name=f"growth of rank {r.rank} per step", value=g.per_step, unit="bytes"
                    )
                    for r, g in zip(ranks[:8], growths, strict=False)
                ),
                Evidence(
                    name="lower end of the 95 % interval",
                    value=growths[0].per_step_low,
                    unit="bytes",
                ),
                Evidence(
                    name="upper end of the 95 % interval",
                    value=growths[0].per_step_high,
                    unit="bytes",
                ),
                *_forecast_evidence(forecast),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.HIGH if is_certain else ConfidenceLevel.LOW,
                text=f"{p_value(min(1.0, worst_p))} for growth within windows of the run, "
                f"{plural(growths[0].num_samples, 'sample')}, "
                f"over {plural(len(context.study.attempt.ranks), 'rank')}"
                f"{'' if is_certain else _UNCERTAIN}",
                p_value=min(1.0, worst_p),
            ),
            change="Find what is kept from step to step: tensors with their graphs in lists of "
            "losses, caches without a limit, hooks added again; tracemalloc or a memory snapshot "
            "names the line.",
            gain=NOT_TIME,
        )

    def _is_over(self, context: Context, ranks: list[RankMemory]) -> bool:
        """Whether one of them ended in an exception: there is nothing left to forecast."""
        found = context.study.attempt.ranks
        return any(found[one.rank].exception is not None for one in ranks)

    def _grade(
        self, context: Context, forecast: Forecast | Unavailable, growths: list[Growth]
    ) -> Severity:
        if isinstance(forecast, Unavailable) or isinstance(forecast.seconds, Unavailable):
            return Severity.HIGH
        num_seen = max(growth.last_step - growth.first_step for growth in growths)
        is_far = forecast.num_steps > _MAX_FORECAST_RATIO * num_seen
        if forecast.seconds <= context.thresholds[_LEAK_CRITICAL_S] and not is_far:
            return Severity.CRITICAL
        is_near = forecast.seconds <= context.thresholds[_LEAK_HIGH_S]
        return Severity.HIGH if is_near else Severity.MEDIUM


def _find_least_rise(growth: Growth) -> float:
    """What it grew by at least, by the lower end of its pace's interval."""
    return growth.per_step_low * (growth.last_step - growth.first_step)


def _describe_forecast(forecast: Forecast | Unavailable) -> str:
    if isinstance(forecast, Unavailable):
        return f"; when memory runs out is not known: {forecast.reason}"
    when = (
        ""
        if isinstance(forecast.seconds, Unavailable)
        else f", {duration(forecast.seconds * 1e9)} at this pace"
    )
    return (
        f"; {memory(forecast.limit_bytes)} are full after {count(round(forecast.num_steps))} more "
        f"steps{when}"
    )


def _forecast_evidence(forecast: Forecast | Unavailable) -> tuple[Evidence, ...]:
    if isinstance(forecast, Unavailable):
        return ()
    return (
        Evidence(name="available memory", value=forecast.limit_bytes, unit="bytes"),
        Evidence(name="in use at the last sample", value=forecast.used_bytes, unit="bytes"),
        Evidence(name="steps until it is full", value=round(forecast.num_steps), unit="steps"),
    )


class NearCapacity(Rule):
    """Memory is nearly full.

    What it finds: a device whose allocator's peak takes `memory_near_capacity_ratio` of it or more,
    or a host whose recorded ranks together do.

    Why it matters: a longer sequence, another batch, a second process or fragmentation then ends
    the job; before that, the allocator empties its cache and waits for the device again and again.

    How it is measured: the allocator's own highest allocation over what the process can get of the
    device: what it has reserved and what is free; for hosts, the sum of the ranks' highest resident
    sets over the smaller of the machine's memory and the control group's limit.

    What to change: recompute activations, use a smaller microbatch, shard the optimizer's state, or
    use a device with more memory.

    When it is wrong: on hosts, if ranks share pages, which count once for each of them, and if
    their peaks do not come at the same time.
    """

    code = "ME002"
    resources = frozenset({"memory"})
    name = "near-capacity"
    severities = (Severity.MEDIUM, Severity.HIGH)
    is_pattern = True
    thresholds = (NEAR_RATIO, CRITICAL_RATIO)

    def find(self, context: Context) -> Iterable[Finding]:
        """One for all devices that are nearly full, one for each such host."""
        found = need(context.study.memory)
        devices = [r for r in found.ranks if r.place is Place.DEVICE]
        full = [r for r in devices if _fill(r) >= context.thresholds[NEAR_RATIO]]
        if full:
            worst = max(full, key=_fill)
            numbers, limit = tuple(r.rank for r in full), need(worst.limit_bytes)
            yield self._report(context, "device", numbers, worst.peak_bytes, limit)
        hosts: dict[str, list[RankMemory]] = {}
        for rank in found.ranks:
            if rank.place is Place.HOST:
                hosts.setdefault(rank.host, []).append(rank)
        for ranks in hosts.values():
            limits = [size for r in ranks if (size := known(r.limit_bytes)) is not None]
            used = sum(rank.peak_bytes for rank in ranks)
            if limits and used >= context.thresholds[NEAR_RATIO] * min(limits):
                yield self._report(context, "host", tuple(r.rank for r in ranks), used, min(limits))

    def _report(
        self, context: Context, what: str, ranks: tuple[int, ...], used: int, limit: int
    ) -> Finding:
        share = used / limit
        return Finding(
            code=self.code,
            title=f"{what} memory of {name_ranks(ranks)} is nearly full",
            severity=grade_memory(share, context.thresholds),
            summary=f"The peak on {name_ranks(ranks)} is {memory(used)} of {memory(limit)}, "
            f"{ratio(share)}.",
            ranks=ranks,
            evidence=(
                Evidence(name="highest use", value=used, unit="bytes"),
                Evidence(name="available memory", value=limit, unit="bytes"),
                Evidence(name="share in use", value=share, unit="ratio"),
            ),
            change=NEED_LESS_MEMORY,
            gain=NOT_TIME,
        )


def _fill(rank: RankMemory) -> float:
    if isinstance(rank.limit_bytes, Unavailable):
        return 0.0
    return rank.peak_bytes / rank.limit_bytes


class Fragmentation(Rule):
    """The allocator holds device memory that it cannot use.

    What it finds: a device on which a share of `fragmentation_min_unused_ratio` or more of the
    reserved memory was not in use when most was reserved, or on which what is reserved and not used
    grows all the time, by at least `fragmentation_min_growth_bytes` over the run.

    Why it matters: memory in holes is missing when a large tensor is needed: an allocation fails
    although enough is free. Before that the allocator gives its cache back and takes new memory,
    and the device waits each time (ME005).

    How it is measured: the allocator's highest reservation minus its highest allocation. At the
    moment of the highest reservation at least this much was unused. This is a lower bound, and not
    the cache at the end of a step, which is full by design. Holes of segments in use (inactive
    splits) are reported beside it. Growth is judged as for ME001. LOW while the device has room and
    the unused part does not grow.

    What to change: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, shapes that do not change
    from step to step, fewer large temporary tensors.

    When it is wrong: if a peak was reset between the two, or if one very large tensor came and
    went: its memory is whole and can be used again.
    """

    code = "ME003"
    resources = frozenset({"allocator"})
    name = "fragmentation"
    severities = (Severity.LOW, Severity.MEDIUM)
    thresholds = (_MIN_UNUSED_RATIO, _FRAGMENTATION_FULL_RATIO, _MIN_HOLLOWING_BYTES)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one, for the device on which most is unused; those where it grows come first."""
        found = need(context.study.memory)
        least = context.thresholds[_MIN_UNUSED_RATIO]
        growth = context.thresholds[_MIN_HOLLOWING_BYTES]
        holed = [
            (rank, state)
            for rank in found.ranks
            if (state := known(rank.allocator)) is not None
            and (_unused(state) >= least or state.is_hollowing(growth))
        ]
        if holed:
            growing = [pair for pair in holed if pair[1].is_hollowing(growth)]
            rank, state = max(growing or holed, key=lambda pair: pair[1].unused_at_peak_bytes)
            yield self._report(context, rank, state, [pair[0].rank for pair in growing or holed])

    def _report(
        self, context: Context, rank: RankMemory, state: AllocatorState, ranks: list[int]
    ) -> Finding:
        is_full = not isinstance(rank.limit_bytes, Unavailable) and (
            state.peak_reserved_bytes
            >= context.thresholds[_FRAGMENTATION_FULL_RATIO] * rank.limit_bytes
        )
        is_growing = state.is_hollowing(context.thresholds[_MIN_HOLLOWING_BYTES])
        splits = state.inactive_split_bytes
        holes = "" if isinstance(splits, Unavailable) else f", {memory(splits)} in holes"
        growth = known(state.growth) if is_growing else None
        return Finding(
            code=self.code,
            title="reserved device memory that is not used grows with every step"
            if is_growing
            else f"{ratio(_unused(state))} of the reserved device memory is not used at the peak",
            severity=Severity.MEDIUM if is_full or is_growing else Severity.LOW,
            summary=f"Rank {rank.rank} had {memory(state.peak_reserved_bytes)} reserved at its "
            f"peak, of which at least {memory(state.unused_at_peak_bytes)} were not in use{holes}"
            f"{_describe_hollowing(rank, state, growth)}.",
            ranks=tuple(ranks),
            first_step=None if growth is None else growth.first_step,
            last_step=None if growth is None else growth.last_step,
            evidence=(
                Evidence(name="highest reserved", value=state.peak_reserved_bytes, unit="bytes"),
                Evidence(name="unused then", value=state.unused_at_peak_bytes, unit="bytes"),
                Evidence(name="share unused", value=_unused(state), unit="ratio"),
                *(
                    Evidence(name="growth of the unused per step", value=g.per_step, unit="bytes")
                    for g in (growth,)
                    if g is not None
                ),
            ),
            change="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and keep shapes the same "
            "from step to step.",
            gain=NOT_TIME,
        )


def _describe_hollowing(rank: RankMemory, state: AllocatorState, growth: Growth | None) -> str:
    if growth is None:
        return ""
    text = f"; that grows by {memory(growth.per_step)} a step"
    if isinstance(rank.limit_bytes, Unavailable):
        return text
    num_steps = max(0.0, (rank.limit_bytes - state.peak_reserved_bytes) / growth.per_step)
    return (
        f"{text}, and {memory(rank.limit_bytes)} are reserved after {count(round(num_steps))} more"
    )


def _unused(state: AllocatorState) -> float:
    if state.peak_reserved_bytes <= 0:
        return 0.0
    return state.unused_at_peak_bytes / state.peak_reserved_bytes


class MemorySkew(Rule):
    """A rank needs more memory than ranks that do the same work.

    What it finds: among the ranks that share every coordinate except dp, one whose peak exceeds the
    median of the others by `memory_skew_min_ratio` and `memory_skew_min_bytes`.

    Why it matters: the fullest rank limits the batch size. LOW unless that rank uses
    `memory_skew_full_ratio` of its memory.

    How it is measured: highest resident set, or the allocator's highest allocation, against the
    median of the other peers. ME001 reports ranks that grow all the time.

    What to change: look for work only this rank does: logging, evaluation, checkpoints, a second
    model, uneven sequence lengths.

    When it is wrong: if ranks are not peers although the layout says so.
    """

    code = "ME004"
    name = "memory-skew"
    severities = (Severity.LOW, Severity.MEDIUM)
    thresholds = (_MIN_SKEW_RATIO, _MIN_SKEW_BYTES, _SKEW_FULL_RATIO)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one for hosts and one for devices: the largest."""
        found = need(context.study.memory)
        for place in Place:
            growing = {rank.rank for rank in found.leaking(place)}
            skew = next((s for s in found.skews if s.place is place), None)
            if skew is not None and skew.rank not in growing and _is_skewed(context, skew):
                rank = next(r for r in found.ranks if (r.rank, r.place) == (skew.rank, place))
                yield self._report(context, skew, rank)

    def _report(self, context: Context, skew: PeerSkew, rank: RankMemory) -> Finding:
        excess = skew.peak_bytes - skew.peers_bytes
        is_full = _fill(rank) >= context.thresholds[_SKEW_FULL_RATIO]
        return Finding(
            code=self.code,
            title=f"rank {skew.rank} needs more {skew.place} memory than its peers",
            severity=Severity.MEDIUM if is_full else Severity.LOW,
            summary=f"Rank {skew.rank} needs {memory(skew.peak_bytes)}, the median of its "
            f"{plural(skew.num_peers, 'peer')} {memory(skew.peers_bytes)}: {memory(excess)} more.",
            ranks=(skew.rank,),
            first_step=rank.peak_step,
            evidence=(
                Evidence(name="peak of the rank", value=skew.peak_bytes, unit="bytes"),
                Evidence(name="median of its peers", value=skew.peers_bytes, unit="bytes"),
            ),
            change="Look for what only this rank does: logging, evaluation, checkpoints, longer "
            "sequences.",
            gain=NOT_TIME,
        )


def _is_skewed(context: Context, skew: PeerSkew) -> bool:
    excess = skew.peak_bytes - skew.peers_bytes
    limits = context.thresholds
    return (
        excess >= limits[_MIN_SKEW_BYTES] and excess >= limits[_MIN_SKEW_RATIO] * skew.peers_bytes
    )


class AllocatorRetries(Rule):
    """The allocator had to empty its cache to continue.

    What it finds: ranks whose allocator repeated an allocation after it had released all cached
    memory, or on which an allocation failed.

    Why it matters: each time, the host waits until the device has finished everything it was given,
    and memory is taken from the driver again. It is the last thing that happens before the job runs
    out of memory.

    How it is measured: the allocator's own counts, at the last sample. What a retry costs: by how
    much the steps since the reading before took longer, from start to start, than the median of
    steps without one.

    What to change: as for memory that is nearly full: recompute, smaller microbatches, sharding; if
    much is unused at the peak, expandable segments.

    When it is wrong: if the program provokes it, to find the largest batch. The price is too low if
    every step has retries, and none is given if fewer than 8 steps have none.
    """

    code = "ME005"
    resources = frozenset({"memory", "allocator"})
    name = "allocation-retries"
    severities = (Severity.MEDIUM, Severity.CRITICAL)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        found = need(context.study.memory)
        states = {
            rank.rank: state for rank in found.ranks if (state := known(rank.allocator)) is not None
        }
        retries = {rank: _count(state.num_retries) for rank, state in states.items()}
        failures = {rank: _count(state.num_failures) for rank, state in states.items()}
        ranks = tuple(r for r in sorted(states) if retries[r] or failures[r])
        if not ranks:
            return
        num_retries, num_failures = sum(retries.values()), sum(failures.values())
        first = [states[r].first_retry_step for r in ranks]
        steps = [step for step in map(known, first) if step is not None]
        is_leak = bool({rank.rank for rank in found.leaking(Place.DEVICE)} & set(ranks))
        gain = (
            Unavailable("memory that grows is the cause")
            if is_leak
            else _price_retries([states[r].retry_cost for r in ranks])
        )
        least = Severity.HIGH if num_failures else Severity.MEDIUM
        yield Finding(
            code=self.code,
            title=f"allocations were repeated or failed on {name_ranks(ranks)}",
            severity=least if isinstance(gain, Unavailable) else max(least, severity_of(gain)),
            summary=f"On {name_ranks(ranks)} {plural(num_retries, 'allocation')} succeeded only "
            f"after the cache had been emptied, and {count(num_failures)} failed"
            f"{_describe_retry_cost([states[r].retry_cost for r in ranks])}.",
            ranks=ranks,
            first_step=min(steps, default=None),
            evidence=(
                Evidence(name="repeated allocations", value=num_retries),
                Evidence(name="failed allocations", value=num_failures),
            ),
            change="Leave the device more room: recompute activations, take a smaller microbatch, "
            "shard the optimizer's state; with much unused at the peak, set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
            gain=gain,
        )


def _price_retries(costs: list[RetryCost | Unavailable]) -> Estimate | Unavailable:
    """Ranks wait for each other: the rank that lost most decides."""
    priced = [cost for cost in map(known, costs) if cost is not None]
    if not priced:
        return next(c for c in costs if isinstance(c, Unavailable))
    most = max(priced, key=lambda cost: cost.per_step_ns)
    return Estimate(
        saved_ns=most.per_step_ns,
        step_ns=most.step_ns,
        basis="steps with repeated allocations against the median of those without",
    )


def _describe_retry_cost(costs: list[RetryCost | Unavailable]) -> str:
    priced = [cost for cost in map(known, costs) if cost is not None]
    if not priced:
        return ""
    most = max(priced, key=lambda cost: cost.per_retry_ns)
    return f"; one takes about {duration(most.per_retry_ns)}"


def _count(value: int | Unavailable) -> int:
    return known(value) or 0
