"""Constants from a recording: fitted to its compute, and the rest is said, not hidden."""

import time

import pytest
from jobs import make_job

from meshscope.analyze.study import Study
from meshscope.capture.recorder import Recorder
from meshscope.core.config.presets import PRESETS, fill_model_defaults
from meshscope.errors import UsageError
from meshscope.plan.candidate import Candidate
from meshscope.plan.timing.from_run import fit_runs, measure_run, read_layout
from meshscope.plan.timing.pricing import price_candidates
from meshscope.store.read.run import open_run

CONFIG = {
    "model": fill_model_defaults(PRESETS["llama-tiny"]),
    "parallel": {"dp": 1, "tp": 1, "pp": 1, "schedule": "1f1b", "data_parallel": "reducer"},
    "batch": {"microbatch_size": 2, "num_microbatches": None, "global_batch_size": 8},
    "memory": {"strategy": "standard"},
}


def record(path, config, *, name="train"):
    with Recorder(path) as recorder:
        recorder.set_config(config, name, "made here")
        for _ in range(6):
            with recorder.step(), recorder.phase("forward"):
                time.sleep(0.01)
    return Study(open_run(path).last_attempt)


def test_the_layout_is_that_of_the_run(tmp_path):
    recorded = read_layout(record(tmp_path / "run", CONFIG))
    assert recorded.model.hidden_size == 64
    assert recorded.model.num_kv_heads == 2
    assert recorded.candidate == Candidate(microbatch_size=2, num_microbatches=4, recompute="full")


def test_compute_is_fitted_and_the_rest_is_said(tmp_path):
    study = record(tmp_path / "run", CONFIG)
    job, said = fit_runs(make_job("llama-3-8b", num_devices=8, stack="meshscope"), [study])
    recorded = read_layout(study)
    then = type(job)(**{**_fields(job), "model": recorded.model})
    (price,) = price_candidates(then, [recorded.candidate])
    assert price.compute_s == pytest.approx(measure_run(study).compute_s, rel=0.5)
    assert job.constants.find_source("pace_ratio") == "fitted to compute of the recorded run"
    text = " ".join(said)
    assert "pace of compute" in text
    assert "left over on dp1" in text
    assert "compute: " in text
    left = price.step_s / (study.step_ns / 1e9) - 1
    assert job.constants.interval_ratio >= abs(left) * 0.999


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_run_on_cpus_is_refused(tmp_path, device):
    study = record(tmp_path / "run", {**CONFIG, "device": device})
    with pytest.raises(UsageError, match="the run was on CPUs"):
        fit_runs(make_job("llama-3-8b", num_devices=8, stack="meshscope"), [study])


def _fields(job):
    return {name: getattr(job, name) for name in ("model", "recipe", "cluster", "constants")}


def test_a_run_of_another_program_is_refused(tmp_path):
    study = record(tmp_path / "run", {"lr": 1}, name="config")
    with pytest.raises(UsageError, match="meshscope train"):
        read_layout(study)
