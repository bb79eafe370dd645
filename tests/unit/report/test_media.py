"""Every screen can be shown in every medium, and text from a run acts on none of them."""

import json

import pytest

from builders import make_run
from meshscope.analyze.compare.compare import compare_studies
from meshscope.analyze.memory.memory_attribution import summarize_memory
from meshscope.analyze.memory.snapshot_summary import DeviceSnapshot, SnapshotSummary
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.diagnose.finding_changes import FindingChange
from meshscope.hang.hang import diagnose_hang
from meshscope.hang.processes import this_machine
from meshscope.report.media import MARKDOWN, MEDIA, PAGE, find_medium
from meshscope.report.render.markdown import render_markdown
from meshscope.report.render.terminal import render_terminal
from meshscope.report.screen import Screen
from meshscope.report.sections.compare import Compared, make_compare_page, make_compare_sections
from meshscope.report.sections.hang import make_hang_section
from meshscope.report.sections.memory import make_memory_section
from meshscope.report.sections.simulate import make_simulation_section
from meshscope.report.sections.snapshot import make_snapshot_section
from meshscope.simulate.simulation import simulate_run
from meshscope.store.read.memory_points import read_memory
from meshscope.store.read.run import open_run

HOSTILE = "<script>alert(1)</script>|`x`\x1b[31m\u202e"


def make_snapshot() -> SnapshotSummary:
    device = DeviceSnapshot(
        device=0,
        peak_bytes=7,
        peak_event=0,
        num_events=1,
        actions={},
        num_failures=1,
        initial_bytes=0,
        final_bytes=7,
        reserved_peak_bytes=9,
        categories_bytes={"parameters": 7},
        modules_bytes={HOSTILE: 7},
        stacks=(),
        unexplained_bytes=-1,
        course=(),
        fragmentation=Unavailable(HOSTILE),
        sentence=HOSTILE,
    )
    return SnapshotSummary(file=HOSTILE, devices=(device,), warnings=(HOSTILE,))


@pytest.fixture(scope="module")
def screens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    for name in ("a", "b"):
        make_run(folder / name, layout=Layout(dp=2, pp=2), num_steps=12)
    point = {"kind": "point", "point": HOSTILE, "modules_bytes": {"parameters": {HOSTILE: 7}}}
    for rank in (0, 1):
        (folder / "a" / "memory" / f"rank{rank}").mkdir(parents=True)
        (folder / "a" / "memory" / f"rank{rank}" / "memory.jsonl").write_text(json.dumps(point))
    a, b = (open_run(folder / name).last_attempt for name in ("a", "b"))
    compared = Compared(
        a=HOSTILE,
        b="b",
        comparison=compare_studies(Study(a), Study(b)),
        limit_ratio=None,
        verdict=None,
        ledger=Unavailable(HOSTILE),
        findings=(
            FindingChange(
                code="ST001",
                title=HOSTILE,
                ranks=(0,),
                severity_a=None,
                severity_b="high",
                saved_a_ns=0.0,
                saved_b_ns=1e6,
            ),
        ),
    )
    overview = summarize_memory(read_memory(folder / "a"))
    return {
        "compare": make_compare_sections(compared),
        "compare page": make_compare_page(compared),
        "hang": [make_hang_section(diagnose_hang(a, this_machine()), shows_all_ranks=True)],
        "memory": [make_memory_section(overview, num_rows=3)],
        "simulate": [make_simulation_section(simulate_run(a, [], name=HOSTILE))],
        "snapshot": [make_snapshot_section(make_snapshot(), num_rows=3)],
    }


NAMES = ("compare", "compare page", "hang", "memory", "simulate", "snapshot")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wraps", [True, False])
def test_on_a_narrow_screen_without_unicode(screens, name, wraps):
    screen = Screen(width=50, is_unicode=False, wraps=wraps)
    text = render_terminal(screens[name], screen)
    assert text.isascii()
    assert "\x1b" not in text
    assert not wraps or max(map(len, text.splitlines())) <= 50


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("medium", MEDIA, ids=lambda medium: medium.suffixes[0])
def test_no_control_character_gets_into_a_medium(screens, name, medium):
    assert not set(medium.render(screens[name], HOSTILE)) & set("\x1b\u202e")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("medium", [PAGE, MARKDOWN], ids=lambda medium: medium.suffixes[0])
def test_no_tag_gets_into_what_a_browser_shows(screens, name, medium):
    assert "<script" not in medium.render(screens[name], HOSTILE)


def test_a_suffix_names_one_medium():
    suffixes = [suffix for medium in MEDIA for suffix in medium.suffixes]
    assert len(set(suffixes)) == len(suffixes)
    assert [find_medium(suffix) for suffix in ("htm", "md", "txt")] == [PAGE, MARKDOWN, None]


@pytest.mark.parametrize("name", NAMES)
def test_tables_of_markdown_are_whole(screens, name):
    text = render_markdown(screens[name])
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
