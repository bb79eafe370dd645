"""What `meshscope train` predicts before it starts; the run stores it, and the report checks it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshscope.core.unavailable import Unavailable

if TYPE_CHECKING:
    from meshscope.analyze.study import Study
    from meshscope.core.config.train_config import TrainConfig
    from meshscope.core.placement import Placement
    from meshscope.core.prediction import Prediction
    from meshscope.plan.timing.pricing import Job

_NOT_FITTED = Unavailable(
    "nothing is known of this host's speed; train with --predict-from RUN fits it to a recorded run"
)


def predict(
    config: "TrainConfig",
    device: tuple[str, int | None, int],
    placement: "Placement | None",
    runs: Sequence[Path],
) -> "Prediction":
    """`device` is the device's type, the memory of a rank and the number of GPUs. UsageError where
    a run cannot be fitted to; anything else that is missing is said in the prediction."""
    from meshscope.plan.predict import predict_run

    device_type, memory_bytes, num_gpus = device
    studies = [_open_study(path) for path in runs]
    fitted: tuple[str, ...] = ()
    if device_type == "cpu":
        job, fitted = _fit_host(config, memory_bytes or 0, studies)
    else:
        job = _make_device_job(config, num_gpus, placement)
        if studies and not isinstance(job, Unavailable):
            job, fitted = _fit_device(job, studies)
    return predict_run(config, device_type=device_type, job=job, fitted=fitted)


def _open_study(path: Path) -> "Study":
    from meshscope.analyze.study import Study
    from meshscope.cli.locate import open_located, pick_attempt

    return Study(pick_attempt(open_located(path), None))


def _fit_host(
    config: "TrainConfig", memory_bytes: int, studies: "Sequence[Study]"
) -> "tuple[Job | Unavailable, tuple[str, ...]]":
    from meshscope.plan.predict import make_host_job
    from meshscope.plan.timing.from_run import fit_host_runs

    num_cores = len(os.sched_getaffinity(0))
    job = make_host_job(config, num_cores=num_cores, memory_bytes=memory_bytes)
    if isinstance(job, Unavailable) or not studies:
        return (_NOT_FITTED if not studies else job), ()
    return fit_host_runs(job, studies)


def _make_device_job(
    config: "TrainConfig", num_gpus: int, placement: "Placement | None"
) -> "Job | Unavailable":
    from meshscope.engine.launch.local_ranks import probe_devices
    from meshscope.plan.predict import make_device_job

    name = probe_devices().name
    if name is None:
        return Unavailable("the device's name is not known")
    local = config.layout.world_size if placement is None else placement.local_world_size
    return make_device_job(config, device=name, num_gpus=num_gpus, per_node=local or num_gpus)


def _fit_device(job: "Job", studies: "Sequence[Study]") -> "tuple[Job, tuple[str, ...]]":
    from meshscope.plan.timing.from_run import fit_runs

    return fit_runs(job, studies)
