"""Attaches to a training that knows nothing of us: hooks for steps, taps for communication."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from meshscope.capture.communication.clock_calibration import ClockOffset, measure_offset
from meshscope.capture.communication.default import listen
from meshscope.capture.config import OLDEST_TORCH
from meshscope.capture.frameworks.arguments import ArgumentObjects
from meshscope.capture.frameworks.logged_values import LoggedValues
from meshscope.capture.identity import initialized_distributed
from meshscope.capture.model.layout_search import LayoutSearch
from meshscope.capture.model.losses import Losses
from meshscope.capture.native_steps import choose_hooks
from meshscope.capture.operations.collectives import CollectiveTap
from meshscope.capture.phases.compilations import Compilations
from meshscope.capture.phases.own_code import OwnCode, settle_known_functions
from meshscope.capture.phases.saves import Saves
from meshscope.capture.session import Session
from meshscope.capture.steps.actions import Actions
from meshscope.capture.steps.automatic import Automatic
from meshscope.capture.steps.fetches import LoaderUses
from meshscope.capture.steps.hooks import BACKWARD, Hooks
from meshscope.capture.steps.step_inference import StepInference
from meshscope.errors import CaptureError

T = TypeVar("T")


class Watching:
    """The hooks and taps of one recorder."""

    def __init__(self, session: Session, steps: StepInference, actions: Actions) -> None:
        self._session = session
        self._steps = steps
        self._actions = actions
        self.automatic: Automatic | None = None
        self.hooks: Hooks | None = None
        self.collectives: CollectiveTap | None = None
        timeline, guard, clock = session.timeline, session.guard, session.clock
        self.compilations = Compilations(timeline, guard, clock, session.journal)
        self.saves = Saves(timeline, guard, clock)
        self.layout_search = LayoutSearch(guard, session.note_gap)
        self.logged = LoggedValues(session)
        self._arguments = ArgumentObjects(session.settings, guard, self.logged)
        self._own_code = OwnCode()
        self._num_calibrations = 0

    @property
    def models(self) -> list[Any]:
        return list(self.automatic.models) if self.automatic is not None else []

    def attach(
        self,
        model: Any,
        optimizer: Any,
        at_first_forward: Callable[[Any, Any, Any], None] | None,
    ) -> None:
        """Watches one or several of each; `at_first_forward` gets a model and its inputs once."""
        automatic = self._make_automatic()
        automatic.install_taps()
        for one in as_list(model):
            automatic.attach_model(one)
            if at_first_forward is not None:
                automatic.call_at_first_forward(one, at_first_forward)
        for one in as_list(optimizer):
            automatic.attach_optimizer(one)
        self.find_phases()
        self._session.prepare()

    def attach_everything(self) -> None:
        """Watches all training in this process."""
        if self._session.config.provenance:
            self._arguments.watch()
        self._make_automatic().watch_everything()
        self.find_phases()

    def find_phases(self) -> None:
        """Listens to compilers and savers that the program has loaded by now."""
        if self.automatic is not None:
            self.compilations.find()
            self.saves.find()
            self._arguments.visit()
            if self._session.layout is None:
                self.layout_search.watch_stages()
            self._session.guard.run("own code", self._own_code.mark, sys.modules["torch"])

    def _optimizer_made(self) -> None:
        self.find_phases()  # it loads torch's compiler
        self._session.prepare()

    def _make_automatic(self) -> Automatic:
        self.watch_communication()
        if self.automatic is not None:
            return self.automatic
        torch: Any = sys.modules.get("torch")
        if torch is None:
            raise CaptureError("attach needs torch, and this program has not imported it")
        if torch_version(torch) < OLDEST_TORCH:
            raise CaptureError(
                f"torch {torch.__version__} is older than 2.11: models and optimizers are not "
                "watched; step, phase, data and log still work"
            )
        session = self._session
        session.guard.run("known functions", settle_known_functions)
        timeline, clock = session.timeline, session.clock
        losses = Losses(torch, timeline, clock, session.scalars, session.journal)
        self.hooks = self._actions.hooks = choose_hooks(timeline, self._steps)(
            torch, timeline, self._steps, session.guard, clock, losses
        )
        if self.collectives is not None:
            self.hooks.on_pass_end = self.collectives.end_pass
        self.automatic = Automatic(
            torch, self.hooks, self._steps, session.guard, note=session.note_gap
        )
        losses.list_models = lambda: self.models
        self.hooks.is_evaluation = LoaderUses(torch, timeline, losses.list_models).is_evaluation
        self.automatic.on_optimizer = self._optimizer_made
        self.compilations.on_begin = self.automatic.compile_begins
        return self.automatic

    def watch_communication(self) -> None:
        """Records every operation of torch.distributed from now on, if the settings say so."""
        config = self._session.config
        if self.collectives is None and config.enabled and config.communication:
            self._session.guard.run("communication", self._watch_communication)

    def _watch_communication(self) -> None:
        session = self._session
        listen(session.guard.protect("timed operation", session.operations.put_timed))
        torch: Any = sys.modules.get("torch")
        if torch is None or "torch.distributed" not in sys.modules:
            return
        if torch_version(torch) < OLDEST_TORCH:
            session.note_gap(
                "communication",
                f"torch {torch.__version__} is older than 2.11: communication is not watched; "
                "blocks timed with meshscope.communication() still work",
            )
            return
        tap = CollectiveTap(
            torch, session.operations, session.guard, session.clock, session.journal
        )
        try:
            tap.install()
        except CaptureError as error:
            session.note_gap("communication", f"communication is not recorded: {error}")
            return
        tap.is_compiled = lambda: self.compilations.has_seen_any
        self.collectives = tap
        if self.hooks is not None:
            self.hooks.on_pass_end = tap.end_pass

    def calibrate_clocks(self) -> ClockOffset:
        """Measures this host's clock against rank 0's. All ranks call it at the same point."""
        dist = initialized_distributed()
        if dist is None:
            raise CaptureError("torch.distributed is not initialised: there is no store to use")
        session = self._session
        session.open()
        store = dist.distributed_c10d._get_default_store()
        prefix = f"meshscope/clock/{self._num_calibrations}"
        self._num_calibrations += 1
        found = measure_offset(store, dist.get_rank(), dist.get_world_size(), session.clock, prefix)
        session.journal("update", clock_calibration=asdict(found))
        return found

    def call_unseen(self, function: Callable[[], T]) -> T:
        """Calls the program's model without recording it: hooks take it for a part of something."""
        hooks, operations = self.hooks, self._session.operations
        was_on, operations.is_on = operations.is_on, False
        if hooks is not None:
            hooks.action_begins(BACKWARD)
        try:
            return function()
        finally:
            operations.is_on = was_on
            if hooks is not None:
                hooks.action_ends(BACKWARD)

    @property
    def device_clock_uncertainty_ns(self) -> int:
        """How far times of operations on a device may be off; -1 without any."""
        return self.collectives.device_clock_uncertainty_ns if self.collectives else -1

    def begin_attempt(self) -> None:
        """Steps and phases are found anew."""
        self._steps.reset()
        self.compilations.begin_attempt()
        self.logged.begin_attempt()
        if self.hooks is not None:
            self.hooks.reset()

    def disarm_after_fork(self) -> None:
        """In a forked child: its communication is not watched."""
        if self.collectives is not None:
            self.collectives.remove()

    def note_unseen_steps(self) -> None:
        """Says why there is no step, though gradients were computed."""
        timeline = self._session.timeline
        if not timeline.step_start_ns or timeline.last_step >= 0 or self._steps.is_explicit:
            return
        if self.compilations.has_seen_any:
            text = (
                "an optimizer's step inside a compiled function is not seen; "
                "mark steps with recorder.step(), or call step outside of torch.compile"
            )
        elif getattr(sys, "last_value", None) is None:  # else it did not come so far
            text = (
                "gradients were computed, and no optimizer of torch stepped; "
                "mark steps with recorder.step() (docs/recorder.md)"
            )
        else:
            return
        self._session.note_gap("steps", f"no step finished: {text}")

    def remove_hooks(self) -> None:
        """Takes the hooks on models and optimizers out."""
        if self.hooks is not None:
            self._session.guard.run("last losses", self.hooks.write_last_losses)
        self.compilations.remove()
        self.saves.remove()
        self.layout_search.remove()
        self._arguments.remove()
        if self.automatic is not None:
            self.automatic.remove()

    def remove_tap(self, deadline_ns: int) -> None:
        """Takes the tap of communication out, and gives what is under way until the deadline."""
        listen(None)
        if self.collectives is not None:
            self.collectives.drain(deadline_ns)
            self.collectives.remove()


def torch_version(torch: Any) -> tuple[int, int]:
    """Major and minor version."""
    major, minor, *_ = str(torch.__version__).split(".")
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def as_list(value: Any) -> list[Any]:
    """Accepts None, one thing or several."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
