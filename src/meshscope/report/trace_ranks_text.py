"""What traces of several ranks say together, as text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from meshscope.analyze.device.trace_outline import TraceOutline
from meshscope.analyze.device.trace_verdict import OthersPart
from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.screen import ScreenWriter, make_column

if TYPE_CHECKING:  # what compares ranks is loaded for several traces only
    from meshscope.analyze.communication.rank_comparison import RankComparison
    from meshscope.simulate.critical_path import CriticalPath, PathShare

MAX_RANKS = 64
"""Ranks of the table of all."""
MAX_FILE_NAME = 36


def find_others_part(
    rank: int | Unavailable, comparison: "RankComparison | Unavailable"
) -> OthersPart | None:
    """None where traces of the other ranks do not tell."""
    if isinstance(comparison, Unavailable):
        return None
    own = next((one for one in comparison.exposed if one.rank == rank), None)
    if own is None:
        return None
    late = [one.rank for one in comparison.late if one.rank != rank]
    return OthersPart(
        wait_ns=own.split.wait_ns,
        late_rank=late[0] if late else None,
        unmatched_ns=own.split.unmatched_ns,
    )


def write_comparison(
    out: ScreenWriter, comparison: "RankComparison | Unavailable", num_rows: int
) -> None:
    """Clocks, what was matched, who came late, and what exposed communication was."""
    out.section("Across ranks")
    if isinstance(comparison, Unavailable):
        out.line(f"n/a: {form.clean_text(comparison.reason)}")
        return
    _write_clocks(out, comparison, num_rows)
    num_alone = comparison.num_unmatched
    have = "kernel or call has" if num_alone == 1 else "kernels or calls have"
    alone = f"{form.count(num_alone)} {have} no partner on another rank"
    if isinstance(comparison.clocks, Unavailable):
        if comparison.num_unmatched:
            out.line(alone)
        return
    out.line(f"{form.plural(comparison.num_matched, 'operation')} matched; {alone}")
    for late in comparison.late[:num_rows]:
        out.line(
            f"rank {late.rank} came last {form.plural(late.num_last, 'time')}; the others waited "
            f"{form.duration(late.caused_wait_ns)}"
        )
    if comparison.num_undecided:
        out.line(
            f"in {form.plural(comparison.num_undecided, 'operation')} the last rank is not known: "
            "they arrived closer together than the clocks' error"
        )
    _write_exposed(out, comparison, num_rows)


def _write_clocks(out: ScreenWriter, comparison: "RankComparison", num_rows: int) -> None:
    clocks = comparison.clocks
    if isinstance(clocks, Unavailable):
        out.line(f"clocks: n/a: {form.clean_text(clocks.reason)}")
        return
    offsets = ", ".join(
        f"rank {clock.rank} {clock.offset_ns / 1e3:+.1f} ± {clock.uncertainty_ns / 1e3:.1f} µs"
        for clock in clocks[1 : num_rows + 1]
    )
    left = len(clocks) - 1 - num_rows
    more = f", and {left} more" if left > 0 else ""
    out.facts([("Clocks", Text(f"against rank {clocks[0].rank}: {offsets}{more}"))])
    if comparison.unaligned:
        out.line(f"not aligned: {form.name_ranks(comparison.unaligned)}: too few common operations")


def _write_exposed(out: ScreenWriter, comparison: "RankComparison", num_rows: int) -> None:
    found = sorted(comparison.exposed, key=lambda row: -row.split.wait_ns)
    rows = sorted(found[:num_rows], key=lambda row: row.rank)
    out.rows(
        [
            make_column("rank", rows, lambda row: str(row.rank), 9),
            make_column("exposed", rows, lambda row: form.duration(row.split.exposed_ns), 8),
            make_column("waiting", rows, lambda row: form.duration(row.split.wait_ns), 8),
            make_column("transfer", rows, lambda row: form.duration(row.split.transfer_ns), 8),
            make_column("unmatched", rows, lambda row: form.duration(row.split.unmatched_ns), 5),
        ]
    )
    if len(found) > len(rows):
        out.line(f"and {form.plural(len(found) - len(rows), 'rank')} more; --json has all", "dim")


def write_rank_table(out: ScreenWriter, outlines: Sequence[TraceOutline]) -> None:
    """One line for every rank's device, or its host."""
    out.section("Ranks", "share of each one's time; --rank N shows one in full")
    # Traces of one rank, or of no known one, are told apart by their files.
    is_one_job = len({str(one.rank) for one in outlines}) == len(outlines)
    num_rows = sum(max(len(one.devices), 1) for one in outlines)
    shown = [(one, row) for one in outlines[:MAX_RANKS] for row in _rank_rows(one)][:MAX_RANKS]
    names = [name for _, (name, _) in shown]
    sources = [_file_name(one.source) for one, _ in shown]
    shares = [parts for _, (_, parts) in shown]
    titles = ("total", "compute", "exposed", "idle")
    out.table(
        [
            make_column("rank", names, str, 9),
            *([] if is_one_job else [make_column("trace", sources, str, 7, is_right=False)]),
            *(
                make_column(title, [parts[place] for parts in shares], str, 8 - place)
                for place, title in enumerate(titles)
            ),
        ]
    )
    if num_rows > MAX_RANKS:
        out.line(f"and {form.count(num_rows - MAX_RANKS)} more; --json has all", "dim")


def _file_name(source: str) -> str:
    name = form.clean_text(source.rsplit("/", 1)[-1])
    return name if len(name) <= MAX_FILE_NAME else f"…{name[1 - MAX_FILE_NAME :]}"


def _rank_rows(outline: TraceOutline) -> list[tuple[str, tuple[str, ...]]]:
    rank = "?" if isinstance(outline.rank, Unavailable) else str(outline.rank)
    rows = []
    for time in outline.devices:
        parts = (time.compute_ns, time.exposed_ns, time.idle_ns)
        rows.append((rank, _shares(time.total_ns, parts)))
    host = outline.host
    if host is not None:
        idle = host.loading_ns + host.other_ns
        parts = (host.operator_ns + host.optimizer_ns, host.exposed_ns, idle)
        rows.append((rank, _shares(host.total_ns, parts)))
    return rows


def _shares(total_ns: int, parts: tuple[int, ...]) -> tuple[str, ...]:
    return form.duration(total_ns), *(form.ratio(part / max(total_ns, 1)) for part in parts)


def write_path(out: ScreenWriter, path: "CriticalPath | Unavailable", num_rows: int) -> None:
    """The chain over ranks that the steps' time consists of."""
    out.section("Critical path", "over all ranks; `meshscope simulate` prices its parts")
    if isinstance(path, Unavailable):
        out.line(f"n/a: {form.clean_text(path.reason)}")
        return
    rows = path.shares[:num_rows]
    out.table(
        [
            make_column("share", rows, lambda row: form.ratio(row.ratio), 9),
            make_column("per step", rows, lambda row: _per_step(path, row), 8),
            make_column("rank", rows, lambda row: str(row.rank), 9),
            make_column("what", rows, _name_share, 9, is_right=False),
        ]
    )
    if len(path.shares) > len(rows):
        out.line(f"and {form.count(len(path.shares) - len(rows))} more; --json has all", "dim")


def _per_step(path: "CriticalPath", share: "PathShare") -> str:
    return form.duration(share.total_ns / max(path.num_steps, 1))


def _name_share(share: "PathShare") -> str:
    parts = (str(share.kind), share.phase, share.axis, share.operation)
    return " ".join(form.clean_text(part) for part in parts if part)
