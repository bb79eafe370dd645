"""Sections as Markdown. Every character that Markdown or HTML would act on is escaped: names from
a run cannot end a table, make a link or load an image.
"""

import re
from collections.abc import Iterable, Sequence

from meshscope.report import format as form
from meshscope.report.section import (
    Blank,
    Facts,
    Headline,
    Line,
    Part,
    Section,
    Series,
    Table,
    Tone,
)

_ACTIVE = re.compile(r"([\\`*_{}\[\]#!|~$@])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_LOUD = (Tone.STRONG, Tone.ALARM, Tone.CRITICAL)


def render_markdown(sections: Iterable[Section]) -> str:
    """All sections, each under a heading; ends with a newline."""
    blocks = [block for section in sections for block in _list_blocks(section)]
    return "\n\n".join(blocks) + "\n"


def escape(text: str) -> str:
    """Text with everything escaped that Markdown would act on."""
    shown = "".join(_ENTITIES.get(character, character) for character in form.clean_text(text))
    # After the entities: their own & and ; are not touched by this.
    return _ACTIVE.sub(r"\\\1", shown)


def write_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, escaped."""
    lines = [
        "| " + " | ".join(map(escape, titles)) + " |",
        "|" + "---|" * len(titles),
        *("| " + " | ".join(map(escape, cells)) + " |" for cells in rows),
    ]
    return "\n".join(lines)


def _list_blocks(section: Section) -> list[str]:
    blocks = [f"### {escape(section.title)}"] if section.title else []
    if section.note:
        blocks.append(f"*{escape(section.note)}*")
    return blocks + [block for part in section.parts if (block := _write_part(part))]


def _write_part(part: Part) -> str:
    match part:
        case Headline(text, tone) | Line(text, tone):
            return f"**{escape(text)}**" if tone in _LOUD else escape(text)
        case Facts(rows):
            return "\n".join(
                f"- {escape(name.strip())}: {escape(cell.text)}" for name, cell in rows
            )
        case Table(columns):
            shown = [column for column in columns if not column.bars]
            cells = ([column.cells[at].text for column in shown] for at in range(part.num_rows))
            return write_table([column.title for column in shown], cells)
        case Series(values=values):
            if len(values) < 2:
                return ""
            most = max(part.weights)
            return f"`{form.sparkline(values)}`  \n{escape(part.describe(values, most))}"
        case Blank():
            return ""
