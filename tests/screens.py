"""What tests ask of a text that was written for a terminal."""

from pathlib import Path

from rich.cells import cell_len


def find_widest(text: str, *, but: Path) -> int:
    """Cells of the widest line without that path, which is as long as the machine makes it."""
    return max(cell_len(line) for line in text.splitlines() if str(but) not in line)
