"""The memory half of `--profiling`: which step, and what of the engine is profiled.

One step on every rank, soon after the first ones: by then optimizer states and buckets are there
and libraries have set themselves up. No step that a trace window disturbs is taken, if there is
another.
"""

from typing import TYPE_CHECKING

from meshscope.capture.profiling.profiled_step import choose_step
from meshscope.capture.profiling.settings import parse_settings
from meshscope.core.config.memory_model import estimate_memory
from meshscope.engine.engine import Engine

if TYPE_CHECKING:
    from meshscope.capture.recorder import Recorder


def profile_memory(engine: Engine, recorder: "Recorder", profiling: str) -> None:
    """Profiles one step of those to come; `profiling` is the text of the trace windows."""
    settings = parse_settings(profiling)
    num_steps = engine.config.num_steps - engine.step
    if settings is None or not settings.profiles_memory or num_steps < 1:
        return
    step = engine.step + choose_step(settings.schedule, num_steps)
    recorder.profile_memory(
        list(engine.stages.values()),
        engine.optimizer,
        steps={step},
        communication=[engine.data_parallel],
        estimate=_estimate_rank(engine),
    )


def _estimate_rank(engine: Engine) -> dict[str, int]:
    """What `meshscope train --check` says of this rank, by the categories of a profile."""
    estimate = estimate_memory(engine.config, device_type=engine.device.type)
    rank = estimate.ranks[engine.mesh.here.pp]
    return {
        "parameters": rank.parameters_bytes,
        "gradients": rank.gradients_bytes,
        "optimizer_state": rank.optimizer_bytes,
        "activations": rank.activations_bytes + rank.logits_bytes,
        "communication": rank.communication_bytes,
    }
