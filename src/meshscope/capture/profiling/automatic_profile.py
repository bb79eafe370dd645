"""One memory profile of a program that did not ask for one itself: `meshscope run --profiling`.

Where a warm step has ended and no trace is being taken, the models and optimizers there are are
looked for on the heap, and the next step is profiled. A model is a module that no other contains
and that has something to train (of a list or dict of modules, which cannot be called, those in
it); an optimizer is one that trains a parameter of such a model.
"""

from collections.abc import Callable, Iterable
from typing import Any

from meshscope.capture.memory.heap import find_instances
from meshscope.capture.memory.memory_profile import MemoryProfile
from meshscope.capture.profiling.profiled_step import choose_step
from meshscope.capture.profiling.window_schedule import WindowSchedule
from meshscope.capture.steps.model_search import list_callable

_MAX_STEPS_TO_BEGIN = 3
"""Steps after which the profile of an uncalled model is given up."""
_MANY_STEPS = 1 << 30
"""How many there will be is not known."""


class AutomaticProfile:
    """Waits for the step, and then asks for the profile once."""

    def __init__(
        self,
        schedule: WindowSchedule | None,
        profile: Callable[[list[Any], list[Any]], MemoryProfile | None],
        note: Callable[[str, str], None],
    ) -> None:
        """`profile` takes models and optimizers; `note` takes the reason for no profile."""
        self._num_left = choose_step(schedule, _MANY_STEPS)
        self._profile = profile
        self._note = note
        self._found: MemoryProfile | None = None
        self._num_steps_open = 0
        self.is_waiting = True
        """Whether `visit` is to be called at the end of every step."""

    def visit(self, torch: Any, *, is_tracing: bool) -> None:
        """Called after each step."""
        if self._found is not None:
            self._follow(self._found)
            return
        self._num_left = max(self._num_left - 1, 0)
        if self._num_left or is_tracing:
            return
        models, optimizers = find_training(torch)
        self._found = self._profile(models, optimizers) if models else None
        self.is_waiting = self._found is not None
        if not models:
            self._note("memory profile", "memory is not profiled: no model was found")

    def _follow(self, profile: MemoryProfile) -> None:
        """Watches the profile until it is over and removed."""
        self._num_steps_open += 1
        if profile.is_open and profile.has_begun:
            profile.end_step()  # an optimizer that was found and does not step would not end it
        if profile.is_open and not profile.has_begun and self._num_steps_open > _MAX_STEPS_TO_BEGIN:
            profile.close()
            reason = "no forward of the models that were found was seen"
            self._note("memory profile", f"memory is not profiled: {reason}")
        self.is_waiting = not profile.tidy()


def find_training(torch: Any) -> tuple[list[Any], list[Any]]:
    """Models and their optimizers that this process has now."""
    # By type, as for modules; wrappers that never called the constructor have no hooks to call.
    kind = torch.optim.Optimizer
    objects = find_instances(torch.nn.Module, kind)
    roots = [
        one for root in find_root_modules(torch, objects) for one in list_callable(torch, root)
    ]
    models = [root for root in roots if any(p.requires_grad for p in root.parameters())]
    trained = {id(parameter) for model in models for parameter in model.parameters()}
    known = [one for one in objects if issubclass(type(one), kind) and _takes_hooks(one)]
    return models, [one for one in known if trained & set(map(id, _parameters_of(one)))]


def find_root_modules(torch: Any, objects: Iterable[Any]) -> list[Any]:
    """Modules that no other module contains and that can be called for training."""
    module_type = torch.nn.Module
    # By type, not isinstance: some objects on the heap answer questions about their class with a
    # warning or an import.
    modules = [found for found in objects if issubclass(type(found), module_type)]
    inner = {id(child) for module in modules for child in _children_of(module)}
    return [module for module in modules if id(module) not in inner and _is_callable_root(module)]


def _children_of(module: Any) -> Iterable[Any]:
    return (child for child in module.__dict__.get("_modules", {}).values() if child is not None)


def _is_callable_root(module: Any) -> bool:
    """Whether it was compiled in place: its hooks would be traced into the graph."""
    return module.__dict__.get("_compiled_call_impl") is None and "_modules" in module.__dict__


def _takes_hooks(optimizer: Any) -> bool:
    return "_optimizer_step_post_hooks" in optimizer.__dict__


def _parameters_of(optimizer: Any) -> list[Any]:
    groups = optimizer.__dict__.get("param_groups", ())
    return [parameter for group in groups for parameter in group.get("params", ())]
