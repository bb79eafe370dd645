"""Servers on this machine for `make test-cluster`: each is started by the first test that needs it,
listens on loopback only, and is stopped at the end."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
_START_LIMIT_S = 120


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


def wait_for_port(port: int, server: subprocess.Popen) -> None:
    end = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < end:
        assert server.poll() is None, f"{server.args} ended with {server.returncode}"
        with socket.socket() as tried:
            tried.settimeout(1)
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"{server.args} did not listen within {_START_LIMIT_S} s")


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    """Starts processes, each in a group of its own, and ends the groups."""
    folder = tmp_path_factory.mktemp("servers")
    running: list[subprocess.Popen] = []

    def start(*words: object, **environment: str) -> subprocess.Popen:
        log = folder / f"{len(running)}.log"
        with log.open("wb") as said:
            server = subprocess.Popen(
                [str(word) for word in words],
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **environment},
                cwd=folder,
                start_new_session=True,
            )
        server.log = log
        running.append(server)
        return server

    yield start
    for server in reversed(running):
        stop(server)


def stop(server: subprocess.Popen) -> None:
    """Ends a server and all of its group, within ten seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            break
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            continue
    server.wait(10)


@pytest.fixture(scope="session")
def s3(servers):
    """The address of an S3-compatible server, with the environment that leads clients there."""
    port = free_port()
    server = servers(BIN / "moto_server", "-H", "127.0.0.1", "-p", port)
    wait_for_port(port, server)
    endpoint = f"http://127.0.0.1:{port}"
    os.environ.update(
        AWS_ENDPOINT_URL=endpoint,
        AWS_ACCESS_KEY_ID="testing",
        AWS_SECRET_ACCESS_KEY="testing",
        AWS_DEFAULT_REGION="us-east-1",
    )
    return endpoint


@pytest.fixture
def bucket(s3):
    """An empty bucket: `s3://NAME`."""
    import fsspec

    fsspec.filesystem("s3").clear_instance_cache()
    name = f"runs-{time.time_ns()}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}"


@pytest.fixture(scope="session")
def ray_head(servers, s3):
    """The address of a Ray head with two workers, for RAY_ADDRESS."""
    # Ray's sockets have a limit of 107 characters for their paths.
    folder = Path("/tmp") / f"ray{os.getpid()}"
    port = free_port()
    words = ["--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--block"]
    words += ["--node-ip-address=127.0.0.1", "--disable-usage-stats", f"--temp-dir={folder}"]
    words += ["--object-store-memory=100000000"]
    server = servers(BIN / "ray", "start", *words, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    wait_for_port(port, server)
    yield f"127.0.0.1:{port}"
    stop(server)
    subprocess.run(["rm", "-rf", str(folder)], check=False)


@pytest.fixture(scope="session")
def dask_scheduler(servers, s3):
    """The address of a Dask scheduler with two workers, for DASK_SCHEDULER_ADDRESS."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    server = servers(
        BIN / "dask", "scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard"
    )
    wait_for_port(port, server)
    for _ in range(2):
        servers(BIN / "dask", "worker", address, "--nthreads", 1, "--no-dashboard", "--nanny")
    _wait_for_log(server, "Register worker", 2)
    return address


def _wait_for_log(server: subprocess.Popen, pattern: str, count: int) -> None:
    end = time.monotonic() + _START_LIMIT_S
    while len(re.findall(pattern, server.log.read_text("utf-8"))) < count:
        assert time.monotonic() < end, server.log.read_text("utf-8")[-2000:]
        time.sleep(0.2)


def fetch_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()
