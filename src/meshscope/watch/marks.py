"""What a screen is drawn with: styles, sparks, bars and cells. Characters alone carry everything;
colours repeat it."""

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from meshscope.analyze.timeline.timeline import ACTION_KINDS
from meshscope.page.heat.cells import Cells
from meshscope.page.lamps import LampState
from meshscope.page.step_spans import StepSpans
from meshscope.report import format as form
from meshscope.store.read.arrays import Floats, Int64s

QUIET, STRONG = "#8E97A1", "bold"
TONES = {"bad": "bold #FF8A7A", "attention": "#E3B341", "ok": "#5FD39A", "not known": QUIET}
LAMP_MARKS = {
    LampState.OK: ("✓", TONES["ok"]),
    LampState.ATTENTION: ("△", TONES["attention"]),
    LampState.BAD: ("▲", TONES["bad"]),
    LampState.NOT_KNOWN: ("?", TONES["not known"]),
}
GROUP_MARKS = {
    "compute": ("█", "#4C9BE8"),
    "transfer": ("▓", "#F39A2D"),
    "wait": ("░", "#E070B5"),
    "bubble": ("╱", "#E8CE6A"),
    "idle": ("·", "#6F7883"),
    "input": ("▒", "#3FD9B5"),
    "other": ("-", "#8E97A1"),
}
HEAT = ((".", "#6B7480"), (":", "#C96A58"), ("+", "#E5654C"), ("#", "bold #FFB199"))
HEAT_FROM = (0.0, 0.18, 0.42, 0.72)
"""Share of the scale from which each mark is used."""
_MAX_WIDENING = 3
"""Columns of a step at most."""
_MIN_SCALE = 0.25
"""Of the median step: what is less is noise."""


def spark(values: Sequence[float], width: int) -> str:
    """The last values; where there are more than columns, the largest of each."""
    return form.sparkline(_take_largest(np.array(values, dtype=np.float64), width).tolist())


def _take_largest(values: Floats, width: int) -> Floats:
    if len(values) <= width:
        return values
    edges = np.arange(width) * len(values) // width
    return np.asarray(np.maximum.reduceat(values, edges), dtype=np.float64)


def draw_bar(groups: Sequence[tuple[str, float]], width: int) -> Text:
    """Each group as a bar with its name and per cent behind it."""
    shown = list(groups)
    labels = [f" {name} {100 * share:.0f} " for name, share in shown]
    left = max(width - sum(map(len, labels)), 0)
    bar = Text()
    total = sum(share for _, share in shown) or 1.0
    for (name, share), label in zip(shown, labels, strict=True):
        mark, style = GROUP_MARKS[name]
        num = max(int(left * share / total), 1) if left else 0
        bar.append(mark * num, style).append(label)
    return bar


def find_scale(cells: Cells, step_ns: float | None) -> float:
    """The value that the highest mark begins at is most of this: see EYES, heat ramp."""
    known = cells.value[np.isfinite(cells.value)]
    known = known[known > 0]
    if not len(known):
        return 1.0
    if not cells.metric.is_excess:
        return float(known.max())
    floor = _MIN_SCALE * step_ns if step_ns is not None and cells.metric.unit == "ns" else 0.0
    return float(max(0.72 * known.max(), 1.6 * np.percentile(known, 97), floor, 1.0))


def draw_cells(values: Floats, scale: float, width: int) -> Text:
    """A mark per column, the largest of its steps, or some per step; blank where nothing is
    known."""
    text = Text()
    shown = _take_largest(np.where(np.isfinite(values), values, -1.0), width)
    shown = np.repeat(shown, min(max(width // max(len(shown), 1), 1), _MAX_WIDENING))
    for value in shown.tolist():
        if value < 0:
            text.append(" ")
            continue
        share = value / scale
        level = max(at for at, low in enumerate(HEAT_FROM) if share >= low)
        text.append(*HEAT[level])
    return text


def draw_lane(spans: StepSpans, index: int, width: int) -> Text:
    """Actions of one rank in a step: digits are forward, letters backward, by microbatch."""
    actions = spans.actions
    marks, styles = [" "] * width, [""] * width
    if actions is None:
        return Text("".join(marks))
    scale = width / max(spans.length_ns, 1)
    pieces = spans.pieces.rank == index
    for start, length in zip(
        (spans.pieces.start_ns[pieces] * scale).astype(int).tolist(),
        (spans.pieces.duration_ns[pieces] * scale).astype(int).tolist(),
        strict=True,
    ):
        for at in range(start, min(start + length + 1, width)):
            marks[at], styles[at] = "·", QUIET
    own = np.flatnonzero(actions.rank == index)
    for row in own.tolist():
        is_forward = ACTION_KINDS[actions.kind[row]] == "F"
        mark = "0123456789" if is_forward else "abcdefghij"
        begin = int(actions.start_ns[row] * scale)
        end = max(int((actions.start_ns[row] + actions.duration_ns[row]) * scale), begin + 1)
        for at in range(max(begin, 0), min(end, width)):
            marks[at] = mark[int(actions.microbatch[row]) % 10]
            styles[at] = "#4C9BE8" if is_forward else "#7FA8F5"
    text = Text()
    for mark_, style in zip(marks, styles, strict=True):
        text.append(mark_, style)
    return text


def name_range(values: Int64s | Sequence[int]) -> str:
    """`224–339 ms`."""
    low, high = min(values), max(values)
    return f"{form.duration(low)} – {form.duration(high)}"
