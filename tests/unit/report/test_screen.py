import pytest

from meshscope.report.screen import Screen, ScreenWriter

PATH = "/data/teams/a-long-name/experiments/2026/november/runs/demo/traces/rank0/window-12.pt.trace"
WIDTHS = [40, 80, 100]


def write(width: int, method: str, *arguments, **options) -> list[str]:
    writer = ScreenWriter(Screen(width=width, **options))
    getattr(writer, method)(*arguments)
    return writer.finish().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("headline", (f"see {PATH} for more", "bold")),
        ("line", (f"to read them: meshscope trace {PATH}", "dim")),
        ("facts", ([("Run", f"{PATH}, attempt 2"), ("Steps", "12")],)),
        ("section", ("Traces", f"all of them below {PATH}")),
    ],
)
def test_a_path_is_never_broken(width, method, arguments):
    lines = write(width, method, *arguments)
    assert sum(PATH in line for line in lines) == 1
    # Only the line that holds it may be too wide.
    assert all(len(line) <= width or PATH in line for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_path_that_fits_on_a_line_moves_there_whole(width):
    path = "runs/" + "x" * (width - 7)
    lines = write(width, "line", f"this is below {path} as said", "")
    assert [line.strip() for line in lines if path in line] == [path]
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_other_words_that_are_too_long_are_folded(width):
    lines = write(width, "line", "kernel " + "x" * 3 * width, "")
    assert max(map(len, lines)) == width
    assert sum(line.count("x") for line in lines) == 3 * width


def test_facts_stand_in_two_columns():
    facts = [("Run", "one two three four five six seven eight nine"), ("Layout", "dp4×tp2")]
    assert write(40, "facts", facts) == [
        "  Run     one two three four five six",
        "          seven eight nine",
        "  Layout  dp4×tp2",
    ]


def test_a_colored_path_is_whole_too():
    lines = write(40, "line", f"see {PATH}", "red", is_colored=True)
    assert sum(PATH in line for line in lines) == 1
    assert "\x1b[31m" in lines[0]
