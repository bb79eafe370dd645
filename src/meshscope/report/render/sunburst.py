"""Sunburst pages of a rank's memory: one file each, readable offline, exact bytes inside.

Data are in the page as JSON in which `<` is escaped, so no name can end its script element. The SVG
is drawn by the page itself; nothing is loaded.
"""

import html
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from meshscope.analyze.memory.memory_attribution import MemoryOverview, find_peak, in_use
from meshscope.core.memory_point import MemoryPoint
from meshscope.core.unavailable import Unavailable, known
from meshscope.report import format as form
from meshscope.report.encode import embed
from meshscope.report.render.sunburst_page import SCRIPT, STYLE
from meshscope.store.read.memory_points import MemoryRecording

CHARTS = ("parameters", "gradients", "optimizer_state", "activations", "summary")
_JOINED = {"optimizer_state": ("optimizer_state", "master_parameters")}
"""Charts that show more than one category."""


@dataclass(slots=True)
class Node:
    name: str
    num_bytes: int = 0
    children: dict[str, "Node"] = field(default_factory=dict)

    def child(self, name: str) -> "Node":
        """The child of that name, created if necessary."""
        return self.children.setdefault(name, Node(name))

    def to_json(self) -> dict[str, object]:
        """Own bytes and children, without empty ones."""
        found: dict[str, object] = {"name": self.name}
        if self.num_bytes:
            found["bytes"] = self.num_bytes
        if self.children:
            found["children"] = [child.to_json() for child in self.children.values()]
        return found


_MAX_TREE_DEPTH = 64
"""Parts of a path that become separate nodes; the rest stays one name."""


def build_tree(paths: Iterable[tuple[str, int]]) -> Node:
    """A tree of dotted paths, in order of first appearance."""
    root = Node("all")
    for path, num_bytes in paths:
        node = root
        for part in path.split(".", _MAX_TREE_DEPTH) if path else []:
            node = node.child(part)
        node.num_bytes += num_bytes
    return root


def write_sunbursts(
    recordings: Sequence[MemoryRecording],
    overview: MemoryOverview,
    folder: Path,
    *,
    is_beside: bool = False,
) -> list[Path]:
    """Five pages for each rank, and an index over ranks and stages; returns the files.

    Pages are in one folder per rank, or with `is_beside` next to the profiles below `folder`.
    """
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    folders = {
        recording.rank: recording.path.parent if is_beside else folder / f"rank{recording.rank}"
        for recording in recordings
    }
    for recording in recordings:
        own = folders[recording.rank]
        own.mkdir(exist_ok=True)
        for chart in CHARTS:
            path = own / f"{chart}_sunburst.html"
            page = _render_chart(recording, chart, _link(own, folder))
            path.write_text(page, encoding="utf-8", errors="replace")
            written.append(path)
    index = folder / "index.html"
    links = {rank: _link(folder, own) for rank, own in folders.items()}
    index.write_text(_render_index(overview, links), encoding="utf-8", errors="replace")
    return [*written, index]


def _link(start: Path, to: Path) -> str:
    """A relative URL from one folder to another."""
    path = Path(os.path.relpath(to, start)).as_posix()
    return html.escape(quote(path, safe="/"), quote=True)


def _chart_paths(
    recording: MemoryRecording, chart: str
) -> tuple[MemoryPoint, list[tuple[str, int]]]:
    """The point a chart shows, and its paths: the peak with the residual for the summary, else the
    point at which the category is largest."""
    if chart == "summary":
        peak = known(find_peak(recording.points))
        return (_empty_point(), []) if peak is None else (peak, _summary_paths(peak))
    names = _JOINED.get(chart, (chart,))
    point = max(recording.points, key=lambda one: sum(_sizes(one, names)), default=_empty_point())
    prefixes = names if len(names) > 1 else ("",)
    return point, [
        (f"{prefix}.{path}".strip("."), num_bytes)
        for prefix, name in zip(prefixes, names, strict=True)
        for path, num_bytes in point.modules_bytes.get(name, {}).items()
    ]


def _sizes(point: MemoryPoint, names: Iterable[str]) -> list[int]:
    return [sum(point.modules_bytes.get(name, {}).values()) for name in names]


def _summary_paths(peak: MemoryPoint) -> list[tuple[str, int]]:
    paths = [
        (f"{category}.{path}".rstrip("."), num_bytes)
        for category, sizes in peak.modules_bytes.items()
        for path, num_bytes in sizes.items()
    ]
    residual = in_use(peak) - peak.attributed_bytes
    return [*paths, ("residual", residual)] if residual > 0 else paths


def _empty_point() -> MemoryPoint:
    nothing = Unavailable("no point")
    return MemoryPoint(
        name="no point",
        step=-1,
        microbatch=-1,
        seconds=0.0,
        during="",
        modules_bytes={},
        elsewhere_bytes={},
        allocated_bytes=nothing,
        reserved_bytes=nothing,
        peak_allocated_bytes=nothing,
        sampled_peak_bytes=nothing,
        inactive_split_bytes=nothing,
        num_retries=nothing,
        num_ooms=nothing,
        rss_bytes=nothing,
    )


def _render_chart(recording: MemoryRecording, chart: str, top: str) -> str:
    point, paths = _chart_paths(recording, chart)
    step = "" if point.step < 0 else f", step {point.step}"
    title = f"Rank {recording.rank}: {chart.replace('_', ' ')} ({point.name}{step})"
    links = "".join(
        f'<a href="{name}_sunburst.html">{name.replace("_", " ")}</a>' for name in CHARTS
    )
    body = (
        f'<nav><a href="{top}/index.html">all ranks</a>{links}</nav><p id="where"></p>'
        '<div id="row"><svg id="chart" viewBox="0 0 720 720" role="img"></svg>'
        '<table><tbody id="rows"></tbody></table></div>'
        f'<script type="application/json" id="data">{embed({"tree": build_tree(paths).to_json()})}'
        f"</script><script>{SCRIPT}</script>"
    )
    return _page(title, body)


def _page(title: str, body: str) -> str:
    shown = html.escape(form.clean_text(title))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{shown}</title><style>{STYLE}</style></head>"
        f"<body><h1>{shown}</h1>{body}</body></html>\n"
    )


def _render_index(overview: MemoryOverview, links: Mapping[int, str]) -> str:
    stages = "".join(
        f'<tr><td class="n">{one.stage}</td><td class="n">{len(one.ranks)}</td>'
        f'<td class="n">{_size(one.largest_bytes)}</td>'
        f'<td class="n">{_size(one.smallest_bytes)}</td></tr>'
        for one in overview.stages
    )
    rows = "".join(_index_rows(overview, links))
    body = (
        '<table><tr><th class="n">stage</th><th class="n">ranks</th><th class="n">most</th>'
        f'<th class="n">least</th></tr>{stages}</table><table>'
        '<tr><th class="n">rank</th><th>position</th><th class="n">at the peak</th>'
        f'<th class="n">residual</th><th>charts</th></tr>{rows}</table>'
    )
    return _page("Memory of all ranks at their peaks", body)


def _index_rows(overview: MemoryOverview, folders: Mapping[int, str]) -> Iterable[str]:
    for one in overview.ranks:
        peak = known(one.peak)
        if peak is None:
            continue
        links = " ".join(
            f'<a href="{folders[one.rank]}/{name}_sunburst.html">{name.replace("_", " ")}</a>'
            for name in CHARTS
        )
        position = html.escape(known(one.place) or "")
        cells = (_size(peak.allocated_bytes), _size(peak.residual_bytes))
        yield (
            f'<tr><td class="n">{one.rank}</td><td>{position}</td><td class="n">{cells[0]}</td>'
            f'<td class="n">{cells[1]}</td><td>{links}</td></tr>'
        )


def _size(value: int | Unavailable) -> str:
    """Readable size with the exact number of bytes as a tooltip."""
    return form.or_dash(
        value, lambda size: f'<span title="{size} bytes">{html.escape(form.memory(size))}</span>'
    )
