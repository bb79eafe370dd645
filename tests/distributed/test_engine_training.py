"""Training from end to end with real processes: layouts, restarts, stops, faults, precision.

`engine_training` runs once and does the work; here what it left is judged.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="the engine trains with torch")

from tests.distributed.engine_training import NUM_STEPS, SAVED_STEP, TOML
from tests.distributed.run_program import run_program

from ended_process import run_process
from meshscope.cli import main
from meshscope.core.schedule import Schedule
from meshscope.core.schedule_builders import build_schedule
from meshscope.store.read.query import connect
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Run, open_run
from meshscope.store.schema import ACTION_KINDS, StepFlag

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

LOSS_TOLERANCE = 1e-4
"""Sums in another order: float32 has seven digits, and AdamW makes little of that worse."""
HALF_TOLERANCE = {"bf16": 0.02, "fp16": 0.005}
"""Of losses around 4 after six steps. bf16 rounds to 2⁻⁹ and fp16 to 2⁻¹² of a value: 0.008 and
0.001 of a loss of 4, and a few steps apart."""
ALL_STEPS = list(range(NUM_STEPS))
LATE_STEPS = list(range(SAVED_STEP, NUM_STEPS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every scenario left what happened."""
    folder = tmp_path_factory.mktemp("training")
    run_program("engine_training", folder, timeout_s=500)
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_scalar(recording: Recording, name: str) -> dict[int, float]:
    """What a rank logged, by step; each step once."""
    rows = recording.read("scalars")
    (name_id,) = [number for number, text in recording.names.items() if text == name]
    chosen = rows["name_id"] == name_id
    steps = rows["step"][chosen].tolist()
    assert len(set(steps)) == len(steps), f"{name} is logged twice in a step"
    return dict(zip(steps, rows["value"][chosen].tolist(), strict=True))


def finished_steps(recording: Recording) -> list[int]:
    rows = recording.read("steps")
    return rows["step"][rows["flags"] & StepFlag.ABORTED == 0].tolist()


def aborted_steps(recording: Recording) -> list[int]:
    rows = recording.read("steps")
    return rows["step"][rows["flags"] & StepFlag.ABORTED != 0].tolist()


def read_lines(folder: Path) -> list[str]:
    """What the command itself said."""
    lines = (folder / "stderr.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("meshscope: ")]


# --- loss curves ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        ("llama_2x2x2", ALL_STEPS),
        ("llama_single", ALL_STEPS),
        ("llama_4x1x2", LATE_STEPS),
        ("llama_1x1x1", LATE_STEPS),
        ("tied_2x2x2", ALL_STEPS),
        ("tied_1x2x4", LATE_STEPS),
    ],
)
def test_every_layout_from_begin_or_checkpoint_has_the_losses_of_a_plain_loop(
    folder: Path, run: str, steps: list[int]
) -> None:
    plain = read(folder / "curves" / "plain.json")[run.split("_")[0]]
    attempt = open_run(folder / "curves" / run).last_attempt
    assert len(attempt.ranks) == int(np.prod([int(n) for n in re.findall(r"\d", run)] or [1]))
    for recording in attempt.ranks.values():
        for name, tolerance in (("loss", LOSS_TOLERANCE), ("grad_norm", 1e-3), ("lr", 1e-12)):
            found = read_scalar(recording, name)
            assert list(found) == steps
            assert found == pytest.approx({s: plain[name][s] for s in steps}, abs=tolerance)
        assert finished_steps(recording) == steps


def test_resumed_runs_equal_the_uninterrupted_run_on_the_first_layout(folder: Path) -> None:
    for model, resumed in (
        ("llama", "llama_4x1x2"),
        ("llama", "llama_1x1x1"),
        ("tied", "tied_1x2x4"),
    ):
        whole = read_scalar(
            open_run(folder / "curves" / f"{model}_2x2x2").last_attempt.ranks[0], "loss"
        )
        late = read_scalar(open_run(folder / "curves" / resumed).last_attempt.ranks[0], "loss")
        assert late == pytest.approx({step: whole[step] for step in LATE_STEPS}, abs=LOSS_TOLERANCE)


def test_a_batch_one_step_out_of_place_would_show(folder: Path) -> None:
    for curve in read(folder / "curves" / "plain.json").values():
        late = np.array(curve["loss"][SAVED_STEP - 1 :])
        assert np.abs(np.diff(late)).max() > 100 * LOSS_TOLERANCE


def test_a_run_goes_on_from_its_folder_or_else_from_the_checkpoint_it_is_given(
    folder: Path,
) -> None:
    curves = folder / "curves"
    # 4×1×2 had step 6 in its folder and was given step 12; the others had no folder to look into.
    for run in ("llama_4x1x2_7", "llama_1x1x1_0", "tied_1x2x4_3"):
        summary = read(curves / f"{run}.json")
        assert (summary["first_step"], summary["num_steps"]) == (SAVED_STEP, NUM_STEPS)
        assert not summary["is_stopped"]
    assert read(curves / "llama_single_0.json")["first_step"] == 0
    found = (path.name for path in (curves / "llama_resumed").iterdir())
    saved = sorted(name for name in found if name != ".lock")
    assert saved == ["step-00000006", "step-00000012"]


# --- what is recorded ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "schedule"),
    [
        ("llama_2x2x2", build_schedule("1f1b", 2, 4)),
        ("tied_2x2x2", build_schedule("zb_v", 2, 4)),
        ("tied_1x2x4", build_schedule("interleaved_1f1b", 4, 4)),
    ],
)
def test_every_rank_records_the_actions_of_the_schedule_in_order(
    folder: Path, run: str, schedule: Schedule
) -> None:
    opened = open_run(folder / "curves" / run)
    layout = opened.last_attempt.layout
    for rank, recording in opened.last_attempt.ranks.items():
        pp_rank = layout.coordinates(rank).pp
        stages = schedule.stages_of(pp_rank)
        expected = [
            (str(action.kind), action.stage, action.microbatch, stages.index(action.stage))
            for action in schedule.actions[pp_rank]
        ]
        rows = recording.read("actions")
        assert not rows["flags"].any()
        for step in finished_steps(recording):
            chosen = np.flatnonzero(rows["step"] == step)
            columns = (rows[name][chosen].tolist() for name in ("stage", "microbatch", "chunk"))
            kinds = [ACTION_KINDS[kind] for kind in rows["kind"][chosen]]
            assert list(zip(kinds, *columns, strict=True)) == expected


def test_sql_finds_losses_rates_norms_and_tokens_of_every_step(folder: Path) -> None:
    connection = connect(open_run(folder / "curves" / "llama_2x2x2"))
    rows = connection.execute(
        "SELECT name, count(*), count(DISTINCT step), sum(value) FROM scalars "
        "WHERE name IN ('loss', 'grad_norm', 'lr', 'tokens') GROUP BY name ORDER BY name"
    ).fetchall()
    assert [row[:3] for row in rows] == [
        (name, 8 * NUM_STEPS, NUM_STEPS) for name in ("grad_norm", "loss", "lr", "tokens")
    ]
    # 8 sequences of 8 tokens a step: half of them on each of two dp ranks, of which there are four.
    assert rows[-1][3] == NUM_STEPS * 8 * 8 * 4


def test_the_report_of_a_run_shows_its_speed(folder: Path) -> None:
    for run in ("llama_2x2x2", "tied_2x2x2"):
        path = folder / "curves" / run
        result = CliRunner().invoke(main, ["report", str(path), "--all"])
        assert result.exit_code == 0, result.output
        assert "tokens/s" in result.output
        document = json.loads(CliRunner().invoke(main, ["report", str(path), "--json"]).stdout)
        assert find_values(document, "num_aborted_steps") == [0] * 8
    result = CliRunner().invoke(main, ["report", str(folder / "kill" / "run"), "--strict"])
    assert result.exit_code == 0, "the last attempt is whole"


def find_values(document: Any, key: str) -> list[Any]:
    if isinstance(document, list):
        return [found for entry in document for found in find_values(entry, key)]
    if not isinstance(document, dict):
        return []
    own = [document[key]] if key in document else []
    return own + [found for entry in document.values() for found in find_values(entry, key)]


# --- a rank that is killed -----------------------------------------------------------------------


@pytest.fixture
def killed(folder: Path) -> Run:
    return open_run(folder / "kill" / "run")


def test_after_a_kill_the_command_ends_well_and_says_what_happened(folder: Path) -> None:
    assert read(folder / "kill" / "outcome.json") == {"code": 0, "has_orphans": False}
    died, _ = read_lines(folder / "kill")
    assert died.startswith("meshscope: rank 5 (dp0.tp1.pp1) failed in step 8: was ended by SIGKILL")
    assert died.endswith("; 7 ended because of it; it left no traceback; restart 1 of 1")


def test_attempts_are_kept_apart_and_hold_every_step_once(killed: Run) -> None:
    first, second = killed.attempts
    assert sorted(first.ranks) == sorted(second.ranks) == list(range(8))
    for rank, recording in first.ranks.items():
        assert finished_steps(recording) == list(range(8))
        # The dead rank could not write down its last step; the others were inside of it.
        assert aborted_steps(recording) == ([] if rank == 5 else [8])
        assert (recording.closing is None) == (rank == 5)
    for recording in second.ranks.values():
        assert finished_steps(recording) == LATE_STEPS
        assert aborted_steps(recording) == []


def test_the_losses_of_both_attempts_are_those_of_the_run_that_nobody_killed(
    folder: Path, killed: Run
) -> None:
    whole = read_scalar(open_run(folder / "curves" / "llama_2x2x2").last_attempt.ranks[0], "loss")
    first, second = killed.attempts
    for attempt, steps in ((first, range(8)), (second, LATE_STEPS)):
        for recording in attempt.ranks.values():
            expected = {step: whole[step] for step in steps}
            assert read_scalar(recording, "loss") == pytest.approx(expected, abs=1e-6)


def test_the_kill_is_in_the_table_of_faults_once(killed: Run) -> None:
    rows = connect(killed).execute(
        "SELECT attempt, rank, kind, step, detail, end_host_mono_ns FROM faults"
    )
    assert rows.fetchall() == [(0, 5, "crash", 8, "crash rank=5 steps=8", None)]


# --- stopping and failing ------------------------------------------------------------------------


def test_asked_to_stop_all_ranks_leave_after_one_step_and_the_next_run_goes_on(
    folder: Path,
) -> None:
    assert read(folder / "stop" / "stopped.json") == {"code": 143, "has_orphans": False}
    assert read(folder / "stop" / "resumed.json") == {"code": 0, "has_orphans": False}
    text = (folder / "stop" / "stderr.txt").read_text(encoding="utf-8")
    (stopped,) = [int(number) for number in re.findall(r"stopped after step (\d+)", text)]
    assert 2 <= stopped < NUM_STEPS
    plain = read(folder / "curves" / "plain.json")["llama"]["loss"]
    first, second = open_run(folder / "stop" / "run").attempts
    for attempt, steps in ((first, ALL_STEPS[:stopped]), (second, ALL_STEPS[stopped:])):
        assert sorted(attempt.ranks) == [0, 1, 2, 3]
        for recording in attempt.ranks.values():
            assert finished_steps(recording) == steps
            assert aborted_steps(recording) == []
            assert recording.closing is not None
            expected = {step: plain[step] for step in steps}
            assert read_scalar(recording, "loss") == pytest.approx(expected, abs=LOSS_TOLERANCE)
    assert (folder / "stop" / "kept" / f"step-{stopped:08d}").is_dir()


def test_an_exception_is_one_line_with_rank_place_and_step(folder: Path) -> None:
    assert read(folder / "exception" / "outcome.json") == {"code": 6, "has_orphans": False}
    line, where = read_lines(folder / "exception")
    assert line.startswith("meshscope: rank 2 (dp0.tp0.pp1) failed in step 3: ")
    assert "InjectedFault: injected at step 3" in line
    assert line.endswith("; 3 ended because of it; traceback in run/failures/attempt_0/rank_2.txt")
    assert where == "meshscope: to see the run: meshscope report run"
    assert "Traceback" not in (folder / "exception" / "stderr.txt").read_text(encoding="utf-8")
    path = folder / "exception" / "run" / "failures" / "attempt_0" / "rank_2.txt"
    assert "Traceback (most recent call last)" in path.read_text(encoding="utf-8")
    for recording in open_run(folder / "exception" / "run").last_attempt.ranks.values():
        assert (finished_steps(recording), aborted_steps(recording)) == ([0, 1, 2], [3])


def test_a_hang_ends_after_the_timeout_and_only_the_rank_that_hangs_is_blamed(
    folder: Path,
) -> None:
    assert read(folder / "hang" / "outcome.json") == {"code": 6, "has_orphans": False}
    line, _ = read_lines(folder / "hang")
    blamed, _, waited = line.partition(" did not go on, and ")
    assert blamed == "meshscope: rank 3 (dp1.tp0.pp1)"
    assert re.match(r"rank [012] \(.*\) waited in vain in step 2: ", waited)
    attempt = open_run(folder / "hang" / "run").last_attempt
    assert all(finished_steps(recording) == [0, 1] for recording in attempt.ranks.values())


def test_a_checkpoint_that_does_not_fit_on_the_disk_ends_the_run_with_its_reason(
    folder: Path,
) -> None:
    assert read(folder / "full_disk" / "outcome.json") == {"code": 6, "has_orphans": False}
    (line,) = read_lines(folder / "full_disk")
    assert "CheckpointError: the checkpoint kept/step-00000002 could not be saved" in line
    assert "File too large" in line
    assert "; 3 more failed alike; traceback in " in line
    kept = folder / "full_disk" / "kept"
    assert [path.name for path in kept.iterdir() if path.name.startswith("step-")] == []


# --- precision -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def precision(folder: Path) -> list[dict[str, list[dict[str, Any]]]]:
    """By rank: what each case did in each step."""
    return [read(folder / "precision" / f"rank_{rank}.json") for rank in range(2)]


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_half_precision_trains_nearly_as_float32_does(
    precision: list[dict[str, Any]], axis: str, compute: str
) -> None:
    losses = {kind: losses_of(precision[0][f"{axis} {kind}"]) for kind in ("fp32", compute)}
    assert losses["fp32"][-1] < losses["fp32"][0] - 1, "it learns"
    assert losses[compute] != losses["fp32"], "it does compute in another precision"
    assert losses[compute] == pytest.approx(losses["fp32"], abs=HALF_TOLERANCE[compute])
    assert not any(step["is_skipped"] for step in precision[0][f"{axis} {compute}"])


@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_a_loss_scale_too_large_is_halved_by_all_ranks_until_steps_can_be_taken(
    precision: list[dict[str, Any]], axis: str
) -> None:
    ranks = [rank[f"{axis} huge"] for rank in precision]
    assert shared_facts(ranks[0]) == shared_facts(ranks[1])
    steps = ranks[0]
    num_skipped = [step["is_skipped"] for step in steps].index(False)
    assert num_skipped >= 2
    scale = 2.0**20
    num_finite = 0
    for step in steps:
        assert step["loss_scale"] == scale
        num_finite = 0 if step["is_skipped"] else num_finite + 1
        scale = scale / 2 if step["is_skipped"] else scale * (2 if num_finite % 3 == 0 else 1)
    for rank in ranks:
        assert [step["is_unchanged"] for step in rank] == [step["is_skipped"] for step in rank]
        assert rank[-1]["num_skipped_steps"] == sum(step["is_skipped"] for step in rank)
    taken = [step["loss"] for step in steps[num_skipped:] if not step["is_skipped"]]
    assert taken == sorted(taken, reverse=True)
    assert taken[-1] < taken[0] - 0.5


@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_a_gradient_that_is_nan_on_one_rank_makes_all_of_them_skip_that_step_and_no_other(
    precision: list[dict[str, Any]], axis: str
) -> None:
    for rank in precision:
        steps = rank[f"{axis} nan"]
        assert [step["is_skipped"] for step in steps] == [False, False, True, False, False]
        assert [step["is_unchanged"] for step in steps] == [False, False, True, False, False]
        losses = losses_of(steps)
        assert losses[3] == losses[2], "one batch and the same weights"
        assert losses[4] < losses[3]
        # The step that was put off is the one that comes then.
        if axis != "tp":
            assert losses[4] == pytest.approx(losses_of(rank[f"{axis} fp32"])[3], abs=1e-5)


def losses_of(steps: list[dict[str, Any]]) -> list[float]:
    return [step["loss"] for step in steps]


def shared_facts(steps: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(step["loss"], step["loss_scale"], step["is_skipped"]) for step in steps]


# --- a user's model ------------------------------------------------------------------------------


def test_a_users_model_trains_as_its_modules_do_in_one_process(folder: Path) -> None:
    plain = read(folder / "user_model" / "plain.json")
    assert plain["num_weights"] == 1 + 3 * 6 + 2, "ranks together held the whole model"
    assert plain["weight_difference"] < 1e-5
    assert plain["losses"][-1] < plain["losses"][0] - 0.3
    for rank in range(4):
        found = read(folder / "user_model" / f"rank_{rank}.json")
        assert found["losses"] == pytest.approx(plain["losses"], abs=1e-5)
        assert found["evaluated"] == pytest.approx(plain["evaluated"], abs=1e-5)
        assert found["is_evaluation_free"]


def test_steps_by_hand_and_after_loading_are_those_of_the_engines_own_loop(folder: Path) -> None:
    for rank in range(4):
        found = read(folder / "user_model" / f"rank_{rank}.json")
        assert found["by_hand"] == found["losses"][:2]
        assert found["loaded_step"] == 3
        assert found["by_hand_after_load"] == found["losses"][3:]


def test_statistics_can_be_read_and_go_on_after_loading(folder: Path) -> None:
    for rank in range(4):
        found = read(folder / "user_model" / f"rank_{rank}.json")
        for statistics in (found["statistics"], found["statistics_after_load"]):
            assert statistics["num_steps"] == 5
            assert statistics["num_tokens"] == 5 * 4 * 2 * 8
        # 1F1B: two microbatches on the first pipeline rank (ranks 0 and 1), one on the last.
        assert found["statistics"]["peak_activations"] == (2 if rank < 2 else 1)
        # By hand each forward had its backward at once.
        assert found["statistics_after_load"]["peak_activations"] == 1


def test_a_step_by_hand_that_fails_is_recorded_as_aborted(folder: Path) -> None:
    (recording,) = open_run(folder / "user_model" / "failed_by_hand").last_attempt.ranks.values()
    assert (finished_steps(recording), aborted_steps(recording)) == ([0], [1])


# --- under torchrun ------------------------------------------------------------------------------


def test_torchrun_restarts_from_the_last_checkpoint(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(TOML, encoding="utf-8")
    tokens = (folder / "curves" / "tokens.bin").read_bytes()
    (tmp_path / "tokens.bin").write_bytes(tokens)
    done = run_process(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--max-restarts", "1", "--master-port", str(20_000 + time.time_ns() % 9_000)),
            *("-m", "meshscope", "train", "train.toml", "--pp", "2"),
            *("--set", "checkpoint.folder=kept", "--set", "checkpoint.every=3"),
            *("--fault", "crash rank=1 steps=8 how=SIGKILL"),
        ],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    plain = read(folder / "curves" / "plain.json")["llama"]["loss"]
    (run_dir,) = (tmp_path / "runs" / "train").iterdir()  # one for both ranks and both attempts
    first, second = open_run(run_dir).attempts
    for attempt, steps in ((first, range(8)), (second, LATE_STEPS)):
        assert sorted(attempt.ranks) == [0, 1]
        for recording in attempt.ranks.values():
            assert finished_steps(recording) == list(steps)
            expected = {step: plain[step] for step in steps}
            assert read_scalar(recording, "loss") == pytest.approx(expected, abs=LOSS_TOLERANCE)
