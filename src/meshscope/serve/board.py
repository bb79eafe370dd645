"""What the dashboard knows: runs, their lines, who follows which, and who analyses what.

A run that goes on is followed by one process, and asked about there; all others are analysed by a
second one.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from meshscope.errors import MeshscopeError, RunNotFound
from meshscope.page.run_state import StateKind
from meshscope.serve.answer import Answer
from meshscope.serve.answers import Answers
from meshscope.serve.documents import RunRow, RunSummary
from meshscope.serve.feed import Feed
from meshscope.serve.rows import UNREADABLE, Rows
from meshscope.serve.runs import Runs, ServedRun
from meshscope.serve.worker import Heard, Worker

MAX_FOLLOWED = 8
"""Runs at once; the one that nobody asked about for longest is let go."""
_KEPT_S = 60.0
"""A run that nobody listens to is followed for so long."""
_MAX_AGE_NS = 3600 * 10**9
"""A run without an end whose last step is older was killed: it is not followed until asked."""
_SUMMARY_S = 1.0
"""Between two runs that are analysed for the list."""
_MAX_SUMMARIES = 200
_KEPT = frozenset(("page", "report", "matrix", "timeline", "series", "memory"))
"""What is the same until the next report."""


class Board:
    """Lives in one event loop: `start` and `stop` are called there."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises RunNotFound for what is no folder."""
        self.server = token_hex(4)
        """Tells this server from one that was started later."""
        self.runs = Runs(folders)
        self.rows = Rows(self.runs.roots)
        self.live = Worker("live", self._hear)
        self.archive = Worker("archive", self._hear)
        self._feeds: dict[str, Feed] = {}
        self._asked: dict[str, float] = {}
        self._ids: dict[str, str] = {}
        """Path to id of the runs that are followed."""
        self._summarised: set[str] = set()
        self._answers = Answers()
        self._tasks: list[asyncio.Task[None]] = []

    # --- lifetime ---------------------------------------------------------------------------------

    async def start(self) -> None:
        self.archive.start()
        self.live.start()
        self._tasks = [asyncio.create_task(self._let_go()), asyncio.create_task(self._summarise())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for feed in self._feeds.values():
            feed.close()
        for worker in (self.live, self.archive):
            worker.stop()

    # --- runs -------------------------------------------------------------------------------------

    async def list_rows(self) -> tuple[RunRow, ...]:
        return await asyncio.to_thread(lambda: self.rows.read(self.runs.list_runs()))

    async def find(self, run_id: str) -> tuple[ServedRun, RunRow]:
        """Raises RunNotFound for an id that is not in the list, and for a run that cannot be
        read."""
        run = await asyncio.to_thread(self.runs.find, run_id)
        if run is None:
            raise RunNotFound("there is no run of this id; the list of runs has all of them")
        row = await asyncio.to_thread(self.rows.read_one, run)
        if row.state == UNREADABLE:
            raise MeshscopeError(row.problem or "it cannot be read")
        return run, row

    async def ask(self, run_id: str, method: str, *arguments: Any) -> Answer:
        run, row = await self.find(run_id)
        if not is_going(row):
            answer: Answer = await self.archive.call(method, str(run.path), *arguments)
            return answer
        feed = self.feed(run)
        if method not in _KEPT:
            answer = await self.live.call(method, str(run.path), *arguments)
            return answer
        # Many ask the same of a run that many watch: it is asked for once per report.
        key = (run_id, method, arguments)
        return await self._answers.get(
            key, feed.num_reports, lambda: self.live.call(method, str(run.path), *arguments)
        )

    async def compare(self, a: str, b: str) -> Answer:
        first, second = (await self.find(a))[0], (await self.find(b))[0]
        names = (first.name, second.name)
        if names[0] == names[1]:
            names = (first.folder, second.folder)
        answer: Answer = await self.archive.call(
            "compare", str(first.path), str(second.path), names
        )
        return answer

    # --- live -------------------------------------------------------------------------------------

    def feed(self, run: ServedRun) -> Feed:
        """The events of a run, which is followed from now on."""
        self._asked[run.id] = time.monotonic()
        feed = self._feeds.get(run.id)
        if feed is None:
            self._make_room()
            feed = self._feeds[run.id] = Feed()
            self._ids[str(run.path)] = run.id
            self.live.follow(str(run.path))
        return feed

    def _make_room(self) -> None:
        while len(self._feeds) >= MAX_FOLLOWED:
            free = [one for one, feed in self._feeds.items() if not feed.num_listeners]
            oldest = min(free or self._feeds, key=lambda one: self._asked.get(one, 0.0))
            self._drop(oldest)

    def _drop(self, run_id: str) -> None:
        feed = self._feeds.pop(run_id)
        self._asked.pop(run_id, None)
        self.rows.note_moment(run_id, None)
        for path in [path for path, one in self._ids.items() if one == run_id]:
            del self._ids[path]
            self.live.unfollow(path)
        feed.close()

    async def _let_go(self) -> None:
        while True:
            await asyncio.sleep(_KEPT_S / 6)
            now = time.monotonic()
            for run_id, feed in list(self._feeds.items()):
                is_asked = now - self._asked.get(run_id, 0.0) < _KEPT_S
                if not feed.num_listeners and not is_asked:
                    self._drop(run_id)

    def _hear(self, heard: Heard) -> None:
        run_id = self._ids.get(heard.path)
        if run_id is None:
            return
        if heard.moment is not None:
            self.rows.note_moment(run_id, heard.moment)
        elif heard.summary is not None:
            self.rows.note_summary(run_id, heard.summary)
        else:
            self._feeds[run_id].publish(heard.kind, heard.data)

    async def _summarise(self) -> None:
        """Analyses runs that ended one after another, for the list, while there is time."""
        while True:
            await asyncio.sleep(_SUMMARY_S)
            todo = [one for one in self.rows.list_unknown() if one not in self._summarised]
            run = self.runs.find(todo[0]) if todo else None
            if run is None or len(self._summarised) >= _MAX_SUMMARIES:
                continue
            self._summarised.add(run.id)
            begun = time.monotonic()
            try:
                summary: RunSummary = await self.archive.call("summary", str(run.path))
            except MeshscopeError:
                continue
            self.rows.note_summary(run.id, summary)
            await asyncio.sleep(time.monotonic() - begun)  # others may want the process, too


def is_going(row: RunRow) -> bool:
    """Whether a run may still record."""
    if row.state in (StateKind.LIVE, StateKind.STUCK):
        return True
    age = time.time_ns() - (row.last_step_unix_ns or row.started_unix_ns or 0)
    return row.state == StateKind.OPEN and age < _MAX_AGE_NS
