"""Numbers and alarms in a run of Weights & Biases; `WANDB_MODE=offline` keeps them in a file."""

from typing import Any

from meshscope.alarms.sample import Sample
from meshscope.alarms.sinks.background import Background
from meshscope.alarms.sinks.log import describe_event
from meshscope.report.alarm_event import AlarmEvent

_STEP = "meshscope/step"


class WandbSink:
    """Its own run beside the job's: curves are over the job's steps."""

    name = "wandb"

    def __init__(self, project: str, run_name: str) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=project,
            name=f"watch {run_name}",
            job_type="meshscope-watch",
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("meshscope/*", step_metric=_STEP)
        self._background = Background(self.name, close_s=30.0)
        self._step = -1

    def tell(self, event: AlarmEvent) -> None:
        row = {_STEP: event.step or 0, "meshscope/alarm": describe_event(event)}
        self._background.run(lambda: self._run.log(row))

    def measure(self, sample: Sample) -> None:
        if sample.step is None or sample.step == self._step:
            return
        self._step = sample.step
        row = {_STEP: sample.step, **{f"meshscope/{key}": one for key, one in sample.values()}}
        self._background.run(lambda: self._run.log(row))

    def problems(self) -> list[str]:
        return self._background.problems()

    def close(self) -> None:
        self._background.run(lambda: self._run.finish(quiet=True))
        self._background.close()
