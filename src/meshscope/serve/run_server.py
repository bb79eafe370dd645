"""Starts the server: where it listens, and what it tells on the terminal."""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from meshscope.errors import UsageError
from meshscope.serve.app import make_app
from meshscope.serve.board import Board
from meshscope.serve.security import TOKEN, Access

DEFAULT_PORT = 8265
_NEXT_PORTS = 20
"""Tried one after another, where none was asked for."""
_STOP_S = 2


def listen(host: str, port: int | None) -> socket.socket:
    """A socket; the next free port where none was asked for. UsageError says why not."""
    ports = [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + _NEXT_PORTS)
    problem: OSError | None = None
    for one in ports:
        try:
            found = socket.getaddrinfo(host, one, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = found[0]
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            raise UsageError(f"--host {host} cannot be listened on: {error}") from error
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            sock.close()
            problem = error
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                continue
            break
        sock.listen(512)
        return sock
    assert problem is not None
    raise UsageError(f"port {ports[-1]} of {host} cannot be used: {problem.strerror}; give --port")


def make_url(access: Access) -> str:
    """The address to open."""
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(
        access.host, access.host
    )
    shown = f"[{name}]" if ":" in name else name
    query = "" if access.token is None else f"?{TOKEN}={access.token}"
    return f"http://{shown}:{access.port}/{query}"


def make_server(folders: Sequence[Path], access: Access) -> uvicorn.Server:
    board = Board(folders)
    config = uvicorn.Config(
        make_app(board, access),
        log_level=logging.WARNING,
        access_log=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=_STOP_S,
        server_header=False,
        proxy_headers=False,
    )
    return uvicorn.Server(config)


def serve(
    folders: Sequence[Path],
    sock: socket.socket,
    access: Access,
    *,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Answers until it is interrupted."""
    server = make_server(folders, access)

    async def run() -> None:
        asyncio.get_running_loop().call_soon(ready)
        await server.serve(sockets=[sock])

    asyncio.run(run())
