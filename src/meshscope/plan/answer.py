"""What `meshscope plan` answers: choices with intervals, and where each number comes from."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from meshscope.core.flops import Flops, measure_utilization
from meshscope.core.unavailable import Unavailable
from meshscope.plan.candidate import Candidate
from meshscope.plan.export import list_megatron_flags, list_torchtitan_keys
from meshscope.plan.memory.engine_layout import make_train_config
from meshscope.plan.memory.memory_parts import RankMemory
from meshscope.plan.search.request import Request
from meshscope.plan.search.search import Choice, Found, Rejection
from meshscope.plan.timing.calibration import Constants
from meshscope.plan.timing.pricing import Job

_HOURS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted number; nine of ten are expected between low and high."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetToken:
    """What a number of tokens takes."""

    days: Estimate
    cost: Estimate | Unavailable
    """In the currency of the price that was given."""
    energy_kwh: Estimate | Unavailable
    """At the boards' power limit: an upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """Communication that nothing hides, in seconds of a step, by axis."""

    tp_s: float
    pp_s: float
    dp_s: float
    cp_s: float
    ep_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """One choice."""

    layout: str
    candidate: Candidate
    step_s: Estimate
    tokens_per_s: Estimate
    mfu_ratio: Estimate | Unavailable
    compute_s: float
    bubble_s: float
    bubble_ratio: float
    """Of the pipeline's time."""
    exposed: Exposed
    optimizer_s: float
    fixed_s: float
    memory: tuple[RankMemory, ...]
    peak_bytes: int
    headroom_bytes: int
    """Of the device's memory beside the fullest rank."""
    budget: BudgetToken | Unavailable
    engine: str | Unavailable
    """Whether `meshscope train` runs it; its reason where not."""
    megatron_flags: tuple[str, ...] | Unavailable
    torchtitan_keys: tuple[str, ...] | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantUsed:
    name: str
    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The whole answer; times in seconds, memory in bytes."""

    model: str
    num_parameters: int
    num_active_parameters: int
    sequence_length: int
    global_batch_size: int
    device: str
    num_devices: int
    per_node: int
    memory_bytes: int
    link_inside: str
    link_between: str
    stack: str
    precision: str
    optimizer: str
    num_combinations: int
    num_bounded: int
    num_replayed: int
    choices: tuple[PlannedLayout, ...]
    pareto: tuple[PlannedLayout, ...]
    rejections: tuple[Rejection, ...]
    least_memory_bytes: int | None
    """Where nothing fits: what the leanest layout needs at least."""
    least_memory_layout: str
    constants: tuple[ConstantUsed, ...]
    sources: Mapping[str, str]
    """Where the numbers of a choice come from, by field."""
    fitted: tuple[str, ...] = ()
    """What was fitted from a recording, in words; empty without one."""


def make_answer(
    job: Job,
    request: Request,
    found: Found,
    *,
    token_budget: float | None = None,
    price_per_hour: float | None = None,
    fitted: tuple[str, ...] = (),
) -> PlanAnswer:
    """From what a search found."""
    model, cluster, recipe = job.model, job.cluster, job.recipe

    def show(choice: Choice) -> PlannedLayout:
        return describe_choice(
            job, request, choice, token_budget=token_budget, price_per_hour=price_per_hour
        )

    return PlanAnswer(
        model=model.name,
        num_parameters=model.num_parameters,
        num_active_parameters=model.num_active_parameters,
        sequence_length=model.sequence_length,
        global_batch_size=request.global_batch_size,
        device=cluster.device.name,
        num_devices=cluster.num_devices,
        per_node=cluster.per_node,
        memory_bytes=cluster.memory_bytes,
        link_inside=f"{cluster.inside.name}: {cluster.inside.source}",
        link_between=f"{cluster.between.name}: {cluster.between.source}",
        stack=f"{recipe.stack.name}: {recipe.stack.description}",
        precision=recipe.precision.name,
        optimizer=recipe.optimizer,
        num_combinations=found.num_combinations,
        num_bounded=found.num_bounded,
        num_replayed=found.num_replayed,
        choices=tuple(map(show, found.best)),
        pareto=tuple(map(show, found.pareto)),
        rejections=found.rejections,
        least_memory_bytes=found.least_memory_bytes,
        least_memory_layout=found.least_memory_layout,
        constants=list_constants(job),
        sources=list_sources(job),
        fitted=fitted,
    )


def describe_choice(
    job: Job,
    request: Request,
    choice: Choice,
    *,
    token_budget: float | None,
    price_per_hour: float | None,
) -> PlannedLayout:
    """One choice with all that is asked of it."""
    price, candidate, model = choice.price, choice.candidate, job.model
    width = job.constants.interval_ratio
    step = Estimate(
        value=price.step_s, low=price.step_s / (1 + width), high=price.step_s * (1 + width)
    )
    tokens = request.global_batch_size * model.sequence_length
    rate = Estimate(value=tokens / step.value, low=tokens / step.high, high=tokens / step.low)
    config = make_train_config(model, candidate)
    is_engine = not isinstance(config, Unavailable)
    return PlannedLayout(
        layout=candidate.describe(),
        candidate=candidate,
        step_s=step,
        tokens_per_s=rate,
        mfu_ratio=_measure_mfu(job, tokens, step),
        compute_s=price.compute_s,
        bubble_s=price.bubble_s,
        bubble_ratio=price.bubble_ratio,
        exposed=Exposed(
            tp_s=price.tp_s, pp_s=price.pp_s, dp_s=price.dp_s, cp_s=price.cp_s, ep_s=price.ep_s
        ),
        optimizer_s=price.optimizer_s,
        fixed_s=price.fixed_s,
        memory=choice.ranks,
        peak_bytes=choice.peak_bytes,
        headroom_bytes=job.cluster.memory_bytes - choice.peak_bytes,
        budget=_measure_budget(job, rate, token_budget, price_per_hour),
        engine="meshscope train runs it" if is_engine else _reason(config),
        megatron_flags=list_megatron_flags(model, candidate),
        torchtitan_keys=list_torchtitan_keys(model, candidate),
    )


def _reason(value: object) -> Unavailable:
    assert isinstance(value, Unavailable)
    return value


def _measure_mfu(job: Job, tokens: int, step: Estimate) -> Estimate | Unavailable:
    dtype = "bfloat16" if job.recipe.precision.dtype == "float8" else job.recipe.precision.dtype
    peak = job.cluster.find_peak(dtype)
    if isinstance(peak, Unavailable):
        return peak
    flops = tokens * job.model.num_model_flops_per_token

    def measure(step_s: float) -> float:
        found = measure_utilization(
            Flops(model=flops, hardware=flops),
            step_ns=step_s * 1e9,
            num_devices=job.cluster.num_devices,
            peak_flops_per_s=peak,
        )
        assert not isinstance(found, Unavailable)
        return found.mfu_ratio

    return Estimate(value=measure(step.value), low=measure(step.high), high=measure(step.low))


def _measure_budget(
    job: Job, rate: Estimate, token_budget: float | None, price_per_hour: float | None
) -> BudgetToken | Unavailable:
    if token_budget is None:
        return Unavailable("no number of tokens was given; --tokens gives it")
    hours = Estimate(
        value=token_budget / rate.value / _HOURS,
        low=token_budget / rate.high / _HOURS,
        high=token_budget / rate.low / _HOURS,
    )

    def scale(factor: float) -> Estimate:
        return Estimate(
            value=hours.value * factor, low=hours.low * factor, high=hours.high * factor
        )

    devices, power = job.cluster.num_devices, job.cluster.power_w
    return BudgetToken(
        days=scale(1 / 24),
        cost=Unavailable("no price was given; --price-per-hour gives that of one device")
        if price_per_hour is None
        else scale(price_per_hour * devices),
        energy_kwh=power if isinstance(power, Unavailable) else scale(power * devices / 1e3),
    )


def list_constants(job: Job) -> tuple[ConstantUsed, ...]:
    """Every constant of the time model."""
    constants: Constants = job.constants
    numbers = [
        one.name
        for one in fields(Constants)
        if isinstance(getattr(constants, one.name), (int, float))
    ]
    found = [
        ConstantUsed(
            name=name, value=float(getattr(constants, name)), source=constants.find_source(name)
        )
        for name in numbers
    ]
    if constants.gemm_ratio is None:
        found.append(
            ConstantUsed(
                name="gemm_ratio", value=job.cluster.gemm_ratio, source=job.cluster.gemm_source
            )
        )
    return tuple(found)


def list_sources(job: Job) -> dict[str, str]:
    """Of each number of a choice."""
    layers = job.constants.sources.get("layer_ratios", "a roofline (docs/plan.md)")
    return {
        "step_s": f"event replay of the schedule; layers by {layers}; {job.constants.name}",
        "low, high": "nine of ten: " + job.constants.find_source("interval_ratio"),
        "tokens_per_s": "global batch · sequence length / step_s",
        "mfu_ratio": "6 FLOPs a weight and token and attention over all pairs, by the dense peak "
        f"of {job.cluster.device.name} (core.hardware)",
        "bubble_s": "replay with transfers in no time, less the busiest rank's work",
        "exposed": f"{job.cluster.inside.name} inside, {job.cluster.between.name} between nodes; "
        "overlap as the stack does it",
        "memory": "closed forms, layer by layer over the schedule (docs/plan.md); context and "
        "fragmentation are allowances",
        "budget": "tokens / tokens_per_s; energy at the boards' power limit",
    }
