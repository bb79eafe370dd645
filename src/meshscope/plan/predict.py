"""What `meshscope train` predicts of a run before it starts, to be stored with it.

    prediction = predict_run(config, device_type="cpu", job=job, fitted=said)

Memory is that of `train --check`. Time is the planner's, with the constants of the job that is
given: fitted to recorded runs, or a device's presets; where there is no job, its reason is stored.
"""

from dataclasses import replace

from meshscope.core.config.memory_model import RankEstimate, estimate_memory
from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.core.config.train_config import TrainConfig
from meshscope.core.prediction import PredictedTime, Prediction
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.errors import UsageError
from meshscope.plan.cluster import make_cluster, make_host_cluster
from meshscope.plan.memory.engine_layout import make_candidate, make_shape
from meshscope.plan.model.model_shape import ModelShape
from meshscope.plan.recipe import Recipe, make_recipe
from meshscope.plan.timing.calibration import HOST, find_constants
from meshscope.plan.timing.from_run import list_lines
from meshscope.plan.timing.pricing import Job, price_candidates

_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "communication")


def predict_run(
    config: TrainConfig,
    *,
    device_type: str,
    job: Job | Unavailable,
    fitted: tuple[str, ...] = (),
) -> Prediction:
    """For a configuration without problems; the job's model is the configuration's."""
    ranks = estimate_memory(config, device_type=device_type).ranks
    return Prediction(
        time=_predict_time(config, job, fitted),
        memory_bytes={rank.pp_rank: _list_parts(rank) for rank in ranks},
    )


def _list_parts(rank: RankEstimate) -> dict[str, int]:
    return {part: getattr(rank, f"{part}_bytes") for part in _PARTS}


@or_unavailable
def _predict_time(
    config: TrainConfig, job: Job | Unavailable, fitted: tuple[str, ...]
) -> PredictedTime:
    known = need(job)
    candidate = need(make_candidate(config))
    (price,) = price_candidates(known, [candidate])
    return PredictedTime(
        step_ns=1e9 * price.step_s,
        interval_ratio=known.constants.interval_ratio,
        lines_ns={name: 1e9 * value for name, value in list_lines(price).items()},
        calibrated_on=known.constants.name,
        fitted=fitted,
    )


@or_unavailable
def make_host_job(config: TrainConfig, *, num_cores: int, memory_bytes: int) -> Job:
    """Ranks on this host's cores; its constants must be fitted before they say anything."""
    num_ranks = config.layout.world_size
    return Job(
        model=_need_shape(config),
        recipe=_make_recipe(config),
        cluster=make_host_cluster(num_ranks, num_cores, memory_bytes),
        constants=HOST,
    )


@or_unavailable
def make_device_job(config: TrainConfig, *, device: str, num_gpus: int, per_node: int) -> Job:
    """Ranks on devices of this name, of which a node has so many; more ranks share them."""
    num_ranks = config.layout.world_size
    try:
        cluster = make_cluster(device, num_ranks, per_node=min(per_node, num_ranks))
    except UsageError as error:
        raise Missing(str(error)) from None
    num_nodes = -(-num_ranks // per_node)
    if num_gpus * num_nodes < num_ranks:
        cluster = replace(cluster, num_processors=num_gpus * num_nodes)
    recipe = _make_recipe(config)
    need(cluster.find_peak(recipe.precision.dtype))
    return Job(
        model=_need_shape(config), recipe=recipe, cluster=cluster,
        constants=find_constants("meshscope"),
    )  # fmt: skip


def _need_shape(config: TrainConfig) -> ModelShape:
    if isinstance(config.model, TimedModelConfig):
        raise Missing("the model's times are stated, not computed")
    return make_shape(config.model)


def _make_recipe(config: TrainConfig) -> Recipe:
    momentum = "sgd-momentum" if config.optimizer.momentum else "sgd"
    optimizer = "adamw" if config.optimizer.kind == "adamw" else momentum
    precision = "fp32" if config.precision.compute == "fp32" else "autocast"
    return make_recipe("meshscope", precision, optimizer)
