"""Writes runs that communicate, with known ground truth: who arrived when, on which clock.

    job = Job(path, num_ranks=4, host=lambda rank: f"node{rank}", clocks={"node1": (SECOND, 50)})
    group = job.group(range(4), description="mesh_dp")
    job.collective(group, {0: 0, 1: 0, 2: 20 * MS, 3: 0}, transfer_ns=2 * MS)
    job.close()

Moments are true ones, in ns from the start of the job; the builder puts them on the clocks of the
hosts, each with an offset and a drift in ppm.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from builders import MS, SECOND, START_MONO_NS, START_UNIX_NS, put_step
from meshscope.core.layout import Layout
from meshscope.core.operations import DTYPES, EndSource, Kind, Outcome
from meshscope.store.read.run import Attempt, open_run
from meshscope.store.schema import MISSING, NoteCode
from meshscope.store.write.groups import GROUP_KIND, pack_ranks
from meshscope.store.write.writer import RankWriter

Moments = Mapping[int, int]
"""Rank to a moment or a duration."""
MAX_TAG = 127


def operation_words(
    *,
    kind: int = Kind.ALL_REDUCE,
    outcome: int = Outcome.OK,
    end_source: int = EndSource.WAIT,
    flags: int = 0,
    group_id: int = 0,
    phase_id: int = 0,
    sequence: int = 0,
    peer: int = -1,
    enqueue_ns: int,
    start_ns: int | None = None,
    end_ns: int = MISSING,
    size_bytes: int = 4096,
    step: int = -1,
    microbatch: int = 0,
    dtype: int = 1,
    tag: int = 0,
) -> tuple[int, int, int, int, int, int, int]:
    """The seven words of a row of `collectives`."""
    return (
        kind | outcome << 8 | end_source << 16 | flags << 24 | group_id << 32 | phase_id << 48,
        sequence | (peer + 1) << 32,
        enqueue_ns,
        enqueue_ns if start_ns is None else start_ns,
        end_ns,
        size_bytes,
        step + 1 | (microbatch + 1) << 32 | dtype << 48 | tag << 56,
    )


class Job:
    """A job of several ranks that communicate."""

    def __init__(
        self,
        path: Path,
        *,
        num_ranks: int,
        layout: Layout | None = None,
        host: Callable[[int], str] = lambda rank: "node0",
        clocks: Mapping[str, tuple[int, float]] | None = None,
        missing: Iterable[int] = (),
        wall_clock_error_ns: Mapping[str, int] | None = None,
        header: Callable[[int], Mapping[str, object]] = lambda rank: {},
    ) -> None:
        self.path = path
        self.host = host
        self.clocks = clocks or {}
        self.ranks = [rank for rank in range(num_ranks) if rank not in set(missing)]
        self._num_groups = 0
        self._members: dict[int, tuple[int, ...]] = {}
        self._sequences: dict[tuple[object, ...], int] = {}
        self.writers = {}
        errors = wall_clock_error_ns or {}
        for rank in self.ranks:
            wall_ns = START_UNIX_NS + errors.get(host(rank), 0)
            self.writers[rank] = RankWriter(
                path,
                rank,
                header={
                    "rank": rank,
                    "world_size": num_ranks,
                    "launch_id": "launch",
                    "restart_count": 0,
                    "host": host(rank),
                    "start_host_mono_ns": self.local_ns(rank, 0),
                    "start_unix_ns": wall_ns,
                    "layout": layout.to_dict() if layout else None,
                    **header(rank),
                },
            )

    def local_ns(self, rank: int, moment_ns: int) -> int:
        """A true moment as the rank's clock shows it."""
        offset_ns, drift_ppm = self.clocks.get(self.host(rank), (0, 0.0))
        return START_MONO_NS + offset_ns + moment_ns + round(moment_ns * drift_ppm * 1e-6)

    def group(
        self,
        ranks: Iterable[int],
        *,
        name: str | None = None,
        description: str = "",
        backend: str = "gloo",
    ) -> int:
        """Makes a process group; its number is the same on all ranks."""
        group_id, self._num_groups = self._num_groups, self._num_groups + 1
        members = self._members[group_id] = tuple(ranks)
        for rank in members:
            if rank in self.writers:
                self.writers[rank].journal.write(
                    GROUP_KIND,
                    id=group_id,
                    name=str(group_id) if name is None else name,
                    description=description,
                    backend=backend,
                    ranks=pack_ranks(members),
                )
        return group_id

    def next_sequence(self, *channel: object) -> int:
        """Counts the operations of a channel."""
        number = self._sequences[channel] = self._sequences.get(channel, -1) + 1
        return number

    def collective(
        self,
        group: int,
        arrivals: Moments,
        *,
        transfer_ns: int = MS,
        kind: Kind = Kind.ALL_REDUCE,
        notice_ns: Moments | None = None,
        size_bytes: int = 4096,
        dtype: str = "float32",
        step: int = -1,
        phase: str = "",
        flags: int = 0,
        end_source: EndSource = EndSource.WAIT,
        root: int = -1,
        overrides: Mapping[int, Mapping[str, int]] | None = None,
    ) -> dict[int, int]:
        """One operation that every arriving rank enters and leaves, `transfer_ns` after the last.

        `notice_ns` is how late each rank notices. Returns the keys of its rows.
        """
        end_ns = max(arrivals.values()) + transfer_ns
        keys = {}
        for rank, arrival_ns in arrivals.items():
            if rank not in self.writers:
                continue
            late_ns = (notice_ns or {}).get(rank, 0)
            keys[rank] = self.local_ns(rank, arrival_ns)
            words = {
                "kind": int(kind),
                "end_source": int(end_source),
                "flags": flags,
                "group_id": group,
                "phase_id": self.writers[rank].name_id(phase) if phase else 0,
                "sequence": self.next_sequence(group, rank),
                "peer": root,
                "enqueue_ns": keys[rank],
                "end_ns": self.local_ns(rank, end_ns + late_ns),
                "size_bytes": size_bytes,
                "step": step,
                "dtype": DTYPES.index(dtype),
                **(overrides or {}).get(rank, {}),
            }
            self.writers[rank].table("collectives").put(*operation_words(**words))
        return keys

    def message(
        self,
        group: int,
        source: int,
        target: int,
        *,
        sent_ns: int,
        asked_ns: int,
        latency_ns: int = MS,
        size_bytes: int = 4096,
        tag: int = 0,
        step: int = -1,
        end_source: EndSource = EndSource.WAIT,
    ) -> None:
        """A send and its recv: it arrives `latency_ns` after both have been called."""
        arrived_ns = max(sent_ns, asked_ns) + latency_ns
        for rank, peer, kind, begin_ns in (
            (source, target, Kind.SEND, sent_ns),
            (target, source, Kind.RECV, asked_ns),
        ):
            if rank not in self.writers:
                continue
            words = operation_words(
                kind=kind,
                end_source=end_source,
                group_id=group,
                sequence=self.next_sequence(group, rank, peer, kind, tag),
                peer=peer,
                enqueue_ns=self.local_ns(rank, begin_ns),
                end_ns=self.local_ns(rank, arrived_ns),
                size_bytes=size_bytes,
                step=step,
                tag=tag,
            )
            self.writers[rank].table("collectives").put(*words)

    def wait(
        self,
        rank: int,
        key_ns: int,
        begin_ns: int,
        duration_ns: int,
        *,
        device_ns: int = MISSING,
        step: int = -1,
    ) -> None:
        """A wait of the program for the operation with that key."""
        self.writers[rank].table("waits").put(
            1, key_ns, self.local_ns(rank, begin_ns), duration_ns, device_ns, 0, step + 1 | 1 << 32
        )

    def note_error(self, rank: int, key_ns: int, text: str) -> None:
        """The message of an operation that failed."""
        writer = self.writers[rank]
        name_id = writer.name_id(text)
        writer.table("operation_notes").put(
            name_id | NoteCode.ERROR << 16, key_ns, key_ns, 0, 0, 0, 0
        )

    def step(self, step: int, begin_ns: int, end_ns: int) -> None:
        """One finished step on every rank."""
        for rank, writer in self.writers.items():
            put_step(writer, step, self.local_ns(rank, begin_ns), self.local_ns(rank, end_ns))

    def calibrate(
        self, rank: int, reference_rank: int, moment_ns: int, uncertainty_ns: int
    ) -> None:
        """The recorder measures the rank's clock against another's, without error."""
        local_ns = self.local_ns(rank, moment_ns)
        self.writers[rank].journal.write(
            "update",
            clock_calibration={
                "reference_rank": reference_rank,
                "offset_ns": local_ns - self.local_ns(reference_rank, moment_ns),
                "uncertainty_ns": uncertainty_ns,
                "at_host_mono_ns": local_ns,
            },
        )

    def close(self) -> Attempt:
        """Ends the recording and opens it."""
        for rank, writer in self.writers.items():
            writer.close(end_host_mono_ns=self.local_ns(rank, 3600 * SECOND))
        return open_run(self.path).last_attempt
