"""What a table of a run is: named quantities in records of eight 64-bit words."""

from dataclasses import dataclass

RECORD_BYTES = 64
NUM_WORDS = RECORD_BYTES // 8
MISSING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One named quantity inside a record."""

    name: str
    word: int
    """Which of the eight words holds it (1-7)."""
    meaning: str
    unit: str = ""
    shift: int = 0
    """Lowest bit inside the word."""
    width: int = 64
    """Number of bits; 64 is the whole word, signed; less is unsigned."""
    is_float: bool = False
    """The word is an IEEE-754 double rather than an integer."""
    can_be_missing: bool = False
    """-1 says that there is no value; SQL shows it as NULL."""
    is_stored_plus_one: bool = False
    """Stored as value + 1, so that bits that were never set are a missing value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One record file per rank and attempt."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    is_detail: bool = False
    """Detail is what a rank gives up first when it reaches its size limit."""

    def column(self, name: str) -> Column:
        """The column of that name."""
        return next(column for column in self.columns if column.name == name)


def name_column(word: int, meaning: str) -> Column:
    """The id of a name in the rank's name list."""
    return Column(name="name_id", word=word, width=16, meaning=meaning)
