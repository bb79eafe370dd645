"""A program that is started for every event, with the event as JSON on its standard input."""

import contextlib
import os
import shlex
import signal
import subprocess

from meshscope.alarms.sample import Sample
from meshscope.alarms.sinks.background import Background
from meshscope.errors import UsageError
from meshscope.report.alarm_event import DOCUMENT, SHAPES, AlarmEvent
from meshscope.report.encode import encode_line

_MAX_SHOWN = 200


class CommandSink:
    """No shell reads the command: nothing from a run is ever a part of it."""

    name = "on_finding"

    def __init__(self, command: str, *, timeout_s: float) -> None:
        try:
            self._argv = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"--on-finding: {command!r} is no command: {error}") from error
        if not self._argv:
            raise UsageError("--on-finding: the command is empty")
        self._timeout_s = timeout_s
        self._background = Background(self.name, close_s=timeout_s + 1)

    def tell(self, event: AlarmEvent) -> None:
        line = encode_line(*DOCUMENT, event, SHAPES) + "\n"
        self._background.run(lambda: self._start(line.encode()))

    def measure(self, sample: Sample) -> None:
        """Events only."""

    def problems(self) -> list[str]:
        return self._background.problems()

    def close(self) -> None:
        self._background.close()

    def _start(self, line: bytes) -> None:
        try:
            process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._background.note(f"{self._argv[0]}: {error.strerror}")
            return
        try:
            _, errors = process.communicate(line, timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it started
            process.communicate()
            self._background.note(f"ended after {self._timeout_s:g} s without an answer")
            return
        if process.returncode:
            text = errors.decode(errors="replace").strip()[-_MAX_SHOWN:]
            self._background.note(f"exit code {process.returncode}: {text}")
