"""`meshscope export`: a run for other tools, as a trace or as tables."""

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from meshscope.capture.profiling.rank_choice import RankChoice
from meshscope.cli.locate import has_traces, open_located, pick_attempt
from meshscope.cli.options import attempt_option, engine_option
from meshscope.cli.places import READ, WRITE_FILE
from meshscope.cli.terminal_screen import say, tell_work
from meshscope.core.unavailable import Unavailable, known
from meshscope.errors import UsageError
from meshscope.export.step_windows import parse_steps
from meshscope.export.table_files import FORMATS, pick_format
from meshscope.report import format as form

if TYPE_CHECKING:
    from meshscope.export.run_trace import Exported
    from meshscope.export.trace_sink import TraceSink
    from meshscope.report.run_study import RunStudy
    from meshscope.store.read.run import Attempt

_PERFETTO_SUFFIXES = (".pftrace", ".perfetto-trace")
_MAX_JSON_ROWS = 400_000
"""Rows of tables that a trace in JSON is made of, unless steps are chosen."""


@click.command("export", short_help="Write a run for other tools: Perfetto, CSV, Parquet.")
@click.argument("run", type=READ)
@click.option(
    "--perfetto",
    type=WRITE_FILE,
    metavar="FILE",
    help="Write a trace for ui.perfetto.dev (.pftrace): all ranks on one clock.",
)
@click.option(
    "--chrome",
    type=WRITE_FILE,
    metavar="FILE",
    help="Write the same trace as JSON (chrome://tracing); for small runs.",
)
@click.option(
    "--table",
    "table",
    metavar="NAME",
    help="Write this table; --tables lists them.",
)
@click.option("--tables", "lists_tables", is_flag=True, help="List the tables.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    help="Of the table.  [default: by the suffix of --output]",
)
@click.option(
    "-o",
    "--output",
    type=WRITE_FILE,
    help="Where the table goes (default: standard output); without --table, a trace by its suffix: "
    ".pftrace, .perfetto-trace or .json.",
)
@click.option("--steps", metavar="TEXT", help="Only these steps: 10-20, 15, 10-.  [default: all]")
@click.option(
    "--ranks", metavar="TEXT", help="Only these ranks: 0,3-5, stages, dp0.tp0.  [default: all]"
)
@click.option("--no-diagnosis", is_flag=True, help="Leave findings out of the trace.")
@attempt_option
@engine_option
def command(
    *,
    run: Path,
    perfetto: Path | None,
    chrome: Path | None,
    table: str | None,
    lists_tables: bool,
    format_: str | None,
    output: Path | None,
    steps: str | None,
    ranks: str | None,
    no_diagnosis: bool,
    attempt_index: int | None,
) -> None:
    """Writes RUN (or traces) for other tools.

    \b
        meshscope export RUN --perfetto run.pftrace      open it at ui.perfetto.dev
        meshscope export RUN --perfetto run.pftrace --steps 10-20 --ranks 0,3-5
        meshscope export RUN --table budget -o budget.parquet
    """
    if lists_tables:
        click.echo(_describe_tables(), nl=False)
        return
    if table is None and output is not None:
        perfetto, chrome = _pick_trace(output, perfetto, chrome)
    if table is None and perfetto is None and chrome is None:
        raise UsageError(
            "nothing to write; give --perfetto FILE, --chrome FILE, or --table NAME with -o FILE"
        )
    if table is None and format_ is not None:
        raise UsageError("--format is the format of a table; give --table, too")
    asked_steps = None if steps is None else parse_steps(steps)
    if table is not None and table.startswith("trace_"):
        _write_table(partial(_write_trace_table, run, table), table, output, format_)
        return
    from meshscope.report.run_study import RunStudy

    opened = open_located(run)
    attempt = pick_attempt(opened, attempt_index)
    study = RunStudy(opened, attempt)
    chosen = None if ranks is None else _pick_ranks(attempt, ranks)
    if table is not None:
        from meshscope.export.run_tables import write_table

        write = partial(write_table, study, table, ranks=chosen, steps=asked_steps)
        _write_table(write, table, output, format_)
    traces = ((perfetto, False), (chrome, True))
    for path, is_json in traces:
        if path is not None:
            _write_trace(study, path, chosen, asked_steps, no_diagnosis, is_json=is_json)


def _pick_trace(
    output: Path, perfetto: Path | None, chrome: Path | None
) -> tuple[Path | None, Path | None]:
    if output.suffix.lower() in _PERFETTO_SUFFIXES and perfetto is None:
        return output, chrome
    if output.suffix.lower() == ".json" and chrome is None:
        return perfetto, output
    raise UsageError(
        f"what to write to {output} is not known; a trace ends in .pftrace or .json, a table needs "
        "--table NAME"
    )


def _pick_ranks(attempt: "Attempt", text: str) -> list[int]:
    choice, layout = RankChoice.parse(text), known(attempt.layout)
    found = [rank for rank in attempt.ranks if choice.has(rank, layout)]
    if not found:
        there = form.name_ranks(attempt.ranks)
        raise UsageError(f"{text!r} chooses none of the recorded ranks ({there})")
    return found


def _write_trace(
    study: "RunStudy",
    path: Path,
    ranks: list[int] | None,
    steps: tuple[int, int | None] | None,
    no_diagnosis: bool,  # noqa: FBT001
    *,
    is_json: bool,
) -> None:
    from meshscope.export.run_trace import MAX_ROWS, export_trace

    def write(file: BinaryIO) -> "Exported":
        return export_trace(
            study.study,
            () if no_diagnosis else study.findings,
            _make_sink(file, is_json=is_json),
            ranks=ranks,
            steps=steps,
            max_rows=_MAX_JSON_ROWS if is_json else MAX_ROWS,
        )

    with tell_work("writing the trace"):
        done = _write_whole(path, write)
    _tell(done, path, is_chosen=steps is not None)


def _make_sink(file: BinaryIO, *, is_json: bool) -> "TraceSink":
    from meshscope.export.chrome_trace import ChromeSink
    from meshscope.export.pftrace import PerfettoSink

    return ChromeSink(file) if is_json else PerfettoSink(file)


def _write_whole(path: Path, write: "Callable[[BinaryIO], Exported]") -> "Exported":
    """The file is whole, or is not there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb", buffering=1 << 20) as file:
            done = write(file)
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            part.unlink()
    return done


def _tell(done: "Exported", path: Path, *, is_chosen: bool) -> None:
    written, steps = done.written, done.steps
    where = "no finished step" if steps is None else f"steps {steps.first} to {steps.last}"
    say(
        f"{path}: {form.plural(len(done.ranks), 'rank')}, {where}, "
        f"{form.plural(written.slices, 'slice')}, {form.plural(written.arrows, 'arrow')}, "
        f"{form.plural(written.values, 'counter value')}, "
        f"{form.plural(written.marks, 'finding')} ({form.memory(path.stat().st_size)})"
    )
    if steps is not None and not steps.is_whole and not is_chosen:
        say(
            "the run is too large for one trace: only its last steps are there; choose with --steps"
        )
    if done.num_crowded:
        say(f"{form.count(done.num_crowded)} slices are left out: too many were open at once")


def _write_trace_table(run: Path, name: str, path: Path, format_: str) -> int:
    """A table of what each trace says for itself."""
    from meshscope.cli.trace_loading import summarize_traces
    from meshscope.export.table_files import write_relation
    from meshscope.report.trace_tables import TRACE_TABLES, build_trace_table

    if name not in TRACE_TABLES:
        raise UsageError(f"there is no table {name}; of traces there are {', '.join(TRACE_TABLES)}")
    if not has_traces(run):
        raise UsageError(f"{run} is a run; {name} is a table of traces: name these instead")
    table = build_trace_table(name, summarize_traces([run]))
    if isinstance(table, Unavailable):
        raise UsageError(f"{run}: {table.reason}")
    con, relation = table.connect()
    return write_relation(con, relation, path, format_)


def _write_table(
    write: Callable[[Path, str], int], name: str, output: Path | None, format_: str | None
) -> None:
    chosen = pick_format(output, format_ or ("csv" if output is None else None))
    if output is not None:
        num_rows = write(output, chosen)
        say(f"{output}: {form.plural(num_rows, 'row')} of {name}")
        return
    if chosen == "parquet" and sys.stdout.isatty():
        raise UsageError("Parquet is not for a terminal; give -o FILE")
    is_terminal = sys.stdout.isatty()
    with tempfile.TemporaryDirectory(prefix="meshscope-export-") as folder:
        path = Path(folder) / f"table.{chosen}"
        write(path, chosen)
        with path.open("rb") as file:
            for line in file:
                click.echo(_make_safe(line) if is_terminal else line, nl=False)


def _make_safe(line: bytes) -> str:
    """A terminal would obey escapes."""
    return form.clean_text(line.decode("utf-8", "replace"), 1 << 20) + "\n"


def _describe_tables() -> str:
    from meshscope.export.run_tables import list_tables

    rows = list_tables()
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {meaning}\n" for name, meaning in rows)
