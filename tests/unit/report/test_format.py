import ast
import math
from pathlib import Path, PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (0.4, "<1 ns"),
        (850, "850 ns"),
        (999.6, "1.00 µs"),
        (12_345, "12.3 µs"),
        (412_000_000, "412 ms"),
        (1_214_000_000, "1.21 s"),
        (99_960_000_000, "1 min 40 s"),
        (192_000_000_000, "3 min 12 s"),
        (7_500_000_000_000, "2 h 05 min"),
        (-3_000_000, "-3.00 ms"),
    ],
)
def test_durations_have_three_digits_in_the_unit_that_fits(ns, text):
    assert form.duration(ns) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 %"), (0.714, "71 %"), (0.032, "3.2 %"), (0.00018, "0.018 %"), (1e-9, "<0.001 %"),
     (-0.05, "-5.0 %"), (0.0996, "10 %")],
)  # fmt: skip
def test_ratios_become_percent(value, text):
    assert form.ratio(value) == text


def test_memory_is_in_powers_of_1024():
    assert [form.energy(joules) for joules in (8.5e-4, 0.0123, 51, 1210, 3.4e6)] == [
        "850 µJ", "12.3 mJ", "51.0 J", "1.21 kJ", "3.40 MJ"
    ]  # fmt: skip
    assert [form.memory(n) for n in (512, 3 << 30, 12_900_000, 5 << 40)] == [
        "512 B", "3.00 GiB", "12.3 MiB", "5.00 TiB"
    ]  # fmt: skip


def test_rates_and_counts_are_readable():
    assert form.rate(2.414, "steps") == "2.41 steps/s"
    assert form.rate(19661.2, "tokens") == "19,661 tokens/s"
    assert form.rate(0.0123, "steps") == "0.012 steps/s"
    assert form.plural(1, "step") == "1 step"
    assert form.plural(12345, "step") == "12,345 steps"


def test_bandwidths_are_in_powers_of_1000():
    assert [form.bandwidth(n) for n in (12, 850e3, 12_345_678, 1.214e9, 4.5e11, 2e12)] == [
        "12 B/s", "850 kB/s", "12.3 MB/s", "1.21 GB/s", "450 GB/s", "2000 GB/s"
    ]  # fmt: skip


def test_drifts_expectations_and_ranks_are_readable():
    assert (form.drift(12.34), form.drift(-0.04)) == ("+12.3 ppm", "-0.0 ppm")
    assert form.expected(1234.56) == "1,234.6"
    assert form.name_ranks([3]) == "rank 3"
    assert form.name_ranks([0, 1, 2, 7]) == "ranks 0-2, 7"


def test_what_is_missing_shows_its_reason():
    assert form.or_reason(Unavailable("no \x1b[31mdata"), form.duration) == "n/a: no data"
    assert form.or_reason(5000, form.duration) == "5.00 µs"


def test_a_moment_out_of_range_is_still_text():
    assert form.moment(1_763_200_000 * 10**9) == "2025-11-15 09:46:40 UTC"
    assert form.moment(1 << 62).startswith(("2116", "unix time"))
    assert form.moment(10**30).startswith("unix time")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07name", "name"),
        ("a\nb\tc", "a b c"),
        ("abc\u202edef", "abcdef"),
        ("zero\u200bwidth", "zerowidth"),
        ("half \ud800", "half ?"),
        ("[red]markup[/]", "[red]markup[/]"),
        ("größe 网", "größe 网"),
        ("\x9b31mC1", "31mC1"),
        ("x" * 300, "x" * 199 + "…"),
    ],
)
def test_text_from_a_run_cannot_act_on_a_terminal(text, clean):
    assert form.clean_text(text) == clean


@given(st.text(alphabet=st.characters(codec=None), max_size=300))
def test_clean_text_is_one_printable_line_whatever_comes(text):
    clean = form.clean_text(text)
    assert "\x1b" not in clean
    assert "\n" not in clean
    assert all(character.isprintable() for character in clean)
    clean.encode("utf-8")


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((0.9948, 0.679), ["0.9948", "0.6790"]),
        ((4.0, 0.5597), ["4.000", "0.5597"]),
        ((6.667e-5, 1.001e-4), ["6.667e-05", "1.001e-04"]),
        ((0.01, 1e-5), ["1.000e-02", "1.000e-05"]),
        ((0.0, 3e-4), ["0", "3.000e-04"]),
        ((-12345.6, 2.0), ["-12346", "2.000"]),
    ],
)
def test_logged_values_are_written_alike_with_four_digits(values, texts):
    assert form.numbers(*values) == texts


def test_axes_of_degree_one_are_left_out_where_there_are_others():
    dp8 = {"dp": 8, "tp": 1, "pp": 1, "cp": 1, "ep": 1}
    assert form.layout("dp8×tp1×pp1", dp8) == "dp8"
    assert form.position("dp3.tp0.pp0", dp8) == "dp3"
    mixed = dp8 | {"pp": 2}
    assert form.layout("dp8×tp1×pp2 (dp-pp, pp fastest)", mixed) == "dp8×pp2 (dp-pp, pp fastest)"
    assert form.position("dp3.tp0.pp1", mixed) == "dp3.pp1"
    alone = dict.fromkeys(dp8, 1)
    assert form.layout("dp1×tp1×pp1", alone) == "dp1"
    assert form.position("dp0.tp0.pp0", alone) == "dp0"


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/job/examples/train.py", "examples/train.py"),
        ("/opt/other/train.py", "train.py"),
        ("/home/me/jobs/train.py", "train.py"),
        ("examples/train.py", "examples/train.py"),
        ("../train.py", "train.py"),
        ("-c", "-c"),
        ("/", "/"),
    ],
)
def test_a_script_is_named_as_one_would_call_it_from_here(path, shown):
    assert form.script(path, PurePath("/home/me/job")) == shown


def literals(path):
    """The string literals of a module that can be shown, so not its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes:
            yield node.value


NOT_SHOWN = "\ud7ff\ue000\ufffd\U00010000\U0010ffff"
"""Ends of the ranges that a pattern of `report.render.junit` lists."""


def test_every_character_of_the_report_has_an_ascii_form():
    package = Path(form.__file__).parents[1]
    modules = [
        path
        for part in ("report", "diagnose", "simulate", "analyze", "core", "store")
        for path in (package / part).rglob("*.py")
    ]
    used = {c for path in modules for text in literals(path) for c in text if not c.isascii()}
    used = {character for character in used if character not in NOT_SHOWN}
    assert {"▍", "▎", "▁", "µ", "→"} <= used
    for character in sorted(used):
        shown = form.to_ascii(character)
        assert shown != "?", f"{character!r} has no ASCII form"
        assert len(shown) == 1, "columns would move"


def test_bars_fill_their_width_in_eighths():
    assert form.bar(1.0, 4) == "████"
    assert form.bar(0.5, 1) == "▌"
    assert form.bar(0.0, 4) == ""
    assert form.bar(1e-9, 4) == "▏"
    assert form.bar(7.0, 2) == "██"
    assert form.bar(-1.0, 2) == ""


def test_a_sparkline_draws_steady_values_from_zero_and_shows_spikes():
    assert form.sparkline([100, 101, 100]) == "███"
    assert form.sparkline([75, 100, 100, 100, 100, 75]) == "▇████▇"
    assert form.sparkline([100, 200, 100]) == "▁█▁"
    assert form.sparkline([0, 0]) == "▁▁"
    assert form.sparkline([]) == ""
    assert form.sparkline([1, 9], is_unicode=False) == "_#"


@given(st.floats(min_value=0, max_value=1e30, allow_nan=False))
def test_every_number_has_a_text(value):
    for show in (form.duration, form.ratio, form.memory, form.bandwidth, form.numbers):
        assert show(value)
    assert math.isfinite(value)


def test_a_path_is_cleaned_and_never_cut():
    path = "/runs" + "/a-long-name" * 300
    assert form.clean_path(path) == path
    assert form.clean_path(path + "\x1b[31m\n") == path
    assert form.clean_path("") == ""
