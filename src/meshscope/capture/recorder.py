"""The recorder: what a training program talks to.

    import meshscope
    rec = meshscope.start("runs/my-run")
    rec.attach(model, optimizer)          # automatic: steps, phases, loss, lr, tokens
    for batch in rec.data(loader):        # optional: loaders of torch are seen anyway
        with rec.phase("augment"): …      # optional: anything else worth a separate line
        rec.log(loss=loss)                # optional: a tensor on a device is not waited for

Nothing is opened until the first record; nothing here raises into the program, but for a UsageError
when a setting's name is wrong; everything is undone by `close`. Standard library only; torch is
used if the program has imported it.

This is the face. `session` has the files, `watching` the hooks and taps, `sampling` what is looked
at between steps, `profiles` what is taken on request.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from meshscope.capture.communication.clock_calibration import ClockOffset
from meshscope.capture.config import RecorderConfig as RecorderConfig
from meshscope.capture.config import check_names
from meshscope.capture.lifetime import forget, remember
from meshscope.capture.memory.memory_profile import MemoryProfile
from meshscope.capture.model.flops import CountedFlops
from meshscope.capture.model.gemm_peak import MeasuredPeak
from meshscope.capture.model.layer_counts import check_stage_layers
from meshscope.capture.model.model_facts import PER_STEP, ModelFacts
from meshscope.capture.model.settings import GIVEN
from meshscope.capture.monitor.monitor import Monitor
from meshscope.capture.monitor.monitor_results import MonitorAnalysis, MonitorStats
from meshscope.capture.monitor.surroundings import look_around
from meshscope.capture.native_steps import choose_inference
from meshscope.capture.profiles import Profiles
from meshscope.capture.sampling import Sampling
from meshscope.capture.session import Session
from meshscope.capture.steps.actions import ActionBlock, Actions, WaitBlock
from meshscope.capture.steps.blocks import Phase, PhaseClock, Span, StepBlock, Timer
from meshscope.capture.steps.fetches import time_fetches
from meshscope.capture.steps.marking import Marking
from meshscope.capture.watching import Watching, as_list
from meshscope.core.layout import Layout, read_layout

DRAIN_SECONDS = 2.0
"""How long `close` waits at most for marks the device has not reached."""

B = TypeVar("B", Phase, Span, Timer)
T = TypeVar("T")


class Recorder:
    """Records one process. See the module's docstring for use."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        layout: Layout | str | None = None,
        config: Any = None,
        clock: Callable[[], int] = time.monotonic_ns,
        attempt: int | None = None,
    ) -> None:
        """`layout`: the mesh, also as text (`dp=4,tp=2`). `config`: the recorder's own settings as
        a `RecorderConfig`, or the run's hyper-parameters (see `set_config`). `attempt`: which
        attempt of the job this is, the same number on every rank (see
        `store.attempts.next_attempt`); by default MESHSCOPE_ATTEMPT, else found out by readers."""
        own = config if isinstance(config, RecorderConfig) else RecorderConfig()
        mesh = None if layout is None else read_layout(layout)
        self.session = session = Session(
            run_dir, layout=mesh, config=own, clock=clock, attempt=attempt
        )
        self.guard, self.clock, self.timeline = session.guard, clock, session.timeline
        self.operations = session.operations
        scalars, put_span = session.scalars, partial(session.put, "device_spans")
        self._marking = Marking(self.timeline, clock, put_span, scalars.put_from_device)
        scalars.marking = self._marking
        self._steps = choose_inference()(self.timeline)
        self._marks = PhaseClock(self.timeline, self._steps, clock, session.name_id)
        self._step_block = StepBlock(self.timeline, self._steps, self.guard, clock, self._marks)
        self._actions = Actions(self.timeline, self._steps, self.guard, clock)
        self._facts = ModelFacts(session.journal)
        self.watching = Watching(session, self._steps, self._actions)
        self.profiles = Profiles(session, self.watching, self._facts)
        self.sampling = Sampling(session, self._marking, self.watching, self.profiles)
        look = partial(look_around, session, self.watching, self._facts)
        self.monitor = Monitor(look, clock, self.guard)
        """Behind `stats`, `analysis` and `report`; its `thresholds` may be replaced."""
        self._phases: dict[str, Phase] = {}
        self._spans: dict[str, Span] = {}
        self._apply_config()
        session.on_journal = self._write_facts
        session.on_open = self.sampling.follow_config
        session.on_prepare = self.sampling.warm_up
        session.arm()
        remember(self)
        if config is not None and config is not own:
            self.set_config(config)

    # --- opening and closing --------------------------------------------------------------

    def open(self) -> bool:
        """Opens the files; False (and silence from then on) when that is not possible."""
        return self.session.open()

    def _write_facts(self) -> None:
        self._facts.write_all()
        self.guard.run("settings", self.session.settings.write_all)

    def flush(self) -> None:
        """Hands everything recorded to the operating system (mapped files need no flush)."""
        self.session.flush()

    def close(self) -> None:
        """Takes all hooks out, completes the files. Recording cannot be resumed afterwards."""
        with self.session.lock:
            if self.session.is_closed:
                return
            self.session.is_closed = True
        self.guard.run("close", self._close)

    def _close(self) -> None:
        self.session.stop_flusher()
        self.session.stack_sampler.close()
        self.profiles.close()
        self.sampling.close()
        self.watching.note_unseen_steps()
        self.watching.remove_hooks()
        deadline_ns = self.clock() + int(DRAIN_SECONDS * 1e9)
        self._marking.drain(deadline_ns)
        self.watching.remove_tap(deadline_ns)
        forget(self)
        self._finish()

    def _finish(self) -> None:
        self.session.finish(
            num_given_up=self._marking.num_given_up,
            device_uncertainty_ns=self.watching.device_clock_uncertainty_ns,
        )

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
        if self.session.disarm_after_fork():
            self.sampling.disarm_after_fork()
            self.profiles.disarm_after_fork()
            self.watching.disarm_after_fork()

    # --- state ----------------------------------------------------------------------------

    @property
    def config(self) -> RecorderConfig:
        """The settings in force; `configure` changes them."""
        return self.session.config

    @property
    def run_dir(self) -> Path | None:
        """The run directory, once the first record has been written."""
        return self.session.run_dir

    @property
    def is_recording(self) -> bool:
        """Whether records reach the run now."""
        return self.session.writer is not None and not self.session.is_paused

    @property
    def is_closed(self) -> bool:
        """Whether recording has ended for good."""
        return self.session.is_closed

    @property
    def current_step(self) -> int:
        """The open step, else the last finished one, else -1."""
        return self.timeline.current_step

    @property
    def failure(self) -> str:
        """Why nothing is recorded; empty when all is well."""
        return self.session.failure

    def configure(self, **changes: Any) -> None:
        """Changes settings of `RecorderConfig` from now on; an unknown name is a UsageError."""
        check_names(RecorderConfig, changes)
        session, was_enabled = self.session, self.config.enabled
        session.config = replace(session.config, **changes)
        self._apply_config()
        self.watch_communication()
        if self.config.enabled != was_enabled:
            session.resume() if self.config.enabled else session.pause()
        if not self.config.device_events:
            self._marking.drop()
        self.sampling.follow_config()
        if session.writer is not None:
            written = {name: repr(value) for name, value in changes.items()}
            self.guard.run("configure", lambda: session.journal("update", config=written))

    def _apply_config(self) -> None:
        self._marking.is_wanted = self.config.device_events
        self.operations.switch(is_on=self.config.communication)
        self.session.scalars.are_signals_wanted = self.config.signals
        self.session.stack_sampler.is_on = self.config.stack_samples

    def pause(self) -> None:
        """Stops writing; hooks stay, so that `resume` finds everything in step."""
        self.session.pause()

    def resume(self) -> None:
        self.session.resume()

    def reset(self) -> None:
        """Completes the current attempt and starts a new one: numbering and clocks begin again."""
        with self.session.lock:
            self.profiles.begin_attempt()
            self.guard.run("reset", self._finish)
            self.watching.begin_attempt()
            self.sampling.begin_attempt()
            self.monitor.reset()
            self.session.begin_attempt()

    # --- what is known of the job ---------------------------------------------------------

    def set_layout(self, layout: Layout | str, source: str = "declared") -> None:
        """Tells the recorder the mesh, also as text (`dp=4,tp=2`), if it was not known at the
        start."""
        self.guard.run("layout", lambda: self.session.set_layout(read_layout(layout), source))

    def set_config(
        self, config: Any, name: str = GIVEN, source: str = "given by the program"
    ) -> None:
        """Stores the run's hyper-parameters: a mapping, dataclass, namespace or object with
        `to_dict`. Calls add up under their `name`; `source` says how the values are known."""
        self.guard.run("config", self.session.settings.add, config, name, source)

    def set_stage_layers(self, stages: Mapping[int, int | Mapping[str, int]]) -> None:
        """Declares what each pipeline stage of this rank holds, to tell uneven stages from slow
        ones: `{2: 4}` is four layers, `{0: {"Block": 4, "embedding": 1}}` names them."""
        self.guard.run(
            "stage layers", lambda: self.session.add_stage_layers(check_stage_layers(stages))
        )

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
        set_flops = partial(self._facts.set_flops, per=PER_STEP, source=source, dtype=dtype)
        self.guard.run("flops", set_flops, model_flops_per_step, hardware_flops_per_step)

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
        count = partial(self._facts.count, model, inputs, kwargs, loss_of, is_real=is_real)
        return self.guard.run("count flops", self.watching.call_unseen, count)

    def set_peak(self, flops_per_s: float, dtype: str, source: str = "declared") -> None:
        """Says what this rank's device reaches at best in `dtype`, FLOP/s (989e12, not 989)."""
        self.guard.run("peak", self._facts.set_peak, flops_per_s, dtype, source)

    def measure_peak(self, dtype: Any = None, device: Any = None) -> MeasuredPeak | None:
        """Measures the fastest matrix product for about a third of a second, and records it as the
        peak. Waits for the device: call it before training, while nothing else runs."""
        return self.guard.run("peak", self._facts.measure_peak, dtype, device)

    # --- on request -----------------------------------------------------------------------

    def profile(self, text: str = "", /, **settings: Any) -> None:
        """Takes traces of torch.profiler over a few steps, from the next step's end on.

        `text` is as in `--trace-windows`, such as `skip=5,active=2,ranks=stages,shapes`; `settings`
        are fields by name (`active=2, ranks="0,3", stack=True`). `profile("off")` ends it. Raises
        UsageError when either makes no sense. See docs/profiling.md.
        """
        self.profiles.choose_windows(text, settings)

    def profile_now(self, num_steps: int = 1) -> None:
        """A window over the next steps, after one of warm-up; with the settings of `profile`."""
        self.profiles.ask_for_window(max(1, int(num_steps)))

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
        given = (as_list(model), as_list(optimizer), steps, communication, estimate or {})
        return self.guard.run("memory profile", self.profiles.profile_memory, *given)

    def profile_memory_soon(self) -> None:
        """Profiles the memory of one warm step in which nothing is traced, of all models that this
        process has by then. With trace windows off, only triggered, or `traces_only`, does
        nothing."""
        self.profiles.profile_memory_soon()

    def watch_out_of_memory(self, model: Any = None, optimizer: Any = None) -> bool:
        """From now on, when a CUDA device is full: says in one sentence what filled it, and writes
        attribution and snapshot beside the memory profile. Without a model, those attached count.
        False where there is no such device."""
        return self.profiles.watch_out_of_memory(model, optimizer)

    def stats(self) -> MonitorStats:
        """Counts, sums and rates of this rank since the last reset; see docs/monitor.md."""
        return self.monitor.stats()

    def analysis(self) -> MonitorAnalysis:
        """Shares of the step, efficiencies and bottlenecks of this rank, over up to 50 steps."""
        return self.monitor.analysis()

    def report(self) -> str:
        """Both as text, with what to try."""
        return self.monitor.report()

    def reset_stats(self) -> None:
        """The monitor forgets what was; the recording goes on. (`reset` begins a new attempt.)"""
        self.monitor.reset()

    # --- automatic recording --------------------------------------------------------------

    def attach(self, model: Any = None, optimizer: Any = None) -> "Recorder":
        """Times a model (or several) and its optimizer (or several) through torch's hooks."""
        first = self._count_first if self.config.count_flops else None
        self.guard.run("attach", self.watching.attach, model, optimizer, first)
        return self

    def _count_first(self, model: Any, args: Any, kwargs: Any) -> None:
        count = partial(self._facts.count, model, args, kwargs, None, is_real=False)
        self.watching.call_unseen(count)

    def watch_everything(self) -> None:
        """Attaches to all training in this process (what `meshscope run` does)."""
        self.session.waits_for_training = True
        self.guard.run("attach", self.watching.attach_everything)

    def watch_communication(self) -> None:
        """Records every operation of torch.distributed from now on; `start` and `attach` do it."""
        self.watching.watch_communication()

    def calibrate_clocks(self) -> ClockOffset | None:
        """Measures this host's clock against rank 0's, through the store of torch.distributed.

        All ranks must call it, at the same point. Not needed on one host, nor where ranks share
        collectives: their common ends align the clocks of a recording.
        """
        return self.guard.run("clock calibration", self.watching.calibrate_clocks)

    # --- manual recording -----------------------------------------------------------------

    def name_id(self, name: str) -> int:
        """The id of a name in this run; opens the run when it is the first thing recorded."""
        return self.session.name_id(name)

    def phase(self, name: str) -> Phase:
        """A part of a step with a separate line: a context manager and a decorator."""
        found = self._phases.get(name)
        if found is None:
            self._marks.has_company = True
            found = self._phases.setdefault(name, self._make_block(Phase, name))
        return found

    def span(self, name: str) -> Span:
        """A named interval inside a phase, for detail: takes nothing from the phase's time."""
        found = self._spans.get(name)
        return found or self._spans.setdefault(name, self._make_block(Span, name))

    def _make_block(self, kind: type[B], name: str) -> B:
        return kind(name, self.timeline, self.guard, self.clock, self.session.name_id)

    def mark(self, name: str) -> None:
        """The time since the last mark, or since the step began, was the phase `name`: for loops
        with `begin_step` and `end_step` that name each part when it is over."""
        self._marks.has_company |= self.watching.automatic is not None
        self.guard.run("mark", self._marks.mark, name)

    def timer(self, name: str) -> Timer:
        """A timer with `start` and `stop`, for what begins in one function and ends in another: a
        span, like `span`. Each call makes a new one."""
        return self._make_block(Timer, name)

    def add_duration(self, name: str, seconds: float) -> None:
        """A duration the program measured itself, and that has just ended: `add_duration("data",
        0.2)`. It counts as that phase where nothing else was measured at that time, and reports
        say that it was given."""
        self.guard.run("duration", self._marks.add, name, seconds)

    def step(self, step: int | None = None) -> StepBlock:
        """Marks a step; from the first use on, steps are no longer inferred."""
        block = self._step_block
        block.number = step
        return block

    def begin_step(self, step: int | None = None) -> None:
        """Begins a step by hand; an open one ends here. `step` sets its number."""
        self._step_block.begin(step)

    def end_step(self) -> None:
        """Ends the step begun by `begin_step`."""
        self._step_block.end(is_aborted=False)

    @contextlib.contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Labels what is recorded inside with a microbatch index."""
        self.guard.run("microbatch", self.timeline.set_microbatch, index, 0)
        try:
            yield
        finally:
            self.guard.run("microbatch", lambda: self.timeline.set_microbatch(index + 1, 1))

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
        start_ns = self.clock() if begin_host_mono_ns is None else begin_host_mono_ns
        given = (kind, step, start_ns, end_host_mono_ns, detail)
        self.guard.run("fault", self.session.put_fault, *given)

    def data(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterates over `loader`, timing each fetch as the phase "data" ("eval" in evaluations)."""
        self._marks.has_company = True
        hooks = self.watching.hooks
        is_evaluation = None if hooks is None else hooks.is_evaluation
        given = (self.timeline, self._steps, self.guard, self.clock, is_evaluation)
        return time_fetches(loader, *given)

    def log(self, **scalars: Any) -> None:
        """Records numbers under their names, for the open step or the last one.

        Anything `float()` takes; a one-element tensor on a device travels to the host without
        being waited for. What is not a number is counted as an error, not raised.
        """
        for name, value in scalars.items():
            self.session.scalars.log(name, value)

    def count(self, name: str, number: float = 1) -> None:
        """Adds to a counter; reports show its total over steps and ranks. One record a call."""
        self.session.scalars.count(name, number)
