"""What a watcher does, when and whom it tells: a TOML file, and flags that win over it."""

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from meshscope.alarms.stalls import WATCH_CODES
from meshscope.core.verdict.severity import parse_severity
from meshscope.core.verdict.thresholds import choose_thresholds
from meshscope.diagnose.registry import RULES, list_thresholds
from meshscope.errors import UsageError

_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class _Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file: a key that it does not have is an error."""


class LookSettings(_Table, frozen=True):
    """[watch]: how often and at what is looked."""

    every_s: Annotated[float, Meta(ge=0.1, le=3600)] = 2.0
    """Least time between two looks at the files."""
    cpu_share: Annotated[float, Meta(gt=0, le=1)] = 0.08
    """At most this share of a core, over time."""
    window_steps: Annotated[int, Meta(ge=20, le=10_000)] = 100
    """Last steps that a diagnosis looks at."""
    max_ranks: Annotated[int, Meta(ge=8, le=65_536)] = 64
    """Ranks in one diagnosis: those that stand out, and others in turn."""


class AlarmSettings(_Table, frozen=True):
    """[alarms]: what is told."""

    min_severity: str = "medium"
    min_saved_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Findings with a smaller price are not told."""
    ignore: tuple[str, ...] = ()
    """Codes that are never told."""
    confirm: _Count = 2
    """Looks that have to see a finding before it is told."""
    clear: _Count = 2
    """Looks without it after which it is cleared."""
    cooldown_s: _Seconds = 300.0
    remind_s: _Seconds = 0.0
    """Told again after so long; 0: never."""
    stall_s: _Seconds = 20.0
    """Without a new step for so long, and for 10 steps' time: look whether the job is stuck."""
    behind_steps: _Count = 64
    """A rank so many steps behind the first one is told."""


class TraceSettings(_Table, frozen=True):
    """[trace]: trace windows that are asked for when an alarm is raised."""

    steps: Annotated[int, Meta(ge=0, le=1000)] = 0
    """0: none are asked for."""
    min_severity: str = "high"
    cooldown_s: _Seconds = 1800.0
    limit: _Count = 3
    """At most so many windows of one run."""


class LogSettings(_Table, frozen=True):
    """[log]: lines on standard output."""

    every_s: _Seconds = 60.0
    """A line about the run, however it is; 0: only alarms."""


class HookSettings(_Table, frozen=True):
    """[webhook] and [slack]: alarms by HTTP POST, kept on disk until they are received."""

    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    """A value `env:NAME` is read from the environment."""
    queue: str = ""
    """Folder of what was not received yet."""
    max_queued: _Count = 10_000
    timeout_s: Annotated[float, Meta(gt=0, le=300)] = 10.0
    retry_s: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    """First wait before it is sent again; doubled up to a minute."""


class CommandSettings(_Table, frozen=True):
    """[on_finding]: a program that gets every event as JSON on standard input."""

    command: str = ""
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 30.0


class PrometheusSettings(_Table, frozen=True):
    """[prometheus]: /metrics on this machine's loopback."""

    port: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    host: str = "127.0.0.1"


class OtelSettings(_Table, frozen=True):
    """[otel]: metrics by OTLP over HTTP."""

    endpoint: str = ""
    every_s: Annotated[float, Meta(ge=1, le=3600)] = 15.0


class TensorboardSettings(_Table, frozen=True):
    """[tensorboard]: scalars in an event file."""

    folder: str = ""


class WandbSettings(_Table, frozen=True):
    """[wandb]: a run of a Weights & Biases project."""

    project: str = ""


class MlflowSettings(_Table, frozen=True):
    """[mlflow]: a run of an MLflow experiment."""

    uri: str = ""
    experiment: str = "meshscope"


class WatchSettings(_Table, frozen=True):
    """All tables of the file."""

    watch: LookSettings = LookSettings()
    alarms: AlarmSettings = AlarmSettings()
    thresholds: dict[str, float] = field(default_factory=dict)
    """Limits of rules, as of `meshscope report --thresholds`."""
    trace: TraceSettings = TraceSettings()
    log: LogSettings = LogSettings()
    webhook: HookSettings = HookSettings()
    slack: HookSettings = HookSettings()
    on_finding: CommandSettings = CommandSettings()
    prometheus: PrometheusSettings = PrometheusSettings()
    otel: OtelSettings = OtelSettings()
    tensorboard: TensorboardSettings = TensorboardSettings()
    wandb: WandbSettings = WandbSettings()
    mlflow: MlflowSettings = MlflowSettings()


_SINK_KEYS = {
    "webhook": "url",
    "slack": "url",
    "on_finding": "command",
    "prometheus": "port",
    "otel": "endpoint",
    "tensorboard": "folder",
    "wandb": "project",
    "mlflow": "uri",
}
"""What each sink cannot do without: a table without it would tell nobody, and say nothing."""


def read_settings(file: Path | None, flags: dict[str, dict[str, object]]) -> WatchSettings:
    """The file's, with what flags say (table to key to value) above it. UsageError says what is
    wrong and where."""
    given: dict[str, object] = {} if file is None else _read_file(file)
    for table, values in flags.items():
        if values:
            there = given.get(table, {})
            given[table] = {**(there if isinstance(there, dict) else {}), **values}
    try:
        settings = msgspec.convert(given, WatchSettings)
        parse_severity(settings.alarms.min_severity)
        parse_severity(settings.trace.min_severity)
        _check_sinks(given)
        _check_codes(settings.alarms.ignore)
        _check_thresholds(settings.thresholds)
    except (msgspec.ValidationError, ValueError) as error:
        where = "the flags" if file is None else str(file)
        raise UsageError(f"{where}: {error}; docs/watching.md lists all settings") from error
    return settings


def _check_sinks(given: dict[str, object]) -> None:
    for table, key in _SINK_KEYS.items():
        values = given.get(table)
        if isinstance(values, dict) and values.get(key, "") == "":
            raise ValueError(f"[{table}] has no {key}; without one nothing is told there")


def _check_codes(codes: tuple[str, ...]) -> None:
    known = RULES.keys() | WATCH_CODES
    unknown = [code for code in codes if code not in known]
    if unknown:
        raise ValueError(f"[alarms] ignore: there is no code {unknown[0]!r}; `meshscope rules`")


def _check_thresholds(limits: dict[str, float]) -> None:
    try:
        choose_thresholds(list_thresholds(), assignments=[f"{k}={v}" for k, v in limits.items()])
    except UsageError as error:
        raise ValueError(f"[thresholds]: {error}") from error


def _read_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
