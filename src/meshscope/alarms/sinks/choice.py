"""The sinks that settings ask for."""

from collections.abc import Callable, Iterator
from pathlib import Path

from meshscope.alarms.settings import WatchSettings
from meshscope.alarms.sinks.log import LogSink
from meshscope.alarms.sinks.sink import Sink
from meshscope.live.run_name import name_run


def open_sinks(
    settings: WatchSettings, run: Path, write: Callable[[str], None], *, as_json: bool
) -> list[Sink]:
    """Raises UsageError, and ModuleNotFoundError where a package is not installed; what was opened
    before is closed then."""
    sinks: list[Sink] = [LogSink(write, every_s=settings.log.every_s, as_json=as_json)]
    try:
        sinks.extend(_make(settings, run))
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return sinks


def _make(settings: WatchSettings, run: Path) -> Iterator[Sink]:
    """One by one, so that those made are known when the next cannot be."""
    if settings.webhook.url:
        from meshscope.alarms.sinks.webhook import WebhookSink

        yield WebhookSink(settings.webhook, run)
    if settings.slack.url:
        from meshscope.alarms.sinks.slack import make_slack_sink

        yield make_slack_sink(settings.slack, run)
    chosen = settings.on_finding
    if chosen.command:
        from meshscope.alarms.sinks.command import CommandSink

        yield CommandSink(chosen.command, timeout_s=chosen.timeout_s)
    if settings.prometheus.port is not None:
        from meshscope.alarms.sinks.prometheus import PrometheusSink

        yield PrometheusSink(port=settings.prometheus.port, host=settings.prometheus.host)
    if settings.otel.endpoint:
        from meshscope.alarms.sinks.otel import OtelSink

        yield OtelSink(settings.otel)
    if settings.tensorboard.folder:
        from meshscope.alarms.sinks.tensorboard import TensorboardSink

        yield TensorboardSink(settings.tensorboard.folder)
    if settings.wandb.project:
        from meshscope.alarms.sinks.wandb import WandbSink

        yield WandbSink(settings.wandb.project, name_run(run))
    if settings.mlflow.uri:
        from meshscope.alarms.sinks.mlflow import MlflowSink

        yield MlflowSink(settings.mlflow, name_run(run))
