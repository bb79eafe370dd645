"""Writes one rank's part of a run directory, without talking to any other rank.

    RUN/run.json                             what this directory is (the first process writes it)
    RUN/rank00003/attempt000/journal.jsonl   header, names, health, closing line
    RUN/rank00003/attempt000/tables.pack     all tables

A restarted job finds `attempt000` taken and makes `attempt001`: attempts are never mixed and
nothing is ever overwritten. Standard library only.
"""

import logging
import os
import shutil
import threading
import time
from pathlib import Path

from meshscope.store.schema import (
    BUILTIN_NAMES,
    FIRST_CUSTOM_NAME_ID,
    MAX_DETAIL_BYTES,
    MAX_NAME_ID,
    SCHEMA_VERSION,
    TABLES,
)
from meshscope.store.write.access import FOLDER_MODE, make_folder, rename_new
from meshscope.store.write.journal import JOURNAL_NAME, JournalWriter
from meshscope.store.write.manifest import place_new, seal
from meshscope.store.write.pack import PACK_NAME, SEALED_PACK, PackedTable, PackWriter
from meshscope.store.write.segments import AnyTable, SegmentedTable
from meshscope.store.write.table_file import Put, TableWriter, describe_os_error
from meshscope.store.write.thinning import GRACE_SECONDS, Thinner

logger = logging.getLogger(__name__)

MANIFEST_NAME = "run.json"
RUN_FORMAT = "meshscope-run"
OVERFLOW_NAME = "(too many names)"
_MOUNT_TABLE = Path("/proc/self/mountinfo")

_UNMAPPABLE_FILE_SYSTEMS = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
        "nfs4", "orangefs", "panfs", "smb3", "smbfs", "virtiofs", "wekafs",
        "bcachefs", "btrfs", "f2fs", "nilfs2", "zfs",
    }
)  # fmt: skip
"""Where a mapped file is not safely shared or not supported, and (the last five) where a page that
was written once needs new space when it is written again, so that a full disk would be a SIGBUS.
Any `fuse.*` counts too."""


def rank_dir_name(rank: int) -> str:
    """`rank00003`."""
    return f"rank{rank:05d}"


def attempt_dir_name(attempt: int) -> str:
    """`attempt000`."""
    return f"attempt{attempt:03d}"


def file_system_type(path: Path, mount_table: Path = _MOUNT_TABLE) -> str | None:
    """Type of the file system that holds `path`, from the kernel's mount table; None if unknown."""
    try:
        mounts = mount_table.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    target = str(path.resolve())
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = fields[4].replace("\\040", " ")
        is_above = target == point or target.startswith(point.rstrip("/") + "/")
        # The longest mount point counts; of two mounts on one point, the later.
        if is_above and (best is None or len(point) >= best[0]):
            best = (len(point), after.split(" ")[0])
    return best[1] if best else None


def is_mappable(path: Path, mount_table: Path = _MOUNT_TABLE) -> bool:
    """Whether records may be written through a mapping of a file at `path`."""
    kind = file_system_type(path, mount_table)
    return kind is None or not (kind in _UNMAPPABLE_FILE_SYSTEMS or kind.startswith("fuse"))


def ensure_manifest(run_dir: Path, fields: dict[str, object]) -> None:
    """Writes `run.json` unless it is there: complete or absent, never half."""
    manifest = run_dir / MANIFEST_NAME
    if manifest.exists():
        return
    document = {
        "format": RUN_FORMAT,
        "schema_version": SCHEMA_VERSION,
        "run_id": os.urandom(6).hex(),
        "created_unix_ns": time.time_ns(),
        **fields,
    }
    place_new(manifest, seal(document))


class RankWriter:
    """Everything one rank writes in one attempt."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        *,
        header: dict[str, object],
        manifest: dict[str, object] | None = None,
        mapped: bool | None = None,
        max_detail_bytes: int = MAX_DETAIL_BYTES,
        max_bytes: int | None = None,
        grace_seconds: float = GRACE_SECONDS,
        is_draft: bool = False,
    ) -> None:
        """A draft is in a folder that no reader looks into, until `publish`. With `max_bytes`,
        somebody has to let `thinner` work."""
        self.rank = rank
        self._run_dir = run_dir
        self._made_run_dir = not run_dir.exists()
        make_folder(run_dir)
        rank_dir = run_dir / rank_dir_name(rank)
        ensure_manifest(run_dir, manifest or {})
        make = _make_draft if is_draft else _claim_attempt
        self.attempt, self.directory = make(rank_dir)
        self._draft_dir = self.directory.parent if is_draft else None
        self.is_mapped = is_mappable(self.directory) if mapped is None else mapped
        self._max_detail_bytes = max_detail_bytes
        self._fields: dict[str, object] = {"rank": rank, "attempt": self.attempt}
        self.segment = 0
        """Which pack is written, where packs are thinned."""
        self._sealing: PackWriter | None = None
        self._lock = threading.Lock()
        self._tables: dict[str, AnyTable] = {}
        self._name_ids = dict(BUILTIN_NAMES)
        self._next_name_id = FIRST_CUSTOM_NAME_ID
        self.thinner: Thinner | None = None
        """Keeps the files within `max_bytes`."""
        if max_bytes is not None:
            self.thinner = Thinner(self, self._fields, max_bytes, grace_seconds=grace_seconds)
        self._pack = self._make_pack()
        self.journal = JournalWriter(self.directory / JOURNAL_NAME)
        self.journal.write(
            "header",
            schema_version=SCHEMA_VERSION,
            attempt=self.attempt,
            sink="mapped" if self.is_mapped else "append",
            **({} if max_bytes is None else {"max_bytes": max_bytes}),
            **header,
        )

    def publish(self) -> bool:
        """Gives a draft its place among the attempts; False where another one has it by now.

        Called inside of a training step: most often it is one rename, of the rank's whole folder.
        """
        assert self._draft_dir is not None
        rank_dir = self._run_dir / rank_dir_name(self.rank)
        target = rank_dir / attempt_dir_name(self.attempt)
        try:
            try:
                rename_new(self._draft_dir, rank_dir)
            except FileExistsError:  # an earlier attempt made the rank's folder
                rename_new(self.directory, target)
                os.rmdir(self._draft_dir)
            ensure_manifest(self._run_dir, {})  # another rank may have given up its draft
        except OSError:
            return False
        self.directory, self._draft_dir = target, None
        self._pack.path = target / PACK_NAME
        return True

    def discard(self) -> None:
        """Removes a draft, and the run's folder if nothing else is in one that it made."""
        self.disarm()
        shutil.rmtree(self._draft_dir or self.directory, ignore_errors=True)
        if self._made_run_dir and os.listdir(self._run_dir) == [MANIFEST_NAME]:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def table(self, name: str) -> AnyTable:
        """The writer of a table; its file is made the first time it is asked for."""
        found = self._tables.get(name)
        if found is not None:
            return found
        with self._lock:
            found = self._tables.get(name)
            if found is None:
                table = self._make_table(name, self._pack)
                found = table if self.thinner is None else SegmentedTable(table)
                self._tables[name] = found
                self._try_journal("table", name=name)  # so that a file that gets lost is missed
        return found

    def _make_table(self, name: str, pack: PackWriter) -> TableWriter:
        fields = self._fields if self.thinner is None else {**self._fields, "segment": self.segment}
        place = PackedTable(pack, name)
        return TableWriter(place, TABLES[name], fields, max_detail_bytes=self._max_detail_bytes)

    def _make_pack(self) -> PackWriter:
        fields = self._fields if self.thinner is None else {**self._fields, "segment": self.segment}
        return PackWriter(self.directory / PACK_NAME, fields, mapped=self.is_mapped)

    # --- segments -------------------------------------------------------------------------------

    def roll(self) -> bool:
        """Begins a new segment; False, and all as before, where that is not possible now.

        The pack gets its new name first and is written on under it, so that a kill finds every
        record in one pack or the other.
        """
        with self._lock:
            before, sealed = self._pack, self.directory / SEALED_PACK
            if self._sealing is not None or before.fd < 0 or sealed.exists():
                return False
            os.rename(before.path, sealed)
            self.segment += 1
            pack = self._make_pack()
            made = {name: self._make_table(name, pack) for name in self._tables}
            if any(table.error for table in made.values()):
                for table in made.values():
                    table.disarm()
                pack.disarm()
                pack.path.unlink(missing_ok=True)
                os.rename(sealed, before.path)
                self.segment -= 1
                return False
            for name, segmented in self._tables.items():
                made[name].make_room()
                if isinstance(segmented, SegmentedTable):
                    segmented.switch(made[name])
            self._sealing, self._pack = before, pack
            return True

    def seal(self) -> None:
        """Completes the segment before the newest, some time after `roll`."""
        with self._lock:
            tables = list(self._tables.values())
        for table in tables:
            if isinstance(table, SegmentedTable):
                table.seal()
        if self._sealing is not None:
            self._sealing.close()
            self._sealing = None

    def put_into(self, name: str) -> Put:
        """What writes a record into a table now."""
        return self.table(name).put

    def live_sizes(self) -> dict[str, int]:
        """Bytes of the newest segment, by table."""
        return dict(self._pack.sizes)

    def name_id(self, text: str) -> int:
        """The id of a phase, span or scalar name; a new one is written down before its first use.

        Ids are 16 bits. A program that makes names without end (an index in each, say) shares one
        id for all that come after the last.
        """
        found = self._name_ids.get(text)
        if found is not None:
            return found
        with self._lock:
            if self._next_name_id >= MAX_NAME_ID:
                text = OVERFLOW_NAME
            found = self._name_ids.get(text)
            if found is None:
                found = self._next_name_id
                self.journal.write("name", id=found, text=text)
                self._next_name_id += 1
                self._name_ids[text] = found
            return found

    def _try_journal(self, kind: str, *, is_last: bool = False, **fields: object) -> None:
        """Writes a line that can be done without."""
        write = self.journal.write_last if is_last else self.journal.write
        try:
            write(kind, **fields)
        except OSError as error:
            logger.warning("the journal of rank %s: %s", self.rank, describe_os_error(error))

    def num_dropped(self) -> dict[str, int]:
        """Records lost so far per table, where any were."""
        return {
            name: table.num_dropped for name, table in self._tables.items() if table.num_dropped
        }

    def flush(self) -> None:
        """Hands everything to the operating system (a no-op for mapped tables)."""
        for table in list(self._tables.values()):
            table.flush()

    def close(self, **summary: object) -> None:
        """Completes every table and writes the closing line. Threads must have stopped asking for
        new tables; what they still put is either in the file before its end or not at all."""
        with self._lock:
            tables = dict(self._tables)
        for table in tables.values():
            table.close()
        for pack in (self._sealing, self._pack):
            if pack is not None:
                pack.close()
        for name, table in tables.items():
            if table.error:
                self._try_journal(
                    "health", cause="store", where=name, count=table.num_dropped, text=table.error
                )
        self._try_journal("close", is_last=True, **summary)
        self.journal.close()

    def disarm(self) -> None:
        """In a forked child: stop writing and leave the parent's files as they are."""
        self._lock = threading.Lock()
        for table in list(self._tables.values()):
            table.disarm()
        for pack in (self._sealing, self._pack):
            if pack is not None:
                pack.disarm()
        self.journal.disarm()


def _make_draft(rank_dir: Path) -> tuple[int, Path]:
    """The number the next attempt would have now, and its folder below one that readers pass over,
    which takes the place of the rank's."""
    attempt = 0
    while (rank_dir / attempt_dir_name(attempt)).exists():
        attempt += 1
    draft = rank_dir.with_name(f".{rank_dir.name}.{os.getpid()}.{os.urandom(4).hex()}")
    directory = draft / attempt_dir_name(attempt)
    draft.mkdir(FOLDER_MODE)
    directory.mkdir(FOLDER_MODE)
    return attempt, directory


def _claim_attempt(rank_dir: Path) -> tuple[int, Path]:
    """Makes the next free attempt directory; mkdir decides, so two processes never share one."""
    make_folder(rank_dir)
    attempt = 0
    while True:
        directory = rank_dir / attempt_dir_name(attempt)
        try:
            directory.mkdir(FOLDER_MODE)
        except FileExistsError:
            attempt += 1
        else:
            return attempt, directory
