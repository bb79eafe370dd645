import math
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from builders import (
    MS,
    START_MONO_NS,
    Faults,
    make_run,
    make_writer,
    put_device_span,
    put_span,
    put_step,
)
from meshscope.core.layout import Layout
from meshscope.report.screen import Screen
from meshscope.report.sections.run.head import describe_run
from report_builders import render_report, report_of
from screens import find_widest

PROVENANCE = {
    "argv": ["train.py", "--steps", "60"],
    "git": {"revision": "0123456789abcdef", "is_dirty": True},
    "torch": {"version": "2.13.0"},
}


def make_golden_run(tmp_path, monkeypatch):
    """A run with something of everything, under a path that is the same everywhere."""
    monkeypatch.chdir(tmp_path)
    make_run(
        tmp_path / "runs" / "demo",
        layout=Layout(dp=4, tp=2),
        num_steps=60,
        first_step_extra_ns=900 * MS,
        scalars={
            "loss": lambda rank, step: math.nan if step == 30 else 4 * math.exp(-step / 30),
            "lr": lambda rank, step: 3e-4,
        },
        input_tokens=4096,
        memory=(3 << 30, -1, -1, -1, -1),
        header={"provenance": PROVENANCE},
        faults=Faults(slow={3: 1.2}, killed={5: 40}, errors={2: {"scalar": 4}}),
    )
    return report_of(Path("runs/demo"))


@pytest.mark.parametrize("width", [100, 60])
def test_the_report_looks_as_agreed(tmp_path, monkeypatch, golden, width):
    report = make_golden_run(tmp_path, monkeypatch)
    golden(f"reports/demo-{width}.txt", render_report(report, Screen(width=width)))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(tmp_path, monkeypatch, width):
    report = make_golden_run(tmp_path, monkeypatch)
    text = render_report(report, Screen(width=width, is_colored=False))
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert not re.search(r"[\u2500-\u257f]", text), "box-drawing characters"


def test_the_first_line_says_where_the_time_went(tmp_path):
    make_run(tmp_path, layout=Layout(dp=8), num_steps=60)
    assert describe_run(report_of(tmp_path)) == (
        "60 steps on 8 ranks (dp8), median step 100 ms; 60 % of it in backward, 3.0 % unattributed."
    )


def test_a_run_without_steps_says_so_instead_of_zeros(tmp_path):
    make_run(tmp_path, num_steps=0)
    text = render_report(report_of(tmp_path), Screen())
    assert text.startswith("1 rank, 510 ms recorded; no step to measure: no step finished.")
    assert "n/a: no step finished" in text


def test_colours_only_when_asked_for(tmp_path):
    make_run(tmp_path)
    report = report_of(tmp_path)
    plain = render_report(report, Screen())
    colored = render_report(report, Screen(is_colored=True))
    assert "\x1b" not in plain
    assert "\x1b[" in colored
    assert re.sub(r" +$", "", re.sub(r"\x1b\[[0-9;]*m", "", colored), flags=re.MULTILINE) == plain


def test_a_terminal_without_unicode_gets_ascii(tmp_path):
    scalars = {"loss": lambda rank, step: 4.0 - step / 10}
    make_run(tmp_path, layout=Layout(dp=2, tp=2), num_steps=30, scalars=scalars)
    for width in (60, 100):
        text = render_report(report_of(tmp_path), Screen(is_unicode=False, width=width))
        assert text.isascii()
        assert "?" not in text
        assert find_widest(text, but=tmp_path) <= width


def test_hostile_names_have_no_effect(tmp_path):
    evil = "[bold]x[/bold]\x1b[31m\x1b]0;owned\x07\nsecond\u202eline[/]"
    writer = make_writer(
        tmp_path,
        host=evil,
        layout={"dp": 1},
        layout_source=evil,
        provenance={
            "argv": [evil],
            "git": {"revision": evil},
            "torch": {"version": evil, "devices": [{"name": evil}]},
        },
    )
    for index, name in enumerate((evil, "z" * 5000, ":smile:", "[/]")):
        put_span(writer, name, 1000 + 100 * index, 50)
    put_step(writer, 0, 1000, 2000)
    put_span(writer, evil + "2", 900, 2000)
    writer.journal.write("health", cause="gap", where=evil, text=evil)
    writer.close(end_host_mono_ns=3000, errors={evil: {"count": 1, "first": evil}})
    text = render_report(report_of(tmp_path), Screen())
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "owned" not in text
    assert "[bold]x[/bold] secondline[/]" in text
    assert ":smile:" in text
    assert find_widest(text, but=tmp_path) <= 100


def test_thousands_of_ranks_are_cut_to_the_slowest(tmp_path):
    make_run(tmp_path, layout=Layout(dp=40), num_steps=2, faults=Faults(slow={33: 1.5}))
    report = report_of(tmp_path)
    text = render_report(report, Screen())
    table = text[text.index("\nRanks") :].splitlines()
    assert table[3].split()[0] == "33"
    assert "24 ranks not shown (--all-ranks)" in text
    everything = render_report(report, shows_all_ranks=True)
    assert "not shown" not in everything
    assert len(re.findall(r"finished$", everything, flags=re.MULTILINE)) == 41


def test_an_incomplete_recording_is_said_first(tmp_path):
    faults = Faults(missing=frozenset({1}), damaged={0: "spans"})
    make_run(tmp_path, layout=Layout(dp=3), faults=faults)
    lines = render_report(report_of(tmp_path), Screen()).splitlines()
    assert lines[1] == (
        "! The recording is not complete: 1 rank missing, 1 damaged or unreadable part."
    )


def test_steps_at_one_time_are_not_called_damage(tmp_path):
    writer = make_writer(tmp_path, 0, 1)
    for step in range(8):
        begin_ns = START_MONO_NS + step * MS
        put_step(writer, step, begin_ns, begin_ns + 3 * MS // 2)
    writer.close(end_host_mono_ns=START_MONO_NS + 8 * MS)
    lines = render_report(report_of(tmp_path), Screen()).splitlines()
    assert lines[1] == "! The recording is not complete: rank 0 with steps that overlap in time."


def test_a_clue_stands_under_the_first_line(tmp_path):
    make_run(tmp_path, layout=Layout(dp=4), num_steps=30, faults=Faults(slow={2: 1.5}))
    lines = render_report(report_of(tmp_path), Screen(width=200)).splitlines()
    assert lines[1] == (
        "Clue: rank 2 spends 90.0 ms in backward, the others 60.0 ms (median); "
        "also rank 2 in forward (45.0 ms, 30.0 ms), rank 2 in optimizer (7.50 ms, 5.00 ms) "
        "and 1 more (see --json)."
    )
    make_run(tmp_path / "mesh", layout=Layout(dp=2, pp=2), num_steps=30, faults=Faults(slow={2: 2}))
    text = render_report(report_of(tmp_path / "mesh"), Screen(width=200))
    assert "rank 2 spends 120 ms in backward, its only dp peer 60.0 ms (median)" in text
    make_run(tmp_path / "bare", world_size=3, num_steps=30, faults=Faults(slow={2: 2}))
    text = render_report(report_of(tmp_path / "bare"), Screen(width=300))
    assert "the layout is not known, so they may do different work.\n" in text


def test_the_slowest_rank_is_named_only_beyond_chance(tmp_path):
    make_run(tmp_path / "alike", layout=Layout(dp=4), num_steps=30)
    assert "Slowest" not in render_report(report_of(tmp_path / "alike"), Screen())
    make_run(tmp_path / "slow", layout=Layout(dp=4), num_steps=30, faults=Faults(slow={1: 1.1}))
    text = render_report(report_of(tmp_path / "slow"), Screen())
    assert "Slowest  rank 1 in 29 of 29 steps, more often than by chance" in text
    assert "slowest rank: the longest of each step, not the job's pace" in text


def test_parts_of_no_length_and_empty_columns_are_left_out(tmp_path):
    writer = make_writer(tmp_path)
    put_step(writer, 0, START_MONO_NS, START_MONO_NS + MS)
    writer.close(end_host_mono_ns=START_MONO_NS + 2 * MS)
    text = render_report(report_of(tmp_path), Screen())
    table = text[text.index("The recorded time") :].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table[1:]] == ["time", "steps", "after", "recorded"]
    assert "of which" not in text


def test_device_marks_on_some_steps_are_said_to_be(tmp_path):
    writer = make_writer(tmp_path)
    for step in range(8):
        begin = START_MONO_NS + step * MS
        put_span(writer, "forward", begin, MS // 2)
        if step % 2:
            put_device_span(writer, "forward", begin, MS // 4)
        put_step(writer, step, begin, begin + MS)
    writer.close(end_host_mono_ns=START_MONO_NS + 8 * MS)
    text = render_report(report_of(tmp_path), Screen())
    assert "device time: marked in 4 of 7 steps" in text


def test_the_program_is_named_from_here_and_no_word_is_broken(tmp_path):
    argv = [str(tmp_path / "examples" / "train.py"), "--name", "x" * 70, "--steps=60"]
    writer = make_writer(tmp_path / "run", provenance={"argv": argv})
    put_step(writer, 0, START_MONO_NS, START_MONO_NS + MS)
    writer.close(end_host_mono_ns=START_MONO_NS + MS)
    report = report_of(tmp_path / "run")
    for width in range(40, 100, 7):
        text = render_report(report, Screen(width=width), directory=tmp_path)
        words = text[text.index("Program") : text.index("Where a step")].split()
        assert words[1:3] == ["examples/train.py", "--name"]
        assert words[-1] == "--steps=60"
        assert len(words) == 5
        assert find_widest(text, but=tmp_path) <= width
    elsewhere = render_report(report, Screen(width=200), directory=tmp_path / "other")
    assert "Program   train.py --name" in elsewhere


def test_the_recorders_cost_is_its_median_and_p95(tmp_path):
    make_run(tmp_path, layout=Layout(dp=2), num_steps=60)
    text = render_report(report_of(tmp_path), Screen(width=200))
    assert (
        "Own cost      median 20.0 µs a step (0.020 %), p95 20.0 µs (0.020 %), "
        "measured in 6 of 120 rank-steps\n"
    ) in text


def test_on_a_device_without_marks_the_cost_is_a_bound(tmp_path):
    make_run(tmp_path, num_steps=60, memory=(1 << 30, 1, 2, 5 << 30, 4))
    text = render_report(report_of(tmp_path), Screen(width=250))
    assert (
        "Own cost      at most 0.020 % of a step (no mark on the device says whether it had work "
        "meanwhile); host time: median 20.0 µs a step"
    ) in text


def test_a_signal_says_the_one_name_it_was_read_from(tmp_path):
    scalars = {
        "backward_loss": lambda rank, step: 4.0 - step,
        "lr": lambda rank, step: 3e-4 * step,
    }
    make_run(tmp_path, num_steps=3, scalars=scalars)
    text = render_report(report_of(tmp_path), Screen())
    assert "4.000 → 2.000 at step 2 (rank 0: backward_loss, what backward was called on)" in text
    assert "0 → 6.000e-04 at step 2 (rank 0: lr)" in text


def test_device_time_stands_beside_host_time(tmp_path):
    make_run(tmp_path, num_steps=6, device_ratio=0.5, memory=(1 << 30, 1, 2, 5 << 30, 4))
    text = render_report(report_of(tmp_path), Screen())
    row = next(line for line in text.splitlines() if line.startswith("  backward"))
    assert row.endswith("60 %  60.0 ms  30.0 ms")
    assert "5.00 GiB" in text
