"""Alarms by HTTP POST. What a receiver does not take is kept on disk and sent again, in order.

Taken is any answer of 200 to 299. 408, 429, 5xx and no answer are tried again, with waits that
double up to a minute (or as `Retry-After` says); other answers mean that it will never be taken:
the message goes and the log says so. Redirects are not followed: a token would go with them.
"""

import hashlib
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from meshscope.alarms.disk_queue import DiskQueue
from meshscope.alarms.kept_book import choose_state_folder
from meshscope.alarms.sample import Sample
from meshscope.alarms.settings import HookSettings
from meshscope.errors import UsageError
from meshscope.report import format as form
from meshscope.report.alarm_event import DOCUMENT, SHAPES, AlarmEvent
from meshscope.report.encode import encode_line

_MAX_RETRY_S = 60.0
_MAX_ASKED_RETRY_S = 600.0
_CLOSE_S = 5.0
_AGAIN = frozenset((HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS))
Format = Callable[[AlarmEvent], bytes]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """None: the answer stands as it is."""


def format_document(event: AlarmEvent) -> bytes:
    return encode_line(*DOCUMENT, event, SHAPES).encode()


class WebhookSink:
    def __init__(
        self,
        settings: HookSettings,
        run: Path,
        *,
        name: str = "webhook",
        format_event: Format = format_document,
    ) -> None:
        self.name = name
        self._settings, self._format = settings, format_event
        self._headers = {"Content-Type": "application/json", "User-Agent": "meshscope"}
        self._headers |= {key: _read_value(name, value) for key, value in settings.headers.items()}
        _check_url(name, settings.url)
        folder = Path(settings.queue) if settings.queue else _choose_folder(settings.url, run)
        self._queue = DiskQueue(folder, max_messages=settings.max_queued)
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closed = False
        self._problems: list[str] = []
        self._is_down = False
        self._thread = threading.Thread(
            target=self._send_all, name=f"meshscope-{name}", daemon=True
        )
        self._thread.start()

    def tell(self, event: AlarmEvent) -> None:
        try:
            with self._lock:
                self._queue.put(self._format(event))
        except OSError as error:
            self._note(f"{event.id} is lost: it cannot be written: {error.strerror}")
        self._wake.set()

    def measure(self, sample: Sample) -> None:
        """Alarms only."""

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return len(self._queue)

    def problems(self) -> list[str]:
        with self._lock:
            found, self._problems = self._problems, []
            if self._queue.num_dropped:
                found.append(f"{self.name}: {self._queue.num_dropped} messages dropped: queue full")
                self._queue.num_dropped = 0
        return found

    def close(self) -> None:
        """What was not received stays on disk for the next watcher of this run."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(self._settings.timeout_s + _CLOSE_S)
        if not self._thread.is_alive():
            self._queue.close()

    def _note(self, text: str) -> None:
        with self._lock:
            if len(self._problems) < 10:
                self._problems.append(f"{self.name}: {form.clean_text(text)}")

    def _send_all(self) -> None:
        wait_s = self._settings.retry_s
        while True:
            with self._lock:
                message = self._queue.first()
            if message is None:
                if self._is_closed:
                    return
                self._wake.wait()
                self._wake.clear()
                continue
            retry_s = self._send(message[1])
            if retry_s is None:
                with self._lock:
                    self._queue.done(message[0])
                wait_s = self._settings.retry_s
                continue
            if self._is_closed:
                return
            self._pause(max(wait_s, retry_s))
            wait_s = min(2 * wait_s, _MAX_RETRY_S)

    def _pause(self, seconds: float) -> None:
        """New messages do not end it; closing does."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._is_closed:
            self._wake.wait(left)
            self._wake.clear()

    def _send(self, message: bytes) -> float | None:
        """None: done with it; else the seconds that the receiver asks to wait at least."""
        request = urllib.request.Request(
            self._settings.url, data=message, headers=self._headers, method="POST"
        )
        try:
            with self._opener.open(request, timeout=self._settings.timeout_s) as answer:
                answer.read(1024)
        except urllib.error.HTTPError as error:
            with error:
                if error.code not in _AGAIN and error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                    self._note(f"refused with {error.code} {error.reason}; the message is dropped")
                    return None
                self._note_down(f"{error.code} {error.reason}")
                return _read_retry(error.headers.get("Retry-After"))
        except (OSError, ValueError) as error:
            self._note_down(str(getattr(error, "reason", error)))
            return 0.0
        self._is_down = False
        return None

    def _note_down(self, why: str) -> None:
        if not self._is_down:
            self._note(f"not received ({why}); kept on disk and sent again")
        self._is_down = True


def _read_retry(text: str | None) -> float:
    return min(float(text), _MAX_ASKED_RETRY_S) if text and text.isdecimal() else 0.0


def _read_value(sink: str, value: str) -> str:
    if not value.startswith("env:"):
        return value
    name = value.removeprefix("env:")
    if name not in os.environ:
        raise UsageError(f"[{sink}] headers: the environment has no {name}")
    return os.environ[name]


def _check_url(sink: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"[{sink}] url: {form.clean_text(url)!r} is no http:// or https:// URL")


def _choose_folder(url: str, run: Path) -> Path:
    key = hashlib.sha256(f"{url}\n{run.resolve()}".encode()).hexdigest()[:16]
    return choose_state_folder("outbox") / key
