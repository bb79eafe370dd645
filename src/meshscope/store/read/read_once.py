"""Reads every table of a small attempt once: later readers get the same columns.

An attempt with more rows than fit is left as it is: its tables are read again by each reader.
"""

from dataclasses import dataclass, field, fields, replace

from meshscope.store.read.columns import Columns
from meshscope.store.read.run import Attempt, RankRecording
from meshscope.store.schema import TABLES

MAX_KEPT_ROWS = 500_000
"""Of all tables and ranks together: about 60 megabytes as columns."""


@dataclass(slots=True, kw_only=True)
class _KeptRecording(RankRecording):
    kept: dict[str, Columns] = field(default_factory=dict, repr=False, compare=False)

    def read(self, name: str) -> Columns:
        if self.windows is not None:
            return RankRecording.read(self, name)
        if name not in self.kept:
            self.kept[name] = RankRecording.read(self, name)
            for array in self.kept[name].values():
                array.flags.writeable = False
        return self.kept[name]


def read_once(attempt: Attempt) -> Attempt:
    """The same attempt, whose tables are kept once they are read, where they all fit."""
    num_rows = 0
    for recording in attempt:
        num_rows += sum(recording.count_rows(name) for name in TABLES)
        if num_rows > MAX_KEPT_ROWS:
            return attempt
    return replace(attempt, ranks={rank: _keep(one) for rank, one in attempt.ranks.items()})


def _keep(recording: RankRecording) -> RankRecording:
    if isinstance(recording, _KeptRecording):
        return recording
    given = {one.name: getattr(recording, one.name) for one in fields(recording)}
    return _KeptRecording(**given)
