"""Ranks summed up by other processes give the same report, and the same problems."""

import os

import pytest

import meshscope
from builders import flip_byte, table_path
from late_runs import STEADY, LateRun
from meshscope.core.layout import Layout
from meshscope.pool import local
from meshscope.pool.pool import use_engine
from meshscope.store.read import run as run_module
from meshscope.store.write.table_file import HEADER_BYTES


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    LateRun(layout=Layout(dp=4), work=lambda rank, step: STEADY, num_steps=12).record(path)
    flip_byte(table_path(path / "rank00002" / "attempt000", "steps"), HEADER_BYTES + 3 * 64 + 20)
    return path


def test_the_report_is_the_same_from_processes(run, monkeypatch):
    alone = meshscope.study(run).report().to_json()
    assert '"file": "rank00002/attempt000/tables.pack/steps.tbl"' in alone
    monkeypatch.setattr(run_module, "_MAX_KEPT_ROWS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(local, "_MIN_ITEMS", 1)
    started: list[int] = []
    plain = local._map_in_processes

    def count(items, work, num_processes):
        started.append(num_processes)
        return plain(items, work, num_processes)

    monkeypatch.setattr(local, "_map_in_processes", count)
    with use_engine("local"):
        assert meshscope.study(run).report().to_json() == alone
    assert started == [2]
