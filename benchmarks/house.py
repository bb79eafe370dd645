"""Prints the signs by which the redesign is judged, each counted by code on this tree.

    make house                                                   # or: python benchmarks/house.py
    python benchmarks/house.py --traces ../shared/data/nccl/ddp  # traces of your own

What is read from the source is counted in its syntax trees; what a command does is counted while
it runs here, on an 8-rank run and on traces that the tests' builders make: calls by a profile
function, files by an audit hook. The column "before" is the tree of 2026-11-16, by the same rules;
where the proposal counted on another run or in another way, its number is in brackets. A row that
cannot be counted says why; nothing here fails.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshscope"
sys.path[:0] = [str(SOURCE.parent), str(ROOT / "tests")]

NUM_RANKS = 8
ONCE = ("match_operations", "align_clocks", "load_operations")
"""Functions that a report should call once."""
PLANNER_INPUTS = ("flops", "hardware", "memory_estimate", "memory_model", "model_config",
                  "schedule", "train_config")  # fmt: skip
ARRAY_TYPES = {"Bools", "Floats", "Int16s", "Int32s", "Int64s", "Uint8s"}
SCAN_CACHE_SUFFIX = ".meshscope"
"""Of what `trace` keeps beside a trace on purpose."""


# --- what the source says ------------------------------------------------------------------------


@dataclass(slots=True)
class Source:
    """Every module of the package: its path below it, its lines and its syntax tree."""

    modules: dict[str, tuple[int, ast.Module]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Source":
        found = {}
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            found[path.relative_to(folder).as_posix()] = len(text.splitlines()), ast.parse(text)
        return cls(found)

    def walk(self) -> Iterator[tuple[str, ast.AST]]:
        for name, (_, tree) in self.modules.items():
            for node in ast.walk(tree):
                yield name, node

    def count_lines(self) -> int:
        return sum(num_lines for num_lines, _ in self.modules.values())

    def find_longest(self) -> str:
        name = max(self.modules, key=lambda name: self.modules[name][0])
        return f"{self.modules[name][0]} ({name})"

    def find_fullest_folder(self) -> str:
        folders = Counter(name.rpartition("/")[0] or "." for name in self.modules)
        name, count = folders.most_common(1)[0]
        return f"{count} ({name})"

    def find_smallest(self, folder: str) -> str:
        """The shortest module in a folder, as a sign of what one more would cost."""
        sizes = {
            name: num_lines
            for name, (num_lines, _) in self.modules.items()
            if name.startswith(f"{folder}/") and not name.endswith("__init__.py")
        }
        if not sizes:
            return f"n/a: no {folder}"
        name = min(sizes, key=lambda name: sizes[name])
        return f"{sizes[name]} lines ({name.rpartition('/')[2]})"

    def count_public_names(self) -> int:
        """Functions, classes and assigned names at the top of modules, without an underscore."""
        return sum(
            not name.startswith("_")
            for _, tree in self.modules.values()
            for name in {name for node in tree.body for name in _list_names(node)}
        )

    def count_value_types(self) -> int:
        """Dataclasses, structs and named tuples, wherever they are defined."""
        return sum(isinstance(node, ast.ClassDef) and _is_value(node) for _, node in self.walk())

    def count_aliases(self) -> int:
        """Definitions of the six names for types of arrays."""
        return sum(
            isinstance(node, ast.Assign) and not ARRAY_TYPES.isdisjoint(_list_names(node))
            for _, tree in self.modules.values()
            for node in tree.body
        )

    def count_checks(self, name: str) -> int:
        """Calls of `isinstance` that ask for a class of that name."""
        return sum(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "isinstance"
            and any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node.args[1]))
            for _, node in self.walk()
        )

    def list_encoders(self) -> list[str]:
        """Modules above the analyses that make JSON themselves."""
        makers = {"json.dump", "json.dumps", "msgspec.json.encode", "msgspec.json.Encoder"}
        return sorted(
            {
                name
                for name, node in self.walk()
                if isinstance(node, ast.Call)
                and ast.unparse(node.func) in makers
                and name.startswith(("cli/", "report/"))
            }
        )


def _list_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _is_value(node: ast.ClassDef) -> bool:
    bases = " ".join(map(ast.unparse, node.bases))
    return "Struct" in bases or "NamedTuple" in bases or any(
        "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
    )  # fmt: skip


def find_torch_importers() -> str:
    """Which inputs of a planner cannot be imported where there is no torch."""
    names = [
        path.relative_to(SOURCE.parent).with_suffix("").as_posix().replace("/", ".")
        for path in sorted(SOURCE.rglob("*.py"))
        if path.stem in PLANNER_INPUTS
    ]
    code = (
        "import importlib, sys\nsys.modules['torch'] = None\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError: print(name.removeprefix('meshscope.'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    failed = done.stdout.split()
    return f"no: {', '.join(failed)}" if failed else f"yes ({len(names)} modules)"


# --- what commands do ----------------------------------------------------------------------------


@dataclass(slots=True)
class Watch:
    """What a command did."""

    output: str = ""
    calls: Counter[str] = field(default_factory=Counter)
    """By name of the function, of those in `ONCE`."""
    num_tables_read: int = 0
    written: list[str] = field(default_factory=list)
    """Files opened for writing, but for the scan cache."""


_watch: Watch | None = None


def _note_file(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch is None or event != "open":
        return
    path, _, flags = arguments
    name = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    if not name or name == os.devnull:
        return
    if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
        if SCAN_CACHE_SUFFIX not in Path(name).name:
            _watch.written.append(name)
    elif name.endswith((".tbl", ".pack")):
        _watch.num_tables_read += 1


def _note_call(frame: Any, event: str, argument: object) -> None:
    if _watch is not None and event == "call" and frame.f_code.co_name in ONCE:
        _watch.calls[frame.f_code.co_name] += 1


def run_command(*arguments: object) -> Watch:
    """A command in this process, watched."""
    global _watch
    from click.testing import CliRunner

    from meshscope.cli import main

    watch = Watch()
    tempfile.gettempdir()  # writes a file to find out where it may
    _watch = watch
    sys.setprofile(_note_call)
    try:
        done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    finally:
        sys.setprofile(None)
        _watch = None
    watch.output = done.stdout
    return watch


def make_run(folder: Path) -> Path:
    """8 ranks of which one is slow, with phases and operations."""
    from late_runs import MS, STEADY, LateRun
    from meshscope.core.layout import Layout

    def work(rank: int, step: int) -> dict[str, int]:
        return {**STEADY, "forward": (15 if rank == 3 else 10) * MS}

    LateRun(layout=Layout(dp=NUM_RANKS), work=work).record(folder)
    return folder


def make_traces(folder: Path) -> Path:
    from trace_builders import MS, write_traces

    write_traces(folder, num_ranks=2, num_steps=12, extra_ns={1: 5 * MS})
    return folder


def compare_exposed(traces: Path) -> str:
    """Exposed communication per rank and step, by `trace` and by `report`, which splits it: a
    bubble on a device is a message that waits for its sender."""
    trace = json.loads(run_command("trace", traces, "--no-cache", "--json").output)
    steps = [
        sum(row["exposed_ns"] for row in step["communication"])
        for one in trace["traces"]
        for device in one["devices"]
        for step in device["steps"]
    ]
    report = json.loads(run_command("report", traces, "--json").output)
    lines = [
        line["mean_ns"]
        for line in report["budget"]["lines"]
        if line["name"].startswith(("exposed", "pipeline bubble"))
        and line["name"] != "exposed copies"
    ]
    return f"{sum(steps) / len(steps) / 1e6:.2f} / {sum(lines) / 1e6:.2f} ms"


def read_envelopes(run: Path, traces: Path) -> dict[str, str]:
    """Of every document: the keys around what it says."""
    commands: dict[str, list[object]] = {
        "report": [run], "trace": [traces, "--no-cache"], "simulate": [run], "compare": [run, run],
        "ls": [run.parent], "hang": [run], "sql": [run, "select 1 as one"],
    }  # fmt: skip
    found = {}
    for name, arguments in commands.items():
        try:
            document = json.loads(run_command(name, *arguments, "--json").output)
        except ValueError:
            found[name] = "no JSON"
            continue
        keys = set(document) if isinstance(document, dict) else set()
        envelope = keys & {"document", "document_version", "version"}
        found[name] = " ".join(sorted(envelope)) or "none"
    return found


BEFORE_MS = {
    "made": "6.50 / 6.50 ms",
    "nccl/ddp": "76.82 / 57.25 ms",
    "nccl/fsdp2": "100.42 / 5.47 ms",
    "nccl/pp4": "29.24 / 27.39 ms",
    "nccl/tp2dp2": "262.56 / 187.65 ms",
}


# --- the table -----------------------------------------------------------------------------------

Row = tuple[str, str, str, str]


def attempt(count: Callable[[], object]) -> str:
    """What was counted, or why it could not be."""
    try:
        return str(count())
    except Exception as error:  # noqa: BLE001 - a row that fails says so and hides no other
        return f"n/a: {type(error).__name__}: {error}"


def list_source_rows(source: Source) -> list[Row]:
    encoders = attempt(lambda: len(source.list_encoders()))
    schemas = sum(1 for _ in (ROOT / "docs").rglob("*.schema.json"))
    return [
        ("modules of cli and report that make JSON", "9 (5 ways)", encoders, "1"),
        ("documents with a schema", "1", str(schemas), "all"),
        ("smallest section", "9 files, ≈ 250 lines", source.find_smallest("report/sections"),
         "≤ 80 lines"),
        ("smallest renderer", "per document", source.find_smallest("report/render"),
         "≤ 150 lines"),
        ("isinstance(…, Unavailable)", "434", attempt(lambda: source.count_checks("Unavailable")),
         "< 200"),
        ("isinstance(…, Absent)", "47", attempt(lambda: source.count_checks("Absent")), "0"),
        ("value types", "541", attempt(source.count_value_types), "≤ 420"),
        ("public names", "2759", attempt(source.count_public_names), "≤ 1800"),
        ("definitions of array types", "57", attempt(source.count_aliases), "6"),
        ("modules in the fullest folder", "117", attempt(source.find_fullest_folder), "≤ 16"),
        ("lines of the largest file", "1388", attempt(source.find_longest), "≤ 600"),
        ("lines of source", "83909", attempt(source.count_lines), "≤ 77500"),
        ("planner's inputs without torch", "no", attempt(find_torch_importers), "yes"),
    ]  # fmt: skip


def list_command_rows(folder: Path, traces: list[Path]) -> list[Row]:
    run, made = make_run(folder / "runs" / "run"), make_traces(folder / "traces")
    report = run_command("report", run)
    calls = " / ".join(str(report.calls[name]) for name in ONCE)
    envelopes = read_envelopes(run, made)
    kinds = Counter(envelopes.values())
    rows = [
        (f"{', '.join(ONCE)} per report", "2 / 2 / 2", calls, "1 / 1 / 1"),
        (f"table reads per report of {NUM_RANKS} ranks", "124 (162)", str(report.num_tables_read),
         "≤ 80"),
        ("files written by trace, its cache not counted", "17 (13)",
         attempt(lambda: len(run_command("trace", made, "--no-cache").written)), "0"),
        ("files written by report TRACES, likewise", "17 (13)",
         attempt(lambda: len(run_command("report", made).written)), "0"),
        ("envelopes of JSON documents", "3 (2)", str(len(kinds)), "1"),
    ]  # fmt: skip
    for path in [made, *traces]:
        name = "made" if path == made else f"{path.parent.name}/{path.name}"
        exposed = attempt(lambda path=path: compare_exposed(path))  # type: ignore[misc]
        before = BEFORE_MS.get(name, "not measured")
        rows.append((f"exposed by trace / report, {name}", before, exposed, "equal"))
    return rows


def list_python_rows() -> list[Row]:
    import meshscope

    now = "meshscope.study(path)" if hasattr(meshscope, "study") else "no study()"
    return [("report in Python", "7 imports, 8 calls", now, "study(path).report()")]


def print_table(rows: list[Row]) -> None:
    titles: Row = ("measure", "before", "now", "goal")
    widths = [max(len(row[at]) for row in [titles, *rows]) for at in range(len(titles))]
    for row in [titles, *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=Path, nargs="*", help="more traces to compare")
    parser.add_argument("--verbose", action="store_true", help="list what was counted")
    options = parser.parse_args()
    sys.addaudithook(_note_file)
    shared = ROOT.parent / "shared" / "data" / "nccl"
    traces = options.traces or (sorted(shared.iterdir()) if shared.is_dir() else [])
    source = Source.read(SOURCE)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        command_rows = list_command_rows(Path(folder), traces)
        envelopes = read_envelopes(Path(folder, "runs", "run"), Path(folder, "traces"))
    print_table([*command_rows, *list_source_rows(source), *list_python_rows()])
    if options.verbose:
        print("\nmodules that make JSON:", *source.list_encoders(), sep="\n  ")
        print("\nenvelopes:", *(f"{k}: {v}" for k, v in envelopes.items()), sep="\n  ")


if __name__ == "__main__":
    main()
