"""A flame graph as one SVG file: widths are time, stacks grow upwards, titles have the numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from meshscope.report import format as form

_WIDTH, _ROW, _LETTER = 1200, 17, 6.6
_MIN_WIDTH = 0.4
"""Pixels; what is narrower is left out."""
_COLOURS = ("#e8a33d", "#d9822b", "#cf6a2c", "#e0b85a", "#c9542e", "#dd9440")


@dataclass(slots=True)
class _Frame:
    total_ns: int = 0
    inner: dict[str, "_Frame"] = field(default_factory=dict)


def render_flame(stacks: Mapping[tuple[str, ...], int], title: str) -> str:
    """The whole file."""
    root = _Frame()
    for names, ns in stacks.items():
        root.total_ns += ns
        frame = root
        for name in names:
            frame = frame.inner.setdefault(name, _Frame())
            frame.total_ns += ns
    boxes = list(_lay(root, root.total_ns, 0.0, 0))
    height = (max((depth for depth, *_ in boxes), default=0) + 3) * _ROW
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="monospace" font-size="11">',
        f'<text x="4" y="12">{escape(form.clean_text(title))}, '
        f"{escape(form.duration(root.total_ns))} of device time</text>",
    ]
    for depth, left, width, name, ns in boxes:
        top = height - (depth + 1) * _ROW
        clean = form.clean_text(name)
        share = form.ratio(ns / max(root.total_ns, 1))
        shown = clean[: int(width / _LETTER)] if width > 3 * _LETTER else ""
        colour = _COLOURS[sum(map(ord, clean)) % len(_COLOURS)]
        lines.append(
            f"<g><title>{escape(clean)}: {escape(form.duration(ns))}, {share}</title><rect "
            f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 1}" fill="{colour}"/>'
            f'<text x="{left + 2:.1f}" y="{top + 12}">{escape(shown)}</text></g>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _lay(
    frame: _Frame, whole_ns: int, left: float, depth: int
) -> Iterator[tuple[int, float, float, str, int]]:
    for name, inner in sorted(frame.inner.items(), key=lambda item: -item[1].total_ns):
        width = inner.total_ns / max(whole_ns, 1) * _WIDTH
        if width >= _MIN_WIDTH:
            yield depth, left, width, name, inner.total_ns
            yield from _lay(inner, whole_ns, left, depth + 1)
        left += width
