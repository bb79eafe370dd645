"""`meshscope glossary`: what the words on the screens mean, and on which clock times are."""

import click

from meshscope.cli.terminal_screen import show_sections
from meshscope.errors import UsageError
from meshscope.report.glossary import GLOSSARY, INTRODUCTION, Entry
from meshscope.report.section import Line, Section, Tone, make_facts


@click.command("glossary", short_help="Explain the words and clocks on the screens.")
@click.argument("word", required=False)
@click.pass_context
def command(context: click.Context, *, word: str | None) -> None:
    """Says what words mean, in which unit and on which clock; all of them, or those with WORD."""
    chosen = {
        title: [entry for entry in entries if (word or "").lower() in entry.word.lower()]
        for title, entries in GLOSSARY.items()
    }
    if not any(chosen.values()):
        raise UsageError(f"{word!r} is not in the glossary; without a word, all are listed")
    sections = [_make_section(title, entries) for title, entries in chosen.items() if entries]
    if word is None:
        head = Section(key="introduction", title="", parts=(Line(INTRODUCTION, Tone.QUIET),))
        sections.insert(0, head)
    show_sections(context, sections)


def _make_section(title: str, entries: list[Entry]) -> Section:
    rows = [
        (entry.word, f"{entry.meaning} [{entry.unit}]" if entry.unit else entry.meaning)
        for entry in entries
    ]
    return Section(key=title, title=title, parts=(make_facts(rows),))
