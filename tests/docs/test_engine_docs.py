"""The pages about the engine: snippets run, and tables say what the code says and ranks send."""

import itertools
import json
import re
import runpy
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("torch", reason="the engine trains with torch")

from tests.docs.engine_traffic import CASES, DEGREES, MODEL

from ended_process import run_process
from meshscope.core.config import train_config
from meshscope.core.schedule_builders import BUILDERS
from meshscope.engine.config.problems import find_problems
from meshscope.engine.config.toml_file import from_document
from meshscope.store.read.query import connect
from meshscope.store.read.run import open_run

ROOT = Path(__file__).parents[2]
RUNNABLE = re.compile(r"<!-- runnable -->\n```python\n(.*?)```", flags=re.DOTALL)
# What a page takes as given before its first snippet.
GIVEN = {
    "checkpoints.md": "import torch\nmodel = torch.nn.Linear(4, 4)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
    "training-data.md": "import torch\noptimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)\n",
}
COLUMNS: dict[str, list[dict[str, Any]]] = {
    "`reducer`": [{"parallel.data_parallel": "reducer"}],
    "`ddp`": [{"parallel.data_parallel": "ddp"}],
    "`fsdp`, ZeRO 1 to 3": [
        {"parallel.data_parallel": "fsdp", "parallel.zero_stage": stage} for stage in (1, 2, 3)
    ],
}
CHOICES = {
    "parallel.schedule": tuple(BUILDERS),
    "parallel.tensor_parallel": get_args(train_config.TensorParallelKind),
    "parallel.sequence_parallel": ("true",),
    "communication.compression": get_args(train_config.CompressionKind),
    "communication.strategy": get_args(train_config.AllReduceKind),
    "memory.strategy": get_args(train_config.MemoryKind),
    "precision.compute": get_args(train_config.Precision),
    "compile": ("true",),
}
NOT_IN_THE_MATRIX = {
    ("communication.compression", "none"),
    ("communication.strategy", "flat"),
    ("memory.strategy", "cpu_offload"),  # in the second table
}
MATRIX_HEADER = "| | `reducer` | `ddp` | `fsdp`, ZeRO 1 to 3 |\n"
TRAFFIC_HEADER = "| what | operation | group | when | bytes per step |\n"


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def read_tables(header: str) -> list[list[list[str]]]:
    """The cells of every table of engine.md that has this header."""
    tables = []
    for text in read("engine.md").split(header)[1:]:
        rows = itertools.takewhile(lambda line: line.startswith("|"), text.splitlines()[1:])
        tables.append([[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows])
    return tables


def find_told_problems(settings: dict[str, Any]) -> str:
    """Everything that is wrong with a sound configuration after these settings."""
    document: dict[str, Any] = {
        "device": "cuda",
        "model": {
            "vocab_size": 64,
            "num_layers": 16,
            "hidden_size": 16,
            "num_heads": 4,
            "sequence_length": 16,
        },
        "parallel": {"dp": 2, "tp": 2, "pp": 2},
        "batch": {"num_microbatches": 8},
        # The system's temporary folder may be memory, which extreme refuses.
        "memory": {"offload_dir": str(ROOT)},
    }
    for key, value in settings.items():
        *tables, name = key.split(".")
        table = document
        for each in tables:
            table = table.setdefault(each, {})
        table[name] = value
    return "; ".join(find_problems(from_document(document)))


def read_matrix() -> dict[tuple[str, Any], dict[str, str]]:
    """By key and value: what each column says."""
    (rows,) = read_tables(MATRIX_HEADER)
    return {
        (key, value): dict(zip(COLUMNS, cells, strict=True))
        for first, *cells in rows
        for key, values in [re.fullmatch(r"`([a-z_.]+)`: (.*)", first).groups()]
        for value in re.findall(r"`(\w+)`", values)
    }


MATRIX = read_matrix()


def to_value(text: str) -> Any:
    return True if text == "true" else text


# --- snippets and the example --------------------------------------------------------------------


@pytest.mark.parametrize("page", ["engine.md", "schedules.md", *GIVEN])
def test_all_snippets_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippets = RUNNABLE.findall(read(page))
    assert snippets
    scope: dict[str, Any] = {"__name__": page}
    for number, code in enumerate([GIVEN.get(page, ""), *snippets]):
        exec(compile(code, f"{page}, snippet {number}", "exec"), scope)
    if page == "schedules.md":
        shown = re.search(r"\n\n```\n(.*?)```", read(page), flags=re.DOTALL)[1]
        assert capsys.readouterr().out.startswith(shown)


def test_the_example_trains_alone_and_records_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_engine.py", "--steps", "12"])
    runpy.run_path(str(ROOT / "examples" / "train_engine.py"), run_name="__main__")
    output = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    run_dir = tmp_path / output.rpartition("recorded in ")[2].strip()
    assert len(open_run(run_dir).attempts[0].ranks[0].read("steps")["step"]) == 12


# --- what goes with what -------------------------------------------------------------------------


def test_every_choice_stands_in_the_matrix():
    chosen = {(key, value) for key, values in CHOICES.items() for value in values}
    assert set(MATRIX) == chosen - NOT_IN_THE_MATRIX


@pytest.mark.parametrize(("key", "value"), MATRIX)
def test_a_row_of_the_matrix_is_what_is_refused(key, value):
    for column, cell in MATRIX[key, value].items():
        for data_parallel in COLUMNS[column]:
            problems = find_told_problems({**data_parallel, key: to_value(value)})
            if cell.startswith("yes"):
                assert problems == ""
            else:
                assert cell.removeprefix("no: ") in problems


def test_choices_that_go_with_data_parallelism_go_together():
    """Refused is what the matrix refuses one by one, and nothing else."""
    keys = ("parallel.schedule", "parallel.tensor_parallel", "memory.strategy")
    for column, data_parallels in COLUMNS.items():
        crossed = itertools.product(
            data_parallels,
            *([value for other, value in MATRIX if other == key] for key in keys),
        )
        for data_parallel, *values in crossed:
            settings = dict(zip(keys, values, strict=True))
            is_refused = any(MATRIX[item][column].startswith("no") for item in settings.items())
            problems = find_told_problems({**data_parallel, **settings})
            assert bool(problems) == is_refused, (data_parallel, settings, problems)


@pytest.mark.parametrize("row", *read_tables("| setting | with | because |\n"))
def test_a_pair_is_refused_and_neither_of_the_two_alone(row):
    *settings, reason = row
    first, second = (dict(flatten(tomllib.loads(setting.strip("`")))) for setting in settings)
    # DTensors need fsdp, and chunks a schedule that has them.
    base = {"parallel.data_parallel": "fsdp", "parallel.schedule": "round_robin"}
    assert reason in find_told_problems(base | first | second)
    assert find_told_problems(base | first) == find_told_problems(base | second) == ""


def flatten(document: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested tables as dotted keys."""
    found = []
    for key, value in document.items():
        is_table = isinstance(value, dict)
        found += flatten(value, f"{prefix}{key}.") if is_table else [(f"{prefix}{key}", value)]
    return found


# --- what ranks send -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traffic(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("traffic")
    done = run_process([sys.executable, "-m", "tests.docs.engine_traffic", str(folder)], cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def find_sent(run_dir: Path, rank: int) -> dict[tuple[str, str], int]:
    """Bytes of the step on a rank, by operation and group as the page calls them."""
    rows = connect(open_run(run_dir), tables=["collectives"]).execute(
        "select kind_name, group_description, sum(size_bytes) from collectives "
        f"where step = 0 and rank = {rank} and kind_name != 'recv' group by all"
    )
    groups = {"default_pg": "all", "mesh_pp_ends": "pp ends"}
    return {
        (kind, groups.get(group, group.removeprefix("mesh_"))): size
        for kind, group, size in rows.fetchall()
    }


def pick_rows(case: str, *, is_first: bool) -> list[list[str]]:
    """The rows of the three tables that say what such a rank of this case sends."""
    parallel, _ = CASES[case]
    plain, sequence_parallel, fsdp = read_tables(TRAFFIC_HEADER)
    rows = plain
    if parallel.sequence_parallel:
        rows = [row for row in rows if row[2] != "tp" or row[0].startswith("loss")]
        rows += sequence_parallel
    if parallel.data_parallel == "fsdp":
        rows = [row for row in rows if row[2] != "dp"]
        digits = str(parallel.zero_stage)
        rows += [row for row in fsdp if digits in row[0].partition("ZeRO")[2]]
    here, elsewhere = ("first", "last") if is_first else ("last", "first")
    return [
        row
        for row in rows
        if f"not of the {here} stage" not in row[3]
        and (f"{elsewhere} stage" not in row[3] or f"not of the {elsewhere}" in row[3])
    ]


@pytest.mark.gloo
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", [0, 7])
def test_ranks_send_what_the_tables_say(traffic, case, rank):
    parallel, compute = CASES[case]
    sizes = json.loads((traffic / f"sizes-{rank}.json").read_text(encoding="utf-8"))[case]
    values = {"m": 4, "b": 2, "s": MODEL.sequence_length, "h": MODEL.hidden_size}
    values |= {"L": 2, "V": MODEL.vocab_size, "tp": 2, "e": 2 if compute == "bf16" else 4, **sizes}
    is_fsdp = parallel.data_parallel == "fsdp"
    expected: defaultdict[tuple[str, str], float] = defaultdict(float)
    for what, operation, group, _, form in pick_rows(case, is_first=rank == 0):
        size = eval(form.strip("`").replace("·", "*"), {}, values)
        if operation == "send":  # a part of the sequence each; under fsdp in e bytes
            size /= DEGREES["tp"] if parallel.sequence_parallel else 1
            size *= values["e"] / 4 if is_fsdp else 1
        if is_fsdp and what.startswith("embedding"):
            size *= values["e"] / 4
        if is_fsdp and (what == "tied table" or "(N elements)" in what):
            size /= DEGREES["dp"]
        expected[operation, group] += size
    assert find_sent(traffic / case, rank) == expected
