"""Faults on real gloo ranks: who dies, hangs, waits or computes NaN, and that nobody else does.

`engine_faults` runs once and does the work; here its files are judged.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.run_program import run_program

pytest.importorskip("torch", reason="the engine trains with torch")

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

DELAY_NS = 30_000_000
"""`engine_faults.DELAY_MS`."""

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every rank left what it saw."""
    folder = tmp_path_factory.mktemp("faults")
    run_program("engine_faults", folder, timeout_s=170)
    return folder


def read(folder: Path, case: str, rank: int) -> Lines:
    text = (folder / f"{case}_{rank}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def select(lines: Lines, *kinds: str) -> Lines:
    return [line for line in lines if line["kind"] in kinds]


def exits(folder: Path, case: str) -> list[int]:
    found: list[int] = json.loads((folder / "exits.json").read_text(encoding="utf-8"))[case]
    return found


@pytest.mark.parametrize(
    ("how", "exit_code"), [("SIGKILL", -9), ("SIGSEGV", -11), ("SIGABRT", -6), ("exit", 1)]
)
def test_a_crash_ends_its_rank_at_its_step_and_is_on_record(
    folder: Path, how: str, exit_code: int
) -> None:
    assert exits(folder, f"crash {how}") == [0, exit_code]
    healthy, crashed = (read(folder, f"crash {how}", rank) for rank in range(2))
    assert [line["step"] for line in select(healthy, "forward", "crash")] == [0, 1, 2, 3]
    assert [(line["kind"], line.get("step")) for line in crashed] == [
        ("started", None),
        ("forward", 0),
        ("forward", 1),
        ("crash", 2),
    ]
    assert crashed[-1]["end_host_mono_ns"] is None


def test_a_crash_does_not_come_again_after_a_restart(folder: Path) -> None:
    assert exits(folder, "crash restarted") == [0, 0]
    assert not select(read(folder, "crash restarted", 1), "crash")


@pytest.mark.parametrize(("point", "last_forward"), [("forward", 1), ("collective", 2)])
def test_a_hang_never_ends_and_its_peer_waits_until_the_timeout(
    folder: Path, point: str, last_forward: int
) -> None:
    assert exits(folder, f"hang {point}") == [0, -14]
    waiting, hung = (read(folder, f"hang {point}", rank) for rank in range(2))
    assert [line["step"] for line in select(hung, "forward")] == list(range(last_forward + 1))
    assert [(line["step"], line["end_host_mono_ns"]) for line in select(hung, "hang")] == [
        (2, None)
    ]
    assert hung[-1]["kind"] == "hang"
    assert [line["step"] for line in select(waiting, "timeout")] == [2]


def test_a_hang_before_collectives_of_another_axis_does_not_come(folder: Path) -> None:
    assert exits(folder, "hang elsewhere") == [0, 0]
    assert not select(read(folder, "hang elsewhere", 1), "hang")


def test_a_slow_link_delays_what_goes_over_it_and_nothing_else(folder: Path) -> None:
    assert exits(folder, "link") == [0] * 4
    ranks = [read(folder, "link", rank) for rank in range(4)]
    recorded = [[line["step"] for line in select(lines, "slow_link")] for lines in ranks]
    # Rank 0: three barriers of all, its message and its sum; rank 1 does not send to rank 0.
    assert recorded == [[1] * 5, [1] * 4, [], []]
    for lines in ranks[:2]:
        for line in select(lines, "slow_link"):
            assert line["end_host_mono_ns"] - line["begin_host_mono_ns"] >= DELAY_NS
        assert select(lines, "sum")[1]["took_ns"] >= DELAY_NS
    assert [line["took_ns"] >= DELAY_NS for line in select(ranks[1], "message")][1]
    sums = [[line["value"] for line in select(lines, "sum")] for lines in ranks]
    assert sums == [[1.0] * 3] * 2 + [[5.0] * 3] * 2, "a delay changes no result"
    assert all(select(lines, "after close")[0]["text"] == "" for lines in ranks)


def test_a_slow_axis_delays_by_the_byte_on_chosen_ranks(folder: Path) -> None:
    for rank in range(4):
        lines = read(folder, "axis", rank)
        slow = select(lines, "slow_link")
        took_ns = [line["end_host_mono_ns"] - line["begin_host_mono_ns"] for line in slow]
        if rank in (1, 3):
            assert slow == []
            continue
        # 1,000 and 2,000 bytes at 0.1 MB/s; the 4,000 along tp are not slow.
        assert [line["detail"].rpartition(": ")[2] for line in slow] == [
            "collective of 1000 bytes",
            "collective of 2000 bytes",
        ]
        assert took_ns[0] >= 10_000_000
        assert took_ns[1] >= 20_000_000


def read_steps(folder: Path, case: str) -> list[Lines]:
    assert exits(folder, case) == [0] * 4
    return [select(read(folder, case, rank), "step") for rank in range(4)]


def count_nan_ranks(folder: Path, case: str, key: str) -> list[list[int]]:
    """The ranks with NaN gradients, for each step."""
    ranks = read_steps(folder, case)
    return [[rank for rank, steps in enumerate(ranks) if steps[i][key]] for i in range(2)]


def test_a_run_without_due_faults_is_healthy(folder: Path) -> None:
    assert count_nan_ranks(folder, "healthy", "is_nan_after") == [[], []]
    for rank in range(4):
        lines = read(folder, "healthy", rank)
        assert {line["kind"] for line in lines} == {"started", "step"}


def test_a_slow_stage_is_slow_in_each_of_its_forwards(folder: Path) -> None:
    ranks = read_steps(folder, "slow stage")
    for rank in range(4):
        faults = select(read(folder, "slow stage", rank), "slow")
        # Ranks 2 and 3 hold the second stage; three microbatches each.
        assert [line["step"] for line in faults] == ([1] * 3 if rank >= 2 else [])
        assert all(f["end_host_mono_ns"] - f["begin_host_mono_ns"] >= DELAY_NS for f in faults)
    for rank in (2, 3):
        runs = ranks[rank][1]["runs"]
        assert all(runs[f"1F{index}"] >= DELAY_NS for index in range(3))


def test_nan_in_a_loss_reaches_the_others_only_by_the_sum_over_dp(folder: Path) -> None:
    # dp 1 is ranks 1 and 3; the last stage is on 3, its gradient goes to 1.
    assert count_nan_ranks(folder, "nan loss", "is_nan_before") == [[], [1, 3]]
    assert count_nan_ranks(folder, "nan loss", "is_nan_after") == [[], [0, 1, 2, 3]]
    recorded = [len(select(read(folder, "nan loss", rank), "nan")) for rank in range(4)]
    assert recorded == [0, 0, 0, 1]


def test_nan_in_a_gradient_stays_on_its_rank(folder: Path) -> None:
    assert count_nan_ranks(folder, "nan gradient", "is_nan_before") == [[], []]
    assert count_nan_ranks(folder, "nan gradient", "is_nan_after") == [[], [2]]
