"""The screen of a run: lines of text for a terminal of a given size.

80 × 24    state, verdict, lamps, step times, budget, ranks that stand out, axes, findings; what to
           do and since when where lines are left
120 × 40   and what to change, loss, up to 16 ranks, the budget's lines by axis, memory, a step of
           the pipeline
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from meshscope.core.unavailable import known
from meshscope.page.heat.cells import METRICS, Cells
from meshscope.page.lamps import LampState
from meshscope.page.run_state import StateKind
from meshscope.report import format as form
from meshscope.watch import marks, plain
from meshscope.watch.axes_table import count_table_rows, draw_axes, draw_lines
from meshscope.watch.findings_list import (
    list_findings,
    list_in_full,
    name_findings,
    tell_first,
    wrap_text,
)
from meshscope.watch.glance import Glance, order_ranks
from meshscope.watch.watched import Watched

WIDE_COLUMNS, WIDE_ROWS = 110, 34
KEYS = (
    ("q", "quit"),
    ("↑ ↓", "choose a rank, or scroll"),
    ("Enter", "detail of the rank, and back"),
    ("m", "next metric of the heat map"),
    ("f", "findings in full, and back"),
    ("p", "pause the screen"),
    ("?", "this list, and back"),
)
_FOOTER = "q quit ↑↓ rank ⏎ detail m metric f findings p pause ? keys"
_STATE_TONES = {
    StateKind.LIVE: "ok",
    StateKind.FINISHED: "ok",
    StateKind.FAILED: "bad",
    StateKind.STUCK: "bad",
    StateKind.OPEN: "not known",
    StateKind.TRACES: "not known",
}
_MIN_VERDICT_STEPS = 5
_MAX_WIDE_RANKS = 16
_LABEL, _MEAN = 18, 11
"""Columns of a heat row's name and mean."""


@dataclass(slots=True)
class View:
    """What the user chose to see."""

    mode: str = "run"
    """`run`, `rank`, `findings` or `keys`."""
    selected: int | None = None
    """Place among the ranks that are shown; None until one was chosen: the one that stands out."""
    scroll: int = 0
    is_paused: bool = False


def draw_screen(watched: Watched, view: View, width: int, height: int) -> list[Text]:
    """Exactly `height` lines, none wider than `width`."""
    body = {
        "run": _draw_run,
        "rank": _draw_rank,
        "findings": _draw_findings,
        "keys": _draw_keys,
    }[view.mode](watched, view, width, height - 4)
    lines = [_draw_head(watched, width), *_draw_verdict(watched, width), *body]
    lines = lines[: height - 1]
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(_draw_foot(watched, view, width))
    for line in lines:
        line.truncate(width)
        line.stylize_before(line.style)  # a text without spans is drawn plain
    return lines


def list_shown(watched: Watched, limit: int) -> list[int]:
    """Ranks of the heat map, by rank where all fit, else those that stand out most."""
    cells = watched.cells
    if cells is None:
        return []
    if len(cells.ranks) <= limit:
        return list(cells.ranks)
    return [cells.ranks[index] for index in order_ranks(cells)[:limit]]


def move_selection(watched: Watched, view: View, change: int, size: tuple[int, int]) -> None:
    """Chooses the next rank of those that a screen of this size shows."""
    shown = list_shown(watched, count_rows(watched, *size))
    if shown:
        place = _find_selected(watched, view, shown) + change
        view.selected = min(max(place, 0), len(shown) - 1)


def _find_selected(watched: Watched, view: View, shown: list[int]) -> int:
    if view.selected is not None:
        return min(view.selected, len(shown) - 1)
    cells = watched.cells
    return 0 if cells is None else shown.index(cells.ranks[order_ranks(cells)[0]])


def count_rows(watched: Watched, width: int, height: int) -> int:
    """Rows that ranks have on the screen of this size."""
    glance, is_wide = watched.glance, _is_wide(width, height)
    fixed = 10 + (0 if glance is None else count_table_rows(glance, is_wide=is_wide))
    if is_wide:
        return max(min(_MAX_WIDE_RANKS, height - fixed - 12), 1)
    return max(height - fixed - 1, 1)


def _is_wide(width: int, height: int) -> bool:
    return width >= WIDE_COLUMNS and height >= WIDE_ROWS


def _draw_head(watched: Watched, width: int) -> Text:
    moment, state, glance = watched.moment, watched.state, watched.glance
    parts = [plain.describe_step(watched)]
    if moment is not None and moment.pace_ns:
        parts.append(f"{1e9 / moment.pace_ns:.3g} steps/s")
    parts += plain.describe_tokens(watched)
    ranks = plain.describe_ranks(watched)
    layout = "" if glance is None else glance.layout
    is_all = moment is not None and moment.num_ranks == moment.world_size
    if width < WIDE_COLUMNS and is_all and moment is not None:
        ranks = f"{moment.num_ranks}r"
    rest = "  ".join(filter(None, [*parts, " ".join(filter(None, (ranks, layout)))]))
    kind = plain.name_state(watched)
    name = form.clean_text(watched.name, max(width - len(rest) - len(kind) - 4, 12))
    line = Text().append(name, "bold").append(f"  {kind}", marks.TONES[_STATE_TONES[state.kind]])
    return line.append(f"  {rest}")


def _draw_verdict(watched: Watched, width: int) -> Iterator[Text]:
    """One line, or two."""
    glance, state = watched.glance, watched.state
    tone = "not known" if glance is None else glance.tone
    if state.kind in (StateKind.STUCK, StateKind.FAILED):
        tone = "bad"
    mark = {"bad": "▲", "attention": "△", "ok": "✓"}.get(tone, "?")
    for line in wrap_text(f"{mark} {plain.tell_verdict(watched)}", width)[:2]:
        yield Text(line, marks.TONES[tone])


def _draw_foot(watched: Watched, view: View, width: int) -> Text:
    age = "" if not watched.read_s else f"read {time.monotonic() - watched.read_s:.1f} s ago"
    age = "paused" if view.is_paused else age
    line = Text().append(_FOOTER, marks.QUIET)
    line.append(" " * max(width - len(_FOOTER) - len(age), 1))
    return line.append(age, marks.TONES["attention"] if view.is_paused else marks.QUIET)


def _draw_run(watched: Watched, view: View, width: int, height: int) -> list[Text]:
    glance = watched.glance
    if glance is None:
        explained = wrap_text(_explain_nothing(watched), width)
        return [
            *_draw_steps(watched, width),
            Text(),
            *(Text(one, marks.QUIET) for one in explained),
        ]
    is_wide = _is_wide(width, height + 4)
    lines = [Text(f"change: {glance.change}")] if is_wide and glance.change else []
    lines.append(_draw_lamps(glance, is_wide=is_wide))
    if glance.alarm:
        lines.append(Text(f"! {glance.alarm}", marks.TONES["attention"]))
    lines += _draw_steps(watched, width)
    if is_wide and len(watched.losses) > 1:
        lines.append(_draw_loss(watched, width))
    lines.append(_draw_budget(glance, width))
    lines += _draw_heat(watched, view, width, count_rows(watched, width, height + 4))
    lines += draw_lines(glance) if is_wide else draw_axes(glance)
    if is_wide:
        rest = height - len(lines) - 1 - min(len(glance.findings), 3)
        lines += _draw_lanes(glance, width, rest)
        lines += list_findings(glance, height - len(lines) - 1)
    else:
        lines.append(name_findings(glance, width))
        lines += tell_first(glance, width, height - len(lines) + 1)
    return lines


def _explain_nothing(watched: Watched) -> str:
    if watched.moment is None:
        return watched.problem or "This screen fills when a rank has recorded something."
    return f"There is no verdict before {_MIN_VERDICT_STEPS} steps and the first report."


def _draw_lamps(glance: Glance, *, is_wide: bool) -> Text:
    line = Text()
    for lamp in glance.lamps:
        mark, style = marks.LAMP_MARKS[lamp.state]
        shown = "" if lamp.value == "not known" else lamp.value
        if not is_wide:
            is_plain = lamp.key in ("move", "trust") and lamp.state is LampState.OK
            shown = "" if is_plain else shown.removesuffix("/step").removeprefix("loss ")
        line.append(f"{mark}{lamp.key}", style)
        line.append(f" {form.clean_text(shown, 24)}  " if shown else "  ")
    return line


def _draw_steps(watched: Watched, width: int) -> list[Text]:
    if not watched.steps:
        return []
    times = [time_ns for _, time_ns in watched.steps]
    behind = f"  {marks.name_range(times)}"
    shown = marks.spark(times, max(width - 5 - len(behind), 10))
    return [Text("step ").append(shown, "#4C9BE8").append(behind)]


def _draw_loss(watched: Watched, width: int) -> Text:
    finite = [value for value in watched.losses if np.isfinite(value)]
    num_bad = len(watched.losses) - len(finite)
    behind = f"  {finite[0]:.4g} → {finite[-1]:.4g}" if finite else "  no finite value"
    behind += f", {num_bad} not finite" if num_bad else ""
    shown = marks.spark(finite, max(width - 5 - len(behind), 10)) if finite else ""
    return Text("loss ").append(shown, "#5FD39A").append(behind)


def _draw_budget(glance: Glance, width: int) -> Text:
    if not glance.groups:
        return Text(f"where a step goes: not known: {glance.no_budget}", marks.QUIET)
    line = Text(f"{form.duration(glance.wall_ns)} ")
    least = 0.005 if width >= WIDE_COLUMNS else 0.03
    groups = [(name, share) for name, share in glance.groups if share >= least]
    return line.append_text(marks.draw_bar(groups, width - len(line.plain)))


def _draw_heat(watched: Watched, view: View, width: int, num_rows: int) -> list[Text]:
    glance, cells = watched.glance, watched.cells
    label = METRICS[watched.metric].label
    if cells is None or not len(cells.steps):
        reason = "" if glance is None else glance.no_cells
        return [Text(f"{label}: not known: {reason}", marks.QUIET)]
    step_ns = None if glance is None else glance.step_ns
    columns = max(width - _LABEL - _MEAN, 10)
    title = Text().append(f"{label:<{_LABEL}} ", marks.STRONG)
    title.append(f"steps {int(cells.steps[0])}–{int(cells.steps[-1])}", marks.QUIET)
    title.append(" " * max(width - len(title.plain) - 5, 1)).append("mean", marks.QUIET)
    shown = list_shown(watched, num_rows)
    selected = _find_selected(watched, view, shown)
    scale = marks.find_scale(cells, step_ns)
    lines = [title]
    for place, rank in enumerate(shown):
        row = cells.value[cells.ranks.index(rank)]
        where = "" if glance is None else glance.places.get(rank, "")
        style = "reverse" if place == selected else ""
        label = f"{rank:>4} {form.clean_text(where, _LABEL - 6):<{_LABEL - 6}}"
        line = (
            Text()
            .append(label, style)
            .append(" ")
            .append_text(marks.draw_cells(row, scale, columns))
        )
        line.append(" " * max(width - _MEAN - line.cell_len, 1))
        lines.append(line.append(f"{_show_mean(cells, row, scale):>{_MEAN - 1}}"))
    rest = len(cells.ranks) - len(shown)
    if rest > 0:
        hidden = [one for at, one in enumerate(cells.value) if cells.ranks[at] not in shown]
        highest = max((_mean(one) for one in hidden), default=0.0)
        last = _mean(cells.value[cells.ranks.index(shown[-1])])
        below = _show(cells, max(highest, last))
        lines[-1] = Text(f" … {rest + 1} ranks, at most {below}", marks.QUIET)
    return lines


def _mean(row: np.ndarray) -> float:
    known_ = row[np.isfinite(row)]
    return float(known_.mean()) if len(known_) else 0.0


def _show_mean(cells: Cells, row: np.ndarray, scale: float) -> str:
    """Noise of a metric that is above something is a dot."""
    value = _mean(row)
    if cells.metric.is_excess:
        return f"+{_show(cells, value)}" if value > 0.05 * scale else "·"
    return _show(cells, value)


def _show(cells: Cells, value: float) -> str:
    return form.memory(round(value)) if cells.metric.unit == "bytes" else form.duration(value)


def _draw_lanes(glance: Glance, width: int, num_rows: int) -> list[Text]:
    spans = glance.lanes
    if spans is None or num_rows < 3:
        return []
    title = Text().append(f"pipeline, step {spans.step} ", marks.STRONG)
    title.append(
        f"{form.duration(spans.length_ns)}; 0–9 forward, a–j backward by microbatch, · the rest",
        marks.QUIET,
    )
    lines = [title]
    for index, rank in enumerate(spans.ranks[: num_rows - 1]):
        line = Text(f"{rank:>4} {glance.places.get(rank, ''):<{_LABEL - 6}} ")
        lines.append(line.append_text(marks.draw_lane(spans, index, width - _LABEL)))
    return lines


def _draw_findings(watched: Watched, view: View, width: int, height: int) -> list[Text]:
    glance = watched.glance
    if glance is None or not glance.findings:
        return [Text("no finding", marks.QUIET)]
    lines: list[Text] = []
    for one in glance.findings:
        lines += [*list_in_full(one, width), Text()]
    view.scroll = min(max(view.scroll, 0), max(len(lines) - height, 0))
    return lines[view.scroll :]


def _draw_rank(watched: Watched, view: View, width: int, height: int) -> list[Text]:
    """What one rank did, beside the mean of all."""
    glance = watched.glance
    shown = list_shown(watched, count_rows(watched, width, height + 4))
    if glance is None or not shown:
        return [Text("no rank to show yet", marks.QUIET)]
    rank = shown[_find_selected(watched, view, shown)]
    place, host = glance.places.get(rank, ""), glance.hosts.get(rank, "")
    lines = [Text(f"rank {rank}  {place}  {host}", marks.STRONG)]
    lines += _list_lines(glance, rank)
    cells = watched.cells
    if cells is not None and rank in cells.ranks:
        row = cells.value[cells.ranks.index(rank)]
        scale = marks.find_scale(cells, glance.step_ns)
        lines += [Text(), Text(f"{cells.metric.label}, by step", marks.QUIET)]
        lines.append(marks.draw_cells(row, scale, width))
        lines.append(Text(f"Not: {cells.metric.denial}", marks.QUIET))
    named = [one for one in glance.findings if rank in one.ranks]
    lines += [Text(), Text(f"findings that name it: {len(named)}", marks.QUIET)]
    for one in named:
        lines += list_in_full(one, width)
    view.scroll = min(max(view.scroll, 0), max(len(lines) - height, 0))
    return lines[view.scroll :]


def _list_lines(glance: Glance, rank: int) -> list[Text]:
    budget = known(glance.report.study.budget)
    if budget is None or rank not in budget.ranks:
        return [Text(f"where its time goes: not known: {glance.no_budget}", marks.QUIET)]
    num_steps = max(budget.run.num_steps, 1)
    own = budget.of_ranks_ns()[budget.ranks.index(rank)] / num_steps
    mean = budget.total_ns() / num_steps / max(len(budget.ranks), 1)
    lines = [Text(f"{'per step':<28}{'this rank':>12}{'all ranks':>12}", marks.QUIET)]
    order = np.argsort(-own, kind="stable").tolist()
    for at in order:
        if own[at] > 0 or mean[at] > 0:
            name = form.clean_text(budget.lines[at].name, 26)
            times = f"{form.duration(float(own[at])):>12}{form.duration(float(mean[at])):>12}"
            lines.append(Text(f"{name:<28}{times}"))
    return lines


def _draw_keys(watched: Watched, view: View, width: int, height: int) -> list[Text]:
    lines = [Text(), *(Text(f"  {key:<8} {meaning}") for key, meaning in KEYS), Text()]
    names = {"✓": "ok", "△": "attention", "▲": "bad", "?": "not known"}
    lines.append(Text("  " + "   ".join(f"{mark} {word}" for mark, word in names.items())))
    lines.append(Text("  heat: " + " ".join(mark for mark, _ in marks.HEAT) + " from low to high"))
    lines.append(Text(f"  Not: {METRICS[watched.metric].denial}", marks.QUIET))
    return lines
