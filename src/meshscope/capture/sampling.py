"""What the recorder looks at between steps: memory, clocks, collections, and what has turned up.

`Timeline.end_step` calls `visit`: at every step once a device is in use or a profile is due, else
as often as memory is read, and once a second.
"""

import sys
from collections import deque
from collections.abc import Callable
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
from meshscope.capture.model.layer_counts import count_layers, count_parameter_bytes
from meshscope.capture.model.replicas import describe_replicas
from meshscope.capture.profiles import Profiles
from meshscope.capture.session import CLOCKS_EVERY_NS, Session, read_clocks
from meshscope.capture.stacks.gap_watch import GapWatch
from meshscope.capture.steps.marking import Marking
from meshscope.capture.watching import Watching
from meshscope.store.schema import MISSING

_SAMPLE_EVERY_NS = 1_000_000_000
_LEAST_PARTS_NS = 50_000
_PARTS_SHARE = 1000
"""Of what is looked at once a second so much is done at the end of one step: until it has taken
50 µs or a thousandth of the step, and the rest at the end of the next ones."""
_EARLY = frozenset((2, 4, 8, 16))
_LAST_EARLY = max(_EARLY)
_MAX_REPLICA_LOOKS = 3
"""Most programs have no wrapper to tell of: nobody looks on for one until the end."""
SILENT_STEPS = 20
"""Steps of a job of several ranks after which communication should have been seen."""

_Part = Callable[[int, int], object]
"""Given a step and its end."""


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
        self._parts = self._list_parts()
        self._due: deque[tuple[str, _Part]] = deque()
        """What is still to be done of the last look."""
        self._has_looked = False
        """The first step, which opened the files, is spared all but devices."""
        self._num_early = 0
        """Steps in which the layout was not known yet, at most `_LAST_EARLY`."""
        self._next_memory_ns = 0
        self._last_memory_cost_ns = 0
        self._num_readings = 0
        """Of memory, in this attempt."""
        self._next_capacity_ns = 0
        self._device_limit_bytes = MISSING
        self._first_sampled_step: int | None = None
        self._has_counted_layers = False
        self._has_told_replicas = False
        self._num_replica_looks = 0
        self._has_noted_seed = False
        self._has_said_silent = False
        watching.compilations.on_end = self._wake
        session.timeline.on_visit = self.visit
        marking.on_probe = self._note_probe

    def begin_attempt(self) -> None:
        self._first_sampled_step = None
        self._num_readings = 0
        self._has_counted_layers = False
        self._has_told_replicas = False
        self._num_replica_looks = 0
        self._has_noted_seed = False
        self._has_looked = False
        self._num_early = 0
        self._due.clear()
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
        self._profiles.flops.warm_up()
        if self._session.config.stack_samples:
            self._session.stack_sampler.reserve.fill()

    def close(self) -> None:
        if self._session.writer is not None:
            self._guard.run("seed", self._note_seed)
        self._guard.run("layout", self.learn_layout)  # a short run had one look
        if not self._has_counted_layers:
            self._guard.run("layers", self._count_layers)
        self._guard.run("replicas", self._tell_replicas)
        self._guard.run("core queue", self._core_queue.close, self._session.clock())
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
        is_sparse = False
        if marking.device is not None:
            try:
                marking.end_step(end_ns)
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
            if not self._due:
                self._due.extend(self._parts)
        if self._due:
            run("sample", self._take_due, step, end_ns)
        is_early = bool(run("layout", self._look_early))
        if marking.device is not None and marking.device.device_type == "cuda":
            self._profiles.visit_samples(step, end_ns)
        collectives = self._watching.collectives
        if collectives is not None and collectives.uses_device:
            is_wanted = self._profiles.samples.needs_operations
            is_sparse = bool(
                run("operation stride", self._choose_operations, step, end_ns, is_wanted)
            )
        stride = 1 if collectives is None else collectives.operation_stride
        marking.choose(step, end_ns, is_wanted=is_sparse, operation_stride=stride)
        next_ns = min(
            self._next_sample_ns, self._next_memory_ns, self._profiles.visit_flops(step, end_ns)
        )
        if self._session.config.stack_samples and run("gaps", self._gaps.visit, step, end_ns):
            next_ns = 0
        if self._profiles.windows is not None:
            # Last: what is traced begins and ends here.
            next_ns = 0 if self._profiles.visit(step, end_ns) else next_ns
        is_every_step = marking.device is not None or (
            collectives is not None and collectives.uses_device
        )
        is_soon = is_every_step or is_early or self._due
        self._timeline.next_visit_ns = 0 if is_soon else next_ns

    def _choose_operations(self, step: int, end_ns: int, is_wanted: bool) -> bool:  # noqa: FBT001
        """Whether the next step's operations are recorded, unlike those of others."""
        start_ns, collectives = self._timeline.step_start_ns, self._watching.collectives
        if collectives is None:
            return False
        return collectives.end_step(step, start_ns, end_ns, is_wanted=is_wanted)

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
        self._num_readings += 1
        cost_ns, self._last_memory_cost_ns = min(cost_ns, self._last_memory_cost_ns), cost_ns
        self._next_memory_ns = end_ns + pause_after(cost_ns, self._num_readings)

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

    def _list_parts(self) -> list[tuple[str, _Part]]:
        """What is looked at once a second, what devices need first."""
        session, watching = self._session, self._watching
        return [
            ("hardware", lambda _step, _end_ns: self._look_at_devices()),
            ("phases", lambda _step, _end_ns: watching.find_phases()),
            ("layout", lambda _step, _end_ns: self.learn_layout()),
            ("files", lambda _step, _end_ns: session.check_files()),
            ("core queue", lambda _step, end_ns: self._core_queue.visit(end_ns)),
            ("seed", lambda _step, _end_ns: self._note_seed()),
            ("clocks", lambda _step, end_ns: self._read_clocks(end_ns)),
            ("layers", self._look_at_models),
        ]

    def _look_at_devices(self) -> None:
        """Whether an accelerator has appeared."""
        self._marking.find()
        self.hardware.visit()

    def _take_due(self, step: int, end_ns: int) -> None:
        """Some of what is due, by what it takes; a recorder that is closed waits for nothing."""
        session = self._session
        if session.writer is None or session.is_paused:
            self._due.clear()
            return
        length_ns = end_ns - self._timeline.step_start_ns
        allowed_ns = max(_LEAST_PARTS_NS, length_ns // _PARTS_SHARE)
        is_first, self._has_looked = not self._has_looked, True
        until_ns = session.clock() + (0 if is_first else allowed_ns)
        while self._due:
            site, part = self._due.popleft()
            self._guard.run(site, part, step, end_ns)
            if session.clock() >= until_ns:
                break

    def _look_at_models(self, step: int, end_ns: int) -> None:
        """Layers and replicas once, not at the first look, and whether ranks talk."""
        if self._first_sampled_step is None:
            self._first_sampled_step = step
            return
        if not self._has_counted_layers:
            self._count_layers()
        if self._num_replica_looks < _MAX_REPLICA_LOOKS:
            self._num_replica_looks += 1
            self._guard.run("replicas", self._tell_replicas)
        num_steps = step - self._first_sampled_step + 1  # a resumed job does not begin at 0
        if num_steps > SILENT_STEPS and self._watching.collectives is not None:
            self._check_communication(num_steps)

    def _read_clocks(self, end_ns: int) -> None:
        session = self._session
        if end_ns >= session.next_clocks_ns:
            session.next_clocks_ns = end_ns + CLOCKS_EVERY_NS
            unix_ns, mono_ns, uncertainty_ns = read_clocks(session.clock)
            session.put("clocks", mono_ns, unix_ns, uncertainty_ns, 0, 0, 0, 0)
            session.watch_size()

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

    def _look_early(self) -> bool:
        """Looks for the layout after 2, 4, 8 and 16 steps too: a short run may have taken its
        groups down before the next second, and when it closes. Whether it is to be called again."""
        if self._session.layout is not None or self._num_early >= _LAST_EARLY:
            return False
        if initialized_distributed() is None:
            return False
        self._num_early += 1
        if self._num_early in _EARLY:
            self.learn_layout()
        return self._session.layout is None and self._num_early < _LAST_EARLY

    def _note_seed(self) -> None:
        """Once, in a step: a run that communication opened may be older than the program's seed."""
        if self._has_noted_seed:
            return
        self._has_noted_seed = True
        torch: Any = sys.modules.get("torch")
        if torch is not None and self._session.config.provenance:
            self._session.journal("update", initial_seed=int(torch.initial_seed()))

    def _count_layers(self) -> None:
        """Once: trained bytes and repeated parts of the models watched, which are one stage's if
        there is a pipeline."""
        models = self._watching.models
        if not models:
            return
        self._has_counted_layers = True
        self._session.journal("update", parameter_bytes=count_parameter_bytes(models))
        told = self._session.stage_layers
        counted = [] if told else [parts for parts in map(count_layers, models) if parts]
        if counted:
            self._session.journal("update", model_layers=counted)

    def _tell_replicas(self) -> None:
        """Once: what wrappers of data parallelism say of parameters and buckets."""
        if self._has_told_replicas:
            return
        found = describe_replicas(self._watching.models)
        if found:
            self._has_told_replicas = True
            self._session.journal("update", replicas=found)
