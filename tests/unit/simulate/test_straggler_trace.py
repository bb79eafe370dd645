"""Straggler traces: the published answers, closed forms, and files that are damaged."""

import contextlib
import json
from pathlib import Path

import duckdb
import numpy as np
import pytest
from click.testing import CliRunner

from meshscope.cli import main
from meshscope.core.unavailable import Unavailable
from meshscope.errors import RunError
from meshscope.ingest.straggler.straggler_trace import load_straggler_trace, make_straggler_trace
from meshscope.simulate.straggler.slowdown import Slowdown
from meshscope.simulate.straggler.straggler_replay import StragglerReplay, measure_slowdown

SHARED = Path(__file__).parents[4] / "shared" / "data" / "straggler"
COLUMNS = (
    "dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id",
    "gmc",
)  # fmt: skip


def make_rows(
    *,
    num_stages=2,
    num_dp=2,
    num_steps=3,
    num_microbatches=2,
    num_chunks=1,
    slow=lambda step, stage, dp: 1.0,
):
    """One microbatch after the other: transfers of 0.1 s, forwards of 1 s, backwards of 2 s.

    Times are found by running the pipeline here, so that nothing but clip waits for others.
    """
    rows = []
    for step in range(num_steps):
        for dp in range(num_dp):
            shape = (num_stages, num_chunks, num_microbatches)
            rows += _run_pipeline(step, dp, shape, lambda st, s=step, d=dp: slow(s, st, d))
    for step in range(num_steps):
        _synchronise(rows, step)
    return rows


def _run_pipeline(step, dp, shape, slow):
    num_stages, num_chunks, num_microbatches = shape
    rows, made, count = [], {}, {}
    free = dict.fromkeys(range(num_stages), 0.0)

    def put(chunk, optype, start, end, *, is_compute=False):
        stage = chunk % num_stages
        seq = count[stage, optype] = count.get((stage, optype), -1) + 1
        rows.append(
            [dp, stage, stage * 10 + dp, step, optype, start, end - start, seq,
             chunk // num_stages if is_compute else -1, seq if is_compute else -1,
             chunk if is_compute else -1]
        )  # fmt: skip

    chunks = list(range(num_stages * num_chunks))
    for way, line, cost in (("forward", chunks, 1.0), ("backward", chunks[::-1], 2.0)):
        for microbatch in range(num_microbatches):
            for index, chunk in enumerate(line):
                stage = chunk % num_stages
                ready = free[stage]
                if index:
                    sent = made[way, microbatch, line[index - 1]]
                    arrived = max(sent, ready) + 0.1
                    put(line[index - 1], f"{way}-send", sent, arrived)
                    put(chunk, f"{way}-recv", ready, arrived)
                    ready = arrived
                elif num_chunks > 1:  # profilers note messages of the model's ends, too
                    put(chunk, f"{way}-recv", ready, ready)
                end = ready + cost * slow(stage)
                put(chunk, f"{way}-compute", ready, end, is_compute=True)
                free[stage] = made[way, microbatch, chunk] = end
            if num_chunks > 1:
                put(line[-1], f"{way}-send", end, end)
    for stage in range(num_stages):
        put(stage, "optimizer-clip-main-grad", free[stage], free[stage])
        put(stage, "optimizer", free[stage], free[stage] + 0.5)
    return rows


def _synchronise(rows, step):
    """Clip ends 0.1 s after the last has come, and the optimizer follows."""
    own = [row for row in rows if row[3] == step]
    clips = [row for row in own if row[4] == "optimizer-clip-main-grad"]
    end = max(row[5] for row in clips) + 0.1
    for row in clips:
        row[6] = end - row[5]
    for row in own:
        if row[4] == "optimizer":
            row[5] = end


def to_columns(rows):
    return {name: np.array([row[index] for row in rows]) for index, name in enumerate(COLUMNS)}


def write_parquet(path, rows):
    columns = to_columns(rows)
    with duckdb.connect() as connection:
        connection.execute(
            "create table t (dp_rank TINYINT, stage TINYINT, rank SMALLINT, step BIGINT, "
            "optype VARCHAR, start_ts DOUBLE, duration DOUBLE, seq_id INTEGER, mc TINYINT, "
            "mb_id TINYINT, gmc SMALLINT)"
        )
        values = list(zip(*(columns[name].tolist() for name in COLUMNS), strict=True))
        connection.executemany("insert into t values (?,?,?,?,?,?,?,?,?,?,?)", values)
        connection.execute(f"copy t to '{path}' (format parquet)")
    return path


def replay_rows(rows):
    return StragglerReplay.make(make_straggler_trace(to_columns(rows), name="made"))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared straggler trace is not here")
class TestPublished:
    def test_answers_are_the_published_ones(self):
        found = measure_slowdown(
            StragglerReplay.make(load_straggler_trace(SHARED / "trace-ST.parquet"))
        )
        wanted = json.loads((SHARED / "result-ST.json").read_text())
        last, worst = (json.loads((SHARED / f"m{x}-ST.json").read_text()) for x in "sw")
        assert isinstance(found, Slowdown)
        assert found.step_ns / 1e9 == pytest.approx(2.1727, abs=5e-5)
        assert found.ideal_ns / 1e9 == pytest.approx(1.8433, abs=5e-5)
        assert found.slowdown == pytest.approx(wanted["blocking_slowdown"], abs=1e-6)
        assert found.last_stage_share.removed == pytest.approx(last["Ms"], abs=1e-5)
        assert found.last_stage_share.added_alone == pytest.approx(last["add"], abs=1e-5)
        assert found.worst_share.removed == pytest.approx(worst["Mw"], abs=1e-5)
        assert found.worst_share.added_alone == pytest.approx(worst["add"], abs=1e-5)
        for ours, theirs in (
            (found.by_axis["pp"], wanted["blocking_decompose_by_stage"]),
            (found.by_axis["dp"], wanted["blocking_decompose_by_dp_rank"]),
            (found.by_type, wanted["blocking_decompose_by_optype"]),
        ):
            assert {str(key): value for key, value in ours.items()} == pytest.approx(
                theirs, abs=1e-6
            )
        assert 1 / (1 - found.fidelity.error_ratio) == pytest.approx(wanted["launch_slowdown"])

    def test_step_times_are_the_published_ones(self):
        replay = StragglerReplay.make(load_straggler_trace(SHARED / "trace-ST.parquet"))
        wanted = json.loads((SHARED / "result-ST.json").read_text())
        times = replay.step_times_s([replay.measured_s])[0]
        steps = [str(step) for step in replay.trace.steps.tolist()]
        assert dict(zip(steps, times.tolist(), strict=True)) == pytest.approx(
            wanted["step_t_nodelay"], abs=1e-5
        )

    def test_the_command_says_them(self):
        result = CliRunner().invoke(main, ["simulate", str(SHARED), "--json"])
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert round(document["slowdown"]["slowdown"], 4) == 1.1787
        assert round(document["slowdown"]["last_stage_share"]["removed_ratio"], 4) == 1.2194
        assert round(document["slowdown"]["worst_workers_share"]["removed_ratio"], 4) == 0.0314
        stages = document["slowdown"]["by_axis"]["pp"]
        assert [round(stages[s], 4) for s in "3012"] == [1.2323, 0.9980, 0.9831, 0.9825]


class TestClosedForms:
    def test_an_even_pipeline_is_its_own_ideal(self):
        found = measure_slowdown(replay_rows(make_rows()))
        # 2 stages, 2 microbatches: 3 forwards, 3 backwards, a message each way, clip, optimizer.
        assert found.step_ns / 1e9 == pytest.approx(3 + 6 + 0.1 * 4 + 0.1 + 0.5, abs=0.11)
        assert found.slowdown == pytest.approx(1)
        assert found.fidelity.error_ratio == pytest.approx(0, abs=1e-12)

    def test_a_rank_that_is_slow_everywhere(self):
        rows = make_rows(num_dp=4, slow=lambda step, stage, dp: 2.0 if (stage, dp) == (1, 2) else 1)
        found = measure_slowdown(replay_rows(rows))
        assert found.fidelity.error_ratio == pytest.approx(0, abs=1e-12)
        assert found.worst_workers == (12,)
        assert found.worst_share.removed == pytest.approx(1, abs=0.35)
        assert next(iter(found.by_axis["dp"])) == 2

    def test_gaps_that_nothing_explains_are_said_and_from_5_percent_on_refused(self):
        rows = make_rows()
        for row in rows:
            if row[4].startswith("optimizer"):
                row[5] += 4.0
        replay = replay_rows(rows)
        assert replay.fidelity().error_ratio > 0.05
        found = measure_slowdown(replay)
        assert isinstance(found, Unavailable)
        assert "misses the measured step time" in found.reason

    def test_virtual_stages_wrap_around(self):
        replay = replay_rows(make_rows(num_stages=2, num_chunks=3, num_dp=1))
        assert replay.trace.num_chunks == 3
        assert replay.fidelity().error_ratio == pytest.approx(0, abs=1e-12)
        pairs = [group for group in replay.dependencies.groups if len(group) == 2]
        operations = replay.trace.operations
        messages = [
            {operations[index].optype for index in group}
            for group in pairs
            if operations[group[0]].optype.endswith(("send", "recv"))
        ]
        # Two microbatches between six chunks, both ways.
        assert messages.count({"forward-send", "forward-recv"}) == 10
        assert messages.count({"backward-send", "backward-recv"}) == 10

    def test_one_rank_alone(self):
        found = replay_rows(make_rows(num_stages=1, num_dp=1))
        assert found.fidelity().error_ratio == pytest.approx(0, abs=1e-12)


class TestDamage:
    def test_a_step_that_was_cut_is_left_out(self):
        rows = make_rows(num_steps=4)
        del rows[-3:]
        trace = make_straggler_trace(to_columns(rows), name="cut")
        assert trace.num_left_out == 1
        assert trace.steps.tolist() == [0, 1, 2]

    def test_times_that_cannot_be_cost_their_step(self):
        rows = make_rows(num_steps=4)
        rows[0][6] = float("nan")
        rows[-1][6] = -1.0
        assert make_straggler_trace(to_columns(rows), name="bad").steps.tolist() == [1, 2]

    def test_an_operation_twice_costs_its_step(self):
        rows = make_rows(num_steps=3)
        trace = make_straggler_trace(to_columns([*rows, rows[0]]), name="twice")
        assert trace.steps.tolist() == [1, 2]

    def test_an_empty_trace(self):
        with pytest.raises(RunError, match="no rows"):
            make_straggler_trace(to_columns([]), name="bad")

    def test_a_rank_that_is_not_there(self):
        rows = [row for row in make_rows() if row[:2] != [1, 1]]
        with pytest.raises(RunError, match="none of its 3 steps"):
            make_straggler_trace(to_columns(rows), name="bad")

    def test_a_stage_without_compute(self):
        rows = [row for row in make_rows() if not (row[1] == 1 and "compute" in row[4])]
        with pytest.raises(RunError, match="neither forward-compute nor backward-compute"):
            replay_rows(rows)

    def test_files_that_are_none(self, tmp_path):
        (tmp_path / "trace-x.parquet").write_bytes(b"PAR1 and nothing more")
        result = CliRunner().invoke(main, ["simulate", str(tmp_path)])
        assert result.exit_code == 3
        assert "cannot be read as Parquet" in result.output
        with duckdb.connect() as connection:
            connection.execute(
                f"copy (select 1 as a) to '{tmp_path / 'other.parquet'}' (format parquet)"
            )
        result = CliRunner().invoke(main, ["simulate", str(tmp_path / "other.parquet")])
        assert result.exit_code == 3
        assert "it has no column dp_rank" in result.output

    def test_random_damage_is_an_error_or_an_answer(self):
        generator = np.random.default_rng(5)
        for _ in range(60):
            rows = make_rows(num_steps=2)
            kept = [row for row in rows if generator.random() > 0.02]
            index = int(generator.integers(len(kept)))
            column = int(generator.choice([0, 1, 2, 3, 5, 6, 7, 8, 10]))
            kept[index][column] = float(generator.choice([-7, 0, 3, 1e300, np.nan, np.inf]))
            with contextlib.suppress(RunError):
                assert isinstance(measure_slowdown(replay_rows(kept)), Slowdown | Unavailable)


class TestEdits:
    def test_edits_of_a_trace(self, tmp_path):
        rows = make_rows(slow=lambda step, stage, dp: 1.5 if stage == 1 else 1.0)
        path = write_parquet(tmp_path / "trace-made.parquet", rows)
        edits = ["stage=1:ideal", "rank=10,11:ideal", "compute=0.5x", "phase=optimizer:0",
                 "bandwidth.pp=2x", "dp=0:ideal", "schedule=zb_h1", "tp=0:ideal"]  # fmt: skip
        flags = [part for edit in edits for part in ("--edit", edit)]
        result = CliRunner().invoke(main, ["simulate", str(path), "--json", *flags])
        assert result.exit_code == 0, result.output
        gains = {one["edit"]: one["gain"] for one in json.loads(result.stdout)["edits"]}
        assert gains["stage=1:ideal"] == gains["rank=10,11:ideal"]
        assert gains["stage=1:ideal"]["saved_ns"] > 0
        assert gains["phase=optimizer:0"]["saved_ns"] == pytest.approx(0.5e9)
        assert gains["compute=0.5x"]["saved_ratio"] > 0.4
        assert "unavailable" in gains["schedule=zb_h1"]
        assert "unavailable" in gains["tp=0:ideal"]

    @pytest.mark.parametrize(
        "edit", ["rank=5:ideal", "stage=7:ideal", "phase=x:0", "bandwidth.ep=2x", "dp=9:ideal"]
    )
    def test_what_the_trace_does_not_have(self, tmp_path, edit):
        path = write_parquet(tmp_path / "trace-made.parquet", make_rows())
        result = CliRunner().invoke(main, ["simulate", str(path), "--edit", edit])
        assert result.exit_code == 2
        assert edit in result.output
