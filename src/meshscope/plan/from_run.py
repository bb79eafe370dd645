"""Constants from a recorded run of `meshscope train`: what its devices and links did.

    job, fitted = fit_run(job, study)

Three things are fitted, each from its own part of the recording, and said in words: the pace of
compute (the busiest rank's compute line over the predicted one), bandwidth and latency of links
(the run's own α–β fits of matched operations), and the interval (half of the middle nine tenths of
its steps, or the error that is left, whichever is larger). What is left is not fitted away:
`compare_lines` shows predicted and measured line by line. Loader, host and stragglers are part of
the measured lines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshscope.analyze.communication.bandwidth import LatencyFit
from meshscope.analyze.prediction import COMPUTE_SHARES, CheckedTime, measure_lines
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable, known
from meshscope.errors import UsageError
from meshscope.plan.calibration import HOST_FITTED_NAMES, Constants
from meshscope.plan.candidate import Candidate
from meshscope.plan.cluster import Link
from meshscope.plan.fitting import fit_constants
from meshscope.plan.model_shape import ModelShape
from meshscope.plan.pricing import Job, StepPrice, price_candidates

_GROUP = "train"
_LEAST_INTERVAL = 0.02
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
    groups = study.settings
    values: Mapping[str, object] = {}
    if not isinstance(groups, Unavailable):
        values = next((one.values for one in groups if one.name == _GROUP), {})
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


def fit_run(job: Job, study: Study) -> tuple[Job, tuple[str, ...]]:
    """The job with constants of the run, and what was fitted."""
    recorded = read_layout(study)
    measured_s = _measure_step(study)
    said: list[str] = []
    cluster = job.cluster
    fits = _list_fits(study)
    for is_across, name in ((False, "inside"), (True, "between")):
        found = [one for one in fits if one.is_across_hosts is is_across]
        rates = [one.bus_bytes_per_s for one in found if isinstance(one.bus_bytes_per_s, float)]
        if rates:
            rate = float(np.median(rates))
            source = f"{len(rates)} fits of the run's own operations"
            link = Link(name=f"recorded, {name}", nominal_bytes_per_s=rate, ratio=1, source=source)
            is_inside = not is_across
            cluster = replace(cluster, inside=link) if is_inside else replace(cluster, between=link)
            said.append(f"link {name} nodes {rate / 1e9:.3g} GB/s, from {source}")
    constants = job.constants
    delays = [one.latency_ns / 1e9 / max(1.0, np.log2(one.num_ranks)) for one in fits]
    delays = [one for one in delays if one > 0]
    if delays:
        constants = replace(constants, collective_latency_s=float(np.median(delays)))
        said.append(f"latency {constants.collective_latency_s * 1e6:.3g} µs for each doubling")
    then = replace(
        job, model=recorded.model, cluster=replace(cluster, num_devices=max(1, study.num_ranks))
    )
    before = _price(replace(then, constants=constants), recorded)
    compute_s = _measure_compute(study)
    pace = constants.pace_ratio * compute_s / before.compute_s
    constants = replace(constants, pace_ratio=pace)
    said.append(
        f"pace of compute {pace:.3g} of the roofline's time (compute {compute_s * 1e3:.4g} ms of a "
        f"step on the busiest rank, {before.compute_s * 1e3:.4g} ms by the roofline)"
    )
    after = _price(replace(then, constants=constants), recorded)
    error = after.step_s / measured_s - 1
    width = max(_measure_spread(study), abs(error), _LEAST_INTERVAL)
    sources = {
        **constants.sources,
        "pace_ratio": "fitted to the recorded run's compute",
        "interval_ratio": "steps of the recorded run, and the error left after fitting",
    }
    if delays:
        sources["collective_latency_s"] = "the recorded run's own operations"
    name = f"the recorded run ({recorded.candidate.describe()})"
    constants = replace(constants, name=name, interval_ratio=width, sources=sources)
    said.append(
        f"left over, not fitted: step {after.step_s * 1e3:.4g} ms predicted, "
        f"{measured_s * 1e3:.4g} ms measured, {error:+.1%}"
    )
    said += [
        f"{one.name}: {one.predicted_ns / 1e6:.4g} ms predicted, {one.measured_ns / 1e6:.4g} "
        "measured"
        for one in compare_lines(after, study)
    ]
    return replace(job, cluster=cluster, constants=constants), tuple(said)


def fit_host_runs(
    job: Job, studies: Sequence[Study], num_processors: Sequence[float] | None = None
) -> tuple[Job, tuple[str, ...]]:
    """The job with constants of runs on cores that ranks share, and what was fitted.

    Four constants to each run's step and compute, by all runs at once; the rest of the budget is
    compared, not fitted. On shared cores a transfer's own time cannot be told from that of being
    scheduled, so one latency stands for messages and collectives. `num_processors` are the cores
    that each run had, where others used some; by default the job's.
    """
    recorded = [read_layout(study) for study in studies]
    had: Sequence[float | None] = num_processors or [job.cluster.num_processors] * len(studies)
    measured = np.array(
        [value for study in studies for value in (_measure_step(study), _mean_compute(study))]
    )

    def predict(constants: Constants) -> npt.NDArray[np.float64]:
        tied = _tie_latency(constants)
        then = replace(job, constants=tied)
        prices = [_price_recorded(then, *one) for one in zip(recorded, had, strict=True)]
        return np.array([value for one in prices for value in (one.step_s, one.compute_s)])

    fitted = _tie_latency(fit_constants(predict, measured, job.constants, HOST_FITTED_NAMES))
    left = predict(fitted)[::2] / measured[::2] - 1
    width = max(*map(_measure_spread, studies), *np.abs(left).tolist(), _LEAST_INTERVAL)
    number = f"{len(studies)} recorded runs" if len(studies) > 1 else "the recorded run"
    layouts = "; ".join(one.candidate.describe() for one in recorded)
    source = f"fitted to {number}"
    constants = replace(
        fitted,
        name=f"{number} ({layouts})",
        interval_ratio=float(width),
        sources={**fitted.sources, **dict.fromkeys((*HOST_FITTED_NAMES, "p2p_latency_s"), source)},
    )
    rate = job.cluster.between.bytes_per_s * constants.network_ratio
    said = [
        f"pace of compute {constants.pace_ratio:.3g} of the placeholder's time",
        f"{constants.host_layer_s * 1e6:.3g} µs to issue a layer",
        f"link {rate / 1e9:.3g} GB/s, latency {constants.collective_latency_s * 1e6:.3g} µs",
        f"{job.cluster.ranks_per_processor:g} ranks share a core (a fact of the placement)",
    ]
    said += [
        f"left over on {one.candidate.describe()}, not fitted: step {error:+.1%}"
        for one, error in zip(recorded, left.tolist(), strict=True)
    ]
    return replace(job, constants=constants), tuple(said)


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
