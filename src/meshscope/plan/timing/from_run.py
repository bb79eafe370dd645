"""Constants from a recorded run of `meshscope train`: what its devices and links did.

    job, fitted = fit_runs(job, [study])

Fitted, and said in words: the pace of compute, the time to issue a layer, bandwidth and latency of
links (`fit_runs`). The interval is half of the middle nine tenths of steps, or the error that is
left, whichever is larger, and what other layouts miss beyond (`MODEL_ERROR`). What is left is not
fitted away: `compare_lines` shows predicted and measured line by line. Loader, host and stragglers
are part of the measured lines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot

import numpy as np
import numpy.typing as npt

from meshscope.analyze.communication.bandwidth import LatencyFit
from meshscope.analyze.prediction import COMPUTE_SHARES, CheckedTime, measure_lines
from meshscope.analyze.study import Study
from meshscope.core.hardware import Device
from meshscope.core.unavailable import Unavailable, known
from meshscope.errors import UsageError
from meshscope.plan.candidate import Candidate
from meshscope.plan.cluster import Cluster, Link
from meshscope.plan.model.model_shape import ModelShape
from meshscope.plan.timing.calibration import HOST_FITTED_NAMES, Constants
from meshscope.plan.timing.fitting import fit_constants
from meshscope.plan.timing.pricing import Job, StepPrice, price_candidates

_GROUP = "train"
_INTERVAL_SOURCE = (
    "steps of {}, the error left after fitting, and what layouts that were not recorded miss "
    "beyond (benchmarks/planner_intervals.py)"
)
_LEAST_INTERVAL = 0.02
MODEL_ERROR = 0.25
"""What layouts that were not recorded miss beyond the spread and the error of those that were, so
that nine of ten lie within: set on every second layout that was measured, on cores and devices,
and tried on the others (benchmarks/planner_intervals.py)."""
_FITTED_LINES = ("tp", "dp")
_LEAST_LINE = 0.02
"""Of a step: shorter lines say nothing of links."""
_MODEL_NUMBERS = (
    "vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size",
    "sequence_length",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLayout:
    """What a run of the engine was."""

    model: ModelShape
    candidate: Candidate


def read_layout(study: Study) -> RecordedLayout:
    """From the run's own configuration; UsageError where it has none."""
    values = _read_settings(study)
    missing = [name for name in _MODEL_NUMBERS if not isinstance(values.get(f"model.{name}"), int)]
    if missing:
        raise UsageError(
            f"the run has no configuration of meshscope train (model.{missing[0]} is not "
            "recorded); --from needs a run of meshscope train of a transformer"
        )

    def number(key: str, default: int) -> int:
        value = values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    heads = number("model.num_heads", 1)
    model = ModelShape(
        name="recorded model",
        head_size=number("model.hidden_size", 1) // max(heads, 1),
        norm=str(values.get("model.norm", "rmsnorm")),
        position=str(values.get("model.position", "rope")),
        activation=str(values.get("model.activation", "swiglu")),
        bias=values.get("model.bias") is True,
        tie_embeddings=values.get("model.tie_embeddings") is True,
        vocab_size=number("model.vocab_size", 1),
        num_layers=number("model.num_layers", 1),
        hidden_size=number("model.hidden_size", 1),
        num_heads=heads,
        num_kv_heads=number("model.num_kv_heads", 1),
        ffn_hidden_size=number("model.ffn_hidden_size", 1),
        sequence_length=number("model.sequence_length", 1),
    )
    dp, size = number("parallel.dp", 1), number("batch.microbatch_size", 1)
    count = number("batch.num_microbatches", 0)
    count = count or max(1, number("batch.global_batch_size", dp * size) // (dp * size))
    schedule = str(values.get("parallel.schedule", "1f1b"))
    is_cut = values.get("parallel.data_parallel") == "fsdp" and dp > 1
    candidate = Candidate(
        dp=dp,
        tp=number("parallel.tp", 1),
        pp=number("parallel.pp", 1),
        microbatch_size=size,
        num_microbatches=count,
        schedule=schedule,
        chunks=number("parallel.chunks_per_rank", 2 if schedule == "zb_v" else 1),
        zero_stage=number("parallel.zero_stage", 3) if is_cut else 0,
        recompute="none" if values.get("memory.strategy") in (None, "basic") else "full",
        sequence_parallel=values.get("parallel.sequence_parallel") is True,
    )
    return RecordedLayout(model=model, candidate=candidate)


def _read_settings(study: Study) -> Mapping[str, object]:
    groups = study.settings
    if isinstance(groups, Unavailable):
        return {}
    return next((one.values for one in groups if one.name == _GROUP), {})


def _is_on_host(study: Study) -> bool:
    """Whether its ranks computed on the host's cores."""
    device = _read_settings(study).get("device")
    return device == "cpu" or (device == "auto" and not study.has_accelerators)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """What constants are fitted to, in seconds of a step."""

    layout: RecordedLayout
    step_s: float
    compute_s: float
    """Of the busiest rank."""
    lines: dict[str, float]
    """Exposed communication by axis, where it is worth fitting to."""
    spread_ratio: float
    """Half of the middle nine tenths of steps, by their median."""
    device: Device | None = None
    """The part of a device that each rank had to itself; None: the job's whole one."""
    issue_s: float | None = None
    """What the busiest host took to issue a step, if it was timed."""


def measure_run(study: Study) -> MeasuredRun:
    """From a recording; UsageError where it does not say enough."""
    step_s = _measure_step(study)
    lines = {
        axis: ns / 1e9
        for axis, ns in measure_lines(study.budget).items()
        if axis in _FITTED_LINES and ns / 1e9 > _LEAST_LINE * step_s
    }
    return MeasuredRun(
        layout=read_layout(study), step_s=step_s, compute_s=_measure_compute(study), lines=lines,
        spread_ratio=_measure_spread(study),
    )  # fmt: skip


def fit_runs(job: Job, studies: Sequence[Study]) -> tuple[Job, tuple[str, ...]]:
    """The job with constants of recorded runs on devices, and what was fitted, line by line."""
    if any(map(_is_on_host, studies)):
        raise UsageError(
            "the run was on CPUs, whose pace says nothing of a device's; give a run on devices, or "
            "plan without --from"
        )
    cluster, said = _take_links(job.cluster, studies)
    runs = [measure_run(study) for study in studies]
    job, more, prices = fit_measured(replace(job, cluster=cluster), runs)
    lines = [
        f"{one.name}: {one.predicted_ns / 1e6:.4g} ms predicted, {one.measured_ns / 1e6:.4g} "
        "measured"
        for price, study in zip(prices, studies, strict=True)
        for one in compare_lines(price, study)
        if one.predicted_ns or one.measured_ns
    ]
    return job, (*said, *more, *lines)


def fit_measured(
    job: Job, runs: Sequence[MeasuredRun]
) -> tuple[Job, tuple[str, ...], list[StepPrice]]:
    """The job with fitted constants, what was fitted, and the runs as it then predicts them.

    The pace of compute is the busiest rank's compute line over the roofline's, with a host that
    takes no time. Then the time to issue a layer, or where ranks talk the bandwidth of links and a
    latency instead, to each run's step and to its lines of tp and dp, by all runs at once. Where
    hosts were timed, the time to issue a layer is the middle of what they took, and links are
    fitted to steps alone: a collective's kernel waits for hosts that are late, so lines only say
    where to begin.
    """
    ready = _Fit(job=job, runs=runs)
    start = replace(job.constants, pace_ratio=ready.find_pace(job.constants))
    talks = any(one.lines for one in runs)
    is_timed = all(one.issue_s for one in runs)
    if is_timed:
        start = replace(start, host_layer_s=start.host_layer_s * ready.find_host_ratio(start))
    names = [] if is_timed else ["host_layer_s"]
    if talks:
        # A host that waits for messages says nothing of the time it needs.
        names = ["link_ratio", "collective_latency_s"]
        start = ready.scale_link(start)
    if is_timed:
        ready = replace(ready, runs=[replace(one, lines={}) for one in runs])
    fitted = start
    if names:
        fitted = _tie_latency(
            fit_constants(
                lambda own: ready.predict(_tie_latency(own)), ready.truth, start, names, cap=2.0
            )
        )
    prices = ready.price(fitted)
    left = [price.step_s / run.step_s - 1 for price, run in zip(prices, runs, strict=True)]
    width = _find_interval([run.spread_ratio for run in runs], left)
    number = f"{len(runs)} runs" if len(runs) > 1 else "the recorded run"
    layouts = "; ".join(run.layout.candidate.describe() for run in runs)
    sources = {
        **fitted.sources,
        **dict.fromkeys((*names, "p2p_latency_s"), f"fitted to steps and lines of {number}"),
        **({"host_layer_s": f"hosts of {number}, timed"} if is_timed else {}),
        "pace_ratio": f"fitted to compute of {number}",
        "interval_ratio": _INTERVAL_SOURCE.format(number),
    }
    constants = replace(fitted, name=f"{number} ({layouts})", interval_ratio=width, sources=sources)
    said = [f"pace of compute {constants.pace_ratio:.3g} of the roofline's time"]
    if "host_layer_s" in names or is_timed:
        said.append(f"{constants.host_layer_s * 1e6:.3g} µs to issue a layer")
    if talks:
        rates = [job.cluster.inside.bytes_per_s]
        rates += [job.cluster.between.bytes_per_s] if job.cluster.per_node == 1 else []
        said.append(
            f"link {min(rates) * constants.link_ratio / 1e9:.3g} GB/s, latency "
            f"{constants.collective_latency_s * 1e6:.3g} µs for each doubling"
        )
    said += [
        f"left over on {run.layout.candidate.describe()}, not fitted: step "
        f"{price.step_s * 1e3:.4g} ms predicted, {run.step_s * 1e3:.4g} ms measured, {error:+.1%}"
        for run, price, error in zip(runs, prices, left, strict=True)
    ]
    return replace(job, constants=constants), tuple(said), prices


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """Runs, and what constants make of them."""

    job: Job
    runs: Sequence[MeasuredRun]

    def price(self, constants: Constants) -> list[StepPrice]:
        cluster = self.job.cluster
        return [
            _price_recorded(
                replace(
                    self.job,
                    constants=constants,
                    cluster=replace(cluster, device=run.device or cluster.device),
                ),
                run.layout,
                cluster.num_processors,
            )
            for run in self.runs
        ]

    def find_pace(self, constants: Constants) -> float:
        """The middle of what the runs ask for."""
        prices = self.price(replace(constants, host_layer_s=1e-9, pace_ratio=1.0))
        ratios = [
            run.compute_s / (price.compute_s + price.optimizer_s)
            for run, price in zip(self.runs, prices, strict=True)
        ]
        return float(np.median(ratios))

    def find_host_ratio(self, constants: Constants) -> float:
        """How much longer hosts took to issue steps than predicted; the runs' middle."""
        ratios = [
            max(run.issue_s - constants.step_s, 0.0) / price.host_s
            for run, price in zip(self.runs, self.price(constants), strict=True)
            if run.issue_s is not None and price.host_s > 0
        ]
        return float(np.exp(np.mean(np.log(ratios)))) if ratios and min(ratios) > 0 else 1.0

    def scale_link(self, start: Constants) -> Constants:
        """Lines are nearly inverse to the link's bandwidth: a few rounds bring them near."""
        for _ in range(6):
            asked: list[float] = [
                list_lines(price)[axis] / seconds
                for price, run in zip(self.price(start), self.runs, strict=True)
                for axis, seconds in run.lines.items()
            ]
            ratio = float(np.median(asked)) if asked else 1.0
            start = replace(start, link_ratio=start.link_ratio * min(10.0, max(1e-2, ratio)))
        return start

    @property
    def truth(self) -> npt.NDArray[np.float64]:
        return np.array([v for run in self.runs for v in (run.step_s, *run.lines.values())])

    def predict(self, constants: Constants) -> npt.NDArray[np.float64]:
        return np.array(
            [
                max(value, 1e-9)
                for price, run in zip(self.price(constants), self.runs, strict=True)
                for value in (price.step_s, *(list_lines(price)[axis] for axis in run.lines))
            ]
        )


def _take_links(cluster: Cluster, studies: Sequence[Study]) -> tuple[Cluster, list[str]]:
    """Bandwidths that the runs' own α–β fits of matched operations state."""
    said = []
    fits = [fit for study in studies for fit in _list_fits(study)]
    for is_across, name in ((False, "inside"), (True, "between")):
        found = [one for one in fits if one.is_across_hosts is is_across]
        rates = [one.bus_bytes_per_s for one in found if isinstance(one.bus_bytes_per_s, float)]
        if rates:
            rate = float(np.median(rates))
            number = "a fit" if len(rates) == 1 else f"{len(rates)} fits"
            source = f"{number} of the run's own operations"
            link = Link(name="recorded links", nominal_bytes_per_s=rate, ratio=1, source=source)
            cluster = replace(cluster, between=link) if is_across else replace(cluster, inside=link)
            said.append(f"link {name} nodes {rate / 1e9:.3g} GB/s, from {source}")
    return cluster, said


def fit_host_runs(
    job: Job, studies: Sequence[Study], num_processors: Sequence[float] | None = None
) -> tuple[Job, tuple[str, ...]]:
    """The job with constants of runs on cores that ranks share, and what was fitted.

    Four constants to each run's step, and without tp to its compute and its line of dp, by all
    runs at once; the rest of the budget is compared, not fitted. With tp a rank that waits inside
    its layers leaves its core to others, so that its lines say little of its own work. On shared
    cores a transfer's own time cannot be told from that of being scheduled, so one latency stands
    for messages and collectives. `num_processors` are the cores that each run had, where others
    used some; by default the job's.
    """
    recorded = [read_layout(study) for study in studies]
    had: Sequence[float | None] = num_processors or [job.cluster.num_processors] * len(studies)
    truth = [
        {"step": _measure_step(study), "compute": _mean_compute(study), "dp": _measure_dp(study)}
        for study in studies
    ]
    chosen = [
        (index, name)
        for index, (run, one) in enumerate(zip(recorded, truth, strict=True))
        for name in (("step",) if run.candidate.tp > 1 else ("step", "compute", "dp"))
        if one[name] > _LEAST_LINE * one["step"]
    ]
    measured = np.array([truth[index][name] for index, name in chosen])

    def predict(constants: Constants) -> npt.NDArray[np.float64]:
        tied = _tie_latency(constants)
        then = replace(job, constants=tied)
        prices = [_price_recorded(then, *one) for one in zip(recorded, had, strict=True)]
        found = [
            {"step": one.step_s, "compute": one.compute_s + one.optimizer_s, "dp": one.dp_s}
            for one in prices
        ]
        return np.array([max(found[index][name], 1e-9) for index, name in chosen])

    fitted = _tie_latency(
        fit_constants(predict, measured, job.constants, HOST_FITTED_NAMES, cap=2.0)
    )
    is_step = [name == "step" for _, name in chosen]
    left = (predict(fitted) / measured - 1)[is_step]
    width = _find_interval(list(map(_measure_spread, studies)), left.tolist())
    number = f"{len(studies)} recorded runs" if len(studies) > 1 else "the recorded run"
    layouts = "; ".join(one.candidate.describe() for one in recorded)
    source = f"fitted to {number}"
    constants = replace(
        fitted,
        name=f"{number} ({layouts})",
        interval_ratio=width,
        sources={
            **fitted.sources,
            **dict.fromkeys((*HOST_FITTED_NAMES, "p2p_latency_s"), source),
            "interval_ratio": _INTERVAL_SOURCE.format(number),
        },
    )
    latency_us = constants.collective_latency_s * 1e6
    rate = job.cluster.between.bytes_per_s * constants.network_ratio
    said = [
        f"pace of compute {constants.pace_ratio:.3g} of the placeholder's time",
        f"{constants.host_layer_s * 1e6:.3g} µs to issue a layer",
        f"link {rate / 1e9:.3g} GB/s, {latency_us:.3g} µs a message",
        f"{job.cluster.ranks_per_processor:g} ranks share a core (a fact of the placement)",
    ]
    said += [
        f"left over on {one.candidate.describe()}, not fitted: step {error:+.1%}"
        for one, error in zip(recorded, left.tolist(), strict=True)
    ]
    return replace(job, constants=constants), tuple(said)


def _find_interval(spreads: Sequence[float], left: Sequence[float]) -> float:
    """The spread of recorded steps or the error left, whichever is more, and what other layouts
    miss beyond: independent, so their squares add up."""
    own = max(*spreads, *map(abs, left), _LEAST_INTERVAL)
    return hypot(own, MODEL_ERROR)


def _tie_latency(constants: Constants) -> Constants:
    return replace(constants, p2p_latency_s=constants.collective_latency_s)


def _price_recorded(job: Job, recorded: RecordedLayout, num_processors: float | None) -> StepPrice:
    cluster = replace(
        job.cluster, num_devices=recorded.candidate.world_size, num_processors=num_processors
    )
    return _price(replace(job, model=recorded.model, cluster=cluster), recorded)


def _mean_compute(study: Study) -> float:
    found = measure_lines(study.budget).get("compute", 0.0)
    if not found > 0:
        raise UsageError("the recorded run's budget has no compute; record more steps")
    return found / 1e9


def _measure_dp(study: Study) -> float:
    return measure_lines(study.budget).get("dp", 0.0) / 1e9


def list_lines(price: StepPrice) -> dict[str, float]:
    """Seconds of a step by the lines of a stored prediction; they sum to the step."""
    return {
        "compute": price.compute_s,
        "bubble": price.bubble_s,
        "tp": price.tp_s,
        "dp": price.dp_s,
        "pp": price.pp_s,
        "other": price.optimizer_s + price.fixed_s + price.cp_s + price.ep_s,
    }


def compare_lines(price: StepPrice, study: Study) -> tuple[CheckedTime, ...]:
    """Predicted against measured, mean of ranks and steps, line by line."""
    predicted = list_lines(price)
    return tuple(
        CheckedTime(name=name, predicted_ns=1e9 * predicted[name], measured_ns=measured)
        for name, measured in measure_lines(study.budget).items()
    )


def _price(job: Job, recorded: RecordedLayout) -> StepPrice:
    return price_candidates(job, [recorded.candidate])[0]


def _list_fits(study: Study) -> list[LatencyFit]:
    communication = known(study.communication)
    if communication is None:
        return []
    return [one for one in communication.fits if isinstance(one, LatencyFit)]


def _measure_step(study: Study) -> float:
    step_ns = study.step_ns
    if isinstance(step_ns, Unavailable):
        raise UsageError(f"--from: {step_ns.reason}")
    return step_ns / 1e9


def _measure_compute(study: Study) -> float:
    """Of the busiest rank, mean of its steps."""
    budget = study.budget
    if isinstance(budget, Unavailable):
        raise UsageError(f"--from: {budget.reason}")
    chosen = [index for index, line in enumerate(budget.lines) if line.share in COMPUTE_SHARES]
    compute = budget.time_ns[:, :, chosen].sum(axis=2).mean(axis=1)
    if not compute.size or not compute.max() > 0:
        raise UsageError("--from: the run's budget has no compute; record more steps")
    return float(compute.max()) / 1e9


def _measure_spread(study: Study) -> float:
    """Half of the middle nine tenths of steps, by their median."""
    budget = known(study.budget)
    if budget is None or not budget.wall_ns.size:
        return 0.0
    walls = budget.wall_ns.max(axis=0).astype(float)
    low, middle, high = np.quantile(walls, (0.05, 0.5, 0.95))
    return float((high - low) / 2 / middle) if middle else 0.0
