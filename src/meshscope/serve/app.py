"""The web application: addresses, and what each answers with."""

import gzip
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from meshscope.errors import MeshscopeError, RunNotFound, UsageError
from meshscope.export.table_files import FORMATS
from meshscope.page.file import SCRIPT, STYLE, read_bundle
from meshscope.report.encode import as_plain
from meshscope.serve.answer import Answer, make_json
from meshscope.serve.board import Board, is_going
from meshscope.serve.documents import RUNS, RunRow, RunsPageDocument
from meshscope.serve.feed import Feed, Listener
from meshscope.serve.openapi import render_openapi
from meshscope.serve.questions import read_matrix, read_number, read_timeline
from meshscope.serve.security import Access, Guard
from meshscope.serve.shell import render_shell

HEARTBEAT_S = 15.0
_RETRY_MS = 2000
_ASSETS = {SCRIPT: "text/javascript; charset=utf-8", STYLE: "text/css; charset=utf-8"}
API = "/api/v1"

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


def make_app(board: Board, access: Access) -> ASGIApp:
    """Raises MeshscopeError where the bundle is not installed."""
    pages = _Pages()
    api = _Api(board)

    @asynccontextmanager
    async def live(app: Starlette) -> AsyncIterator[None]:
        await board.start()
        yield
        await board.stop()

    run = f"{API}/runs/{{run}}"
    routes = [
        Route("/", pages.runs),
        Route("/run/{run}", pages.run),
        Route("/compare", pages.compare),
        Route("/assets/{version}/{name}", pages.asset),
        Route(f"{API}/openapi.json", api.openapi),
        Route(f"{API}/runs", api.runs),
        Route(f"{API}/compare", api.compare),
        Route(f"{run}/page", api.page),
        Route(f"{run}/page.html", api.page_file),
        Route(f"{run}/table/{{name}}.{{form}}", api.table),
        Route(f"{run}/report", api.report),
        Route(f"{run}/hang", api.hang),
        Route(f"{run}/matrix", api.matrix),
        Route(f"{run}/timeline", api.timeline),
        Route(f"{run}/series", api.series),
        Route(f"{run}/memory", api.memory),
        Route(f"{run}/events", api.events),
    ]
    app = Starlette(
        routes=routes,
        lifespan=live,
        exception_handlers={HTTPException: _tell_http, MeshscopeError: _tell, Exception: _tell_bug},
    )
    return Guard(app, access)


async def _tell_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = "there is nothing at this address" if error.status_code == 404 else error.detail
    return JSONResponse({"error": text}, error.status_code)


async def _tell(_: Request, error: Exception) -> Response:
    status = (
        404 if isinstance(error, RunNotFound) else 400 if isinstance(error, UsageError) else 422
    )
    return JSONResponse({"error": str(error)}, status)


async def _tell_bug(_: Request, error: Exception) -> Response:
    text = f"this went wrong: {type(error).__name__}; the server's own output says more"
    return JSONResponse({"error": text}, 500)


class _Pages:
    """HTML and the bundle, read once."""

    def __init__(self) -> None:
        self._files = {name: read_bundle(name).encode() for name in _ASSETS}
        self._packed = {name: gzip.compress(data, 9, mtime=0) for name, data in self._files.items()}
        together = b"".join(self._files[name] for name in sorted(self._files))
        self._version = hashlib.sha256(together).hexdigest()[:12]

    async def runs(self, _: Request) -> Response:
        return self._show("./")

    async def run(self, request: Request) -> Response:
        return self._show("../", request.path_params["run"])

    async def compare(self, _: Request) -> Response:
        return self._show("./")

    def _show(self, base: str, run_id: str | None = None) -> Response:
        text = render_shell(base=base, version=self._version, run_id=run_id)
        return Response(text, media_type="text/html")

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            raise HTTPException(404)
        is_current = request.path_params["version"] == self._version
        headers = {
            "cache-control": "public, max-age=31536000, immutable" if is_current else "no-store"
        }
        return _pack(request, self._files[name], self._packed[name], _ASSETS[name], headers)


def _pack(
    request: Request, plain: bytes, packed: bytes, media: str, headers: dict[str, str]
) -> Response:
    headers["vary"] = "accept-encoding"
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, headers={**headers, "content-encoding": "gzip"}, media_type=media)
    return Response(plain, headers=headers, media_type=media)


class _Api:
    def __init__(self, board: Board) -> None:
        self._board = board
        self._openapi = make_json(render_openapi())

    async def openapi(self, request: Request) -> Response:
        return send(request, self._openapi)

    async def runs(self, request: Request) -> Response:
        rows = await self._board.list_rows()
        name, version = RUNS
        plain = as_plain(RunsPageDocument(runs=rows))
        return send(request, make_json({"document": name, "document_version": version, **plain}))

    async def page(self, request: Request) -> Response:
        return await self._ask(request, "page", _attempt(request))

    async def page_file(self, request: Request) -> Response:
        return await self._ask(request, "page_file", _attempt(request))

    async def table(self, request: Request) -> Response:
        name, form = request.path_params["name"], request.path_params["form"]
        if form not in FORMATS:
            raise UsageError(f"a table comes as {', '.join(FORMATS)}, not as {form[:20]!r}")
        return await self._ask(request, "table", _attempt(request), name, form)

    async def report(self, request: Request) -> Response:
        return await self._ask(request, "report", _attempt(request))

    async def hang(self, request: Request) -> Response:
        return await self._ask(request, "hang", _attempt(request))

    async def matrix(self, request: Request) -> Response:
        asked = read_matrix(request.query_params)
        return await self._ask(request, "matrix", _attempt(request), asked)

    async def timeline(self, request: Request) -> Response:
        asked = read_timeline(request.query_params)
        return await self._ask(request, "timeline", _attempt(request), asked)

    async def series(self, request: Request) -> Response:
        name = request.query_params.get("name")
        return await self._ask(request, "series", _attempt(request), name)

    async def memory(self, request: Request) -> Response:
        return await self._ask(request, "memory", _attempt(request))

    async def compare(self, request: Request) -> Response:
        a, b = request.query_params.get("a"), request.query_params.get("b")
        if not a or not b:
            raise UsageError("a or b is missing; add ?a=ID&b=ID")
        return send(request, await self._board.compare(a, b))

    async def _ask(self, request: Request, method: str, *arguments: Any) -> Response:
        answer = await self._board.ask(request.path_params["run"], method, *arguments)
        return send(request, answer)

    async def events(self, request: Request) -> Response:
        run, row = await self._board.find(request.path_params["run"])
        after = self._read_last(request)
        feed = self._board.feed(run) if is_going(row) else _tell_end(row)
        if feed.status is None:  # until the follower has looked
            feed.publish("status", _describe_status(row))
        return StreamingResponse(
            self._stream(feed, feed.listen(after), run.id),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    def _read_last(self, request: Request) -> int | None:
        """The last event a listener had; one of another server is too old to go on from."""
        given = request.headers.get("last-event-id") or request.query_params.get("last_event_id")
        if not given:
            return None
        server, _, seq = given.rpartition("-")
        is_ours = server == self._board.server and seq.isascii() and seq.isdecimal()
        return int(seq) if is_ours and len(seq) < 16 else -1

    async def _stream(self, feed: Feed, listener: Listener, run_id: str) -> AsyncIterator[bytes]:
        server = self._board.server
        hello = make_json({"server": server, "run": run_id, "seq": feed.seq}).body
        try:
            yield b"retry: %d\nevent: hello\ndata: %s\n\n" % (_RETRY_MS, hello)
            while not listener.is_closed or len(listener):
                event = await listener.take(HEARTBEAT_S)
                if event is None:
                    yield b": still here\n\n"
                    continue
                yield event.encode(server)
                if event.kind == "end":
                    return
        finally:
            feed.leave(listener)


def _tell_end(row: RunRow) -> Feed:
    """Of a run that nobody follows: it is over, or was killed."""
    feed = Feed()
    feed.publish("status", _describe_status(row))
    feed.publish("end", {"state": row.state})
    return feed


def _describe_status(row: RunRow) -> dict[str, Any]:
    step = row.num_steps - 1 if row.num_steps else None
    return {"state": row.state, "text": row.state_text, "step": step}


def _attempt(request: Request) -> int | None:
    return read_number(request.query_params, "attempt", high=1 << 30)


def send(request: Request, answer: Answer) -> Response:
    """As the browser takes it; nothing where it has it already."""
    headers = {"vary": "accept-encoding", **dict(answer.headers)}
    if answer.etag:
        headers["etag"] = f'"{answer.etag}"'
        headers["cache-control"] = "no-cache"
        if answer.status == 200 and _has(request, answer.etag):
            return Response(status_code=304, headers=headers)
    if answer.file_name:
        headers["content-disposition"] = f'attachment; filename="{answer.file_name}"'
    body = answer.body
    if answer.is_packed:
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
        else:
            body = gzip.decompress(body)
    return Response(body, answer.status, headers, media_type=answer.media)


def _has(request: Request, etag: str) -> bool:
    known = request.headers.get("if-none-match", "")
    return any(one.strip().removeprefix("W/").strip('"') == etag for one in known.split(","))
