"""A rank's recording session: opens the files, connects the tables, completes them.

No file has its place in the run before the first record. They are made, out of sight, as soon as an
optimizer shows that this process will train, so that no step pays for it. Everything that writes
gets its table, its ids of names and its journal here; where the session cannot open, is paused or
has ended, it gets nothing, and training goes on.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from meshscope.capture.background_thinning import BackgroundThinning, find_max_bytes
from meshscope.capture.communication import communication
from meshscope.capture.config import RecorderConfig
from meshscope.capture.guard import Guard
from meshscope.capture.identity import (
    Identity,
    clock_id,
    initialized_distributed,
    pid_namespace,
    process_start_ticks,
    resolve_identity,
    resolve_run_dir,
)
from meshscope.capture.memory.host_memory import read_host_memory
from meshscope.capture.model.settings import Settings
from meshscope.capture.native_steps import choose_timeline
from meshscope.capture.operations.operation_log import OperationLog
from meshscope.capture.operations.process_groups import GroupEntry
from meshscope.capture.provenance import collect_provenance
from meshscope.capture.rank_files import RankFiles, are_devices_known
from meshscope.capture.stacks.dumps import StackDumps
from meshscope.capture.stacks.sampler import StackSampler
from meshscope.capture.steps.scalars import ScalarLog
from meshscope.capture.steps.timeline import NullSink
from meshscope.core.group_axis import name_axis
from meshscope.core.layout import Layout
from meshscope.errors import CaptureError
from meshscope.store.schema import MISSING
from meshscope.store.write.access import can_rename_new
from meshscope.store.write.cut_guard import count_cut_pages
from meshscope.store.write.in_flight import InFlightWriter
from meshscope.store.write.now_file import NOW_NAME, NowFile
from meshscope.store.write.open_step import OpenStepWriter
from meshscope.store.write.segments import AnyTable
from meshscope.store.write.writer import RankWriter, is_mappable, rank_dir_name

logger = logging.getLogger(__name__)

CLOCKS_EVERY_NS = 60_000_000_000
_FLUSH_SECONDS = 0.2
"""How long the append sink (network file systems) holds records back at most."""
_MAX_WAITING_RECORDS = 256
"""Records kept until the first training step; older ones are forgotten."""

_MAX_FAULT_CHARACTERS = 500
_USUAL_SIGNALS = ("backward_loss", "lr")
"""Names that every training logs in its first step."""


class Session:
    """The files of one rank, from the first record to the last, and what writes them."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None,
        *,
        layout: Layout | None,
        config: RecorderConfig,
        clock: Callable[[], int],
        attempt: int | None,
    ) -> None:
        self.config = config
        self.guard = Guard()
        self.clock = clock
        self._given_run_dir = run_dir
        self._attempt = attempt
        self.layout = layout
        self._layout_source = "declared" if layout else ""
        self.stage_layers: dict[str, dict[str, int]] = {}
        self.prediction: dict[str, object] | None = None
        self.lock = threading.RLock()
        self.writer: RankWriter | None = None
        """None before the first record and after the last."""
        self.last_writer: RankWriter | None = None
        """Also after `close`: what was recorded can still be read."""
        self.on_open: Callable[[], None] = _do_nothing
        """Called when the files have been opened, before the first record is in them."""
        self.on_journal: Callable[[], None] = _do_nothing
        """Called when there is a new journal; it may be made ahead of the opening."""
        self.on_prepare: Callable[[], None] = _do_nothing
        """Called when the files have been made ahead."""
        self.waits_for_training = False
        self.is_closed = False
        self.is_paused = False
        self.failure = ""
        self.world_size = 1
        self.host_limit_bytes = MISSING
        self.next_clocks_ns = 0
        """When wall clock and monotonic clock are to be read together again."""
        self.name_ids: dict[str, int] = {}
        self.timeline = choose_timeline()(clock)
        self.scalars = ScalarLog(
            self.timeline, clock, self.guard, self.name_id, lambda: self.find_table("scalars")
        )
        self.operations = OperationLog(
            self.timeline, self.guard, clock, self.name_id, self._open_operations, self.journal
        )
        self.settings = Settings(self.journal)
        self.stack_sampler = StackSampler(self, lambda: self.timeline.current_step)
        self._now: NowFile | None = None
        self._open_step: OpenStepWriter | None = None
        self._stack_dumps: StackDumps | None = None
        self._flusher: threading.Thread | None = None
        self._stop = threading.Event()
        self._thinning: BackgroundThinning | None = None
        self._opening_cost_ns = 0
        self._has_lost_files = False
        self._has_cut_files = False
        self._prepared: RankFiles | None = None
        """Made ahead, and not in the run yet."""

    # --- opening --------------------------------------------------------------------------

    def arm(self) -> None:
        """The next record opens the run."""
        if not self.config.enabled or self.is_closed:
            self.go_silent()
            return
        self.timeline.spans = _OpeningSink(self, "spans")
        self.timeline.steps = _OpeningSink(self, "steps")
        self.timeline.actions = _OpeningSink(self, "actions")

    def open(self) -> bool:
        with self.lock:
            if self.writer is not None:
                return True
            if self.is_closed or self.failure or not self.config.enabled:
                return False
            opened = self.guard.run("open", self._try_open)
            if opened is None:
                self.failure = self.guard.first_messages.get("open", "unknown")
                self.go_silent()
                logger.error("meshscope records nothing in this process: %s", self.failure)
                return False
            return True

    def prepare(self) -> None:
        """Makes the files ahead of the first step, where it can be known what goes into them."""
        with self.lock:
            is_wanted = self.config.enabled and not (self.is_closed or self.is_paused)
            is_made = self.writer is not None or self._prepared is not None
            if is_wanted and not is_made and not self.failure and are_devices_known():
                self._prepared = self.guard.run("prepare", self._try_prepare)

    def _try_prepare(self) -> RankFiles | None:
        start_ns = self.clock()
        try:
            identity = resolve_identity(os.environ)
            run_dir = resolve_run_dir(self._given_run_dir, identity)
            if not (can_rename_new() and is_mappable(run_dir)):
                return None
            self._prepared = files = self._make_files(identity, run_dir, is_draft=True)
            self.guard.run("facts", self.on_journal)
            self.guard.run("warm up", self.on_prepare)
            return files
        except (CaptureError, OSError):
            return None  # the first record tries again, and says why if it cannot be
        finally:
            self._opening_cost_ns += self.clock() - start_ns

    def _try_open(self) -> bool:
        start_ns = self.clock()
        identity = resolve_identity(os.environ)
        self.world_size = identity.placement.world_size
        files, self._prepared = self._prepared, None
        if files is not None and not files.place(self._list_claims(identity)):
            files.discard()
            files = None
        is_new = files is None
        if files is None:
            run_dir = resolve_run_dir(self._given_run_dir, identity)
            files = self._make_files(identity, run_dir, is_draft=False)
        self.writer = self.last_writer = writer = files.writer
        self._now, self._open_step = files.now, files.open_step
        self._stack_dumps = files.stack_dumps
        self.guard.on_first = lambda site, text: writer.journal.write(
            "health", cause="recorder", where=site, count=1, text=text
        )
        if not writer.is_mapped:
            self._start_flusher()
        if writer.thinner is not None:
            self._thinning = BackgroundThinning(writer.thinner, self.guard, self.note_gap)
        if is_new:
            self.on_journal()
        self.on_open()
        self.connect()
        self._opening_cost_ns += self.clock() - start_ns
        return True

    def watch_size(self) -> None:
        """Looks whether old records are to be thinned; once a minute."""
        if self._thinning is not None:
            self._thinning.look()

    def _make_files(self, identity: Identity, run_dir: Path, *, is_draft: bool) -> RankFiles:
        rank = identity.placement.rank
        unix_ns, mono_ns, uncertainty_ns = read_clocks(self.clock)
        header = self._make_header(identity, unix_ns, mono_ns, uncertainty_ns)
        config = self.config
        writer = RankWriter(
            run_dir,
            rank,
            header=header,
            max_detail_bytes=config.max_detail_bytes,
            max_bytes=find_max_bytes(
                config.max_disk_bytes,
                os.environ,
                identity.placement.world_size,
                run_dir / rank_dir_name(rank),
            ),
            is_draft=is_draft,
        )
        writer.table("clocks").put(mono_ns, unix_ns, uncertainty_ns, 0, 0, 0, 0)
        self.next_clocks_ns = mono_ns + CLOCKS_EVERY_NS
        # Without a mapped file for stamps (the disk may be full) there is no short cut.
        now = self.guard.run("now file", self._make_now_file, writer)
        open_step = None if now is None or not writer.is_mapped else OpenStepWriter(now, mono_ns)
        if is_draft:  # what every training writes in its first steps
            wanted = {"scalars": config.signals, "memory": config.memory}
            for name in ("steps", "phases", "spans", *(n for n, on in wanted.items() if on)):
                writer.table(name).make_room()
            if config.signals:
                for name in _USUAL_SIGNALS:
                    writer.name_id(name)
        self.guard.run("host memory", self._journal_host_memory, writer)
        return RankFiles(
            claims=self._list_claims(identity),
            writer=writer,
            now=now,
            open_step=open_step,
            stack_dumps=self._offer_stacks(writer) if config.stack_dumps else None,
        )

    @staticmethod
    def _make_now_file(writer: RankWriter) -> NowFile:
        return NowFile(writer.directory / NOW_NAME, mapped=writer.is_mapped)

    def _list_claims(self, identity: Identity) -> tuple[object, ...]:
        return (identity, self.layout, dict(self.stage_layers), self.prediction, self.config)

    def _make_header(
        self, identity: Identity, unix_ns: int, mono_ns: int, uncertainty_ns: int
    ) -> dict[str, object]:
        placement = identity.placement
        header: dict[str, object] = {
            "rank": placement.rank,
            "world_size": placement.world_size,
            "local_rank": placement.local_rank,
            "local_world_size": placement.local_world_size,
            "node_rank": placement.node_rank,
            "placement_source": placement.source,
            "launch_id": identity.launch.launch_id,
            "restart_count": identity.launch.restart_count,
            "job_attempt": identity.launch.attempt if self._attempt is None else self._attempt,
            "host": identity.host,
            "pid": identity.pid,
            "process_start_ticks": self.guard.run("process start", process_start_ticks),
            "clock_id": self.guard.run("clock id", clock_id),
            "pid_namespace": self.guard.run("pid namespace", pid_namespace),
            "communication": self.config.communication,
            "has_native_hooks": self.timeline.is_native,
            "start_host_mono_ns": mono_ns,
            "start_unix_ns": unix_ns,
            "clock_uncertainty_ns": uncertainty_ns,
            "layout": self.layout.to_dict() if self.layout else None,
            "layout_source": self._layout_source or None,
            "stage_layers": self.stage_layers or None,
            "prediction": self.prediction,
        }
        if self.config.provenance:
            # Packages and git are the same for all ranks: one of them writes them down.
            header["provenance"] = self.guard.run(
                "provenance", lambda: collect_provenance(in_full=placement.rank == 0)
            )
        return header

    def _offer_stacks(self, writer: RankWriter) -> StackDumps | None:
        try:
            found = StackDumps(writer.directory / NOW_NAME)
        except (OSError, ValueError) as error:
            logger.info("meshscope hang will have no stacks of this process: %s", error)
            return None
        writer.journal.write("update", stack_signal=found.signal_number)
        return found

    def _journal_host_memory(self, writer: RankWriter) -> None:
        found = read_host_memory()
        self.host_limit_bytes = min(found.values(), default=MISSING)
        if found:
            writer.journal.write("update", host_memory=found)

    def _start_flusher(self) -> None:
        self._flusher = threading.Thread(
            target=self._flush_until_stopped, name="meshscope-flush", daemon=True
        )
        self._flusher.start()

    def _flush_until_stopped(self) -> None:
        while not self._stop.wait(_FLUSH_SECONDS):
            self.guard.run("flush", self.flush)

    def flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()
        if self.operations.in_flight is not None:
            self.operations.in_flight.flush()

    # --- tables ---------------------------------------------------------------------------

    def connect(self) -> None:
        """Connects the timeline to the tables."""
        writer = self.writer
        if writer is None or self.is_paused:
            return
        timeline = self.timeline
        timeline.spans = writer.table("spans")
        timeline.steps = writer.table("steps")
        timeline.phases = writer.table("phases")
        timeline.actions = _FirstUseSink(self, "actions")  # most runs have no pipeline
        # Marks on a device need every phase on the stack; so does a file that cannot be mapped.
        timeline.store_stamps(self._open_step)
        timeline.mark_device(timeline.device)
        self._connect_operations()

    def _connect_operations(self) -> None:
        log, writer = self.operations, self.writer
        if writer is None or self.is_paused or log.in_flight is None:
            return
        log.collectives = writer.table("collectives")
        log.waits = writer.table("waits")
        log.notes = writer.table("operation_notes")

    def go_silent(self) -> None:
        """Disconnects the timeline from the tables."""
        log = self.operations
        log.collectives = log.waits = log.notes = NullSink()
        self.scalars.forget_table()
        timeline = self.timeline
        timeline.flush_stamps()
        timeline.store_stamps(None)
        timeline.spans = timeline.steps = timeline.phases = timeline.actions = NullSink()

    def _open_operations(self) -> bool:
        """The first communication: opens the run, and the file of operations under way."""
        with self.lock:
            if not self.open() or self.writer is None:
                return False
            log, writer = self.operations, self.writer
            if log.in_flight is None:
                now = self._now = self._now or self._make_now_file(writer)
                log.in_flight = InFlightWriter(now, self.clock())
                if log.groups is not None:
                    log.groups.in_flight = log.in_flight
                self._connect_operations()
                self._connect_profiler()
            return True

    def _connect_profiler(self) -> None:
        """The process's profiler counts what is recorded, and hands on what the program times."""
        profiler = communication()
        profiler.find_step = lambda: self.timeline.current_step
        profiler.before_asking = self.operations.hand_over
        self.operations.observe = profiler.observe
        if self.operations.groups is not None:
            self.operations.groups.on_group = self._name_group

    def _name_group(self, entry: GroupEntry) -> None:
        """Tells the profiler a group's axis, as far as it is known by now."""
        dist = initialized_distributed()
        world_size = 0 if dist is None else int(dist.get_world_size())
        axis = self.find_axis(entry, world_size)
        communication().set_group(entry.group_id, entry.name, axis, entry.ranks)

    def find_axis(self, entry: GroupEntry, world_size: int) -> str:
        """The axis of the mesh that a group runs along; empty when not known."""
        ranks = tuple(sorted(entry.ranks))
        return name_axis(ranks, entry.description, layout=self.layout, world_size=world_size)[0]

    def find_table(self, name: str) -> AnyTable | None:
        """A table to write now; None while nothing is recorded."""
        writer = self.writer
        return None if writer is None or self.is_paused else writer.table(name)

    def put(self, name: str, *words: int) -> None:
        """Writes one record, if the session is recording."""
        table = self.find_table(name)
        if table is not None:
            table.put(*words)

    def name_id(self, name: str) -> int:
        found = self.name_ids.get(name)
        if found is None:
            with self.lock:
                if (self.is_paused and self.writer is None) or not self.open():
                    return 0
                if self.writer is None:
                    return 0
                found = self.name_ids[name] = self.writer.name_id(name)
        return found

    def put_fault(
        self, kind: str, step: int | None, start_ns: int, end_ns: int | None, detail: str
    ) -> None:
        """Writes a fault down; opens the run when it is the first thing recorded."""
        if self.is_paused or not self.open():
            return
        kind_id = self.name_id(str(kind)[:_MAX_FAULT_CHARACTERS])
        detail_id = self.name_id(str(detail)[:_MAX_FAULT_CHARACTERS]) if detail else 0
        step = self.timeline.current_step if step is None else int(step)
        end_ns = MISSING if end_ns is None else int(end_ns)
        self.put("faults", kind_id | detail_id << 16, step, int(start_ns), end_ns, 0, 0, 0)

    def journal(self, kind: str, **fields: object) -> None:
        """Writes a line into the journal, once there is one; it may have been made ahead."""
        writer = self.writer or (self._prepared.writer if self._prepared else None)
        if writer is not None:
            writer.journal.write(kind, **fields)

    def note_gap(self, where: str, text: str) -> None:
        """Notes what is not recorded, in the log and in the journal."""
        logger.warning("meshscope: %s", text)
        self.guard.first_messages.setdefault(where, text)
        self.guard.run("note", lambda: self.journal("health", cause="gap", where=where, text=text))

    def check_files(self) -> None:
        """Says once that somebody deleted this rank's files: training goes on, recording does not
        come back."""
        if self.writer is not None and not self._has_lost_files:
            self._has_lost_files = self.writer.journal.is_deleted()
            if self._has_lost_files:
                self.note_gap(
                    "files",
                    f"the files of rank {self.rank} in {self.run_dir} were deleted while it "
                    "records: what it records is lost; start the job again to record it",
                )
        if not self._has_cut_files and count_cut_pages():
            self._has_cut_files = True
            self.note_gap(
                "cut files",
                f"files of rank {self.rank} in {self.run_dir} were cut short by somebody else "
                "while it records: what was in them is lost; start the job again to record it",
            )

    @property
    def run_dir(self) -> Path | None:
        return self.writer.directory.parent.parent if self.writer else None

    def open_run_dir(self) -> Path | None:
        """The run directory; opens the run. None when nothing is recorded."""
        return self.run_dir if self.open() else None

    @property
    def rank(self) -> int:
        """Once the run is open, and after it; 0 before."""
        return 0 if self.last_writer is None else self.last_writer.rank

    # --- what is known of the job -----------------------------------------------------------

    def set_layout(self, layout: Layout, source: str) -> None:
        self.layout = layout
        self._layout_source = source
        if self.operations.groups is not None:
            for entry in [e for e in self.operations.groups.entries.values() if e.ranks]:
                self._name_group(entry)
        self.journal("update", layout=layout.to_dict(), layout_source=source)

    def add_stage_layers(self, layers: Mapping[str, dict[str, int]]) -> None:
        """Adds what this rank's pipeline stages hold."""
        self.stage_layers |= layers
        self.journal("update", stage_layers=self.stage_layers)

    def add_prediction(self, fields: dict[str, object]) -> None:
        """Stores what was predicted of the run (`core.prediction`), before it is measured."""
        self.prediction = fields
        self.journal("update", prediction=fields)

    # --- pausing and ending -----------------------------------------------------------------

    def pause(self) -> None:
        self.is_paused = True
        self.go_silent()
        self.guard.run("pause", lambda: self.journal("update", paused_host_mono_ns=self.clock()))

    def resume(self) -> None:
        self.is_paused = False
        if self.writer is None:
            self.arm()
        else:
            self.connect()
        self.guard.run("resume", lambda: self.journal("update", resumed_host_mono_ns=self.clock()))

    def finish(self, *, num_given_up: int, device_uncertainty_ns: int) -> None:
        """Completes the files of this attempt: steps whose device marks were given up, and how far
        times of the device may be off, are known elsewhere."""
        log = self.operations
        log.finish()
        log.hand_over()
        if log.in_flight is not None:
            log.in_flight.close()
            log.in_flight = None
        self.go_silent()
        self.guard.run("files", self.check_files)
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.discard()  # there was nothing to record
        writer, self.writer = self.writer, None
        if writer is not None:
            self._complete(writer, num_given_up, device_uncertainty_ns)

    def _complete(self, writer: RankWriter, num_given_up: int, device_uncertainty_ns: int) -> None:
        if self._thinning is not None:
            self._thinning.stop()
            self._thinning = None
        self._remove_stack_dumps()
        writer.close(
            end_host_mono_ns=self.clock(),
            last_step=self.timeline.last_step,
            num_errors=self.guard.num_errors,
            errors={
                site: {"count": count, "first": self.guard.first_messages[site]}
                for site, count in self.guard.counts.items()
            },
            opening_cost_ns=self._opening_cost_ns,
            num_device_steps_given_up=num_given_up,
            num_operations=self.operations.num_entered,
            num_operations_unrecognised=self.operations.num_unrecognised,
            device_clock_uncertainty_ns=device_uncertainty_ns,
        )
        self._open_step = None
        if self._now is not None:
            self._now.disarm()
            self._now = None

    def _remove_stack_dumps(self) -> None:
        if self._stack_dumps is not None:
            self._stack_dumps.remove()
            self._stack_dumps = None

    def stop_flusher(self) -> None:
        """Stops background flushes."""
        self._stop.set()

    def begin_attempt(self) -> None:
        """After `finish`: numbering, clocks and errors begin again with the next record."""
        self.operations.forget()
        self.guard.forget()
        self.timeline.reset()
        self.name_ids.clear()
        self._has_lost_files = False
        self._has_cut_files = False
        self.last_writer = None
        self.arm()

    def disarm_after_fork(self) -> bool:
        """In a forked child: what is open is the parent's; what is not may still become ours.
        Whether something was open."""
        self.lock = threading.RLock()
        self.stack_sampler.forget_thread()
        prepared, self._prepared = self._prepared, None
        if prepared is not None:  # the parent's: a child that trains makes its own
            if prepared.stack_dumps is not None:
                prepared.stack_dumps.remove()
            if prepared.now is not None:
                prepared.now.disarm()
            prepared.writer.disarm()
        if self.writer is None:
            return False
        self.stack_sampler.is_on = False
        self._thinning = None  # the thread is the parent's
        self.operations.is_on = self.operations.is_resting = False
        self._remove_stack_dumps()
        if self.operations.in_flight is not None:
            self.operations.in_flight.disarm()
        if self._now is not None:
            self._now.disarm()
            self._now = None
        self.is_closed = True
        self.timeline.disarm()
        self.scalars.forget_table()
        self._open_step = None
        self.writer.disarm()
        self.writer = self.last_writer = None
        return True


class _OpeningSink:
    """Stands where a table will be until the run is open, which its records bring about.

    A recorder that the program asked for opens at its first record. One that `meshscope run`
    slipped in waits for the first training step: a helper process that only loads data or
    evaluates is not a rank, and a rank may not know its number before its first step.
    """

    def __init__(self, session: Session, table: str) -> None:
        self._session = session
        self._table = table
        self._waiting: deque[tuple[int, ...]] = deque(maxlen=_MAX_WAITING_RECORDS)

    def put(self, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None:
        """Keeps the record until the run can be opened, then writes all."""
        self._waiting.append((a, b, c, d, e, f, g))
        session = self._session
        if session.waits_for_training and not session.timeline.step_start_ns:
            return
        if session.open():
            table = getattr(session.timeline, self._table)
            while self._waiting:
                table.put(*self._waiting.popleft())


class _FirstUseSink:
    """Stands where a table will be that is made only when something is put into it."""

    def __init__(self, session: Session, table: str) -> None:
        self._session = session
        self._table = table

    def put(self, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None:
        """Makes the table, replaces itself by its `put`, and writes."""
        writer = self._session.writer
        if writer is not None:
            table = writer.table(self._table)
            setattr(self._session.timeline, self._table, table)
            table.put(a, b, c, d, e, f, g)


def read_clocks(clock: Callable[[], int]) -> tuple[int, int, int]:
    """Wall clock, monotonic clock at the same moment, and how far apart they may be read."""
    before_ns = clock()
    unix_ns = time.time_ns()
    after_ns = clock()
    return unix_ns, (before_ns + after_ns) // 2, (after_ns - before_ns + 1) // 2


def _do_nothing() -> None: ...
