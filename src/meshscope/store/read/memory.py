"""Recordings in memory: tables are handed over as columns, and read as a folder's are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshscope.store.read.columns import Columns, empty_columns, encode_words, select_rows
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Run
from meshscope.store.read.table_window import TIME_OF
from meshscope.store.schema import FIRST_CUSTOM_NAME_ID, MISSING, TABLES
from meshscope.store.write.access import make_folder
from meshscope.store.write.groups import GROUP_KIND, pack_ranks
from meshscope.store.write.writer import RankWriter, ensure_manifest


@dataclass(slots=True, kw_only=True)
class MemoryRecording(Recording):
    """A rank's tables in memory."""

    columns: Mapping[str, Columns] = field(repr=False)
    """By table; one that is not there has no rows."""

    def has_table(self, name: str) -> bool:
        """Whether the rank has any record of this table."""
        return name in self.columns

    def count_rows(self, name: str) -> int:
        """How many rows a table has."""
        found = self.columns.get(name)
        return len(next(iter(found.values()))) if found else 0

    def read_raw(self, name: str) -> Columns:
        """A table's columns as handed over."""
        table = TABLES[name]
        found = self.columns.get(name)
        if found is None:
            return empty_columns(table)
        if self.windows is None or name not in TIME_OF:
            return found
        moments = TIME_OF[name](encode_words(table, found))
        return select_rows(found, self.windows.contain(moments))


def make_columns(
    name: str, given: Mapping[str, npt.NDArray[np.generic] | int], num_rows: int
) -> Columns:
    """A table's columns of the types that reading a file gives; those not given are zero, or
    missing where zero means that.
    """
    made: Columns = {}
    for column, (dtype, missing) in _column_types(name).items():
        values = given.get(column, missing)
        if isinstance(values, np.ndarray) and values.ndim:
            made[column] = values.astype(dtype)
        else:
            made[column] = np.full(num_rows, values, dtype=dtype)
    if unknown := given.keys() - made.keys():
        raise KeyError(f"table {name} has no column {sorted(unknown)}")
    return made


@cache
def _column_types(name: str) -> dict[str, tuple[np.dtype[np.generic], int]]:
    """Of each column of a table its type, and what stands where it is not given."""
    table = TABLES[name]
    return {
        column.name: (empty.dtype, MISSING if column.is_stored_plus_one else 0)
        for column, empty in zip(table.columns, empty_columns(table).values(), strict=True)
    }


def write_run(run: Run, run_dir: Path) -> None:
    """Writes the last attempt of a run into a new run directory."""
    make_folder(run_dir)
    ensure_manifest(run_dir, dict(run.manifest))
    for recording in run.last_attempt:
        write_recording(recording, run_dir)


def write_recording(recording: Recording, run_dir: Path) -> None:
    """Writes a recording into a run directory, as the rank itself would have."""
    rank_fields = {"schema_version", "attempt", "sink", "kind"}
    header = {key: value for key, value in recording.header.items() if key not in rank_fields}
    writer = RankWriter(run_dir, recording.rank, header=header)
    for name_id, text in sorted(recording.names.items()):
        if name_id >= FIRST_CUSTOM_NAME_ID and writer.name_id(text) != name_id:
            raise ValueError(
                f"name {name_id} of rank {recording.rank} does not follow the one before"
            )
    for group in recording.groups.values():
        writer.journal.write(
            GROUP_KIND,
            id=group.group_id,
            name=group.name,
            description=group.description,
            backend=group.backend,
            ranks=pack_ranks(group.ranks),
        )
    for name, table in TABLES.items():
        if recording.has_table(name):
            put = writer.table(name).put
            for words in encode_words(table, recording.read_raw(name))[:, 1:].tolist():
                put(*words)
    closing = recording.closing or {}
    writer.close(**{key: value for key, value in closing.items() if key != "kind"})
