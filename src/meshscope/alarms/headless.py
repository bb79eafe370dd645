"""The loop of `meshscope watch --headless`: looks, and tells all sinks, until the run is over."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from msgspec.structs import replace

from meshscope.alarms.kept_book import KeptBook
from meshscope.alarms.settings import WatchSettings
from meshscope.alarms.sinks.choice import open_sinks
from meshscope.alarms.sinks.sink import Sink
from meshscope.alarms.watcher import Look, Watcher

Write = Callable[[str], None]


def watch_headless(
    path: Path, settings: WatchSettings, *, write: Write, warn: Write, as_json: bool, once: bool
) -> None:
    """Until the run is over, or SIGTERM; with `once` after two looks, and what one saw is told."""
    if once:
        settings = replace(settings, alarms=replace(settings.alarms, confirm=1))
    kept = None if once else KeptBook(path, settings)
    watcher = Watcher(path, settings, kept=kept)
    try:
        sinks = open_sinks(settings, path, write, as_json=as_json)
    except BaseException:
        if kept is not None:
            kept.close()
        raise
    for sink in sinks:
        if sink.name == "prometheus":
            warn(f"metrics at http://{settings.prometheus.host}:{getattr(sink, 'port', 0)}/metrics")
    stop = threading.Event()
    with _StopOnTerm(stop):
        try:
            _loop(watcher, sinks, stop, warn, once=once)
        finally:
            for sink in sinks:
                sink.close()
                for problem in sink.problems():
                    warn(problem)
            if kept is not None:
                kept.close()


def _loop(
    watcher: Watcher, sinks: list[Sink], stop: threading.Event, warn: Write, *, once: bool
) -> None:
    last_notes: tuple[str, ...] = ()
    num_looks = 0
    while not stop.is_set():
        look = watcher.look()
        num_looks += 1
        _tell(look, sinks, warn)
        watcher.keep_told()
        if look.notes != last_notes:
            for note in look.notes:
                warn(note)
            last_notes = look.notes
        if look.is_over or (once and num_looks >= 2):
            return
        stop.wait(watcher.wait_s)


def _tell(look: Look, sinks: list[Sink], warn: Write) -> None:
    for sink in sinks:
        for event in look.events:
            sink.tell(event)
        if look.sample is not None:
            sink.measure(look.sample)
        for problem in sink.problems():
            warn(problem)


class _StopOnTerm:
    """SIGTERM ends the loop in order; where signals cannot be handled nothing is changed."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._before: signal.Handlers | Callable[[int, FrameType | None], object] | int | None
        self._is_set = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda number, frame: self._stop.set())
            self._is_set = True

    def __exit__(self, *error: object) -> None:
        if self._is_set:
            signal.signal(signal.SIGTERM, self._before)
