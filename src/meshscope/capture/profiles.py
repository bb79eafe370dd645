"""What the recorder takes on request: trace windows of torch.profiler, and profiles of memory."""

import sys
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from meshscope.capture.memory.memory_profile import MemoryProfile
from meshscope.capture.memory.out_of_memory import OutOfMemoryWatch
from meshscope.capture.model.model_facts import ModelFacts
from meshscope.capture.profiling.automatic_profile import AutomaticProfile
from meshscope.capture.profiling.flop_counts import FlopCounts
from meshscope.capture.profiling.kernel_samples import KernelSamples
from meshscope.capture.profiling.settings import (
    ProfilingSettings,
    change_settings,
    parse_settings,
)
from meshscope.capture.profiling.trace_windows import TraceWindows
from meshscope.capture.profiling.window_request import WindowRequest
from meshscope.capture.session import Session
from meshscope.capture.watching import Watching, as_list
from meshscope.core.memory_point import POINTS_NAME
from meshscope.core.trace_names import rank_folder_name
from meshscope.store.schema import MISSING


class Profiles:
    """The trace windows and memory profiles of one recorder."""

    def __init__(self, session: Session, watching: Watching, facts: ModelFacts) -> None:
        self._session = session
        self._watching = watching
        self._guard = session.guard
        self.windows: TraceWindows | None = None
        self.samples = KernelSamples(session)
        self.flops = FlopCounts(session, facts, watching)
        self._memory: list[MemoryProfile] = []
        self._memory_soon: AutomaticProfile | None = None
        self._out_of_memory: OutOfMemoryWatch | None = None

    def visit(self, step: int, end_ns: int) -> bool:
        """Called at the end of a step while there are windows; whether to call at every step."""
        windows = self.windows
        if windows is None or (self._session.is_paused and not windows.is_profiling):
            return False
        start_ns = self._session.timeline.step_start_ns
        self._guard.run("profiling", windows.visit, step, start_ns, end_ns)
        wants_every_step = windows.wants_every_step
        return self._visit_memory(windows) or wants_every_step

    def visit_samples(self, step: int, end_ns: int) -> None:
        """Called at the end of every step of a rank on a CUDA device."""
        session = self._session
        is_free = self._is_free and not self.flops.is_open
        may_begin = is_free and session.config.kernel_samples and not session.is_paused
        self.samples.visit(step, session.timeline.step_start_ns, end_ns, may_begin=may_begin)

    def visit_flops(self, step: int, end_ns: int) -> int:
        """Called at the end of a step; the time to call again, 0 for the next step."""
        session = self._session
        is_free = self._is_free and not self.samples.is_open
        may_begin = is_free and session.config.flop_counts and not session.is_paused
        start_ns = session.timeline.step_start_ns
        return self.flops.visit(step, start_ns, end_ns, may_begin=may_begin)

    @property
    def _is_free(self) -> bool:
        """Whether neither a trace nor a memory profile is being taken."""
        is_tracing = self.windows is not None and self.windows.is_profiling
        return not is_tracing and not any(profile.is_open for profile in self._memory)

    def _visit_memory(self, windows: TraceWindows) -> bool:
        """Whether a memory profile is still to come."""
        soon, torch = self._memory_soon, sys.modules.get("torch")
        if soon is None or not soon.is_waiting or torch is None:
            return False
        self._guard.run(
            "memory profile", lambda: soon.visit(torch, is_tracing=windows.is_profiling)
        )
        return soon.is_waiting

    def close(self) -> None:
        """Ends everything that is under way."""
        self._guard.run("kernel samples", self.samples.close)
        self._guard.run("FLOP counts", self.flops.close)
        if self.windows is not None:
            self._guard.run("profiling", self.windows.close)
        for profile in self._memory:
            self._guard.run("memory profile", profile.close)
        if self._out_of_memory is not None:
            self._out_of_memory.remove()

    def disarm_after_fork(self) -> None:
        """Drops, in a forked child, what belongs to the parent."""
        self.windows = None
        self.samples.disarm_after_fork()
        self.flops.disarm_after_fork()
        for profile in self._memory:
            self._guard.run("memory profile", profile.abandon)

    # --- trace windows --------------------------------------------------------------------

    def choose_windows(self, text: str, settings: Mapping[str, Any]) -> None:
        """Takes windows from now on, or no more. UsageError when that makes no sense."""
        wanted = parse_settings(text)
        if wanted is not None and settings:
            wanted = change_settings(wanted, **settings)
        self._guard.run("profiling", self._use_windows, wanted)

    def _use_windows(self, settings: ProfilingSettings | None) -> None:
        session = self._session
        before, self.windows, session.scalars.watch = self.windows, None, None
        if before is not None:
            before.close()
        if settings is None or session.is_closed:
            return
        self.windows = TraceWindows(settings, session)
        self.windows.make_room = self._make_room
        if settings.anomaly:
            session.scalars.watch = self._note_nonfinite
        session.timeline.next_visit_ns = 0

    def _make_room(self) -> None:
        self.samples.give_way()
        self.flops.give_way()

    def begin_attempt(self) -> None:
        """The same windows, of the next attempt."""
        self.samples.begin_attempt()
        self.flops.begin_attempt()
        if self.windows is not None:
            self._use_windows(self.windows.settings)

    def ask_for_window(self, num_steps: int) -> None:
        """A window over the next steps, with the settings there are."""
        if self.windows is None:
            self.choose_windows("triggered,ranks=all", {})
        if self.windows is not None:
            self.windows.ask(WindowRequest(reason="the program", num_steps=num_steps))
            self._session.timeline.next_visit_ns = 0

    def _note_nonfinite(self, name_id: int, value: float) -> None:
        ids = self._session.name_ids
        name = next((name for name, known in ids.items() if known == name_id), "")
        if self.windows is not None:
            self.windows.note_number(name, value)

    # --- memory ---------------------------------------------------------------------------

    def profile_memory(
        self,
        models: list[Any],
        optimizers: list[Any],
        steps: int | Collection[int],
        communication: Iterable[Any],
        estimate: Mapping[str, int],
    ) -> MemoryProfile | None:
        """Attributes memory in some steps; see `Recorder.profile_memory`."""
        session, timeline = self._session, self._session.timeline
        folder = self.find_memory_folder() if session.open() else None
        if folder is None or session.writer is None:
            return None
        num_before = len(list(folder.glob(f"**/{POINTS_NAME}")))  # nothing is overwritten
        profile = MemoryProfile(
            sys.modules["torch"],
            models,
            optimizers,
            guard=self._guard,
            folder=folder / f"profile{num_before + 1:03d}" if num_before else folder,
            steps=steps,
            communication=list(communication),
            header={
                "title": f"rank {session.rank} of {session.world_size}",
                "rank": session.rank,
                "attempt": session.writer.attempt,
                "layout": session.layout.to_dict() if session.layout else None,
                "unix_ns": time.time_ns(),
                "estimate_bytes": {str(k): int(v) for k, v in estimate.items()},
            },
            find_step=lambda: timeline.step if timeline.current_step >= 0 else MISSING,
            note_step=self._note_memory_step,
        )
        self._memory.append(profile)
        return profile.open()

    def profile_memory_soon(self) -> None:
        """Profiles one warm step in which nothing is traced, of all models there are by
        then."""
        windows = self.windows
        if windows is not None and windows.settings.profiles_memory:
            self._memory_soon = AutomaticProfile(
                windows.settings.schedule, self._profile_found, self._session.note_gap
            )

    def _profile_found(self, models: list[Any], optimizers: list[Any]) -> MemoryProfile | None:
        profile = self._guard.run(
            "memory profile", self.profile_memory, models, optimizers, 1, (), {}
        )
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():  # the observer must not be what initialises it
            self.watch_out_of_memory(None, None)
        return profile

    def _note_memory_step(self, step: int, start_ns: int, end_ns: int | None) -> None:
        """Such a step is slower: readers leave it out as they leave out those of a trace window."""
        if self.windows is not None:
            self.windows.note_disturbed(step)
        fields: dict[str, object] = {
            "number": len(self._memory),
            "reason": "the memory profile",
            "disturbed_from_step": step,
            "first_step": step,
            "last_step": step,
            "begin_host_mono_ns": start_ns,
        }
        if end_ns is not None:
            fields |= {"disturbed_to_step": step, "end_host_mono_ns": end_ns}
        self._session.journal("update", memory_window=fields)

    def find_memory_folder(self) -> Path | None:
        """Where this rank's memory profiles go; None while nothing is recorded."""
        session = self._session
        if session.run_dir is None:
            return None
        return session.run_dir / "memory" / rank_folder_name(session.rank, session.layout)

    def watch_out_of_memory(self, model: Any, optimizer: Any) -> bool:
        """Says what filled a CUDA device, once one is full. False where there is none."""

        def find_training() -> tuple[list[Any], list[Any]]:
            return as_list(model) or self._watching.models, as_list(optimizer)

        def watch() -> bool:
            torch: Any = sys.modules.get("torch")
            if torch is None:
                return False
            if self._out_of_memory is not None:
                return True
            self._out_of_memory = OutOfMemoryWatch(
                torch,
                self._guard,
                find_folder=self.find_memory_folder,
                find_training=find_training,
                find_profile=lambda: next((one for one in self._memory if one.is_open), None),
                note=self.note_full_device,
            )
            return self._out_of_memory.install()

        return bool(self._guard.run("out of memory", watch))

    def note_full_device(self, text: str, path: Path | None) -> None:
        """Writes the line that rule ME006 reads."""
        session = self._session
        run_dir, step = session.run_dir, session.timeline.current_step
        shown = path.relative_to(run_dir).as_posix() if path is not None and run_dir else None
        session.journal(
            "health", cause="memory", where="device", count=1, text=text, path=shown, step=step
        )
