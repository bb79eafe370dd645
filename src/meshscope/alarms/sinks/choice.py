"""The sinks that settings ask for."""

from collections.abc import Callable
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
        for make in _MAKERS:
            made = make(settings, run)
            if made is not None:
                sinks.append(made)
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return sinks


def _webhook(settings: WatchSettings, run: Path) -> Sink | None:
    if not settings.webhook.url:
        return None
    from meshscope.alarms.sinks.webhook import WebhookSink

    return WebhookSink(settings.webhook, run)


def _slack(settings: WatchSettings, run: Path) -> Sink | None:
    if not settings.slack.url:
        return None
    from meshscope.alarms.sinks.slack import make_slack_sink

    return make_slack_sink(settings.slack, run)


def _command(settings: WatchSettings, run: Path) -> Sink | None:
    if not settings.on_finding.command:
        return None
    from meshscope.alarms.sinks.command import CommandSink

    chosen = settings.on_finding
    return CommandSink(chosen.command, timeout_s=chosen.timeout_s)


def _prometheus(settings: WatchSettings, run: Path) -> Sink | None:
    if settings.prometheus.port is None:
        return None
    from meshscope.alarms.sinks.prometheus import PrometheusSink

    return PrometheusSink(port=settings.prometheus.port, host=settings.prometheus.host)


def _otel(settings: WatchSettings, run: Path) -> Sink | None:
    if not settings.otel.endpoint:
        return None
    from meshscope.alarms.sinks.otel import OtelSink

    return OtelSink(settings.otel)


def _tensorboard(settings: WatchSettings, run: Path) -> Sink | None:
    if not settings.tensorboard.folder:
        return None
    from meshscope.alarms.sinks.tensorboard import TensorboardSink

    return TensorboardSink(settings.tensorboard.folder)


def _wandb(settings: WatchSettings, run: Path) -> Sink | None:
    if not settings.wandb.project:
        return None
    from meshscope.alarms.sinks.wandb import WandbSink

    return WandbSink(settings.wandb.project, name_run(run))


def _mlflow(settings: WatchSettings, run: Path) -> Sink | None:
    if not settings.mlflow.uri:
        return None
    from meshscope.alarms.sinks.mlflow import MlflowSink

    return MlflowSink(settings.mlflow, name_run(run))


_MAKERS = (_webhook, _slack, _command, _prometheus, _otel, _tensorboard, _wandb, _mlflow)
