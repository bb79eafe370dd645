"""Communication by axis, and on a wide screen each line of the budget by axis."""

from rich.text import Text

from meshscope.report import format as form
from meshscope.watch import marks
from meshscope.watch.glance import Glance, StageMemory

MAX_AXES = 4
_MAX_LINES = 7
_NAME, _CELL = 26, 10
_HIDDEN = "hidden behind compute"


def count_table_rows(glance: Glance, *, is_wide: bool) -> int:
    """With its title."""
    if is_wide and glance.lines:
        return 1 + min(len(glance.lines), _MAX_LINES) + bool(glance.axes)
    return 1 + len(glance.axes[:MAX_AXES]) if glance.axes else 0


def draw_axes(glance: Glance) -> list[Text]:
    """A row per axis."""
    if not glance.axes:
        return []
    head = f"{'axis':<8}{'exposed':>10}{'wait':>10}{'transfer':>10}{'hidden':>10}"
    title = Text().append(head, marks.QUIET)
    lines = [title.append(f"   {glance.late}", marks.TONES["attention"])]
    for row in glance.axes[:MAX_AXES]:
        times = (row.exposed_ns, row.wait_ns, row.transfer_ns, row.hidden_ns)
        lines.append(Text(f"{row.axis:<8}" + "".join(f"{form.duration(one):>10}" for one in times)))
    return lines


def draw_lines(glance: Glance) -> list[Text]:
    """A row per line of the budget, a column per axis; memory of stages beside it."""
    if not glance.lines:
        return draw_axes(glance)
    axes = [row.axis for row in glance.axes[:MAX_AXES]]
    head = f"{'per step':<{_NAME}}{'time':>{_CELL}}{'share':>{_CELL}}"
    head += "".join(f"{axis:>{_CELL}}" for axis in axes)
    title = Text().append(head, marks.QUIET)
    rows = [title.append(f"   {glance.late}", marks.TONES["attention"])]
    for line in glance.lines[:_MAX_LINES]:
        share = form.part(line.total_ns, glance.wall_ns)
        text = f"{line.name:<{_NAME}}{form.duration(line.total_ns):>{_CELL}}{share:>{_CELL}}"
        rows.append(Text(text + "".join(_show(line.by_axis_ns.get(axis)) for axis in axes)))
    if axes:
        hidden = "".join(_show(row.hidden_ns) for row in glance.axes[:MAX_AXES])
        rows.append(Text(f"{_HIDDEN:<{_NAME + 2 * _CELL}}{hidden}", marks.QUIET))
    for row, one in zip(rows[1:], glance.memory, strict=False):
        row.append(f"   {_describe_memory(one)}")
    return rows


def _show(time_ns: float | None) -> str:
    return f"{form.duration(time_ns) if time_ns else '·':>{_CELL}}"


def _describe_memory(one: StageMemory) -> str:
    limit = "" if one.limit_bytes is None else f" of {form.memory(one.limit_bytes)}"
    return f"{one.name} {form.memory(one.peak_bytes)} {one.where}{limit}, rank {one.rank}"
