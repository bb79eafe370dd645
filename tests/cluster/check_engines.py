"""One document from this machine's cores, Ray and Dask, also where a worker dies in the middle."""

import os
import shutil
import subprocess
import time
from functools import partial

import pytest
from worker_functions import die_always, die_once, sleep_long

from conftest import BIN
from late_runs import STEADY, LateRun
from meshscope.core.layout import Layout
from meshscope.pool.pool import map_items, use_engine
from trace_builders import write_traces

MESHSCOPE = str(BIN / "meshscope")
ENGINES = ("local", "ray", "dask")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("engines") / "run"
    LateRun(
        layout=Layout(dp=8),
        work=lambda rank, step: {**STEADY, "forward": STEADY["forward"] * (1 + (rank == 5))},
    ).record(path)
    return path


@pytest.fixture(autouse=True)
def addresses(ray_head, dask_scheduler, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", ray_head)
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", dask_scheduler)


def call(*words: object) -> str:
    command = [MESHSCOPE, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_gives_the_same_json_from_every_engine(run, engine, bucket, tmp_path, monkeypatch):
    expected = call("report", run, "--json")
    assert call("report", run, "--json", "--engine", engine) == expected
    monkeypatch.setenv("MESHSCOPE_CACHE", str(tmp_path / "cache"))
    url = f"{bucket}/run"
    call("archive", run, url)
    there = call("report", url, "--json", "--engine", engine)
    assert there.replace(f'"path": "{url}"', f'"path": "{run}"') == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_other_commands_say_the_same_by_every_engine(run, engine):
    for words in (
        ("export", run, "--table", "budget"),
        ("compare", run, run, "--json"),
        ("ls", run, "--findings", "--no-index", "--json"),
    ):
        assert call(*words, "--engine", engine) == call(*words)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    (folder / "one").mkdir()
    write_traces(folder / "one", num_ranks=8, num_steps=4)
    files = sorted((folder / "one").rglob("*.json*"))
    many = folder / "many"
    many.mkdir()
    for number in range(256):
        file = files[number % len(files)]
        shutil.copy(file, many / f"{number:03}.{file.name}")
    return many


def test_256_traces_give_the_same_json_from_every_engine(traces):
    found = {
        engine: call("trace", traces, "--json", "--no-cache", "--engine", engine)
        for engine in ENGINES
    }
    assert found["ray"] == found["local"]
    assert found["dask"] == found["local"]


# --- workers that die -----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_killed_in_the_middle_changes_nothing(engine, tmp_path):
    items = list(range(70))
    mark = tmp_path / "killed"
    work = partial(die_once, mark=str(mark), driver=os.getpid())
    with use_engine(engine):
        found = list(map_items(work, items, [1 << 20] * len(items)))
    assert mark.exists()
    assert [square for square, _ in found] == [number**2 for number in items]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_kills_every_worker_is_done_here(engine):
    items = list(range(70)) if engine == "local" else list(range(4))
    work = partial(die_always, driver=os.getpid())
    with use_engine(engine):
        found = list(map_items(work, items, [1 << 20] * len(items)))
    assert found == [number**2 for number in items]


@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_a_map_that_is_left_takes_its_tasks_along(engine):
    with use_engine(engine):
        found = map_items(sleep_long, range(16), [1] * 16)
        assert next(found) == 0
        begun = time.monotonic()
        found.close()
        # The workers are free again: other work is done long before the sleepers would end.
        done = list(map_items(abs, [-1, -2], [1, 1]))
    assert done == [1, 2]
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("engine", "variable", "value", "says"),
    [
        ("ray", "RAY_ADDRESS", "127.0.0.1:9", "ray start --head"),
        ("dask", "DASK_SCHEDULER_ADDRESS", "", "dask scheduler"),
        ("dask", "DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:9", "no Dask scheduler answers"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_line(run, engine, variable, value, says, monkeypatch):
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    done = subprocess.run(
        [MESHSCOPE, "report", str(run), "--engine", engine],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
