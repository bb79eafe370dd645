"""Numbers and alarms in a run of an MLflow experiment."""

import json
import re
from typing import Any

from meshscope.alarms.sample import Sample
from meshscope.alarms.settings import MlflowSettings
from meshscope.alarms.sinks.background import Background
from meshscope.alarms.sinks.log import describe_event
from meshscope.report.alarm_event import DOCUMENT, SHAPES, AlarmEvent
from meshscope.report.encode import encode_line

_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
_MAX_TAG = 4000


class MlflowSink:
    """Its own run beside the job's: metrics are over the job's steps, an alarm is a tag."""

    name = "mlflow"

    def __init__(self, settings: MlflowSettings, run_name: str) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client: Any = MlflowClient(tracking_uri=settings.uri)
        self._background = Background(self.name, close_s=30.0)
        self._run_id = ""
        self._step = -1
        self._background.run(lambda: self._open(settings.experiment, run_name))

    def _open(self, experiment: str, run_name: str) -> None:
        found = self._client.get_experiment_by_name(experiment)
        number = (
            self._client.create_experiment(experiment) if found is None else found.experiment_id
        )
        self._run_id = self._client.create_run(number, run_name=f"watch {run_name}").info.run_id

    def tell(self, event: AlarmEvent) -> None:
        self._background.run(lambda: self._tag(event))

    def _tag(self, event: AlarmEvent) -> None:
        text = json.dumps({"text": describe_event(event)})[:_MAX_TAG]
        line = encode_line(*DOCUMENT, event, SHAPES)
        key = _NOT_IN_NAMES.sub("_", f"meshscope.alarm.{event.id}.{event.event.value}")
        self._client.set_tag(self._run_id, key, line if len(line) <= _MAX_TAG else text)

    def measure(self, sample: Sample) -> None:
        if sample.step is None or sample.step == self._step:
            return
        self._step = sample.step
        at_ms = sample.unix_ns // 1_000_000
        metrics = [
            self._metric(_NOT_IN_NAMES.sub("_", f"meshscope/{name}"), value, at_ms, sample.step)
            for name, value in sample.values()
        ]
        self._background.run(lambda: self._client.log_batch(self._run_id, metrics=metrics))

    def problems(self) -> list[str]:
        return self._background.problems()

    def close(self) -> None:
        self._background.run(lambda: self._client.set_terminated(self._run_id))
        self._background.close()
