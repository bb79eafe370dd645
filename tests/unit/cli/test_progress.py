import io
import os
import shutil
from pathlib import Path

import pytest

from meshscope.cli.jobs.progress import PlainProgress, StatusLine, describe_progress
from meshscope.store.read.tail import LiveView, RunTail
from meshscope.store.write.writer import RankWriter

NOTHING = LiveView(num_ranks=0, last_step=None, mean_step_ns=None, tokens_per_s=None)


@pytest.mark.parametrize(
    ("view", "total_steps", "text"),
    [
        (NOTHING, 100, "waiting for the first step"),
        (
            LiveView(num_ranks=1, last_step=None, mean_step_ns=None, tokens_per_s=None),
            None,
            "first step under way, 1 rank recording",
        ),
        (
            LiveView(num_ranks=8, last_step=0, mean_step_ns=None, tokens_per_s=None),
            None,
            "1 step done, 8 ranks recording",
        ),
        (
            LiveView(num_ranks=8, last_step=49, mean_step_ns=200_000_000, tokens_per_s=1280.0),
            1000,
            "50 of 1,000 steps done, 8 ranks recording, 200 ms per step, "
            "1,280 tokens/s per rank, 3 min 10 s left",
        ),
        (
            LiveView(num_ranks=8, last_step=99, mean_step_ns=200_000_000, tokens_per_s=None),
            100,
            "100 of 100 steps done, 8 ranks recording, 200 ms per step",
        ),
    ],
)
def test_progress_says_what_is_known(view: LiveView, total_steps: int | None, text: str) -> None:
    assert describe_progress(view, total_steps) == text


def record_two_steps(run_dir: Path) -> None:
    steps = RankWriter(run_dir, 0, header={}, mapped=True).table("steps")
    for step in range(2):
        steps.put(step, step * 10**6, (step + 1) * 10**6, 1, -1, -1, 0)


def test_a_log_gets_plain_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    with PlainProgress(RunTail(tmp_path), stream, None) as progress:
        progress.update()
        record_two_steps(tmp_path)
        progress.update()
    assert stream.getvalue() == (
        "meshscope: waiting for the first step\n"
        "meshscope: 2 steps done, 1 rank recording, 1.00 ms per step\n"
    )


def test_a_terminal_keeps_its_last_row_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((40, 24)))
    stream = io.StringIO()
    with StatusLine(RunTail(tmp_path), stream, None) as progress:
        assert stream.getvalue().count("\x1b[1;23r") == 1
        record_two_steps(tmp_path)
        progress.update()
        assert stream.getvalue().count("\x1b[1;23r") == 1
        assert "\x1b[24;1H\x1b[2K\x1b[1m meshscope: 2 steps done, 1 rank record\x1b[0m" in (
            stream.getvalue()
        )
    assert stream.getvalue().endswith("\x1b7\x1b[r\x1b8\x1b[J")


def test_a_terminal_without_room_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((40, 2)))
    stream = io.StringIO()
    with StatusLine(RunTail(tmp_path), stream, None):
        pass
    assert stream.getvalue() == ""
