"""Runs by URL: copies, archives, and what is said when a place cannot be used."""

import json
import shutil
from pathlib import Path

import fsspec
import pytest

import meshscope
from late_runs import STEADY, LateRun
from meshscope.core.layout import Layout
from meshscope.errors import StorageError, StorageNeedsPackage
from meshscope.store.read.files import fetch_below, list_names, look_again
from meshscope.store.read.run import open_run
from meshscope.store.read.run_folders import find_runs
from meshscope.store.remote import mirror
from meshscope.store.remote.mirror import mirror_root, mount, name_place, name_places
from meshscope.store.remote.storage import Storage, is_url
from meshscope.store.remote.upload import Uploader


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(mirror.CACHE_VARIABLE, str(tmp_path / "cache"))
    mirror_root.cache_clear()
    mirror._prefix.cache_clear()
    mirror._mounts.clear()
    yield tmp_path / "cache"
    mirror_root.cache_clear()
    mirror._prefix.cache_clear()
    mirror._mounts.clear()


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    LateRun(layout=Layout(dp=2), work=lambda rank, step: STEADY, num_steps=12).record(path)
    return path


def put(system, folder: Path, key: str) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            target = f"{key}/{file.relative_to(folder).as_posix()}"
            system.makedirs(target.rpartition("/")[0], exist_ok=True)
            system.pipe_file(target, file.read_bytes())


def report(place: object) -> str:
    """Without the place itself."""
    document = json.loads(meshscope.study(place).report().to_json())
    document["run"].pop("path")
    return json.dumps(document)


def test_a_url_is_told_from_a_path():
    assert is_url("s3://bucket/run")
    assert is_url("FILE:///run")
    assert not is_url("runs/s3:/run")
    assert not is_url("zip::s3://bucket/run")


def test_a_run_is_read_by_its_url_as_from_its_folder(run, memory):
    put(memory, run, "/bucket/run")
    assert report("memory://bucket/run") == report(run)
    assert report(f"file://{run}") == report(run)


def test_an_archive_is_read_as_the_folder_it_is_of(run, memory):
    uploader = Uploader(run, "memory://bucket/archived")
    sent = uploader.send(is_final=True)
    assert sent.sent_bytes > 0
    assert uploader.verify() == sum(
        {
            file.read_bytes(): file.stat().st_size for file in run.rglob("*") if file.is_file()
        }.values()
    )
    assert report("memory://bucket/archived") == report(run)


def test_what_is_there_is_not_sent_again_by_anybody(run, memory):
    first = Uploader(run, "memory://bucket/a")
    first.send(is_final=False)
    assert first.send(is_final=False).num_sent == 0
    assert Uploader(run, "memory://bucket/a").send(is_final=True).num_sent == 0


def test_an_archive_that_was_cut_off_goes_on_where_it_was(run, memory, monkeypatch):
    files = [file for file in run.rglob("*") if file.is_file()]
    left = len(files) // 2
    write = Storage.write

    def fail_later(self, name, data):
        nonlocal left
        left -= 1
        if left < 0:
            raise StorageError("away")
        write(self, name, data)

    monkeypatch.setattr(Storage, "write", fail_later)
    with pytest.raises(StorageError, match="away"):
        Uploader(run, "memory://bucket/a").send(is_final=True)
    monkeypatch.undo()
    with pytest.raises(StorageError, match="no list of this run"):
        Uploader(run, "memory://bucket/a").verify()
    again = Uploader(run, "memory://bucket/a").send(is_final=True)
    assert 0 < again.num_sent < len(files)
    assert again.num_files == len(files)


def test_what_the_run_no_longer_has_goes_after_one_more_pass(run, memory):
    uploader = Uploader(run, "memory://bucket/a")
    (run / "extra").write_bytes(b"x" * 100)
    uploader.send(is_final=False)
    (run / "extra").unlink()
    assert uploader.send(is_final=False).num_removed == 0  # a reader may be at it
    assert uploader.send(is_final=False).num_removed == 1
    assert "extra" not in list_names(mount("memory://bucket/a"))


def test_a_damaged_chunk_is_found_by_verification_and_sent_again(run, memory):
    uploader = Uploader(run, "memory://bucket/a")
    uploader.send(is_final=True)
    chunk = next(key for key in memory.store if "/objects/" in key)
    memory.pipe_file(chunk, b"other")
    with pytest.raises(StorageError, match="did not arrive as it was sent"):
        uploader.verify()
    again = Uploader(run, "memory://bucket/a")
    assert again.send(is_final=True).num_sent == 1
    again.verify()


def test_a_damaged_chunk_is_never_read_as_data(run, memory):
    Uploader(run, "memory://bucket/a").send(is_final=True)
    for key in [key for key in memory.store if "/objects/" in key]:
        data = memory.cat_file(key)
        memory.pipe_file(key, bytes([data[0] ^ 1]) + data[1:])
    text = meshscope.study("memory://bucket/a").report().to_json()
    assert "an archived chunk does not match its checksum" in text


def test_only_chunks_that_changed_are_fetched_again(run, memory, monkeypatch):
    big = run / "big.bin"
    big.write_bytes(b"a" * (9 << 20))
    uploader = Uploader(run, "memory://bucket/a")
    uploader.send(is_final=False)
    path = mount("memory://bucket/a")
    fetch_below(path)
    assert (path / "big.bin").read_bytes() == big.read_bytes()
    with big.open("ab") as file:
        file.write(b"b" * 100)
    uploader.send(is_final=False)
    read: list[str] = []
    plain = Storage.read
    monkeypatch.setattr(Storage, "read", lambda self, name: read.append(name) or plain(self, name))
    monkeypatch.setattr(mirror, "_FRESH_S", 0.0)
    look_again(path)
    fetch_below(path)
    assert (path / "big.bin").read_bytes() == big.read_bytes()
    assert sum("/objects/" in f"/{name}" for name in read) == 1


def test_lists_of_several_nodes_make_one_run(run, memory, tmp_path):
    other = tmp_path / "node1"
    (other / "rank00001").parent.mkdir()
    shutil.move(run / "rank00001", other / "rank00001")
    for folder in (run, other):
        Uploader(folder, "memory://bucket/job").send(is_final=True)
    assert sorted(open_run(mount("memory://bucket/job")).last_attempt.ranks) == [0, 1]


def test_runs_below_a_url_are_found_and_called_by_it(run, memory):
    put(memory, run, "/bucket/jobs/plain")
    Uploader(run, "memory://bucket/jobs/archived").send(is_final=True)
    found = find_runs(mount("memory://bucket"))
    assert [name_place(path) for path in found] == [
        "memory://bucket/jobs/archived",
        "memory://bucket/jobs/plain",
    ]
    assert name_places(f"{found[0]} and {found[1]}: bad") == (
        "memory://bucket/jobs/archived and memory://bucket/jobs/plain: bad"
    )


def test_names_that_lead_outside_are_left_out(run, memory, cache):
    put(memory, run, "/bucket/run")
    memory.store["/bucket/run/../../../escaped"] = memory.store["/bucket/run/run.json"]
    fetch_below(mount("memory://bucket/run"))
    assert not list(cache.rglob("escaped"))
    assert not list(cache.parent.glob("escaped"))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nowhere://bucket/run", "no storage is called nowhere"),
        ("memory://bucket/absent", "nothing is there"),
        ("memory://bucket/../run", "goes up by .."),
        ("s3://", "names no place"),
    ],
)
def test_a_place_that_cannot_be_used_is_told_in_a_sentence(url, says, memory):
    with pytest.raises(StorageError, match=says):
        mount(url)


def test_a_package_that_is_missing_is_named(monkeypatch):
    def refuse(*_, **__):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", refuse)
    with pytest.raises(ModuleNotFoundError) as caught:
        mount("s3://bucket/run")
    assert caught.value.name == "s3fs"


def test_a_package_that_only_fsspec_knows_is_told_in_its_words(monkeypatch):
    def refuse(*_, **__):
        raise ImportError('HTTPFileSystem requires "aiohttp" to be installed')

    monkeypatch.setattr(fsspec, "filesystem", refuse)
    with pytest.raises(StorageNeedsPackage, match='"aiohttp" to be installed; install it') as told:
        mount("http://host/run")
    assert told.value.exit_code == 4


def test_copies_used_longest_ago_make_room(run, memory, cache, monkeypatch):
    put(memory, run, "/bucket/a")
    fetch_below(mount("memory://bucket/a"))
    assert list(cache.rglob("*.pack"))
    monkeypatch.setenv(mirror.LIMIT_VARIABLE, "1")
    put(memory, run, "/bucket/b")
    mount("memory://bucket/b")
    assert not list(cache.rglob("*.pack"))
    assert report("memory://bucket/a") == report(run)
