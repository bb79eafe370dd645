"""What the monitor may ask the recorder for besides its tables."""

from meshscope.capture.model.model_facts import ModelFacts
from meshscope.capture.monitor.monitor_records import Surroundings
from meshscope.capture.operations.process_groups import GroupEntry
from meshscope.capture.session import Session
from meshscope.capture.watching import Watching
from meshscope.store.read.tail import Record, read_last_rows
from meshscope.store.write.writer import RankWriter


def look_around(session: Session, watching: Watching, facts: ModelFacts) -> Surroundings:
    """Reads a session, which may be over."""
    writer, groups = session.writer or session.last_writer, session.operations.groups
    if writer is session.writer and writer is not None:
        writer.flush()
    entries = [] if groups is None else list(groups.entries.values())
    return Surroundings(
        read=lambda name, count: [] if writer is None else _read_newest(writer, name, count),
        layout=session.layout,
        rank=session.rank,
        world_size=session.world_size,
        axes={entry.group_id: _find_axis(session, entry) for entry in entries},
        has_communication=(session.operations.is_on or session.operations.is_resting)
        and watching.collectives is not None,
        host_limit_bytes=session.host_limit_bytes,
        tokens_name_id=session.name_ids.get("tokens", 0),
        facts=dict(facts.lines),
    )


def _find_axis(session: Session, entry: GroupEntry) -> str:
    if not entry.ranks:  # timed by the program, which named the axis
        return entry.name.split(":")[1] if entry.name.startswith("timed:") else ""
    return session.find_axis(entry, session.world_size)


def _read_newest(writer: RankWriter, table: str, count: int) -> list[Record]:
    """The newest records this process has put into a table; none while there is no such table."""
    try:
        return read_last_rows(writer.directory, table, count)
    except OSError:
        return []
