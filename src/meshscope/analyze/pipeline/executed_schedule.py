"""Which pipeline schedule was executed, inferred from the recorded order of actions.

The order is compared with every schedule of `core.schedule_builders` for the same number of ranks,
microbatches and chunks: first exactly, then without the microbatches' numbers, so that a schedule
that takes them in another order (backwards from the last to the first) is still recognised, with
`is_exact` false. Any other order is an "unknown order" and is replayed as recorded.

With few microbatches schedules coincide (with one, GPipe is 1F1B): the first name is taken and the
others are listed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from meshscope.core.schedule import Action, ActionKind, Schedule, check_schedule
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.core.unavailable import Unavailable
from meshscope.errors import UsageError

UNKNOWN_ORDER = "unknown order"

# The simplest first: where orders coincide, its name is the usual one.
_NAMES = ("1f1b", *(name for name in BUILDERS if name != "1f1b"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedSchedule:
    """An order of actions and its name."""

    schedule: Schedule
    """As recorded, with the recognised name."""
    is_exact: bool
    """Whether microbatches come in the builder's order as well."""
    also: tuple[str, ...]
    """Other schedules with the same order."""

    @property
    def name(self) -> str:
        """A key of `BUILDERS`, or `UNKNOWN_ORDER`."""
        return self.schedule.name

    @property
    def is_known(self) -> bool:
        """Whether it is one of `BUILDERS`."""
        return self.name != UNKNOWN_ORDER

    @property
    def num_chunks(self) -> int:
        """The most stages on any rank."""
        placement = self.schedule.stage_ranks
        return max(placement.count(rank) for rank in range(self.schedule.num_ranks))


def recognise_schedule(schedule: Schedule) -> ExecutedSchedule:
    """The name of a whole training step's order."""
    candidates = list(_build_candidates(schedule))
    exact = [c.name for c in candidates if c.actions == schedule.actions]
    if exact:
        return _call(schedule, exact, is_exact=True)
    words = _spell(schedule.actions)
    alike = [c.name for c in candidates if _spell(c.actions) == words]
    return _call(schedule, alike or [UNKNOWN_ORDER], is_exact=False)


def order_from_rows(
    rows: Sequence[Sequence[Action]], *, stage_ranks: Sequence[int] | None = None
) -> Schedule | Unavailable:
    """Recorded rows, one for each pipeline rank in the order of the pipeline, as a schedule.

    Unavailable where they are not one whole training step that can run.
    """
    placed = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    if not placed:
        return Unavailable("no action was recorded")
    missing = next(stage for stage in count() if stage not in placed)
    if missing < len(placed):
        return Unavailable(f"no actions of stage {missing} were recorded, but of {max(placed)}")
    num_actions = sum(len(row) for row in rows)
    # A recording may hold impossible numbers: never loop up to them.
    if max(action.microbatch for row in rows for action in row) >= num_actions:
        return Unavailable("microbatches are not numbered from 0 without gaps")
    placement = stage_ranks or [placed[stage] for stage in range(len(placed))]
    try:
        schedule = Schedule(
            name=UNKNOWN_ORDER,
            num_microbatches=1 + max(action.microbatch for row in rows for action in row),
            stage_ranks=tuple(placement),
            actions=tuple(tuple(row) for row in rows),
        )
    except UsageError as error:
        return Unavailable(f"the recorded actions are no schedule: {error}")
    problems = check_schedule(schedule)
    return Unavailable(f"the recorded step is not whole: {problems[0]}") if problems else schedule


def _call(schedule: Schedule, names: list[str], *, is_exact: bool) -> ExecutedSchedule:
    return ExecutedSchedule(
        schedule=replace(schedule, name=names[0]), is_exact=is_exact, also=tuple(names[1:])
    )


def _build_candidates(schedule: Schedule) -> Iterator[Schedule]:
    """Every known schedule of this size and placement."""
    num_chunks, rest = divmod(schedule.num_stages, schedule.num_ranks)
    if rest:
        return
    for name in _NAMES:
        builder = BUILDERS[name]
        # With one chunk, schedules over chunks are GPipe and 1F1B under another name.
        if num_chunks == 1 if builder.is_chunked else builder.default_chunks != num_chunks:
            continue
        try:
            built = build_schedule(name, schedule.num_ranks, schedule.num_microbatches, num_chunks)
        except UsageError:  # it does not exist for these numbers
            continue
        if built.stage_ranks == schedule.stage_ranks:
            yield built


def _spell(rows: tuple[tuple[Action, ...], ...]) -> list[list[tuple[ActionKind, int]]]:
    return [[(action.kind, action.stage) for action in row] for row in rows]
