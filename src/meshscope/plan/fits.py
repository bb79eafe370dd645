"""Whether a configuration of the engine fits a device, and the nearest that does.

    answer = answer_fit(config, find_target_device("H100-80GB"))
    answer.fits, answer.peak_bytes, answer.nearest

Nearest means the fewest and mildest changes, in this order: recompute, smaller microbatches for
the same batch, states cut over dp, both; then more tp or pp in place of dp. The number of ranks and
the global batch stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshscope.core.config.device_fit import TargetDevice
from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.core.config.train_config import TrainConfig
from meshscope.core.unavailable import Unavailable
from meshscope.errors import MeshscopeError
from meshscope.plan.memory.engine_layout import estimate_engine_ranks
from meshscope.plan.memory.memory_parts import RankMemory

_MOST_OF_DEVICE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestFit:
    """Another configuration that fits."""

    change: str
    """As --set would have it."""
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FitAnswer:
    device: str
    memory_bytes: int
    fits: bool
    is_tight: bool
    """More than nine tenths: what is left out may be more than what is left."""
    peak_bytes: int
    ranks: tuple[RankMemory, ...]
    nearest: NearestFit | Unavailable
    """Unavailable where it fits as it is, or nothing near does."""


def answer_fit(config: TrainConfig, device: TargetDevice) -> FitAnswer:
    """For a configuration without problems of another kind."""
    ranks = estimate_engine_ranks(config, device_type=device.device_type)
    peak = find_peak(ranks)
    fits = peak <= device.memory_bytes
    return FitAnswer(
        device=device.label,
        memory_bytes=device.memory_bytes,
        fits=fits,
        is_tight=peak > _MOST_OF_DEVICE * device.memory_bytes,
        peak_bytes=peak,
        ranks=ranks,
        nearest=Unavailable("it fits as it is") if fits else find_nearest(config, device),
    )


def find_peak(ranks: tuple[RankMemory, ...]) -> int:
    """Of the fullest rank, in tensors: what a configuration is refused for."""
    return max(rank.tensor_bytes for rank in ranks)


def find_nearest(config: TrainConfig, device: TargetDevice) -> NearestFit | Unavailable:
    """The first of the changes after which it fits."""
    least: tuple[int, str] | None = None
    for changes in _list_changes(config):
        changed = _apply(config, changes)
        if changed is None:
            continue
        peak = find_peak(estimate_engine_ranks(changed, device_type=device.device_type))
        text = ", ".join(f"{key}={value}" for key, value in changes.items())
        if peak <= _MOST_OF_DEVICE * device.memory_bytes:
            return NearestFit(change=text, peak_bytes=peak)
        if least is None or peak < least[0]:
            least = (peak, text)
    if least is None:
        return Unavailable("nothing near this configuration can be built")
    return Unavailable(
        f"nothing near fits; the leanest ({least[1]}) needs {least[0] / 2**30:.3g} GiB; use more "
        "ranks or a larger device"
    )


def _list_changes(config: TrainConfig) -> Iterator[dict[str, object]]:
    """Mildest first."""
    batch, parallel = config.batch.microbatch_size, config.parallel
    sizes = [size for size in (batch // 2, batch // 4, 1) if 1 <= size < batch]
    strategies = ["standard"] if config.memory.strategy == "basic" else []
    small: list[dict[str, object]] = [{"memory.strategy": one} for one in strategies]
    small += [{"batch.microbatch_size": one} for one in dict.fromkeys(sizes)]
    small += [
        {"memory.strategy": how, "batch.microbatch_size": one}
        for how in strategies
        for one in dict.fromkeys(sizes)
    ]
    cut: dict[str, object] = {"parallel.data_parallel": "fsdp", "parallel.zero_stage": 3}
    can_cut = parallel.dp > 1 and parallel.data_parallel != "fsdp"
    yield from small
    if can_cut:
        yield cut
        yield from ({**cut, **one} for one in small)
    for factor in (2, 4, 8, 16, 32, 64):
        if parallel.dp % factor:
            break
        for axis in ("tp", "pp"):
            moved: dict[str, object] = {
                "parallel.dp": parallel.dp // factor,
                f"parallel.{axis}": getattr(parallel, axis) * factor,
            }
            yield moved
            yield from ({**moved, **one} for one in small)
            if can_cut and parallel.dp // factor > 1:
                yield {**moved, **cut}
                yield from ({**moved, **cut, **one} for one in small)


def _apply(config: TrainConfig, changes: dict[str, object]) -> TrainConfig | None:
    """The changed configuration with the same global batch; None where it cannot be."""
    tables = {name: getattr(config, name) for name in ("parallel", "batch", "memory")}
    for key, value in changes.items():
        table, _, name = key.partition(".")
        tables[table] = replace(tables[table], **{name: value})
    total = config.global_batch_size
    each = tables["batch"].microbatch_size * tables["parallel"].dp
    if total % each or isinstance(config.model, TimedModelConfig):
        return None
    tables["batch"] = replace(
        tables["batch"], num_microbatches=total // each, global_batch_size=None
    )
    changed = replace(config, **tables)
    try:
        schedule = changed.schedule
        problems = config.model.validate(
            changed.parallel.tp,
            schedule.num_stages,
            stage_sizes=changed.parallel.stage_sizes,
            sequence_parallel=changed.parallel.sequence_parallel,
        )
    except MeshscopeError:
        return None
    return None if problems else changed
