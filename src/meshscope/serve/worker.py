"""A process that analyses, so that the one that serves is always free to answer.

Both ends of a pipe: `run_worker` is the child, `Worker` the parent's side, for one event loop. A
child that died is started again by the next call.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any

from meshscope.errors import MeshscopeError, UsageError
from meshscope.live.moment import Moment
from meshscope.serve.answer import Answer, refuse
from meshscope.serve.documents import RunSummary

_NUM_THREADS = 3
_NICE = 5
"""Answers that wait for an analysis can wait longer than those that do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a run that is followed tells."""

    path: str
    kind: str = ""
    """Of an event; empty for the two below."""
    data: Mapping[str, Any] = field(default_factory=dict)
    moment: Moment | None = None
    summary: RunSummary | None = None


class Worker:
    """The parent's side."""

    def __init__(self, name: str, hear: Callable[[Heard], None]) -> None:
        """`hear` is called in the event loop."""
        self._name, self._hear = name, hear
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._followed: set[str] = set()
        self._number = 0
        self._connection: Connection | None = None
        self._process: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the child; called in the event loop."""
        if self._process is not None and self._process.is_alive():
            return
        self._loop = asyncio.get_running_loop()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=run_worker, args=(theirs,), name=f"meshscope-{self._name}", daemon=True
        )
        self._process.start()
        theirs.close()
        self._connection = ours
        Thread(target=self._read, args=(ours, self._loop), daemon=True).start()
        for path in self._followed:
            ours.send(("follow", path))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Raises what the child raised, as a MeshscopeError."""
        self.start()
        assert self._connection is not None
        self._number += 1
        number = self._number
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            self._connection.send(("call", number, method, arguments))
            return await future
        finally:
            self._pending.pop(number, None)

    def follow(self, path: str) -> None:
        self.start()
        assert self._connection is not None
        self._followed.add(path)
        self._connection.send(("follow", path))

    def unfollow(self, path: str) -> None:
        self._followed.discard(path)
        if self._connection is not None:
            try:
                self._connection.send(("unfollow", path))
            except OSError:
                pass  # it died, and follows nothing

    def _read(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                break
            if not _call_in(loop, self._take, message):
                return
        _call_in(loop, self._fail_all, connection)

    def _take(self, message: Any) -> None:
        if isinstance(message, Heard):
            self._hear(message)
            return
        number, is_good, value = message
        future = self._pending.get(number)
        if future is None or future.done():
            return
        if is_good:
            future.set_result(value)
        else:
            future.set_exception(value)

    def _fail_all(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection, self._process = None, None
        for future in self._pending.values():
            if not future.done():
                text = "the process that analyses ended; ask again"
                future.set_exception(MeshscopeError(text))

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.terminate()
            self._process.join(5)


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *given: Any) -> bool:
    try:
        loop.call_soon_threadsafe(function, *given)
    except RuntimeError:  # the loop is closed: nobody waits
        return False
    return True


# --- the child ------------------------------------------------------------------------------------


def run_worker(connection: Connection) -> None:
    """Answers until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.nice(_NICE)
    _Child(connection).serve()


class _Child:
    def __init__(self, connection: Connection) -> None:
        from meshscope.serve.analyst import Analyst
        from meshscope.serve.following import Following

        self._connection = connection
        self._lock = Lock()
        self._analyst = Analyst()
        self._following: dict[str, Following] = {}

    def serve(self) -> None:
        with ThreadPoolExecutor(_NUM_THREADS, "meshscope-answer") as pool:
            while True:
                try:
                    kind, *rest = self._connection.recv()
                except (EOFError, OSError):
                    break
                if kind == "call":
                    pool.submit(self._answer, *rest)
                elif kind == "follow":
                    self._follow(*rest)
                elif kind == "unfollow":
                    self._unfollow(*rest)
            for one in self._following.values():
                one.stop()
            pool.shutdown(wait=False, cancel_futures=True)
        os._exit(0)  # threads that compute are not waited for

    def _send(self, message: object) -> None:
        with self._lock:
            try:
                self._connection.send(message)
            except OSError:
                pass  # the parent is gone; `serve` sees it, too

    def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            found: object = self._analyst.call(method, *arguments)
        except UsageError as error:
            found = refuse(400, str(error))
        except MeshscopeError as error:
            found = refuse(422, str(error))
        except Exception as error:  # noqa: BLE001 - one bad run must not end the process
            text = f"{type(error).__name__}: {error}"
            found = refuse(500, f"this could not be computed ({text}); please report it")
        if method not in _PLAIN or not isinstance(found, Answer):
            self._send((number, True, found))
            return
        self._send((number, False, MeshscopeError("it could not be summarised")))

    def _follow(self, path: str) -> None:
        from meshscope.serve.following import Following
        from meshscope.serve.summary import summarize

        if path in self._following:
            return
        following = Following(
            self._analyst,
            path,
            lambda kind, data: self._send(Heard(path=path, kind=kind, data=data)),
            note=lambda moment: self._send(Heard(path=path, moment=moment)),
            note_report=lambda analysis: self._send(
                Heard(path=path, summary=summarize(analysis.report))
            ),
        )
        self._following[path] = following
        following.start()

    def _unfollow(self, path: str) -> None:
        following = self._following.pop(path, None)
        if following is not None:
            following.stop()
        self._analyst.unfollow(path)


_PLAIN = frozenset(("summary",))
"""Methods that give something else than an `Answer`."""
