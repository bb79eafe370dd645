"""The recorder: what a training program talks to.

    import meshscope
    rec = meshscope.start("runs/my-run")
    rec.attach(model, optimizer)          # automatic: steps, phases, loss, lr, tokens
    for batch in rec.data(loader):        # optional: loaders of torch are seen anyway
        with rec.phase("augment"): …      # optional: anything else worth a line of its own
        rec.log(loss=loss)                # optional: a tensor on a device is not waited for

Nothing is opened until the first record; nothing here raises into the program, but for a UsageError
when a setting's name is wrong; everything is undone by `close`. Standard library only; torch is
used if the program has imported it.

Long because it is the one face of the package: what its methods do is in the modules it puts
together, and here is who owns what, when files open, and what happens after each step.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from meshscope.capture.clock_calibration import ClockOffset, measure_offset
from meshscope.capture.communication import communication
from meshscope.capture.communication.default import listen
from meshscope.capture.guard import Guard
from meshscope.capture.identity import (
    clock_id,
    initialized_distributed,
    pid_namespace,
    process_start_ticks,
    resolve_identity,
    resolve_run_dir,
)
from meshscope.capture.lifetime import forget, remember
from meshscope.capture.memory.automatic_profile import AutomaticProfile
from meshscope.capture.memory.device_memory import pause_after, sample_memory
from meshscope.capture.memory.gc_pauses import GcPauses, pause_name
from meshscope.capture.memory.host_memory import read_host_memory
from meshscope.capture.memory.memory_profile import MemoryProfile
from meshscope.capture.memory.out_of_memory import OutOfMemoryWatch
from meshscope.capture.memory.points import POINTS_NAME
from meshscope.capture.model.flops import CountedFlops
from meshscope.capture.model.gemm_peak import MeasuredPeak
from meshscope.capture.model.layer_counts import check_stage_layers, count_layers
from meshscope.capture.model.model_facts import PER_STEP, ModelFacts
from meshscope.capture.monitor.monitor import Monitor, Surroundings
from meshscope.capture.monitor.monitor_results import MonitorAnalysis, MonitorStats
from meshscope.capture.operations.collectives import CollectiveTap
from meshscope.capture.operations.operation_log import OperationLog
from meshscope.capture.operations.process_groups import GroupEntry
from meshscope.capture.profiling.settings import (
    ProfilingSettings,
    change_settings,
    parse_settings,
)
from meshscope.capture.profiling.trace_windows import Place, TraceWindows, WindowSurroundings
from meshscope.capture.profiling.window_request import WindowRequest
from meshscope.capture.provenance import collect_provenance
from meshscope.capture.stacks import STACKS_NAME, StackDumps
from meshscope.capture.steps.actions import ActionBlock, Actions, WaitBlock
from meshscope.capture.steps.automatic import Automatic
from meshscope.capture.steps.blocks import Phase, Span, StepBlock
from meshscope.capture.steps.hooks import BACKWARD, DATA, Hooks
from meshscope.capture.steps.marking import Marking
from meshscope.capture.steps.scalars import ScalarLog
from meshscope.capture.steps.step_inference import StepInference
from meshscope.capture.steps.timeline import NullSink, Timeline
from meshscope.core.group_axis import name_axis
from meshscope.core.layout import Layout
from meshscope.core.trace_names import rank_folder_name
from meshscope.errors import CaptureError, UsageError
from meshscope.store.read.tail import Record, read_last_records
from meshscope.store.schema import MAX_DETAIL_BYTES, MISSING, StepFlag
from meshscope.store.write.in_flight import IN_FLIGHT_NAME, InFlightWriter
from meshscope.store.write.open_step import OPEN_STEP_NAME, OpenStepWriter
from meshscope.store.write.table_file import TableWriter
from meshscope.store.write.writer import TABLE_SUFFIX, RankWriter

logger = logging.getLogger(__name__)

OLDEST_TORCH = (2, 11)
SAMPLE_EVERY_NS = 1_000_000_000
CLOCK_EVERY_NS = 60_000_000_000
FLUSH_SECONDS = 0.2
"""How long the append sink (network file systems) holds records back at most."""
MAX_WAITING_RECORDS = 256
"""Records kept until the first training step; older ones are forgotten."""
SILENT_STEPS = 20
"""Steps of a job of several ranks after which communication should have been seen."""
MAX_FAULT_CHARACTERS = 500
DRAIN_SECONDS = 2.0
"""How long `close` waits at most for marks the device has not reached."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderConfig:
    """What a recorder does. Change it while it runs with `Recorder.configure`."""

    enabled: bool = True
    """False: nothing is opened or written; every call still works."""
    signals: bool = True
    """Log what backward is called on, the learning rate and the gradient norm."""
    device_events: bool = True
    """Mark phases on the accelerator's stream as well."""
    memory: bool = True
    """Read memory at step ends, as often as it costs a thousandth of the time."""
    gc_pauses: bool = True
    """Record garbage collections over 0.2 ms as detail spans."""
    count_flops: bool = False
    """Count the FLOPs of a model given to `attach`, on fake tensors, at its first forward."""
    communication: bool = True
    """Record every operation of torch.distributed."""
    stack_dumps: bool = True
    """Let `meshscope hang` ask for the Python stacks, by a real-time signal nobody else uses."""
    provenance: bool = True
    """Write git revision, packages, devices and settings into the run."""
    max_detail_bytes: int = MAX_DETAIL_BYTES
    """Limit of one detail table of one rank."""

    @classmethod
    def check_names(cls, settings: Iterable[str]) -> None:
        """UsageError when a name is none of the settings."""
        unknown = set(settings) - set(cls.__dataclass_fields__)
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise UsageError(f"unknown setting {', '.join(sorted(unknown))}; settings: {known}")


class Recorder:
    """Records one process. See the module's docstring for use."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        layout: Layout | None = None,
        config: RecorderConfig | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        attempt: int | None = None,
    ) -> None:
        """`attempt`: which attempt of the job this is, the same number on every rank (see
        `store.attempts.next_attempt`); by default MESHSCOPE_ATTEMPT, else found out by readers."""
        self.config = config or RecorderConfig()
        self.guard = Guard()
        self.clock = clock
        self._given_run_dir = run_dir
        self._attempt = attempt
        self._layout = layout
        self._layout_source = "declared" if layout else ""
        self._stage_layers: dict[str, dict[str, int]] = {}
        self._has_counted_layers = False
        self._lock = threading.RLock()
        self._writer: RankWriter | None = None
        self._last_writer: RankWriter | None = None
        self._open_step: OpenStepWriter | None = None
        self.waits_for_training = False
        self._is_closed = False
        self._is_paused = False
        self._failure = ""
        self.timeline = Timeline(clock)
        self.timeline.on_visit = self._visit
        self._scalars = ScalarLog(self.timeline, clock, self.name_id, self._open_scalars)
        self._log_one = self.guard.protect("scalar", self._scalars.log)
        self._log_signal = self.guard.protect("signal", self._scalars.log_signal)
        self._marking = Marking(
            self.timeline, clock, self._put_device_span, self._scalars.put_from_device
        )
        self._scalars.marking = self._marking
        self._marking.is_wanted = self.config.device_events
        self._steps = StepInference(self.timeline)
        self._step_block = StepBlock(self.begin_step, self._end_step)
        self._actions = Actions(self.timeline, self._steps, self.guard, clock)
        self._automatic: Automatic | None = None
        self._hooks: Hooks | None = None
        self.operations = OperationLog(
            self.timeline, self.guard, clock, self.name_id, self._open_operations, self._journal
        )
        self.operations.is_on = self.config.communication
        self._collectives: CollectiveTap | None = None
        self._stack_dumps: StackDumps | None = None
        self._facts = ModelFacts(self._journal)
        self._gc_pauses = GcPauses(clock, self._wake)
        self._memory_profiles: list[MemoryProfile] = []
        self._memory_soon: AutomaticProfile | None = None
        self._out_of_memory: OutOfMemoryWatch | None = None
        self.monitor = Monitor(self._look_around, clock)
        """Behind `stats`, `analysis` and `report`; its `thresholds` may be replaced."""
        self._host_limit_bytes = MISSING
        self._world_size = 1
        self._windows: TraceWindows | None = None
        self._next_memory_ns = 0
        self._num_calibrations = 0
        self._first_sampled_step: int | None = None
        self._has_said_silent = False
        self._phases: dict[str, Phase] = {}
        self._spans: dict[str, Span] = {}
        self._name_ids: dict[str, int] = {}
        self._next_sample_ns = 0
        self._next_clock_ns = 0
        self._flusher: threading.Thread | None = None
        self._stop = threading.Event()
        self._opening_cost_ns = 0
        self._arm()
        remember(self)

    # --- opening and closing --------------------------------------------------------------

    def _arm(self) -> None:
        """The next record opens the run."""
        if not self.config.enabled or self._is_closed:
            self._go_silent()
            return
        self.timeline.spans = _OpeningSink(self, "spans")
        self.timeline.steps = _OpeningSink(self, "steps")
        self.timeline.actions = _OpeningSink(self, "actions")

    def open(self) -> bool:
        """Opens the files; False (and silence from then on) when that is not possible."""
        with self._lock:
            if self._writer is not None:
                return True
            if self._is_closed or self._failure or not self.config.enabled:
                return False
            opened = self.guard.run("open", self._try_open)
            if opened is None:
                self._failure = self.guard.first_messages.get("open", "unknown")
                self._go_silent()
                logger.error("meshscope records nothing in this process: %s", self._failure)
                return False
            return True

    def _try_open(self) -> bool:
        begin_ns = self.clock()
        identity = resolve_identity(os.environ)
        placement = identity.placement
        self._world_size = placement.world_size
        run_dir = resolve_run_dir(self._given_run_dir, identity)
        unix_ns, mono_ns, uncertainty_ns = _read_clocks(self.clock)
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
            "start_host_mono_ns": mono_ns,
            "start_unix_ns": unix_ns,
            "clock_uncertainty_ns": uncertainty_ns,
            "layout": self._layout.to_dict() if self._layout else None,
            "layout_source": self._layout_source or None,
            "stage_layers": self._stage_layers or None,
        }
        if self.config.provenance:
            # Packages and git are the same for all ranks: one of them writes them down.
            header["provenance"] = self.guard.run(
                "provenance", lambda: collect_provenance(in_full=placement.rank == 0)
            )
        self._writer = self._last_writer = writer = RankWriter(
            run_dir, placement.rank, header=header, max_detail_bytes=self.config.max_detail_bytes
        )
        self.guard.on_first = lambda site, text: writer.journal.write(
            "health", cause="recorder", where=site, count=1, text=text
        )
        writer.table("clocks").put(mono_ns, unix_ns, uncertainty_ns, 0, 0, 0, 0)
        self._next_clock_ns = mono_ns + CLOCK_EVERY_NS
        if writer.is_mapped:
            # Without a place for stamps (a disk that is full already) there is no short cut.
            path = writer.directory / OPEN_STEP_NAME
            self._open_step = self.guard.run("open step", lambda: OpenStepWriter(path, mono_ns))
        else:
            self._start_flusher()
        if self.config.stack_dumps:
            self._offer_stacks(writer)
        self.guard.run("host memory", lambda: self._journal_host_memory(writer))
        self._facts.write_all()
        if self.config.gc_pauses:
            self._gc_pauses.install()
        self._connect()
        self._opening_cost_ns = self.clock() - begin_ns
        return True

    def _offer_stacks(self, writer: RankWriter) -> None:
        try:
            self._stack_dumps = StackDumps(writer.directory / STACKS_NAME)
        except (OSError, ValueError) as error:
            logger.info("meshscope hang will have no stacks of this process: %s", error)
            return
        writer.journal.write("update", stack_signal=self._stack_dumps.signal_number)

    def _journal_host_memory(self, writer: RankWriter) -> None:
        found = read_host_memory()
        self._host_limit_bytes = min(found.values(), default=MISSING)
        if found:
            writer.journal.write("update", host_memory=found)

    def _open_operations(self) -> bool:
        """The first communication: opens the run, and the file of operations under way."""
        with self._lock:
            if not self.open() or self._writer is None:
                return False
            log, writer = self.operations, self._writer
            if log.in_flight is None:
                path = writer.directory / IN_FLIGHT_NAME
                log.in_flight = InFlightWriter(path, self.clock(), mapped=writer.is_mapped)
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
        ranks = tuple(sorted(entry.ranks))
        dist = initialized_distributed()
        world_size = 0 if dist is None else int(dist.get_world_size())
        axis, _ = name_axis(ranks, entry.description, layout=self._layout, world_size=world_size)
        communication().set_group(entry.group_id, entry.name, axis, entry.ranks)

    def _connect_operations(self) -> None:
        log, writer = self.operations, self._writer
        if writer is None or self._is_paused or log.in_flight is None:
            return
        log.collectives = writer.table("collectives")
        log.waits = writer.table("waits")
        log.notes = writer.table("operation_notes")

    def _connect(self) -> None:
        writer = self._writer
        if writer is None or self._is_paused:
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

    def _go_silent(self) -> None:
        log = self.operations
        log.collectives = log.waits = log.notes = NullSink()
        timeline = self.timeline
        timeline.flush_stamps()
        timeline.store_stamps(None)
        timeline.spans = timeline.steps = timeline.phases = timeline.actions = NullSink()

    def _start_flusher(self) -> None:
        self._flusher = threading.Thread(
            target=self._flush_until_stopped, name="meshscope-flush", daemon=True
        )
        self._flusher.start()

    def _flush_until_stopped(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            self.guard.run("flush", self.flush)

    def flush(self) -> None:
        """Hands everything recorded to the operating system (mapped files need no flush)."""
        if self._writer is not None:
            self._writer.flush()
        if self.operations.in_flight is not None:
            self.operations.in_flight.flush()

    def close(self) -> None:
        """Takes all hooks out, completes the files. Recording cannot be resumed afterwards."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.guard.run("close", self._close)

    def _close(self) -> None:
        self._stop.set()
        if self._windows is not None:
            self.guard.run("profiling", self._windows.close)
        for profile in self._memory_profiles:
            self.guard.run("memory profile", profile.close)
        if self._out_of_memory is not None:
            self._out_of_memory.remove()
        self._gc_pauses.remove()
        self.guard.run("gc pauses", self._put_pauses)
        if self._automatic is not None:
            self._automatic.remove()
        deadline_ns = self.clock() + int(DRAIN_SECONDS * 1e9)
        self._marking.drain(deadline_ns)
        listen(None)
        if self._collectives is not None:
            self._collectives.drain(deadline_ns)
            self._collectives.remove()
        self._finish_operations()
        self._go_silent()
        writer, self._writer = self._writer, None
        self._scalars.forget_table()
        forget(self)
        if writer is None:
            return
        self._complete(writer)

    def _finish_operations(self) -> None:
        log = self.operations
        log.finish()
        log.hand_over()
        if log.in_flight is not None:
            log.in_flight.close()
            log.in_flight = None

    def _complete(self, writer: RankWriter) -> None:
        """Completes the files of this attempt."""
        if self._stack_dumps is not None:
            self._stack_dumps.remove()
            self._stack_dumps = None
        tap = self._collectives
        writer.close(
            end_host_mono_ns=self.clock(),
            last_step=self.timeline.last_step,
            num_errors=self.guard.num_errors,
            errors={
                site: {"count": count, "first": self.guard.first_messages[site]}
                for site, count in self.guard.counts.items()
            },
            opening_cost_ns=self._opening_cost_ns,
            num_device_steps_given_up=self._marking.num_given_up,
            num_operations=self.operations.num_entered,
            num_operations_unrecognised=self.operations.num_unrecognised,
            device_clock_uncertainty_ns=tap.device_clock_uncertainty_ns if tap else -1,
        )
        if self._open_step is not None:
            self._open_step.remove()
            self._open_step = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def disarm_after_fork(self) -> None:
        """In a forked child: what is open is the parent's; what is not may still become ours."""
        self._lock = threading.RLock()
        if self._writer is None:
            return
        self.operations.is_on = False
        self._gc_pauses.remove()
        self._windows = None  # what it has started is the parent's
        for profile in self._memory_profiles:
            self.guard.run("memory profile", profile.abandon)
        if self._stack_dumps is not None:
            self._stack_dumps.remove()
            self._stack_dumps = None
        if self.operations.in_flight is not None:
            self.operations.in_flight.disarm()
        if self._collectives is not None:
            self._collectives.remove()
        self._is_closed = True
        self.timeline.disarm()
        self._scalars.forget_table()
        self._open_step = None
        self._writer.disarm()
        self._writer = self._last_writer = None

    # --- state ----------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path | None:
        """The run directory, once the first record has been written."""
        return self._writer.directory.parent.parent if self._writer else None

    @property
    def is_recording(self) -> bool:
        """Whether records reach the run now."""
        return self._writer is not None and not self._is_paused

    @property
    def is_closed(self) -> bool:
        """Whether recording has ended for good."""
        return self._is_closed

    @property
    def current_step(self) -> int:
        """The open step, else the last finished one, else -1."""
        return self.timeline.current_step

    @property
    def failure(self) -> str:
        """Why nothing is recorded; empty when all is well."""
        return self._failure

    def configure(self, **changes: Any) -> None:
        """Changes settings of `RecorderConfig` from now on; an unknown name is a UsageError."""
        RecorderConfig.check_names(changes)
        was_enabled = self.config.enabled
        self.config = replace(self.config, **changes)
        self._marking.is_wanted = self.config.device_events
        self.operations.is_on = self.config.communication
        self.watch_communication()
        if self.config.enabled != was_enabled:
            self.resume() if self.config.enabled else self.pause()
        if not self.config.device_events:
            self._marking.drop()
        if not self.config.gc_pauses:
            self._gc_pauses.remove()
        elif self._writer is not None and not self._is_closed:
            self._gc_pauses.install()
        if self._writer is not None:
            written = {name: repr(value) for name, value in changes.items()}
            self.guard.run("configure", lambda: self._journal("update", config=written))

    def pause(self) -> None:
        """Stops writing; hooks stay, so that `resume` finds everything in step."""
        self._is_paused = True
        self._scalars.forget_table()
        self._go_silent()
        self.guard.run("pause", lambda: self._journal("update", paused_host_mono_ns=self.clock()))

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._is_paused = False
        if self._writer is None:
            self._arm()
        else:
            self._connect()
        self.guard.run("resume", lambda: self._journal("update", resumed_host_mono_ns=self.clock()))

    def reset(self) -> None:
        """Completes the current attempt and starts a new one: numbering and clocks begin again."""
        with self._lock:
            if self._windows is not None:
                self._use_windows(self._windows.settings)
            self._finish_operations()
            self.operations.forget()
            self._go_silent()
            writer, self._writer = self._writer, None
            if writer is not None:
                self.guard.run("reset", lambda: self._complete(writer))
            self.guard.forget()
            self.timeline.reset()
            self._steps.reset()
            if self._hooks is not None:
                self._hooks.reset()
            self._name_ids.clear()
            self._first_sampled_step = None
            self._has_counted_layers = False
            self._last_writer = None
            self.monitor.reset()
            self._scalars.forget_table()
            self._arm()

    def set_layout(self, layout: Layout, source: str = "declared") -> None:
        """Tells the recorder the mesh, if it was not known at the start."""
        self._layout = layout
        self._layout_source = source
        if self.operations.groups is not None:
            for entry in [e for e in self.operations.groups.entries.values() if e.ranks]:
                self._name_group(entry)
        self.guard.run(
            "layout",
            lambda: self._journal("update", layout=layout.to_dict(), layout_source=source),
        )

    def set_stage_layers(self, stages: Mapping[int, int | Mapping[str, int]]) -> None:
        """Tells what each pipeline stage of this rank holds, so that uneven stages are told from
        slow ones: `{2: 4}` is four layers, `{0: {"Block": 4, "embedding": 1}}` names them."""

        def note() -> None:
            self._stage_layers |= check_stage_layers(stages)
            self._journal("update", stage_layers=self._stage_layers)

        self.guard.run("stage layers", note)

    def set_flops(
        self,
        *,
        model_flops_per_step: float,
        hardware_flops_per_step: float | None = None,
        dtype: str | None = None,
        source: str = "declared",
    ) -> None:
        """Says what this rank computes in a step, in FLOPs: what its part of the model needs, and
        with what is computed again. `dtype` is that of most of it; it decides the peak."""
        self.guard.run(
            "flops",
            lambda: self._facts.set_flops(
                model_flops_per_step,
                hardware_flops_per_step,
                per=PER_STEP,
                source=source,
                dtype=dtype,
            ),
        )

    def count_flops(
        self,
        model: Any,
        *inputs: Any,
        loss_of: Callable[[Any], Any] | None = None,
        is_real: bool = False,
        **kwargs: Any,
    ) -> CountedFlops | None:
        """Counts one forward and backward of `model(*inputs, **kwargs)`, a microbatch, and records
        it; None when that was not possible (see `guard`).

        The pass is on fake tensors: no memory, no gradients, no random numbers. `is_real` makes it
        a real one, for models whose course depends on values. `loss_of(output)` is the loss, by
        default `output.loss` or the sum of what comes out.
        """

        def count() -> CountedFlops:
            return self._facts.count(model, inputs, kwargs, loss_of, is_real=is_real)

        return self.guard.run("count flops", lambda: self._unseen(count))

    def _unseen(self, function: Callable[[], T]) -> T:
        """Calls the program's model without recording it: hooks take it for a part of something."""
        hooks, was_on = self._hooks, self.operations.is_on
        self.operations.is_on = False
        if hooks is not None:
            hooks.action_begins(BACKWARD)
        try:
            return function()
        finally:
            self.operations.is_on = was_on
            if hooks is not None:
                hooks.action_ends(BACKWARD)

    def set_peak(self, flops_per_s: float, dtype: str, source: str = "declared") -> None:
        """Says what this rank's device reaches at best in `dtype`, FLOP/s (989e12, not 989)."""
        self.guard.run("peak", lambda: self._facts.set_peak(flops_per_s, dtype, source))

    def measure_peak(self, dtype: Any = None, device: Any = None) -> MeasuredPeak | None:
        """Measures the fastest matrix product for about a third of a second, and records it as the
        peak. Waits for the device: call it before training, while nothing else runs."""
        return self.guard.run("peak", lambda: self._facts.measure_peak(dtype, device))

    def profile_memory(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        steps: int | Collection[int] = 1,
        communication: Iterable[Any] = (),
        estimate: Mapping[str, int] | None = None,
    ) -> MemoryProfile | None:
        """Attributes this rank's memory in some steps; see docs/memory-attribution.md.

        `steps`: how many from now on, or their numbers. `communication`: objects that keep buffers.
        `estimate`: bytes by category, written beside what is found. None if that is not possible.
        """
        return self.guard.run(
            "memory profile",
            lambda: self._profile_memory(
                _as_list(model), _as_list(optimizer), steps, list(communication), estimate or {}
            ),
        )

    def _profile_memory(
        self,
        models: list[Any],
        optimizers: list[Any],
        steps: int | Collection[int],
        communication: list[Any],
        estimate: Mapping[str, int],
    ) -> MemoryProfile | None:
        if not self.open() or self._writer is None or self.run_dir is None:
            return None
        rank, timeline = self._writer.rank, self.timeline
        folder = self._memory_folder() or self.run_dir
        num_before = len(list(folder.glob(f"**/{POINTS_NAME}")))  # nothing is overwritten
        profile = MemoryProfile(
            sys.modules["torch"],
            models,
            optimizers,
            guard=self.guard,
            folder=folder / f"profile{num_before + 1:03d}" if num_before else folder,
            steps=steps,
            communication=communication,
            header={
                "title": f"rank {rank} of {self._world_size}",
                "rank": rank,
                "attempt": self._writer.attempt,
                "layout": self._layout.to_dict() if self._layout else None,
                "unix_ns": time.time_ns(),
                "estimate_bytes": {str(k): int(v) for k, v in estimate.items()},
            },
            find_step=lambda: timeline.step if timeline.current_step >= 0 else MISSING,
            note_step=self._note_memory_step,
        )
        self._memory_profiles.append(profile)
        return profile.open()

    def profile_memory_soon(self) -> None:
        """Profiles the memory of one warm step in which nothing is traced, of whatever models this
        process has by then. With trace windows off, only triggered, or `traces_only`, does
        nothing."""
        windows = self._windows
        if windows is not None and windows.settings.profiles_memory:
            self._memory_soon = AutomaticProfile(
                windows.settings.schedule, self._profile_found, self._note_gap
            )

    def _profile_found(self, models: list[Any], optimizers: list[Any]) -> MemoryProfile | None:
        profile = self.profile_memory(models, optimizers)
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():  # the observer must not be what initialises it
            self.watch_out_of_memory()
        return profile

    def _note_memory_step(self, step: int, begin_ns: int, end_ns: int | None) -> None:
        """Such a step is slower: readers leave it out as they leave out those of a trace window."""
        if self._windows is not None:
            self._windows.note_disturbed(step)
        fields: dict[str, object] = {
            "number": len(self._memory_profiles),
            "reason": "the memory profile",
            "disturbed_from_step": step,
            "first_step": step,
            "last_step": step,
            "begin_host_mono_ns": begin_ns,
        }
        if end_ns is not None:
            fields |= {"disturbed_to_step": step, "end_host_mono_ns": end_ns}
        self._journal("update", memory_window=fields)

    def _memory_folder(self) -> Path | None:
        if self._writer is None or self.run_dir is None:
            return None
        return self.run_dir / "memory" / rank_folder_name(self._writer.rank, self._layout)

    def watch_out_of_memory(self, model: Any = None, optimizer: Any = None) -> bool:
        """From now on, when a CUDA device is full: says in one sentence what filled it, and writes
        attribution and snapshot beside the memory profile. Without a model, those attached count.
        False where there is no such device."""

        def find_training() -> tuple[list[Any], list[Any]]:
            attached = list(self._automatic.models) if self._automatic is not None else []
            return _as_list(model) or attached, _as_list(optimizer)

        def watch() -> bool:
            torch: Any = sys.modules.get("torch")
            if torch is None:
                return False
            if self._out_of_memory is None:
                self._out_of_memory = OutOfMemoryWatch(
                    torch,
                    self.guard,
                    find_folder=self._memory_folder,
                    find_training=find_training,
                    find_profile=lambda: next(
                        (one for one in self._memory_profiles if one.is_open), None
                    ),
                    note=self._note_full_device,
                )
                return self._out_of_memory.install()
            return True

        return bool(self.guard.run("out of memory", watch))

    def _note_full_device(self, text: str, path: Path | None) -> None:
        """What rule ME006 reads."""
        run_dir, step = self.run_dir, self.timeline.current_step
        shown = path.relative_to(run_dir).as_posix() if path is not None and run_dir else None
        self._journal(
            "health", cause="memory", where="device", count=1, text=text, path=shown, step=step
        )

    def _journal(self, kind: str, **fields: object) -> None:
        if self._writer is not None:
            self._writer.journal.write(kind, **fields)

    # --- trace windows --------------------------------------------------------------------

    def profile(self, text: str = "", /, **settings: Any) -> None:
        """Takes traces of torch.profiler over a few steps, from the next step's end on.

        `text` is as in `--trace-windows`, such as `skip=5,active=2,ranks=stages,shapes`; `settings`
        are fields by name (`active=2, ranks="0,3", stack=True`). `profile("off")` ends it. Raises
        UsageError when either makes no sense. See docs/profiling.md.
        """
        wanted = parse_settings(text)
        if wanted is not None and settings:
            wanted = change_settings(wanted, **settings)
        self.guard.run("profiling", lambda: self._use_windows(wanted))

    def profile_now(self, num_steps: int = 1) -> None:
        """A window over the next steps, after one of warm-up; with the settings of `profile`."""
        if self._windows is None:
            self.profile("triggered,ranks=all")
        windows = self._windows
        if windows is not None:
            windows.ask(WindowRequest(reason="the program", num_steps=max(1, int(num_steps))))
            self.timeline.next_visit_ns = 0

    def _use_windows(self, settings: ProfilingSettings | None) -> None:
        before, self._windows, self._scalars.watch = self._windows, None, None
        if before is not None:
            before.close()
        if settings is None or self._is_closed:
            return
        around = WindowSurroundings(
            guard=self.guard,
            clock=self.clock,
            find_place=self._find_place,
            journal=self._journal,
            note=self._note_gap,
        )
        self._windows = TraceWindows(settings, around)
        if settings.anomaly:
            self._scalars.watch = self._note_nonfinite
        self.timeline.next_visit_ns = 0

    def _note_nonfinite(self, name_id: int, value: float) -> None:
        windows = self._windows
        name = next((name for name, known in self._name_ids.items() if known == name_id), "")
        if windows is not None:
            windows.note_number(name, value)

    def _find_place(self) -> Place | None:
        run_dir = self.run_dir if self.open() else None
        if run_dir is None or self._writer is None:
            return None
        return Place(
            run_dir=run_dir,
            rank=self._writer.rank,
            world_size=self._world_size,
            layout=self._layout,
        )

    # --- the monitor ----------------------------------------------------------------------

    def stats(self) -> MonitorStats:
        """Counts, sums and rates of this rank since the last reset; see docs/monitor.md."""
        found = self.guard.run("monitor", self.monitor.stats)
        return self.monitor.empty_stats() if found is None else found

    def analysis(self) -> MonitorAnalysis:
        """Shares of the step, efficiencies and bottlenecks of this rank, over up to 50 steps."""
        found = self.guard.run("monitor", self.monitor.analysis)
        return self.monitor.empty_analysis() if found is None else found

    def report(self) -> str:
        """Both as text, with what to try."""
        found = self.guard.run("monitor", self.monitor.report)
        return "monitor: an error of the recorder's own, see the log" if found is None else found

    def reset_stats(self) -> None:
        """The monitor forgets what was; the recording goes on. (`reset` begins a new attempt.)"""
        self.monitor.reset()

    def _look_around(self) -> Surroundings:
        # What was recorded can be looked at after `close`, too.
        writer, groups = self._writer or self._last_writer, self.operations.groups
        if writer is self._writer and writer is not None:
            writer.flush()
        entries = [] if groups is None else list(groups.entries.values())
        return Surroundings(
            read=lambda name, count: [] if writer is None else _read_newest(writer, name, count),
            layout=self._layout,
            rank=0 if writer is None else writer.rank,
            world_size=self._world_size,
            axes={entry.group_id: self._axis_of(entry) for entry in entries},
            has_communication=self.operations.is_on and self._collectives is not None,
            host_limit_bytes=self._host_limit_bytes,
            tokens_name_id=self._name_ids.get("tokens", 0),
            facts=dict(self._facts.lines),
        )

    def _axis_of(self, entry: GroupEntry) -> str:
        if not entry.ranks:  # timed by the program, which named the axis
            return entry.name.split(":")[1] if entry.name.startswith("timed:") else ""
        ranks = tuple(sorted(entry.ranks))
        world_size = self._world_size
        return name_axis(ranks, entry.description, layout=self._layout, world_size=world_size)[0]

    # --- manual recording -----------------------------------------------------------------

    def name_id(self, name: str) -> int:
        """The id of a name in this run; opens the run when it is the first thing recorded."""
        found = self._name_ids.get(name)
        if found is None:
            with self._lock:
                if (self._is_paused and self._writer is None) or not self.open():
                    return 0
                if self._writer is None:
                    return 0
                found = self._name_ids[name] = self._writer.name_id(name)
        return found

    def phase(self, name: str) -> Phase:
        """A part of a step with a line of its own: a context manager and a decorator."""
        found = self._phases.get(name)
        if found is None:
            found = self._phases[name] = Phase(
                name, self.timeline, self.guard, self.clock, self.name_id
            )
        return found

    def span(self, name: str) -> Span:
        """A named stretch inside a phase, for detail: takes nothing from the phase's time."""
        found = self._spans.get(name)
        if found is None:
            found = self._spans[name] = Span(
                name, self.timeline, self.guard, self.clock, self.name_id
            )
        return found

    def step(self, step: int | None = None) -> StepBlock:
        """Marks a step; from the first use on, steps are no longer inferred."""
        block = self._step_block
        block.number = step
        return block

    def begin_step(self, step: int | None = None) -> None:
        """Begins a step by hand; an open one ends here. `step` sets its number."""
        now_ns = self.clock()
        try:
            self._steps.is_explicit = True
            timeline = self.timeline
            timeline.end_step(now_ns, StepFlag.EXPLICIT)
            if step is not None:
                timeline.step = int(step)
            timeline.begin_step(now_ns)
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self.guard.caught("step begin", error)

    def end_step(self) -> None:
        """Ends the step begun by `begin_step`."""
        self._end_step(is_aborted=False)

    def _end_step(self, is_aborted: bool) -> None:  # noqa: FBT001 - called by the block's exit
        now_ns = self.clock()
        try:
            if is_aborted:
                self.timeline.abort_step(now_ns, StepFlag.EXPLICIT)
            else:
                self.timeline.end_step(now_ns, StepFlag.EXPLICIT)
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self.guard.caught("step end", error)

    @contextlib.contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Labels what is recorded inside with a microbatch index."""
        self.guard.run("microbatch", lambda: self._set_microbatch(index, 0))
        try:
            yield
        finally:
            self.guard.run("microbatch", lambda: self._set_microbatch(index + 1, 1))

    def _set_microbatch(self, index: int, stride: int) -> None:
        self.timeline.microbatch = max(int(index), 0)
        self.timeline.microbatch_stride = stride

    def action(self, kind: str, stage: int, microbatch: int, chunk: int = 0) -> ActionBlock:
        """A pipeline action (F, B, I or W): one microbatch through one stage, as a block.

        Its time is the phase `forward` (F) or `backward`. `stage` counts over the whole model,
        `chunk` over this rank's stages. Enter each block once.
        """
        return self._actions.action(kind, stage, microbatch, chunk)

    def action_wait(self, kind: str, stage: int, microbatch: int) -> WaitBlock:
        """The wait for what an action needs from another rank, just before that action."""
        return self._actions.wait(kind, stage, microbatch)

    def fault(
        self,
        kind: str,
        *,
        step: int | None = None,
        begin_host_mono_ns: int | None = None,
        end_host_mono_ns: int | None = None,
        detail: str = "",
    ) -> None:
        """Writes down a fault that was injected on this rank: the truth a diagnosis is to find.

        By default it begins now, in the open step, and has no end. Of one that ends, or that the
        process may not survive, write it first without an end; the same kind and begin with an end
        replaces that.
        """
        begin_ns = self.clock() if begin_host_mono_ns is None else begin_host_mono_ns
        self.guard.run(
            "fault", lambda: self._put_fault(kind, step, begin_ns, end_host_mono_ns, detail)
        )

    def _put_fault(
        self, kind: str, step: int | None, begin_ns: int, end_ns: int | None, detail: str
    ) -> None:
        if self._is_paused or not self.open() or self._writer is None:
            return
        kind_id = self.name_id(str(kind)[:MAX_FAULT_CHARACTERS])
        detail_id = self.name_id(str(detail)[:MAX_FAULT_CHARACTERS]) if detail else 0
        self._writer.table("faults").put(
            kind_id | detail_id << 16,
            self.timeline.current_step if step is None else int(step),
            int(begin_ns),
            MISSING if end_ns is None else int(end_ns),
            0,
            0,
            0,
        )

    def data(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterates over `loader`, timing each fetch as the phase "data"."""
        iterator = iter(loader)
        while True:
            token = self._fetch_begins()
            try:
                item = next(iterator)
            except StopIteration:
                self._steps.batch_fetch_was_empty()
                return
            finally:
                if token:
                    self.guard.run("data end", self._fetch_ends)
            yield item

    def _fetch_begins(self) -> bool:
        def begin() -> bool:
            now_ns = self.clock()
            if not self._steps.is_explicit:
                self._steps.batch_fetch_begins(now_ns)
            self.timeline.enter(self.timeline.stack_here(), DATA, now_ns)
            return True

        return bool(self.guard.run("data begin", begin))

    def _fetch_ends(self) -> None:
        self.timeline.leave(self.timeline.stack_here(), DATA, self.clock())

    def log(self, **scalars: Any) -> None:
        """Records numbers under their names, for the open step or the last one.

        Anything `float()` takes; a one-element tensor on a device travels to the host without
        being waited for. What is not a number is counted as an error, not raised.
        """
        for name, value in scalars.items():
            self._log_one(name, value)

    def _open_scalars(self) -> TableWriter | None:
        writer = self._writer
        return None if writer is None or self._is_paused else writer.table("scalars")

    # --- automatic recording --------------------------------------------------------------

    def attach(self, model: Any = None, optimizer: Any = None) -> "Recorder":
        """Times a model (or several) and its optimizer (or several) through torch's hooks."""
        self.guard.run("attach", lambda: self._attach(_as_list(model), _as_list(optimizer)))
        return self

    def _attach(self, models: list[Any], optimizers: list[Any]) -> bool:
        automatic = self._make_automatic()
        if automatic is None:
            return False
        automatic.install_taps()
        for model in models:
            automatic.attach_model(model)
            if self.config.count_flops:
                automatic.call_at_first_forward(model, self._count_first)
        for optimizer in optimizers:
            automatic.attach_optimizer(optimizer)
        return True

    def _count_first(self, model: Any, args: Any, kwargs: Any) -> None:
        self._unseen(lambda: self._facts.count(model, args, kwargs, None, is_real=False))

    def watch_everything(self) -> None:
        """Attaches to whatever trains in this process (what `meshscope run` does)."""
        self.waits_for_training = True

        def watch() -> bool:
            automatic = self._make_automatic()
            if automatic is not None:
                automatic.watch_everything()
            return True

        self.guard.run("attach", watch)

    def watch_communication(self) -> None:
        """Records every operation of torch.distributed from now on; `start` and `attach` do it."""
        if self._collectives is None and self.config.enabled and self.config.communication:
            self.guard.run("communication", self._watch_communication)

    def _watch_communication(self) -> bool:
        listen(self.guard.protect("timed operation", self.operations.put_timed))
        torch: Any = sys.modules.get("torch")
        if torch is None or "torch.distributed" not in sys.modules:
            return False
        if torch_version(torch) < OLDEST_TORCH:
            self._note_gap(
                "communication",
                f"torch {torch.__version__} is older than 2.11: communication is not watched; "
                "blocks timed with meshscope.communication() still work",
            )
            return False
        tap = CollectiveTap(torch, self.operations, self.guard, self.clock, self._journal)
        try:
            tap.install()
        except CaptureError as error:
            self._note_gap("communication", f"communication is not recorded: {error}")
            return False
        self._collectives = tap
        return True

    def calibrate_clocks(self) -> ClockOffset | None:
        """Measures this host's clock against rank 0's, through the store of torch.distributed.

        All ranks must call it, at the same point. Not needed on one host, nor where ranks share
        collectives: their common ends align the clocks of a recording.
        """
        return self.guard.run("clock calibration", self._calibrate_clocks)

    def _calibrate_clocks(self) -> ClockOffset | None:
        dist = initialized_distributed()
        if dist is None:
            raise CaptureError("torch.distributed is not initialised: there is no store to use")
        self.open()
        store = dist.distributed_c10d._get_default_store()
        prefix = f"meshscope/clock/{self._num_calibrations}"
        self._num_calibrations += 1
        found = measure_offset(store, dist.get_rank(), dist.get_world_size(), self.clock, prefix)
        self._journal("update", clock_calibration=asdict(found))
        return found

    def _make_automatic(self) -> Automatic | None:
        self.watch_communication()
        if self._automatic is not None:
            return self._automatic
        torch: Any = sys.modules.get("torch")
        if torch is None:
            raise CaptureError("attach needs torch, and this program has not imported it")
        version = torch_version(torch)
        if version < OLDEST_TORCH:
            raise CaptureError(
                f"torch {torch.__version__} is older than 2.11: models and optimizers are not "
                "watched; step, phase, data and log still work"
            )
        self._hooks = Hooks(
            torch, self.timeline, self._steps, self.guard, self.clock, self._take_signal
        )
        self._actions.hooks = self._hooks
        self._automatic = Automatic(
            torch, self._hooks, self._steps, self.guard, note=self._note_gap
        )
        return self._automatic

    def _take_signal(self, name: str, value: Any) -> None:
        """A training signal the hooks came across."""
        if self.config.signals:
            self._log_signal(name, value)

    def _note_gap(self, where: str, text: str) -> None:
        logger.warning("meshscope: %s", text)
        self.guard.first_messages.setdefault(where, text)
        self.guard.run("note", lambda: self._journal("health", cause="gap", where=where, text=text))

    # --- after each step ------------------------------------------------------------------

    def _visit(self, step: int, end_ns: int) -> None:
        """At the end of a step: of every one once a device is in use, else as often as memory is
        read, and once a second."""
        marking = self._marking
        if marking.device is not None:
            try:
                marking.end_step(step, end_ns)
            except RuntimeError as error:  # a device error: training will meet it, and report it
                marking.drop()
                self.guard.caught("device events", error)
        if end_ns >= self._next_memory_ns:
            self.guard.run("memory", lambda: self._sample_memory(step, end_ns))
            self.guard.run("gc pauses", self._put_pauses)
        if end_ns >= self._next_sample_ns:
            self._next_sample_ns = end_ns + SAMPLE_EVERY_NS
            if self._collectives is not None:
                self.guard.run("device operations", self._collectives.visit)
            self.guard.run("sample", lambda: self._sample(step, end_ns))
        next_ns = min(self._next_sample_ns, self._next_memory_ns)
        windows = self._windows
        if windows is not None and (not self._is_paused or windows.is_profiling):
            # Last: what is traced begins and ends here.
            start_ns = self.timeline.step_start_ns
            self.guard.run("profiling", lambda: windows.visit(step, start_ns, end_ns))
            next_ns = 0 if windows.wants_every_step else next_ns
            next_ns = 0 if self._visit_memory(windows) else next_ns
        self.timeline.next_visit_ns = next_ns if marking.device is None else 0

    def _visit_memory(self, windows: TraceWindows) -> bool:
        """Whether a memory profile is still to come."""
        soon, torch = self._memory_soon, sys.modules.get("torch")
        if soon is None or not soon.is_waiting or torch is None:
            return False
        self.guard.run("memory profile", lambda: soon.visit(torch, is_tracing=windows.is_profiling))
        return soon.is_waiting

    def _wake(self) -> None:
        """There is something to write: look at the end of this step. Takes no lock."""
        self._next_memory_ns = self.timeline.next_visit_ns = 0

    def _sample_memory(self, step: int, end_ns: int) -> None:
        """Memory, and when to read it next: a reading may cost a thousandth of the time."""
        writer = self._writer
        if writer is None:  # the first step's own record opens the run
            return
        self._next_memory_ns = end_ns + SAMPLE_EVERY_NS
        if self._is_paused or not self.config.memory:
            return
        table = writer.table("memory")  # making its file is no part of a reading's cost
        begin_ns = self.clock()
        sample = sample_memory(sys.modules.get("torch"))
        table.put(step, end_ns, *sample.memory)
        if sample.allocator is not None:
            writer.table("allocator").put(step, end_ns, *sample.allocator)
        self._next_memory_ns = end_ns + pause_after(self.clock() - begin_ns)

    def _put_pauses(self) -> None:
        """Writes the collector's pauses since the last time as detail spans."""
        for generation, begin_ns, end_ns, ident in self._gc_pauses.take():
            if self._writer is not None and not self._is_paused:
                name_id = self.name_id(pause_name(generation))
                self.timeline.put_pause(name_id, begin_ns, end_ns, ident)

    def _sample(self, step: int, end_ns: int) -> None:
        """Once a second: the wall clock, and whether an accelerator has appeared."""
        writer = self._writer
        if writer is None or self._is_paused:
            return
        self._marking.find()
        if self._layout is None:
            self._learn_layout()
        if not self._has_counted_layers:
            self._count_layers()
        if self._first_sampled_step is None:
            self._first_sampled_step = step
        num_steps = step - self._first_sampled_step + 1  # a resumed job does not begin at 0
        if num_steps > SILENT_STEPS and self._collectives is not None:
            self._check_communication(num_steps)
        if end_ns >= self._next_clock_ns:
            self._next_clock_ns = end_ns + CLOCK_EVERY_NS
            unix_ns, mono_ns, uncertainty_ns = _read_clocks(self.clock)
            writer.table("clocks").put(mono_ns, unix_ns, uncertainty_ns, 0, 0, 0, 0)

    def _put_device_span(self, *words: int) -> None:
        if self._writer is not None and not self._is_paused:
            self._writer.table("device_spans").put(*words)

    def _check_communication(self, num_steps: int) -> None:
        """Many ranks, many steps and not one operation: something goes by unseen. Said once."""
        dist = initialized_distributed()
        is_silent = not self.operations.num_entered and self.operations.is_on
        if dist is not None and is_silent and not self._has_said_silent:
            self._has_said_silent = True
            if int(dist.get_world_size()) > 1:
                self._note_gap(
                    "communication",
                    f"{num_steps} steps on {dist.get_world_size()} ranks, and no communication "
                    "was seen: either these ranks do not communicate through torch.distributed, "
                    "or it is not recorded",
                )

    def _learn_layout(self) -> None:
        """A DistributedDataParallel model over all ranks: the mesh is dp and nothing else."""
        dist = initialized_distributed()
        automatic = self._automatic
        if dist is None or automatic is None:
            return
        world_size = int(dist.get_world_size())
        for model in automatic.models:
            group = getattr(model, "process_group", None)
            if type(model).__name__ != "DistributedDataParallel" or group is None:
                continue
            if group.size() == world_size:
                self.set_layout(
                    Layout(dp=world_size), "a DistributedDataParallel model spans all ranks"
                )
                return

    def _count_layers(self) -> None:
        """Once: the repeated parts of the models watched; of one stage, if there is a pipeline."""
        models = list(self._automatic.models) if self._automatic is not None else []
        if not models or self._stage_layers:
            return
        self._has_counted_layers = True
        counted = [parts for parts in map(count_layers, models) if parts]
        if counted:
            self._journal("update", model_layers=counted)


class _OpeningSink:
    """Stands where a table will be until the run is open, which its records bring about.

    A recorder that the program asked for opens at its first record. One that `meshscope run`
    slipped in waits for the first training step: a helper process that only loads data or
    evaluates is not a rank, and a rank may not know its number before its first step.
    """

    def __init__(self, recorder: Recorder, table: str) -> None:
        self._recorder = recorder
        self._table = table
        self._waiting: deque[tuple[int, ...]] = deque(maxlen=MAX_WAITING_RECORDS)

    def put(self, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None:
        """Keeps the record until the run can be opened, then writes all."""
        self._waiting.append((a, b, c, d, e, f, g))
        recorder = self._recorder
        if recorder.waits_for_training and not recorder.timeline.step_start_ns:
            return
        if recorder.open():
            table = getattr(recorder.timeline, self._table)
            while self._waiting:
                table.put(*self._waiting.popleft())


class _FirstUseSink:
    """Stands where a table will be that is made only when something is put into it."""

    def __init__(self, recorder: Recorder, table: str) -> None:
        self._recorder = recorder
        self._table = table

    def put(self, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None:
        """Makes the table, takes its own place away, and writes."""
        writer = self._recorder._writer
        if writer is not None:
            table = writer.table(self._table)
            setattr(self._recorder.timeline, self._table, table)
            table.put(a, b, c, d, e, f, g)


def _read_newest(writer: RankWriter, table: str, count: int) -> list[Record]:
    """The newest records this process has put into a table; none while there is no such table."""
    try:
        return read_last_records(writer.directory / f"{table}{TABLE_SUFFIX}", count)
    except OSError:
        return []


def torch_version(torch: Any) -> tuple[int, int]:
    """Major and minor version."""
    major, minor, *_ = str(torch.__version__).split(".")
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _read_clocks(clock: Callable[[], int]) -> tuple[int, int, int]:
    """Wall clock, monotonic clock at the same moment, and how far apart they may be read."""
    before_ns = clock()
    unix_ns = time.time_ns()
    after_ns = clock()
    return unix_ns, (before_ns + after_ns) // 2, (after_ns - before_ns + 1) // 2


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
