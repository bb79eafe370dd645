"""One real server on loopback for all tests of this folder."""

import asyncio
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from meshscope.serve.run_server import listen, make_server
from meshscope.serve.security import Access
from serve_builders import LiveRun, Served, make_folder


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_folder(tmp_path_factory.mktemp("serve") / "runs")
    sock = listen("127.0.0.1", 0)
    access = Access(host="127.0.0.1", port=sock.getsockname()[1], token=None)
    server = make_server([folder], access)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{access.port}", timeout=60) as client:
        while not server.started:
            time.sleep(0.05)
        yield Served(folder, client, access)
    server.should_exit = True
    thread.join(30)


@pytest.fixture
def live(served: Served) -> tuple[str, LiveRun]:
    name = f"live{time.monotonic_ns()}"
    run = LiveRun(served.folder / name)
    run.add(6)
    while name not in served.rows():
        time.sleep(0.2)
    return name, run
