"""`meshscope memory` on profiles made by hand: exact bytes, ranks, stages, pages, hostile names."""

import json
import re
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from tests.builders import make_run

from meshscope.analyze.memory.memory_attribution import module_of, summarize_memory
from meshscope.cli import main
from meshscope.core.layout import Layout
from meshscope.core.trace_names import rank_folder_name
from meshscope.errors import RunNotFound
from meshscope.report.render.sunburst import CHARTS, build_tree
from meshscope.store.read.memory_points import read_memory

LAYOUT = Layout(pp=2)
HOSTILE = "</script><script>alert(1)</script>&\x1b[31m\u202e"
PEAK = {
    "parameters": {"layers.0.weight": 600, "layers.1.weight": 400},
    "gradients": {"layers.1.weight": 400},
    "optimizer_state": {"layers.0.weight.exp_avg": 600},
    "activations": {"layers.0": 3000, HOSTILE: 1000},
}


def make_point(name, modules, allocated=None, step=0):
    total = sum(sum(paths.values()) for paths in modules.values())
    return {
        "kind": "point",
        "point": name,
        "step": step,
        "microbatch": 0,
        "seconds": 1.5,
        "modules_bytes": modules,
        "elsewhere_bytes": {},
        "allocated_bytes": total + 100 if allocated is None else allocated,
        "rss_bytes": 10_000,
    }


def write_profile(run, rank, points, **header):
    folder = run / "memory" / rank_folder_name(rank, LAYOUT)
    folder.mkdir(parents=True)
    lines = [{"kind": "header", "version": 1, "rank": rank, "layout": LAYOUT.to_dict(), **header}]
    text = "\n".join(json.dumps(line) for line in [*lines, *points])
    (folder / "memory.jsonl").write_text(text + "\n")
    return folder


@pytest.fixture
def run(tmp_path):
    path = make_run(tmp_path / "run", layout=LAYOUT, num_steps=1)
    first = make_point("construction", {"parameters": PEAK["parameters"]}, step=-1)
    write_profile(path, 0, [first, make_point("at_peak", PEAK)], device="cuda:0")
    small = {"parameters": {"head.weight": 50}}
    write_profile(path, 1, [make_point("at_peak", small)], estimate_bytes={"parameters": 60})
    return path


def invoke(*arguments):
    return CliRunner().invoke(main, ["memory", *map(str, arguments)])


def test_points_add_up_and_the_residual_is_of_the_peak(run):
    first, second = summarize_memory(read_memory(run)).ranks
    assert [p.residual_bytes for p in first.points] == [100, 100]
    assert first.peak.name == "at_peak"
    assert first.peak.allocated_bytes == 6100
    assert first.peak.residual_ratio == pytest.approx(100 / 6100)
    assert first.peak.attributed_bytes + first.peak.residual_bytes == first.peak.allocated_bytes
    assert [(line.estimated_bytes, line.found_bytes) for line in second.estimate] == [(60, 50)]


def test_modules_over_all_categories(run):
    modules = summarize_memory(read_memory(run)).ranks[0].modules
    assert (modules[0].path, modules[0].total_bytes) == ("layers.0", 600 + 600 + 3000)
    assert module_of("optimizer_state", "a.b.weight.exp_avg") == "a.b"
    assert module_of("activations", "a.b") == "a.b"


def test_stages(run):
    stages = summarize_memory(read_memory(run)).stages
    assert [(s.stage, s.largest_rank, s.largest_bytes) for s in stages] == [
        (0, 0, 6100),
        (1, 1, 150),
    ]


def test_the_text(run):
    done = invoke(run)
    assert done.exit_code == 0, done.output
    assert "Rank 0, dp0.tp0.pp0, on cuda:0" in done.output
    assert "layers.0" in done.output
    assert "\x1b" not in done.output
    assert "\u202e" not in done.output
    assert "Rank 1" in invoke(run, "--rank", 1).output


def test_json_has_exact_bytes(run):
    found = json.loads(invoke(run, "--json").stdout)
    assert found["document"] == "meshscope-memory"
    peak = found["ranks"][0]["peak"]
    assert peak["categories_bytes"]["activations"] == 4000
    assert peak["peak_allocated_bytes"] == {"unavailable": "not known on this device"}


def test_errors(run, tmp_path):
    assert invoke(run, "--rank", 9).exit_code == 2
    bare = make_run(tmp_path / "bare", num_steps=1)
    result = invoke(bare)
    assert result.exit_code == 3
    assert "meshscope run --profiling" in result.stderr
    write_profile(bare, 0, [])
    assert "the profile has no point" in invoke(bare).stdout


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(RunNotFound, match="no memory profile"):
        read_memory(make_run(tmp_path / "bare", num_steps=1))


def test_the_newest_profile_of_a_rank_counts(run):
    folder = run / "memory" / rank_folder_name(1, LAYOUT) / "profile002"
    folder.mkdir()
    point = make_point("later", {"parameters": {"head.weight": 70}})
    (folder / "memory.jsonl").write_text(json.dumps(point))
    assert read_memory(run)[1].points[0].name == "later"


def test_damaged_lines_cost_only_themselves(run):
    path = run / "memory" / rank_folder_name(1, LAYOUT) / "memory.jsonl"
    odd = {"kind": "point", "modules_bytes": {"parameters": {"a": -5, "b": "x", "c": 7}, "d": 3}}
    odd |= {"step": 1e300, "seconds": "x", "allocated_bytes": 2**100, "point": None}
    lines = ["{", "[1]", "[" * 100_000, json.dumps(odd), '{"kind": "header", "layout": {"dp": -1}}']
    path.write_text(path.read_text() + "\n".join(lines))
    found = read_memory(run)[1]
    assert len(found.problems) == 3
    assert found.points[1].attributed_bytes == 7
    assert invoke(run, "--json").exit_code == 0


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.texts, self._kind = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._kind = dict(attrs).get("type", "")
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        if self._kind == "application/json":
            self.texts.append(data)


def test_pages_need_nothing_from_elsewhere_and_hold_exact_bytes(run, tmp_path):
    done = invoke(run, "--html", tmp_path / "pages")
    assert done.exit_code == 0, done.output
    for chart in CHARTS:
        text = (tmp_path / "pages" / "rank0" / f"{chart}_sunburst.html").read_text()
        page = Page(text)
        assert page.tags.count("script") == 2
        assert all(re.fullmatch(r"[\w./]+\.html", link) for link in page.links)
        assert "//" not in re.sub(r"http://www\.w3\.org/2000/svg", "", text)
        if chart == "summary":
            tree = json.loads(page.texts[0])["tree"]
            assert total(tree) == 6100  # the residual is in it
            assert [child["name"] for child in tree["children"]] == [*PEAK, "residual"]
    assert (tmp_path / "pages" / "index.html").exists()


def total(node):
    return node.get("bytes", 0) + sum(map(total, node.get("children", [])))


def test_trees_keep_bytes_of_inner_nodes():
    tree = build_tree([("a.b", 1), ("a", 2), ("", 3), ("a.b.c", 4)]).to_json()
    assert total(tree) == 10
    assert tree["bytes"] == 3
    assert tree["children"][0]["bytes"] == 2
