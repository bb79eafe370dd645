"""One memory profile of a program that did not ask for one itself: `meshscope run --profiling`.

Where a warm step has ended and no trace is being taken, the models and optimizers there are are
looked for on the heap, and the next step is profiled. A model is a module that no other contains
and that has something to train; an optimizer is one that trains a parameter of such a model.
"""

import gc
from collections.abc import Callable
from typing import Any

from meshscope.capture.attribution.profiled_step import choose_step
from meshscope.capture.automatic import find_root_modules
from meshscope.capture.profiling.window_schedule import WindowSchedule

MANY_STEPS = 1 << 30
"""How many there will be is not known."""


class AutomaticProfile:
    """Waits for the step, and then asks for the profile once."""

    def __init__(
        self,
        schedule: WindowSchedule | None,
        profile: Callable[[list[Any], list[Any]], object],
        note: Callable[[str, str], None],
    ) -> None:
        """`profile` takes models and optimizers; `note` is told why there is no profile."""
        self._num_left = choose_step(schedule, MANY_STEPS)
        self._profile = profile
        self._note = note
        self.is_waiting = True
        """Whether `visit` is to be called at the end of every step."""

    def visit(self, torch: Any, *, is_tracing: bool) -> None:
        """A step has ended."""
        self._num_left = max(self._num_left - 1, 0)
        if self._num_left or is_tracing:
            return
        self.is_waiting = False
        models, optimizers = find_training(torch)
        if models:
            self._profile(models, optimizers)
        else:
            self._note("memory profile", "memory is not profiled: no model was found")


def find_training(torch: Any) -> tuple[list[Any], list[Any]]:
    """Models and their optimizers that this process has now."""
    objects = gc.get_objects()
    roots = find_root_modules(torch, objects)
    models = [root for root in roots if any(p.requires_grad for p in root.parameters())]
    trained = {id(parameter) for model in models for parameter in model.parameters()}
    # By type, as for modules; wrappers that never called the constructor have no hooks to call.
    kind = torch.optim.Optimizer
    known = [one for one in objects if issubclass(type(one), kind) and _takes_hooks(one)]
    return models, [one for one in known if trained & set(map(id, _parameters_of(one)))]


def _takes_hooks(optimizer: Any) -> bool:
    return "_optimizer_step_post_hooks" in optimizer.__dict__


def _parameters_of(optimizer: Any) -> list[Any]:
    groups = optimizer.__dict__.get("param_groups", ())
    return [parameter for group in groups for parameter in group.get("params", ())]
