"""/metrics in Prometheus' text format, on the loopback interface; nothing needs to be installed."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from meshscope.alarms.sample import Sample
from meshscope.errors import UsageError
from meshscope.page.run_state import StateKind
from meshscope.report.alarm_event import AlarmEvent

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_HELP = {
    "step": ("gauge", "Last step that all ranks finished."),
    "step_seconds": ("gauge", "Median time of the steps since the last look."),
    "steps_per_second": ("gauge", "Pace of the last steps."),
    "tokens_per_second_of_one_rank": ("gauge", "Input tokens of the first rank."),
    "last_step_age_seconds": ("gauge", "Since a step was last new."),
    "ranks": ("gauge", "Ranks that record."),
    "world_size": ("gauge", "Ranks of the job."),
    "attempt": ("gauge", "Launches of the job before this one."),
    "state": ("gauge", "1 for the state that the run is in."),
    "signal": ("gauge", "Newest value of a signal of training."),
    "alarms": ("gauge", "Alarms that stand, by severity."),
    "alarm": ("gauge", "1 for every alarm that stands."),
    "alarm_saved_ratio": ("gauge", "Share of a step that is saved without an alarm's cause."),
    "events_total": ("counter", "Events of alarms since the watcher began."),
    "watcher_cpu_seconds_total": ("counter", "CPU time of the watcher."),
}


class PrometheusSink:
    name = "prometheus"

    def __init__(self, *, port: int, host: str) -> None:
        self._lock = threading.Lock()
        self._sample: Sample | None = None
        self._events: dict[tuple[str, str], int] = {}
        sink = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                is_found = self.path.partition("?")[0] == "/metrics"
                body = sink.render().encode() if is_found else b"see /metrics\n"
                self.send_response(200 if is_found else 404)
                self.send_header("Content-Type", CONTENT_TYPE if is_found else "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Scrapes are no news."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise UsageError(
                f"--prometheus: {host}:{port} cannot be listened on: {error.strerror}; "
                "give another port, or 0 for any"
            ) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="meshscope-prometheus", daemon=True
        )
        self._thread.start()

    def tell(self, event: AlarmEvent) -> None:
        key = (event.event.value, event.severity.word)
        with self._lock:
            self._events[key] = self._events.get(key, 0) + 1

    def measure(self, sample: Sample) -> None:
        with self._lock:
            self._sample = sample

    def problems(self) -> list[str]:
        return []

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def render(self) -> str:
        with self._lock:
            sample, events = self._sample, dict(self._events)
        lines: dict[str, list[str]] = {}
        if sample is not None:
            for name, labels, value in _list_values(sample, events):
                lines.setdefault(name, []).append(_write_line(name, labels, value))
        text = []
        for name, written in lines.items():
            kind, what = _HELP[name]
            # A counter's family has the name of its series in this format.
            text += [f"# HELP meshscope_{name} {what}", f"# TYPE meshscope_{name} {kind}", *written]
        return "\n".join(text) + "\n" if text else ""


def _list_values(
    sample: Sample, events: dict[tuple[str, str], int]
) -> Iterator[tuple[str, dict[str, str], float]]:
    run = {"run": sample.name}
    curves = dict(sample.values())
    if sample.step is not None:
        yield "step", run, float(sample.step)
    yield "world_size", run, float(sample.world_size)
    yield "attempt", run, float(sample.attempt)
    for name, value in curves.items():
        if name in sample.signals:
            yield "signal", {**run, "name": name}, value
        elif name in _HELP and name != "alarms":
            yield name, run, value
    for kind in StateKind:
        yield "state", {**run, "state": kind.value}, float(kind.value == sample.state)
    by_severity: dict[str, int] = {"low": 0, "medium": 0, "high": 0, "critical": 0}
    for one in sample.alarms:
        by_severity[one.severity.word] += 1
    for word, number in by_severity.items():
        yield "alarms", {**run, "severity": word}, float(number)
    seen: set[tuple[str, str]] = set()
    for one in sample.alarms:
        rank = "" if one.rank is None else str(one.rank)
        if (one.code, rank) in seen:
            continue
        seen.add((one.code, rank))
        labels = {**run, "code": one.code, "severity": one.severity.word, "rank": rank}
        yield "alarm", labels, 1.0
        if one.saved_ratio is not None:
            yield "alarm_saved_ratio", {**run, "code": one.code, "rank": rank}, one.saved_ratio
    for (event, severity), number in sorted(events.items()):
        yield "events_total", {**run, "event": event, "severity": severity}, float(number)
    yield "watcher_cpu_seconds_total", run, sample.watcher_cpu_s


def _write_line(name: str, labels: dict[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"meshscope_{name}{{{pairs}}} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
