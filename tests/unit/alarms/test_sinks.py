"""Sinks that need no package, against real receivers on loopback."""

import json
import os
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jsonschema
import pytest

from meshscope.alarms.disk_queue import DiskQueue
from meshscope.alarms.sample import Sample, StandingAlarm
from meshscope.alarms.settings import HookSettings
from meshscope.alarms.sinks.command import CommandSink
from meshscope.alarms.sinks.log import LogSink
from meshscope.alarms.sinks.prometheus import PrometheusSink
from meshscope.alarms.sinks.slack import format_message
from meshscope.alarms.sinks.webhook import WebhookSink
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.errors import UsageError
from meshscope.report.alarm_event import AlarmEvent, EventKind

SCHEMA = Path(__file__).parents[3] / "docs" / "schemas" / "meshscope-alarm.schema.json"


def make_event(number: int = 1, **fields: object) -> AlarmEvent:
    given = {
        "event": EventKind.RAISED, "id": f"ST001-5-{number}", "run": "runs/a", "name": "train",
        "attempt": 0, "code": "ST001", "severity": Severity.HIGH,
        "title": "rank 5 is slow in forward", "summary": "it takes 15 ms more",
        "change": "Replace the host.", "ranks": (5,), "hosts": ("node0",), "saved_ns": 14e6,
        "step_ns": 124e6, "saved_ratio": 14 / 124, "confidence": "p < 1e-9", "step": 200,
        "since_unix_ns": 1, "told_unix_ns": 2, "reason": "",
    }  # fmt: skip
    return AlarmEvent(**{**given, **fields})  # type: ignore[arg-type]


def make_sample(**fields: object) -> Sample:
    given = {
        "name": 'a "b"\\c', "unix_ns": time.time_ns(), "state": "live", "attempt": 0, "step": 120,
        "step_ns": 1.1e8, "steps_per_s": 9.0, "tokens_per_s": None, "age_s": 0.5, "num_ranks": 8,
        "world_size": 8, "signals": {"loss": 2.5}, "watcher_cpu_s": 1.5,
        "alarms": (StandingAlarm(code="ST001", severity=Severity.HIGH, rank=5, saved_ratio=0.1),),
    }  # fmt: skip
    return Sample(**{**given, **fields})  # type: ignore[arg-type]


class Receiver:
    """Answers with `status` and keeps what came."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.got: list[dict[str, object]] = []
        self.tokens: list[str | None] = []


@contextmanager
def receive(receiver: Receiver, port: int = 0) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if receiver.status == 200:
                receiver.got.append(json.loads(body))
                receiver.tokens.append(self.headers["Authorization"])
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def wait_until(is_so) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_receiver_that_is_down_loses_nothing_and_blocks_nothing(tmp_path: Path) -> None:
    receiver = Receiver()
    with receive(receiver) as port:
        pass  # it is gone again: nobody listens on its port
    settings = HookSettings(
        url=f"http://127.0.0.1:{port}/", queue=str(tmp_path / "queue"), retry_s=0.05
    )
    sink = WebhookSink(settings, tmp_path)
    for number in range(20):
        sink.tell(make_event(number))
    assert sink.num_waiting == 20
    wait_until(lambda: any("kept on disk" in text for text in sink.problems()))
    sink.close()  # the watcher ends while the receiver is down
    again = WebhookSink(settings, tmp_path)
    again.tell(make_event(20))
    with receive(receiver, port):
        wait_until(lambda: len(receiver.got) == 21)
        wait_until(lambda: again.num_waiting == 0)
        again.close()
    assert [one["id"] for one in receiver.got] == [f"ST001-5-{n}" for n in range(21)]
    schema = json.loads(SCHEMA.read_text())
    for one in receiver.got:
        jsonschema.validate(one, schema)


def test_a_refused_message_goes_and_is_told_and_a_busy_receiver_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    receiver = Receiver(503)
    with receive(receiver) as port:
        settings = HookSettings(
            url=f"http://127.0.0.1:{port}/",
            queue=str(tmp_path),
            retry_s=0.02,
            headers={"Authorization": "env:TOKEN"},
        )
        sink = WebhookSink(settings, tmp_path)
        sink.tell(make_event(1))
        wait_until(lambda: any("503" in text for text in sink.problems()))
        assert sink.num_waiting == 1
        receiver.status = 200
        wait_until(lambda: sink.num_waiting == 0)
        receiver.status = 404
        sink.tell(make_event(2))
        wait_until(lambda: any("refused with 404" in text for text in sink.problems()))
        assert sink.num_waiting == 0
        sink.close()
    assert [one["id"] for one in receiver.got] == ["ST001-5-1"]
    assert receiver.tokens == ["secret"]


def test_the_queue_is_bounded_and_belongs_to_one_watcher(tmp_path: Path) -> None:
    queue = DiskQueue(tmp_path, max_messages=3)
    for number in range(5):
        queue.put(b"%d" % number)
    assert (len(queue), queue.num_dropped, queue.first()) == (3, 2, (2, b"2"))
    with pytest.raises(UsageError, match="another watcher uses the queue"):
        DiskQueue(tmp_path, max_messages=3)
    queue.close()
    again = DiskQueue(tmp_path, max_messages=3)
    again.done(2)
    assert again.first() == (3, b"3")
    again.close()


@pytest.mark.parametrize("url", ["ftp://x/", "file:///etc/passwd", "http://", "x"])
def test_only_http_urls_are_taken(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match="is no http"):
        WebhookSink(HookSettings(url=url, queue=str(tmp_path)), tmp_path)


def test_slack_messages_mention_nobody() -> None:
    event = make_event(title="rank 5 <!channel> & <http://x|y>")
    message = json.loads(format_message(event))
    assert message["text"] == "High: rank 5 &lt;!channel&gt; &amp; &lt;http://x|y&gt; (train)"
    (attachment,) = message["attachments"]
    assert {"title": "Saves", "value": "14.0 ms of 124 ms a step (11 %)", "short": True} in (
        attachment["fields"]
    )


def test_a_command_gets_the_event_and_no_shell_reads_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, pathlib\n"
        f"path = pathlib.Path({str(tmp_path / 'got')!r})\n"
        "path.write_text(sys.stdin.read() + str(sys.argv[1:]))\n"
    )
    sink = CommandSink(f"{sys.executable} {script} '$(touch x)' ';' y", timeout_s=60)
    sink.tell(make_event(title="; touch z"))
    sink.close()
    line, rest = (tmp_path / "got").read_text().split("\n")
    assert json.loads(line)["title"] == "; touch z"
    assert rest == "['$(touch x)', ';', 'y']"
    assert sink.problems() == []


def test_a_command_that_does_not_end_is_ended_with_what_it_started(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, pathlib\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    sink = CommandSink(f"{sys.executable} {script}", timeout_s=2)
    begun = time.monotonic()
    sink.tell(make_event())
    assert time.monotonic() - begun < 1  # telling never waits
    wait_until(lambda: any("without an answer" in text for text in sink.problems()))
    sink.close()
    pid_file = tmp_path / "pid"
    if pid_file.exists():
        wait_until(lambda: not _lives(int(pid_file.read_text())))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2][:4]


def test_a_command_that_is_not_there_is_told() -> None:
    sink = CommandSink("/no/such/program", timeout_s=5)
    sink.tell(make_event())
    sink.close()
    assert sink.problems() == ["on_finding: /no/such/program: No such file or directory"]


def test_metrics_are_served_on_loopback() -> None:
    sink = PrometheusSink(port=0, host="127.0.0.1")
    sink.tell(make_event())
    sink.measure(make_sample())
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    with pytest.raises(UsageError, match="cannot be listened on"):
        PrometheusSink(port=sink.port, host="127.0.0.1")
    sink.close()
    run = r'run="a \\"b\\"\\\\c"'.replace("\\\\", "\\")
    assert f"meshscope_step{{{run}}} 120.0\n" in text
    assert f'meshscope_signal{{{run},name="loss"}} 2.5\n' in text
    assert re.search(r'meshscope_alarm\{.*code="ST001",severity="high",rank="5"\} 1.0\n', text)


def test_log_lines_say_what_to_do_and_json_is_one_line() -> None:
    lines: list[str] = []
    sink = LogSink(lines.append, every_s=60)
    sink.tell(make_event())
    sink.tell(make_event(event=EventKind.CLEARED, reason="it is no longer seen"))
    sink.measure(make_sample(name="train"))
    sink.measure(make_sample(name="train"))
    LogSink(lines.append, every_s=60, as_json=True).tell(
        make_event(saved_ns=Unavailable("no price"), title="a\nb\u202e")
    )
    assert lines[:3] == [
        "1970-01-01T00:00:00Z RAISED high ST001 rank 5 is slow in forward (node0): saves 14.0 ms "
        "of 124 ms a step (11 %). Replace the host.",
        "1970-01-01T00:00:00Z CLEARED ST001 rank 5 is slow in forward after 1.00 ns: it is no "
        "longer seen",
        lines[2],
    ]
    assert lines[2].endswith("train live step 120 9 steps/s loss 2.5 8 ranks: 1 alarm")
    assert "\n" not in lines[3]
    assert "\u202e" not in lines[3]
    assert json.loads(lines[3])["saved_ns"] == {"unavailable": "no price"}
    assert len(lines) == 4
