"""Metrics by OTLP over HTTP, with OpenTelemetry's own SDK, which sends from a thread of its own."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from meshscope.alarms.sample import Sample
from meshscope.alarms.settings import OtelSettings
from meshscope.report.alarm_event import AlarmEvent

_UNITS = {
    "step": "{step}",
    "step_seconds": "s",
    "steps_per_second": "{step}/s",
    "tokens_per_second_of_one_rank": "{token}/s",
    "last_step_age_seconds": "s",
    "ranks": "{rank}",
    "alarms": "{alarm}",
    "largest_saved_ratio": "1",
}


class OtelSink:
    name = "otel"

    def __init__(self, settings: OtelSettings) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.metrics import CallbackOptions, Observation
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        self._lock = threading.Lock()
        self._sample: Sample | None = None
        exporter = OTLPMetricExporter(endpoint=settings.endpoint, timeout=10)
        reader = PeriodicExportingMetricReader(
            exporter, export_interval_millis=settings.every_s * 1000
        )
        self._provider = MeterProvider(
            [reader], resource=Resource.create({"service.name": "meshscope"})
        )
        meter = self._provider.get_meter("meshscope")

        def observe(name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
            return lambda options: [
                Observation(value, labels) for value, labels in self._read(name)
            ]

        for name, unit in _UNITS.items():
            meter.create_observable_gauge(f"meshscope.{name}", [observe(name)], unit=unit)
        meter.create_observable_gauge("meshscope.signal", [observe("signal")])
        self._events: Any = meter.create_counter("meshscope.events", unit="{event}")

    def _read(self, name: str) -> list[tuple[float, dict[str, str]]]:
        with self._lock:
            sample = self._sample
        if sample is None:
            return []
        run = {"meshscope.run": sample.name}
        if name == "signal":
            return [(value, {**run, "name": key}) for key, value in sample.signals.items()]
        if name == "step":
            return [] if sample.step is None else [(float(sample.step), run)]
        return [(value, run) for key, value in sample.values() if key == name]

    def tell(self, event: AlarmEvent) -> None:
        labels = {
            "meshscope.run": event.name,
            "event": event.event.value,
            "severity": event.severity.word,
            "code": event.code,
        }
        self._events.add(1, labels)

    def measure(self, sample: Sample) -> None:
        with self._lock:
            self._sample = sample

    def problems(self) -> list[str]:
        return []  # the SDK logs what it could not send

    def close(self) -> None:
        self._provider.shutdown(timeout_millis=5_000)
