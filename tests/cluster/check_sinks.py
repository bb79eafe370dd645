"""What `meshscope watch --headless` sends, read back with the packages that others read it with."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]
from synthetic_run import Fault, Job, LiveRun  # noqa: E402

NUM_RANKS, SLOW = 16, 11
STEPS_PER_S = 10
FIRST_SLOW_STEP = 60


@contextmanager
def record(folder):
    """A run that is being recorded by the real writer, with a rank that becomes slow."""
    fault = Fault(rank=SLOW, first_step=FIRST_SLOW_STEP, ratio=2.0)
    run = LiveRun(folder, Job(num_ranks=NUM_RANKS, faults=(fault,)))
    for _ in range(FIRST_SLOW_STEP):
        run.write_step()
    stop = threading.Event()

    def write():
        while not stop.wait(1 / STEPS_PER_S):
            run.write_step()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield run
    finally:
        stop.set()
        writer.join()
        run.close()


def watch(run, *flags, until, config="", **environment):
    """Watches until `until(lines)` is true, lets the run end, and gives all lines."""
    settings = run.parent / "watch.toml"
    settings.write_text(f"[watch]\nevery_s = 0.5\n{config}", encoding="utf-8")
    program = "from meshscope.cli import main; main()"
    command = [sys.executable, "-c", program, "watch", str(run), "--headless", "--json", "--config"]
    lines, errors = [], run.parent / "errors.txt"
    with record(run), errors.open("wb") as said:
        process = subprocess.Popen(
            [*command, str(settings), *flags],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, **environment},
        )
        reader = threading.Thread(target=lambda: lines.extend(process.stdout))
        reader.start()
        end = time.monotonic() + 150
        try:
            while not until(lines) and time.monotonic() < end:
                assert process.poll() is None, errors.read_text()
                time.sleep(0.2)
        except BaseException:
            process.kill()
            raise
        told = until(lines)
    process.wait(timeout=90)
    reader.join()
    assert told, errors.read_text()
    assert process.returncode == 0, errors.read_text()
    return [json.loads(line) for line in lines]


def is_raised(lines):
    return any('"raised"' in line for line in lines)


@contextmanager
def receive(answer):
    """An HTTP server on loopback that hands POSTs to `answer(path, headers, body)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            content = answer(self.path, self.headers, body)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def check_event(event):
    assert event["code"].startswith("ST")
    assert event["ranks"] == [{"first": SLOW, "last": SLOW}]
    assert event["saved_ratio"] > 0.1


def test_prometheus_scrapes_what_the_watcher_knows(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    from conftest import free_port

    port, scraped = free_port(), []

    def scrape(lines):
        if not is_raised(lines):
            return False
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            scraped.append(answer.read().decode())
        return "meshscope_alarm{" in scraped[-1]

    events = watch(tmp_path / "run", "--prometheus", str(port), until=scrape)
    check_event(events[0])
    families = {one.name: one for one in text_string_to_metric_families(scraped[-1])}
    assert all(one.documentation and one.type in ("gauge", "counter") for one in families.values())
    (step,) = families["meshscope_step"].samples
    assert step.value > FIRST_SLOW_STEP
    (ranks,) = families["meshscope_ranks"].samples
    assert ranks.value == NUM_RANKS
    state = {one.labels["state"]: one.value for one in families["meshscope_state"].samples}
    assert sum(state.values()) == 1
    (alarm,) = families["meshscope_alarm"].samples
    assert alarm.labels["rank"] == str(SLOW)
    (raised, *_) = families["meshscope_events"].samples
    assert raised.value >= 1
    assert 1.5 < families["meshscope_signal"].samples[0].value < 3.5


def test_an_otlp_collector_gets_protobuf_it_can_decode(tmp_path):
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
        ExportMetricsServiceResponse,
    )

    got = []

    def answer(path, headers, body):
        assert path == "/v1/metrics"
        assert headers["Content-Type"] == "application/x-protobuf"
        if headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        got.append(ExportMetricsServiceRequest.FromString(body))
        return ExportMetricsServiceResponse().SerializeToString()

    with receive(answer) as port:
        events = watch(
            tmp_path / "run",
            "--otlp",
            f"http://127.0.0.1:{port}/v1/metrics",
            config="[otel]\nevery_s = 1\n",
            until=is_raised,
        )
    last = {}
    for request in got:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    data = metric.gauge if metric.HasField("gauge") else metric.sum
                    last[metric.name] = data.data_points
    assert last["meshscope.step"][0].as_double > FIRST_SLOW_STEP
    assert 0.05 < last["meshscope.step_seconds"][0].as_double < 0.5
    assert sum(point.as_int for point in last["meshscope.events"]) == len(events)
    assert {point.attributes[1].value.string_value for point in last["meshscope.signal"]} == {
        "loss"
    }


def test_tensorboard_reads_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = watch(tmp_path / "run", "--tensorboard", str(tmp_path / "tb"), until=is_raised)
    check_event(events[0])
    read = EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    scalars = read.Scalars("meshscope/step_seconds")
    assert len(scalars) > 3
    assert all(0.05 < one.value < 0.5 for one in scalars)
    steps = [one.step for one in scalars]
    assert steps == sorted(steps)
    assert {"meshscope/loss", "meshscope/alarms"} <= set(read.Tags()["scalars"])
    text = read.Tensors("meshscope/alarms_text")[0].tensor_proto.string_val[0].decode()
    assert f"rank {SLOW}" in text


def read_log(data):
    """The records of W&B's file: 7 bytes, then LevelDB's log (blocks of 32 KiB; each part has a
    checksum, a length and whether it is whole, first, middle or last)."""
    whole, first, middle, last = 1, 2, 3, 4
    assert data[:4] == b":W&B"
    at, held = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind not in (whole, first, middle, last):
            return
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (whole, last):
            yield held
            held = b""


def test_wandb_keeps_the_numbers_offline(tmp_path):
    from wandb.proto import wandb_internal_pb2

    events = watch(
        tmp_path / "run",
        "--wandb",
        "project",
        until=is_raised,
        WANDB_MODE="offline",
        WANDB_DIR=str(tmp_path),
        WANDB_SILENT="true",
    )
    check_event(events[0])
    (file,) = tmp_path.rglob("*.wandb")
    rows = []
    for data in read_log(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json)
                 for item in record.history.item}
            )  # fmt: skip
    told = [row["meshscope/alarm"] for row in rows if "meshscope/alarm" in row]
    assert len(told) == len(events)
    assert f"rank {SLOW}" in told[0]
    paces = [row["meshscope/step_seconds"] for row in rows if "meshscope/step_seconds" in row]
    assert len(paces) > 3
    assert all(0.05 < pace < 0.5 for pace in paces)


def test_mlflow_has_the_metrics_and_the_alarm(tmp_path):
    events = watch(
        tmp_path / "run",
        "--mlflow",
        f"file://{tmp_path}/mlruns",
        until=is_raised,
        MLFLOW_ALLOW_FILE_STORE="true",
    )
    check_event(events[0])
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"file://{tmp_path}/mlruns")
    experiment = client.get_experiment_by_name("meshscope")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "meshscope/step_seconds")
    assert len(history) > 3
    assert all(0.05 < one.value < 0.5 for one in history)
    tags = [text for key, text in run.data.tags.items() if key.startswith("meshscope.alarm.")]
    assert [json.loads(tag)["event"] for tag in tags].count("raised") == 1


def test_a_webhook_that_is_down_at_first_gets_everything(tmp_path):
    from conftest import free_port

    port, got = free_port(), []

    def answer(path, headers, body):
        got.append(json.loads(body))
        return b""

    class Late(ThreadingHTTPServer):
        allow_reuse_address = True

    servers = []

    def come_late(lines):
        if is_raised(lines) and not servers:
            time.sleep(2)  # two tries at least fail

            class Handler(BaseHTTPRequestHandler):
                def do_POST(self):
                    answer(
                        self.path,
                        self.headers,
                        self.rfile.read(int(self.headers["Content-Length"])),
                    )
                    self.send_response(204)
                    self.end_headers()

                def log_message(self, *_):
                    pass

            servers.append(Late(("127.0.0.1", port), Handler))
            threading.Thread(target=servers[0].serve_forever, daemon=True).start()
        return bool(got)

    events = watch(
        tmp_path / "run",
        "--webhook",
        f"http://127.0.0.1:{port}/alarms",
        config=f"[webhook]\nqueue = '{tmp_path}/queue'\nretry_s = 0.3\n",
        until=come_late,
    )
    servers[0].shutdown()
    assert [one["id"] for one in got] == [one["id"] for one in events]
    assert not list((tmp_path / "queue").glob("*.json"))


@pytest.mark.parametrize("flag", ["--otlp", "--wandb", "--mlflow", "--tensorboard"])
def test_a_missing_package_is_told_with_its_pip_line(tmp_path, flag):
    program = (
        "import sys\n"
        "for name in ('opentelemetry', 'wandb', 'mlflow', 'tensorboard'):\n"
        "    sys.modules[name] = None\n"
        "from meshscope.cli import main; main()"
    )
    LiveRun(tmp_path / "run", Job(num_ranks=8)).close()
    command = [sys.executable, "-c", program, "watch", str(tmp_path / "run"), "--headless"]
    done = subprocess.run(
        [*command, flag, str(tmp_path / "x")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 4, done.stderr
    assert "pip install 'meshscope[" in done.stderr
