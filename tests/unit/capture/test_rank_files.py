"""Files of a rank that are made before the first step: out of sight until then, never wrong."""

import os
import shutil

import pytest

from builders import table_path
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.store.read.files import file_size, list_tables
from meshscope.store.read.run import open_run
from meshscope.store.read.tail import list_ranks
from meshscope.store.write.pack import PACK_NAME

CONFIG = RecorderConfig(provenance=False)


@pytest.fixture
def prepared(tmp_path):
    recorder = Recorder(tmp_path / "run", config=CONFIG)
    recorder.session.prepare()
    yield recorder
    recorder.close()


def list_names(folder):
    return sorted(path.name for path in folder.iterdir())


def take_step(recorder):
    with recorder.step():
        recorder.log(loss=1.5)


def test_nothing_is_in_the_run_before_the_first_record(prepared, tmp_path):
    run = tmp_path / "run"
    assert (list_ranks(run), len(list_names(run)), prepared.is_recording) == ([], 2, False)
    take_step(prepared)
    assert list_names(run) == ["rank00000", "run.json"]
    prepared.close()
    rank = next(iter(open_run(run).last_attempt))
    assert (list(rank.read("steps")["step"]), len(rank.read("scalars")["value"])) == ([0], 1)
    assert not prepared.guard.counts


def test_the_first_record_finds_its_window_mapped(prepared, tmp_path):
    (draft,) = (path for path in (tmp_path / "run").iterdir() if path.is_dir())
    (pack,) = draft.rglob(PACK_NAME)
    assert {"steps", "scalars"} <= set(list_tables(pack))
    take_step(prepared)
    prepared.close()
    table = table_path(tmp_path / "run" / "rank00000" / "attempt000", "steps")
    assert file_size(table) == 8192


def test_a_process_that_never_trains_leaves_nothing(prepared, tmp_path):
    prepared.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_others_record_into_stays(prepared, tmp_path):
    with Recorder(tmp_path / "run", config=CONFIG) as other:
        take_step(other)
    prepared.close()
    assert list_names(tmp_path / "run") == ["rank00000", "run.json"]


def test_an_attempt_that_another_process_took_is_left_to_it(prepared, tmp_path):
    with Recorder(tmp_path / "run", config=CONFIG) as other:
        take_step(other)
    take_step(prepared)
    assert list_names(tmp_path / "run") == ["rank00000", "run.json"]
    assert list_names(tmp_path / "run" / "rank00000") == ["attempt000", "attempt001"]
    assert not prepared.guard.counts


def test_a_rank_that_learns_its_number_later_is_recorded_as_that(prepared, tmp_path, monkeypatch):
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    take_step(prepared)
    assert list_names(tmp_path / "run") == ["rank00003", "run.json"]


def test_settings_that_change_before_the_first_step_are_the_ones_recorded(prepared, tmp_path):
    prepared.configure(communication=False)
    take_step(prepared)
    prepared.close()
    rank = next(iter(open_run(tmp_path / "run").last_attempt))
    assert rank.header["communication"] is False


def test_a_forked_child_makes_files_of_its_own(prepared, tmp_path):
    child = os.fork()
    if not child:
        take_step(prepared)
        prepared.close()
        os._exit(0 if not prepared.guard.counts else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert list_names(tmp_path / "run" / "rank00000") == ["attempt000"]
    take_step(prepared)
    prepared.close()
    assert list_names(tmp_path / "run" / "rank00000") == ["attempt000", "attempt001"]
    assert [
        len(r.read("steps")["step"]) for a in open_run(tmp_path / "run").attempts for r in a
    ] == [
        1,
        1,
    ]


def test_a_folder_that_cannot_be_made_is_told_at_the_first_record(tmp_path):
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / "file" / "run", config=CONFIG)
    recorder.session.prepare()
    assert not recorder.guard.counts
    take_step(recorder)
    assert recorder.failure


def test_files_that_somebody_deletes_are_told_once(tmp_path, caplog):
    with Recorder(tmp_path / "run", config=CONFIG) as recorder:
        take_step(recorder)
        recorder.session.check_files()
        assert caplog.text == ""
        shutil.rmtree(tmp_path / "run")
        for _ in range(2):
            take_step(recorder)
            recorder.session.check_files()
    assert caplog.text.count("were deleted while it records") == 1
    assert not recorder.guard.counts


def test_facts_that_are_told_before_the_first_step_are_written_ahead(prepared, tmp_path):
    prepared.set_config({"width": 8})
    prepared.set_flops(model_flops_per_step=6e9)
    (journal,) = (tmp_path / "run").rglob("journal*")
    assert b"6000000000" in journal.read_bytes() or b"6e9" in journal.read_bytes().lower()
    size = journal.stat().st_size
    assert prepared.open()
    (journal,) = (tmp_path / "run" / "rank00000" / "attempt000").glob("journal*")
    assert journal.stat().st_size == size
