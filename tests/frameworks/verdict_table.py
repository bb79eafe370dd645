"""Shows the verdicts as one table, and as JSON."""

import importlib.metadata
import json
import os
from pathlib import Path

from judge import TOLERANCE, Cell

OUTPUT = "FRAMEWORK_TABLE"
"""The variable that names the file for the JSON."""
_PACKAGES = ("torch", "transformers", "accelerate", "lightning", "trl")


class VerdictTable:
    """Rows in the order in which they come."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Cell]] = {}
        self._earlier: dict[str, dict[str, str]] = {}

    def add(self, name: str, cells: dict[str, Cell], earlier: dict[str, str]) -> None:
        """A program's row, and what was wrong in earlier tries; written at once, so that a table
        that is cut short is there too."""
        self._rows[name] = cells
        self._earlier |= {name: earlier} if earlier else {}
        if place := os.environ.get(OUTPUT):
            Path(place).write_text(self._encode(), encoding="utf-8")

    def draw(self) -> str:
        """A row per program: `ok`, `n/a` for what cannot be known, or `RED`; reasons are below."""
        questions = list(next(iter(self._rows.values()), {}))
        width = max(map(len, self._rows), default=0)
        lines = [" " * width + "  " + "  ".join(f"{q:>8}" for q in questions)]
        for name, cells in self._rows.items():
            marks = (_mark(cells[q]) for q in questions)
            lines.append(f"{name:<{width}}  " + "  ".join(f"{mark:>8}" for mark in marks))
        for name, cells in self._rows.items():
            lines += [f"{name}: {q}: {c.text}" for q, c in cells.items() if not c.is_good]
        return "\n".join(("", *lines))

    def _encode(self) -> str:
        cells = {
            name: {
                q: {"is_good": c.is_good, "is_unknown": c.is_unknown, "text": c.text}
                for q, c in row.items()
            }
            for name, row in self._rows.items()
        }
        everything = [cell.is_good for row in self._rows.values() for cell in row.values()]
        found = {
            "versions": {name: _read_version(name) for name in _PACKAGES},
            "tolerance": TOLERANCE,
            "num_programs": len(cells),
            "num_cells": len(everything),
            "num_good": sum(everything),
            "num_unknown": sum(c.is_unknown for row in self._rows.values() for c in row.values()),
            "wrong_in_earlier_tries": self._earlier,
            "programs": cells,
        }
        return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _mark(cell: Cell) -> str:
    return "n/a" if cell.is_unknown else "ok" if cell.is_good else "RED"


def _read_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
