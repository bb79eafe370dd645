"""A run is for its owner and their group, under any umask."""

import os
from pathlib import Path

import pytest

from builders import make_run
from meshscope.store.read.compact import compact_run


@pytest.mark.parametrize(
    ("umask", "folder_mode", "file_mode"),
    [(0o022, 0o750, 0o640), (0o002, 0o770, 0o640), (0o077, 0o700, 0o600), (0, 0o770, 0o640)],
)
def test_others_cannot_read_a_run(
    tmp_path: Path, umask: int, folder_mode: int, file_mode: int
) -> None:
    before = os.umask(umask)
    try:
        run_dir = make_run(tmp_path / "above" / "run", world_size=2)
        written = list(run_dir.rglob("*"))
        compact_run(run_dir)
    finally:
        os.umask(before)
    assert run_dir.stat().st_mode & 0o777 == folder_mode
    assert {p.stat().st_mode & 0o777 for p in written if p.is_dir()} == {folder_mode}
    assert {p.stat().st_mode & 0o777 for p in written if p.is_file()} == {file_mode}
    assert (run_dir / "compact").stat().st_mode & 0o777 == folder_mode
    assert run_dir.parent.stat().st_mode & 0o777 == 0o777 & ~umask  # not the run's


def test_a_folder_that_was_there_keeps_its_rights(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o2775)
    make_run(run_dir, world_size=1)
    assert run_dir.stat().st_mode & 0o7777 == 0o2775
    assert (run_dir / "rank00000").stat().st_mode & 0o007 == 0
