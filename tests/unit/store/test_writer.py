"""One rank's folder: claimed alone, named once, closed even when the disk is full."""

import threading
from pathlib import Path

import pytest

from meshscope.store.schema import MAX_NAME_ID
from meshscope.store.write.journal import read_journal
from meshscope.store.write.manifest import seal, unseal
from meshscope.store.write.writer import (
    OVERFLOW_NAME,
    RankWriter,
    ensure_manifest,
    file_system_type,
    is_mappable,
    rank_dir_name,
)


def test_attempts_are_never_shared_even_by_simultaneous_processes(tmp_path: Path) -> None:
    attempts: list[int] = []

    def claim() -> None:
        attempts.append(RankWriter(tmp_path, 0, header={}).attempt)

    threads = [threading.Thread(target=claim) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(attempts) == list(range(16))


def test_a_large_rank_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert rank_dir_name(3) == "rank00003"
    assert RankWriter(tmp_path, 123_456, header={}).directory.parent.name == "rank123456"


def test_threads_get_one_id_per_name_and_one_table(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, header={})
    found: list[tuple[int, ...]] = []

    def work() -> None:
        ids = tuple(writer.name_id(f"name {n}") for n in range(100))
        writer.table("spans").put(1, 2, 3, 4, 5, 6, 7)
        found.append(ids)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(set(found[0])) == 100


def test_names_without_end_share_the_last_id(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0, header={})
    writer._next_name_id = MAX_NAME_ID - 1
    assert writer.name_id("last") == MAX_NAME_ID - 1
    assert writer.name_id("one more") == writer.name_id("another") == MAX_NAME_ID
    lines, _ = read_journal((writer.directory / "journal.jsonl").read_bytes())
    assert [line["text"] for line in lines if line["kind"] == "name"] == ["last", OVERFLOW_NAME]


def test_the_manifest_of_the_first_stays(tmp_path: Path) -> None:
    ensure_manifest(tmp_path, {"name": "first"})
    ensure_manifest(tmp_path, {"name": "second"})
    document, is_intact = unseal((tmp_path / "run.json").read_bytes())
    assert document["name"] == "first"
    assert is_intact
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_sealed_document_shows_any_change() -> None:
    data = seal({"format": "x", "number": 1, "nested": {"a": [1, 2]}})
    assert unseal(data) == ({**unseal(data)[0]}, True)
    assert not unseal(data.replace(b"1,", b"1 ,"))[1]
    with pytest.raises(ValueError, match="nested too deeply"):
        unseal(b"[" * 100_000)


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        RankWriter(tmp_path / "file", 0, header={})


@pytest.mark.parametrize(
    ("mounts", "kind"),
    [
        ("1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {p} rw - nfs4 server:/x rw\n", "nfs4"),
        ("1 0 0:1 / / rw - overlay o rw\n2 1 0:2 / / rw - btrfs /dev/b rw\n", "btrfs"),
        ("1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {p}x rw - nfs4 server:/x rw\n", "ext4"),
        ("nonsense\n", None),
    ],
    ids=["longest point", "later of two on one point", "no prefix of a name", "unknown"],
)
def test_the_file_system_is_that_of_the_mount_above(
    tmp_path: Path, mounts: str, kind: str | None
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(mounts.format(p=tmp_path), encoding="utf-8")
    assert file_system_type(tmp_path, table) == kind
    assert is_mappable(tmp_path, table) == (kind in ("ext4", None))
