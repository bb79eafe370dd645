"""Writes real run directories with known ground truth: no torch, made-up times, the real writer.

    make_run(path, layout=Layout(dp=2), num_steps=5, phases=(("forward", 30 * MS), …))

writes through `store.writer.RankWriter`, so that what tests read is what a recorder leaves.
Faults change what chosen ranks write; `Faults` says which.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshscope.core.layout import Layout
from meshscope.store.read.files import pack_of
from meshscope.store.schema import MISSING
from meshscope.store.write.pack import PACK_NAME, find_index
from meshscope.store.write.table_file import HEADER_BYTES, pack_record
from meshscope.store.write.writer import RankWriter

MS = 1_000_000
SECOND = 1_000_000_000
START_MONO_NS = 5_000 * SECOND
START_UNIX_NS = 1_763_200_000 * SECOND
"""2025-11-15 09:46:40 UTC."""

Phases = Sequence[tuple[str, int]]
"""Name and duration of the phases of a step, one after another."""

DEFAULT_PHASES: Phases = (
    ("data", 2 * MS),
    ("forward", 30 * MS),
    ("backward", 60 * MS),
    ("optimizer", 5 * MS),
)
UNATTRIBUTED_NS = 3 * MS
"""Of every step, unless told otherwise."""
GAP_NS = 1 * MS
STARTUP_NS = 500 * MS
SHUTDOWN_NS = 10 * MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is wrong with a run, by rank."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """Rank to the factor by which its phases are longer."""
    killed: Mapping[int, int] = field(default_factory=dict)
    """Rank to the number of steps after which it was killed: no closing line."""
    missing: frozenset[int] = frozenset()
    """Ranks that recorded nothing."""
    damaged: Mapping[int, str] = field(default_factory=dict)
    """Rank to the table of which one byte in the second record is flipped."""
    errors: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Rank to errors caught per site."""


NO_FAULTS = Faults()


def make_run(
    path: Path,
    *,
    layout: Layout | None = None,
    world_size: int | None = None,
    num_steps: int = 5,
    phases: Phases = DEFAULT_PHASES,
    unattributed_ns: int = UNATTRIBUTED_NS,
    gap_ns: int = GAP_NS,
    first_step_extra_ns: int = 0,
    input_tokens: int = MISSING,
    scalars: Mapping[str, Callable[[int, int], float]] | None = None,
    memory: Sequence[int] | None = None,
    device_ratio: float | None = None,
    detail: str | None = None,
    host: Callable[[int], str] = lambda rank: f"node{rank // 8}",
    header: Mapping[str, object] | None = None,
    launch_id: str | None = "launch",
    restart_count: int = 0,
    faults: Faults = NO_FAULTS,
    also: Callable[[RankWriter], None] = lambda writer: None,
) -> Path:
    """Writes a run and returns its path.

    `scalars` maps a name to a function of rank and step. `memory` are the five words of one memory
    sample. `device_ratio` adds device spans that last this much of their host span. `also` writes
    what a test adds to a rank.
    """
    world = layout.world_size if layout else world_size or 1
    for rank in range(world):
        if rank in faults.missing:
            continue
        writer = RankWriter(
            path,
            rank,
            header={
                "rank": rank,
                "world_size": world,
                "launch_id": launch_id,
                "restart_count": restart_count,
                "host": host(rank),
                "pid": 100 + rank,
                "start_host_mono_ns": START_MONO_NS,
                "start_unix_ns": START_UNIX_NS + restart_count * 3600 * SECOND,
                "layout": layout.to_dict() if layout else None,
                "layout_source": "declared" if layout else None,
                **(header or {}),
            },
            manifest={"run_id": "0123456789ab", "created_unix_ns": START_UNIX_NS},
        )
        rank_steps = faults.killed.get(rank, num_steps)
        slow = faults.slow.get(rank, 1.0)
        now_ns = START_MONO_NS + STARTUP_NS
        for step in range(rank_steps):
            begin_ns = now_ns
            for name, duration_ns in phases:
                duration_ns = int(duration_ns * slow)
                name_id = writer.name_id(name)
                writer.table("spans").put(name_id, now_ns, duration_ns, duration_ns, 0, 0, 0)
                if detail is not None:
                    put_span(writer, detail, now_ns, duration_ns, flags=2, depth=1)
                if device_ratio is not None:
                    put_device_span(writer, name, now_ns, int(duration_ns * device_ratio))
                now_ns += duration_ns
            now_ns += unattributed_ns + (first_step_extra_ns if step == 0 else 0)
            put_step(
                writer,
                step,
                begin_ns,
                now_ns,
                recorder_ns=20_000 if step % 16 == 0 else MISSING,
                input_tokens=input_tokens,
            )
            for name, value_of in (scalars or {}).items():
                put_scalar(writer, name, step, now_ns, value_of(rank, step))
            now_ns += gap_ns
        if memory is not None:
            writer.table("memory").put(rank_steps - 1, now_ns - gap_ns, *memory)
        also(writer)
        now_ns -= gap_ns if rank_steps else 0
        if rank in faults.killed:
            writer.flush()
            writer.journal.close()
        else:
            errors = faults.errors.get(rank, {})
            writer.close(
                end_host_mono_ns=now_ns + SHUTDOWN_NS,
                last_step=rank_steps - 1,
                num_errors=sum(errors.values()),
                errors={
                    site: {"count": count, "first": "ValueError: made up"}
                    for site, count in errors.items()
                },
                opening_cost_ns=4 * MS,
                num_device_steps_given_up=0,
            )
        if rank in faults.damaged:
            flip_byte(table_path(writer.directory, faults.damaged[rank]), HEADER_BYTES + 64 + 20)
    return path


def put_step(
    writer: RankWriter,
    step: int,
    begin_ns: int,
    end_ns: int,
    *,
    flags: int = 0,
    recorder_ns: int = MISSING,
    input_tokens: int = MISSING,
    input_samples: int = 0,
) -> None:
    """One row of `steps`."""
    words = (step, begin_ns, end_ns, 1 | flags << 32, recorder_ns, input_tokens, input_samples)
    writer.table("steps").put(*words)


def put_span(
    writer: RankWriter,
    name: str,
    start_ns: int,
    duration_ns: int,
    *,
    self_ns: int | None = None,
    depth: int = 0,
    flags: int = 0,
    thread: int = 0,
) -> None:
    """One row of `spans`."""
    writer.table("spans").put(
        writer.name_id(name) | depth << 16 | flags << 24 | thread << 32,
        start_ns,
        duration_ns,
        duration_ns if self_ns is None else self_ns,
        0,
        0,
        0,
    )


def put_device_span(
    writer: RankWriter,
    name: str,
    host_start_ns: int,
    duration_ns: int,
    *,
    start_device_ns: int = 0,
    offset_min_ns: int = 0,
    offset_max_ns: int = 0,
) -> None:
    """One row of `device_spans`; without bounds it cannot be placed on the host's clock."""
    writer.table("device_spans").put(
        writer.name_id(name),
        host_start_ns,
        start_device_ns,
        duration_ns,
        offset_min_ns,
        offset_max_ns,
        0,
    )


def put_scalar(writer: RankWriter, name: str, step: int, time_ns: int, value: float) -> None:
    """One row of `scalars`."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    writer.table("scalars").put(writer.name_id(name), step, time_ns, bits, 0, 0, 0)


def make_writer(path: Path, rank: int = 0, world_size: int = 1, **header: object) -> RankWriter:
    """A writer with a plain header, for tests that place every record themselves."""
    fields: dict[str, object] = {
        "rank": rank,
        "world_size": world_size,
        "launch_id": "launch",
        "restart_count": 0,
        "host": "node0",
        "start_host_mono_ns": START_MONO_NS,
        "start_unix_ns": START_UNIX_NS,
        **header,
    }
    return RankWriter(path, rank, header=fields)


def table_path(directory: Path, name: str) -> Path:
    """A table in the pack that a rank writes."""
    return directory / PACK_NAME / f"{name}.tbl"


def place_of(path: Path, offset: int) -> tuple[Path, int]:
    """The file that has a byte of a table, or of a file, and where."""
    pack = pack_of(path)
    if pack is None:
        return path, offset
    with pack.open("rb") as file:
        index, _ = find_index(pack, file.fileno())
    first, _, at = [one for one in index.extents[path.stem] if one[0] <= offset][-1]
    return pack, at + offset - first


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Bytes of a file, or of a table in a pack, that do not go on beyond one extent."""
    place, at = place_of(path, offset)
    with place.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip_byte(path: Path, offset: int) -> None:
    """Damages one byte of a file, or of a table in a pack."""
    place, at = place_of(path, offset)
    overwrite(place, at, bytes([place.read_bytes()[at] ^ 0xFF]))


def lose_table(path: Path) -> None:
    """Makes a pack as if a table were not in it."""
    pack = path.parent
    data = bytearray(pack.read_bytes())
    for at in range(HEADER_BYTES, 2 * HEADER_BYTES, 64):
        words = struct.unpack_from("<8q", data, at)[1:]
        if struct.pack("<4q", *words[:4]).rstrip(b"\0") == path.stem.encode():
            other = struct.unpack("<4q", b"lost".ljust(32, b"\0"))
            data[at : at + 64] = pack_record(at, (*other, *words[4:]))
    draft = pack.with_name(".draft")  # another file: what is known of one is kept
    draft.write_bytes(data)
    draft.replace(pack)
