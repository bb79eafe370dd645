"""What the recorder looks at between steps: memory, clocks, collections, and what has turned up.

`Timeline.end_step` calls `visit`: at every step once a device is in use or a profile is due, else
as often as memory is read, and once a second.
"""

import sys
from typing import Any

from meshscope.capture.hardware.core_queue import CoreQueue
from meshscope.capture.hardware.hardware_sampling import HardwareSampling
from meshscope.capture.identity import initialized_distributed
from meshscope.capture.memory.device_memory import (
    COST_PER_WALL,
    DeviceCapacity,
    pause_after,
    read_capacity,
    sample_memory,
)
from meshscope.capture.memory.gc_pauses import GcPauses, pause_name
from meshscope.capture.model.layer_counts import count_layers
from meshscope.capture.profiles import Profiles
from meshscope.capture.session import CLOCKS_EVERY_NS, Session, read_clocks
from meshscope.capture.stacks.gap_watch import GapWatch
from meshscope.capture.steps.marking import Marking
from meshscope.capture.watching import Watching
from meshscope.store.schema import MISSING

_SAMPLE_EVERY_NS = 1_000_000_000
SILENT_STEPS = 20
"""Steps of a job of several ranks after which communication should have been seen."""


class Sampling:
    """Visits one rank at the end of its steps."""

    def __init__(
        self, session: Session, marking: Marking, watching: Watching, profiles: Profiles
    ) -> None:
        self._session = session
        self._guard = session.guard
        self._timeline = session.timeline
        self._marking = marking
        self._watching = watching
        self._profiles = profiles
        self._gaps = GapWatch(session.timeline, session.stack_sampler)
        self.gc_pauses = GcPauses(session.clock, self._wake)
        self.hardware = HardwareSampling(session)
        self._core_queue = CoreQueue(session.journal)
        self._next_sample_ns = 0
        self._next_memory_ns = 0
        self._last_memory_cost_ns = 0
        self._next_capacity_ns = 0
        self._device_limit_bytes = MISSING
        self._first_sampled_step: int | None = None
        self._has_counted_layers = False
        self._has_noted_seed = False
        self._has_said_silent = False
        watching.compilations.on_end = self._wake
        session.timeline.on_visit = self.visit
        marking.on_probe = self._note_probe

    def begin_attempt(self) -> None:
        self._first_sampled_step = None
        self._has_counted_layers = False
        self._has_noted_seed = False
        self._gaps.begin_attempt()
        self._core_queue.begin_attempt()
        self._next_capacity_ns = 0
        self._device_limit_bytes = MISSING

    def follow_config(self) -> None:
        """Begins or ends with pauses of the garbage collector, ends with readings of hardware, as
        the settings say."""
        session = self._session
        self.hardware.follow_config()
        if not session.config.gc_pauses:
            self.gc_pauses.remove()
        elif session.writer is not None and not session.is_closed:
            self.gc_pauses.install()

    def warm_up(self) -> None:
        """Reads once what steps read, ahead of them: what is cold takes several times as long."""
        torch, clock = sys.modules.get("torch"), self._session.clock
        for _ in range(2):
            start_ns = clock()
            sample_memory(torch, DeviceCapacity())
            self._last_memory_cost_ns = clock() - start_ns
        if self._watching.collectives is not None:
            self._watching.collectives.visit()

    def close(self) -> None:
        self._guard.run("layout", self.learn_layout)  # a short run had one look
        if not self._has_counted_layers:
            self._guard.run("layers", self._count_layers)
        self._guard.run("core queue", self._core_queue.write)
        self.gc_pauses.remove()
        self._guard.run("hardware", self.hardware.stop)
        self._guard.run("gc pauses", self.put_pauses)
        self._guard.run("compilations", self._watching.compilations.settle)

    def disarm_after_fork(self) -> None:
        self.gc_pauses.remove()
        self.hardware.disarm_after_fork()

    def visit(self, step: int, end_ns: int) -> None:
        """Called at the end of a step. Takes what is due, and sets when to call again."""
        marking, run = self._marking, self._guard.run
        if marking.device is not None:
            try:
                marking.end_step(step, end_ns)
            except RuntimeError as error:  # a device error: training will meet it, and report it
                marking.drop()
                self._guard.caught("device events", error)
        if end_ns >= self._next_memory_ns:
            run("memory", self._sample_memory, step, end_ns)
            run("gc pauses", self.put_pauses)
            run("compilations", self._watching.compilations.settle)
        if end_ns >= self._next_sample_ns:
            self._next_sample_ns = end_ns + _SAMPLE_EVERY_NS
            if self._watching.collectives is not None:
                run("device operations", self._watching.collectives.visit)
            run("sample", self._sample, step, end_ns)
        if marking.device is not None and marking.device.device_type == "cuda":
            self._profiles.visit_samples(step, end_ns)
            if self._watching.collectives is not None:
                is_wanted = self._profiles.samples.needs_operations
                run("operation stride", self._choose_operations, step, end_ns, is_wanted)
        next_ns = min(
            self._next_sample_ns, self._next_memory_ns, self._profiles.visit_flops(step, end_ns)
        )
        if self._session.config.stack_samples and run("gaps", self._gaps.visit, step, end_ns):
            next_ns = 0
        if self._profiles.windows is not None:
            # Last: what is traced begins and ends here.
            next_ns = 0 if self._profiles.visit(step, end_ns) else next_ns
        self._timeline.next_visit_ns = next_ns if marking.device is None else 0

    def _choose_operations(self, step: int, end_ns: int, is_wanted: bool) -> None:  # noqa: FBT001
        start_ns, collectives = self._timeline.step_start_ns, self._watching.collectives
        if collectives is not None:
            collectives.end_step(step, start_ns, end_ns, is_wanted=is_wanted)

    def _note_probe(self, event: Any, issued_ns: int) -> None:
        if self._watching.collectives is not None:
            self._watching.collectives.note_probe(event, issued_ns)

    def _wake(self) -> None:
        """Asks for a visit at the end of this step. Takes no lock."""
        self._next_memory_ns = self._timeline.next_visit_ns = 0

    def _sample_memory(self, step: int, end_ns: int) -> None:
        """Memory, and when to read it next: a reading may cost a thousandth of the time.

        Its cost is the lower of its own and the last one's: the first one, which is cold, and one
        that the system interrupted do not keep the next ones away.
        """
        session = self._session
        writer = session.writer
        if writer is None:  # the first step's own record opens the run
            return
        self._next_memory_ns = end_ns + _SAMPLE_EVERY_NS
        if session.is_paused or not session.config.memory:
            return
        torch = sys.modules.get("torch")
        table = writer.table("memory")  # making its file is no part of a reading's cost
        capacity = self._read_capacity(torch, end_ns)
        start_ns = session.clock()
        sample = sample_memory(torch, capacity)
        table.put(step, end_ns, *sample.memory)
        if sample.allocator is not None:
            writer.table("allocator").put(step, end_ns, *sample.allocator)
        cost_ns = session.clock() - start_ns
        self._next_memory_ns = end_ns + pause_after(min(cost_ns, self._last_memory_cost_ns))
        self._last_memory_cost_ns = cost_ns

    def _read_capacity(self, torch: Any | None, end_ns: int) -> DeviceCapacity:
        """The device's memory, once a second, or less often where a thousandth asks for it."""
        if end_ns < self._next_capacity_ns:
            return DeviceCapacity()
        start_ns = self._session.clock()
        capacity = read_capacity(torch)
        cost_ns = self._session.clock() - start_ns
        self._next_capacity_ns = end_ns + max(_SAMPLE_EVERY_NS, COST_PER_WALL * cost_ns)
        if capacity.limit_bytes != self._device_limit_bytes:
            self._device_limit_bytes = capacity.limit_bytes
            self._session.journal("update", device_memory={"limit_bytes": capacity.limit_bytes})
        return capacity

    def put_pauses(self) -> None:
        """Writes the collector's pauses since the last time as detail spans."""
        session = self._session
        for generation, start_ns, end_ns, ident in self.gc_pauses.take():
            if session.writer is not None and not session.is_paused:
                name_id = session.name_id(pause_name(generation))
                self._timeline.put_pause(name_id, start_ns, end_ns, ident)

    def _sample(self, step: int, end_ns: int) -> None:
        """Once a second: the wall clock, and whether an accelerator has appeared."""
        session = self._session
        writer = session.writer
        if writer is None or session.is_paused:
            return
        self._marking.find()
        self._guard.run("files", session.check_files)
        self._guard.run("hardware", self.hardware.visit)
        self._guard.run("core queue", self._core_queue.visit, end_ns)
        self._watching.find_phases()
        self._guard.run("layout", self.learn_layout)
        if not self._has_noted_seed:
            self._note_seed()
        if self._first_sampled_step is None:
            self._first_sampled_step = step
        elif not self._has_counted_layers:  # not at the first look, which is in the first step
            self._count_layers()
        num_steps = step - self._first_sampled_step + 1  # a resumed job does not begin at 0
        if num_steps > SILENT_STEPS and self._watching.collectives is not None:
            self._check_communication(num_steps)
        if end_ns >= session.next_clocks_ns:
            session.next_clocks_ns = end_ns + CLOCKS_EVERY_NS
            unix_ns, mono_ns, uncertainty_ns = read_clocks(session.clock)
            writer.table("clocks").put(mono_ns, unix_ns, uncertainty_ns, 0, 0, 0, 0)

    def _check_communication(self, num_steps: int) -> None:
        """Notes once that many ranks and steps had no operation: some are not seen."""
        dist, operations = initialized_distributed(), self._session.operations
        is_silent = not operations.num_entered and operations.is_on
        if dist is not None and is_silent and not self._has_said_silent:
            self._has_said_silent = True
            if int(dist.get_world_size()) > 1:
                self._session.note_gap(
                    "communication",
                    f"{num_steps} steps on {dist.get_world_size()} ranks, and no communication "
                    "was seen: either these ranks do not communicate through torch.distributed, "
                    "or it is not recorded",
                )

    def learn_layout(self) -> None:
        """Looks for the mesh in what the program made, unless it is known."""
        session, watching = self._session, self._watching
        if session.layout is None:
            found = watching.layout_search.visit(
                initialized_distributed(), watching.models, session.operations
            )
            if found is not None:
                session.set_layout(found.layout, found.source)

    def _note_seed(self) -> None:
        """Once, in a step: a run that communication opened may be older than the program's seed."""
        self._has_noted_seed = True
        torch: Any = sys.modules.get("torch")
        if torch is not None and self._session.config.provenance:
            self._session.journal("update", initial_seed=int(torch.initial_seed()))

    def _count_layers(self) -> None:
        """Once: the repeated parts of the models watched; of one stage, if there is a pipeline."""
        models = self._watching.models
        if not models or self._session.stage_layers:
            return
        self._has_counted_layers = True
        counted = [parts for parts in map(count_layers, models) if parts]
        if counted:
            self._session.journal("update", model_layers=counted)
