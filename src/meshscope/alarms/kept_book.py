"""What a watcher told, on disk, so that the next watcher of the run does not tell it again.

One file for a run and the receivers of its alarms: who adds a receiver gets what stands told anew.
It is written after receivers have an event, so that a watcher that is killed in between tells once
more rather than never. One watcher at a time: a second one beside it begins without.
"""

import fcntl
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from meshscope.alarms.book import Alarm, AlarmBook
from meshscope.alarms.settings import WatchSettings
from meshscope.store.write.manifest import replace_whole

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAlarms:
    """Told alarms of one attempt; their moments are seconds since 1970."""

    version: int
    attempt: str
    """Another text for another attempt of the job, or another run at the same path."""
    number: int
    alarms: tuple[Alarm, ...]


class KeptBook:
    """The file; without one where it cannot be made or another watcher has it (`problem`)."""

    def __init__(self, run: Path, settings: WatchSettings) -> None:
        self.problem: str | None = None
        self._path = choose_state_folder("alarms") / f"{_name_book(run, settings)}.json"
        self._lock: int | None = None
        self._written: object = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            self._give_up(error)
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock = lock
        except OSError:
            os.close(lock)
            self.problem = "another watcher of this run tells the same receivers: both tell all"

    def load(self, book: AlarmBook, now_s: float) -> str | None:
        """Puts what was told into an empty book; the attempt it was of, None without any."""
        try:
            data = self._path.read_bytes() if self._lock is not None else b""
            kept = msgspec.json.decode(data, type=KeptAlarms) if data else None
        except (OSError, msgspec.DecodeError):  # none yet, or of another version
            return None
        if kept is None or kept.version != _VERSION:
            return None
        book.restore(kept.alarms, kept.number, now_s - time.time())
        return kept.attempt

    def save(self, book: AlarmBook, attempt: str, now_s: float) -> None:
        """Where something else stands than before; what cannot be written is noted."""
        if self._lock is None or self._written == (key := (attempt, book.describe_told())):
            return
        alarms, number = book.list_told(time.time() - now_s)
        kept = KeptAlarms(version=_VERSION, attempt=attempt, number=number, alarms=alarms)
        try:
            replace_whole(self._path, msgspec.json.encode(kept))
        except OSError as error:
            self._give_up(error)
            return
        self._written = key

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _give_up(self, error: OSError) -> None:
        self.close()
        self.problem = (
            f"what was told cannot be kept in {self._path.parent} ({error.strerror}): the next "
            "watcher tells it again"
        )


def choose_state_folder(name: str) -> Path:
    """In the user's folder for state: the run may be on a disk that is only read."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "meshscope" / name


def _name_book(run: Path, settings: WatchSettings) -> str:
    receivers = (
        settings.webhook.url,
        settings.slack.url,
        settings.on_finding.command,
        settings.prometheus.port,
        settings.otel.endpoint,
        settings.tensorboard.folder,
        settings.wandb.project,
        settings.mlflow.uri,
    )
    text = "\n".join(map(str, (run.resolve(), *receivers)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
