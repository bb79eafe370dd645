"""`meshscope schedule`: a pipeline schedule made to measure, beside the built-in ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshscope.cli.places import READ, WRITE_FILE
from meshscope.cli.terminal_screen import show_document, show_sections
from meshscope.errors import UsageError

if TYPE_CHECKING:
    from meshscope.core.schedule_search import Objective, StageCosts

_NS_PER_MS = 1e6


class _Milliseconds(click.ParamType[list[float]]):
    """One number, or one for each rank with commas between them."""

    name = "MS[,MS…]"

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> list[float]:
        try:
            return [float(part) * _NS_PER_MS for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is no number and no list such as 10,12.5", param, context)


@click.command("schedule", short_help="Search a pipeline schedule for given or recorded times.")
@click.argument("run", required=False, type=READ)
@click.option("--pp", type=click.IntRange(min=1), help="Pipeline ranks.")
@click.option("--microbatches", type=click.IntRange(min=1), help="Microbatches of a step.")
@click.option("--forward", type=_Milliseconds(), help="F of one microbatch on a rank.")
@click.option("--input-grad", type=_Milliseconds(), help="I, the backward's first half.")
@click.option("--weight-grad", type=_Milliseconds(), help="W, the other half.")
@click.option(
    "--transfer", type=click.FloatRange(min=0), default=0.0, help="ms between ranks.  [default: 0]"
)
@click.option(
    "--hold",
    type=click.FloatRange(min=1),
    help="Microbatches whose activations a rank may hold.  [default: twice the pipeline ranks]",
)
@click.option(
    "--kept",
    type=click.FloatRange(0, 1),
    default=1.0,
    help="Share of a microbatch's activations that is held from I to W.  [default: 1]",
)
@click.option(
    "--objective",
    type=click.Choice(["span", "makespan"]),
    default="span",
    help="The longest rank's own time, or that of all ranks together.  [default: span]",
)
@click.option("-o", "--output", type=WRITE_FILE, help="Write the schedule here.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@click.pass_context
def command(
    context: click.Context,
    *,
    run: Path | None,
    pp: int | None,
    microbatches: int | None,
    forward: list[float] | None,
    input_grad: list[float] | None,
    weight_grad: list[float] | None,
    transfer: float,
    hold: float | None,
    kept: float,
    objective: "Objective",
    output: Path | None,
    as_json: bool,
) -> None:
    """Searches the schedule with the smallest bubble within the memory of each pipeline rank.

    Times are those of RUN's actions, or given by --pp, --microbatches, --forward, --input-grad and
    --weight-grad. `meshscope train` runs the result: put the text of -o into parallel.schedule.
    """
    from meshscope.plan.schedule_choice import choose_schedule
    from meshscope.report.sections.schedule import DOCUMENT, make_schedule_section

    given = {
        "--pp": pp,
        "--microbatches": microbatches,
        "--forward": forward,
        "--input-grad": input_grad,
        "--weight-grad": weight_grad,
    }
    if run is not None:
        stages, count, source = _read_run(run, given, hold)
    else:
        stages, count, source = _read_options(given, hold)
    choice = choose_schedule(
        stages,
        microbatches or count,
        source=f"{source}; transfers {transfer:g} ms",
        communication_ns=transfer * _NS_PER_MS,
        kept_ratio=kept,
        objective=objective,
    )
    if output is not None:
        _write(output, choice.text)
    if as_json:
        show_document(DOCUMENT, choice)
    else:
        show_sections(context, [make_schedule_section(choice)])


def _read_run(
    run: Path, given: Mapping[str, object], hold: float | None
) -> "tuple[list[StageCosts], int, str]":
    from meshscope.analyze.study import Study
    from meshscope.cli.locate import open_located, pick_attempt
    from meshscope.core.unavailable import Unavailable
    from meshscope.plan.schedule_choice import read_costs

    wrong = [
        name for name, value in given.items() if value is not None and name != "--microbatches"
    ]
    if wrong:
        raise UsageError(
            f"times are taken from {run}, so {', '.join(wrong)} cannot be given as well; remove "
            "them or the run"
        )
    pipeline = Study(pick_attempt(open_located(run), None)).pipeline
    if isinstance(pipeline, Unavailable):
        raise UsageError(f"{run} has no times of a pipeline's actions: {pipeline.reason}")
    count = pipeline.times.executed.schedule.num_microbatches
    costs = read_costs(pipeline.work, hold or 2.0 * pipeline.work.num_positions)
    return costs, count, "medians of the run's actions"


def _read_options(
    given: Mapping[str, object], hold: float | None
) -> "tuple[list[StageCosts], int, str]":
    from meshscope.core.schedule_search import StageCosts

    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; give a run with "
            "a pipeline, or all of " + ", ".join(given)
        )
    pp, count = given["--pp"], given["--microbatches"]
    assert isinstance(pp, int)
    assert isinstance(count, int)
    times = [_spread(name, given[name], pp) for name in list(given)[2:]]
    stages = [
        StageCosts(
            forward_ns=forward_ns,
            input_grad_ns=input_ns,
            weight_grad_ns=weight_ns,
            max_held=hold or 2.0 * pp,
        )
        for forward_ns, input_ns, weight_ns in zip(*times, strict=True)
    ]
    return stages, count, "as given"


def _spread(name: str, values: object, num_ranks: int) -> list[float]:
    assert isinstance(values, list)
    if len(values) not in {1, num_ranks}:
        raise UsageError(
            f"{name} has {len(values)} times for {num_ranks} pipeline ranks; give one for all of "
            "them, or one for each"
        )
    return values * num_ranks if len(values) == 1 else values


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another") from None
