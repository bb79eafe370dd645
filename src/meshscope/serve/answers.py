"""Answers that many ask for: each is made once, however many ask at the same time."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from meshscope.serve.answer import Answer

MAX_BYTES = 64 << 20


class Answers:
    """Keeps the last used answers, of their last version."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Any, tuple[int, asyncio.Future[Answer]]] = OrderedDict()
        self.num_bytes = 0

    async def get(self, key: Any, version: int, make: Callable[[], Awaitable[Answer]]) -> Answer:
        found = self._kept.get(key)
        if found is not None and found[0] == version:
            self._kept.move_to_end(key)
            return await asyncio.shield(found[1])
        future: asyncio.Future[Answer] = asyncio.ensure_future(make())
        self._drop(key)
        self._kept[key] = (version, future)
        try:
            answer = await asyncio.shield(future)
        except BaseException:
            if self._kept.get(key, (0, None))[1] is future and future.done():
                self._drop(key)
            raise
        if answer.status != 200:
            self._drop(key)
            return answer
        if self._kept.get(key, (0, None))[1] is future:
            self.num_bytes += len(answer.body)
            while self.num_bytes > self._max_bytes and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))
        return answer

    def _drop(self, key: Any) -> None:
        found = self._kept.pop(key, None)
        future = None if found is None else found[1]
        if future is None or not future.done() or future.cancelled() or future.exception():
            return
        if future.result().status == 200:
            self.num_bytes -= len(future.result().body)
