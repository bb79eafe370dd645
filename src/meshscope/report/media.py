"""The media in which sections are written to a file, by the suffix of its name.

A medium is added by writing its function in `render/` and naming it here: `-o`, its help and a test
of control characters take it from this list. Terminals have `render.terminal`, which needs a width
and colours; JSON is no medium of sections (`encode`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from meshscope.report.render.markdown import render_markdown
from meshscope.report.render.page import render_page
from meshscope.report.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """A form of text."""

    suffixes: tuple[str, ...]
    """Of files, without the dot and in lower case; the first is the usual one."""
    words: str
    """What `--help` calls it."""
    render: Callable[[Iterable[Section], str], str]
    """Text of sections, under a title where the medium has one."""


PAGE = Medium(
    suffixes=("html", "htm"),
    words="a page",
    render=lambda sections, title: render_page(sections, title=title),
)
MARKDOWN = Medium(
    suffixes=("md",),
    words="Markdown",
    render=lambda sections, title: render_markdown(sections),
)

MEDIA: tuple[Medium, ...] = (PAGE, MARKDOWN)


def find_medium(suffix: str) -> Medium | None:
    """The one that files with this suffix are in."""
    return next((medium for medium in MEDIA if suffix in medium.suffixes), None)
