"""Attaches the hooks to models, optimizers and torch, and takes them off again.

Forward: hooks on the root modules. Backward: a tap on `torch.autograd.backward` and `grad`, which
`Tensor.backward` and the pipeline schedules go through; nested calls (reentrant checkpointing)
count once, and forward calls inside it are recomputation, not forward passes. Optimizer: torch's
own step hooks. Loader: a tap on the loader iterator's next. What cannot be found is noted once in
the journal, never assumed.
"""

import weakref
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.steps.heap import find_instances
from meshscope.capture.steps.hooks import Hooks
from meshscope.capture.steps.module_hook import ModuleHook
from meshscope.capture.steps.step_inference import StepInference
from meshscope.capture.steps.taps import Tap

_MAX_ROOT_SEARCHES = 5
"""How often the heap is searched for models: at the first optimizers, and again as often when
backward comes without a known forward."""


class Automatic:
    """Hooks and taps of one recorder. Everything installed is undone by `remove`."""

    def __init__(
        self,
        torch: Any,
        hooks: Hooks,
        steps: StepInference,
        guard: Guard,
        *,
        note: Callable[[str, str], None],
    ) -> None:
        self._torch = torch
        self._hooks = hooks
        self._steps = steps
        self._guard = guard
        self._note = note
        self._handles: list[Any] = []
        self._taps: list[Tap] = []
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_optimizers = 0
        self._watches_all_optimizers = False
        self._searches_left = 0
        self.on_optimizer: Callable[[], None] | None = None
        """Called when an optimizer has been made, under `watch_everything`."""

    @property
    def models(self) -> list[Any]:
        """The modules whose forward passes are timed and that still exist."""
        return list(self._modules)

    def install_taps(self) -> None:
        """The taps every mode needs. Safe to call again."""
        if self._taps:
            return
        torch, hooks = self._torch, self._hooks
        self._tap(torch.autograd, "backward", hooks.backward_begins, hooks.backward_ends)
        self._tap(torch.autograd, "grad", hooks.backward_begins, hooks.grad_ends)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._tap(torch.nn.utils, name, hooks.clip_begins, hooks.clip_ends, wants_result=True)
        loader = getattr(torch.utils.data, "dataloader", None)
        iterator = getattr(loader, "_BaseDataLoaderIter", None)
        self._tap(iterator, "__next__", hooks.fetch_begins, hooks.fetch_ends, wants_result=True)
        scaler = getattr(getattr(torch, "amp", None), "GradScaler", None)
        self._tap(scaler, "step", hooks.scaler_begins, hooks.scaler_ends)

    def _tap(
        self,
        owner: Any,
        attribute: str,
        begins: Callable[..., Any],
        ends: Callable[..., Any],
        *,
        wants_result: bool = False,
    ) -> None:
        if owner is None or not hasattr(owner, attribute):
            self._note("tap", f"this torch has no {attribute} to watch; that phase is not timed")
            return
        if attribute != "backward":  # the hot one guards itself
            begins = self._guard.protect(f"{attribute} begin", begins)
            ends = self._guard.protect(f"{attribute} end", ends)
        self._taps.append(Tap(owner, attribute, begins, ends, wants_result=wants_result))

    def attach_model(self, model: Any) -> None:
        """Times the forward passes of a module."""
        if model in self._modules:
            return
        self._modules.add(model)
        self._handles += [
            model.register_forward_pre_hook(
                ModuleHook(self._hooks.forward_begins), with_kwargs=True
            ),
            model.register_forward_hook(ModuleHook(self._hooks.forward_ends), always_call=True),
        ]

    def call_at_first_forward(self, model: Any, function: Callable[[Any, Any, Any], None]) -> None:
        """Calls `function(model, args, kwargs)` once, before the model's next training forward."""

        def call(module: Any, args: Any, kwargs: Any) -> None:
            if module.training and self._torch.is_grad_enabled():
                handle.remove()
                self._guard.run("first forward", lambda: function(module, args, kwargs))

        handle = model.register_forward_pre_hook(ModuleHook(call), with_kwargs=True, prepend=True)
        self._handles.append(handle)

    def attach_optimizer(self, optimizer: Any) -> None:
        """Times an optimizer's steps; its last one ends the training step."""
        if self._watches_all_optimizers or optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        self._count_optimizer()
        self._handles += [
            optimizer.register_step_pre_hook(ModuleHook(self._hooks.optimizer_begins)),
            optimizer.register_step_post_hook(ModuleHook(self._hooks.optimizer_ends)),
        ]

    def _count_optimizer(self) -> None:
        self._num_optimizers += 1
        self._steps.has_several = self._num_optimizers > 1

    def watch_everything(self) -> None:
        """Watches a program that knows nothing of us: all optimizers and the models found."""
        self.install_taps()
        if self._watches_all_optimizers:
            return
        # By its full name: torch.optim deletes its own attribute for this submodule.
        optimizer = import_module("torch.optim.optimizer")
        self._handles += [
            optimizer.register_optimizer_step_pre_hook(self._hooks.optimizer_begins),
            optimizer.register_optimizer_step_post_hook(self._hooks.optimizer_ends),
        ]
        self._watches_all_optimizers = True
        self._searches_left = _MAX_ROOT_SEARCHES
        self._hooks.on_unseen_forward = self._search_again
        # An optimizer is made after its model: by then the model can be found and the very first
        # forward is timed.
        self._tap(self._torch.optim.Optimizer, "__init__", _no_token, self._optimizer_made)

    def _optimizer_made(self, token: None) -> None:
        self._count_optimizer()
        # A search looks at every object there is; programs may make an optimizer per parameter.
        if self._num_optimizers <= _MAX_ROOT_SEARCHES:
            self._attach_roots()
            if self.on_optimizer is not None:
                self.on_optimizer()

    def _search_again(self) -> None:
        if self._searches_left:
            self._searches_left -= 1
            self._attach_roots()

    def _attach_roots(self) -> None:
        for root in find_root_modules(self._torch, find_instances(self._torch.nn.Module)):
            self._guard.run("attach", lambda root=root: self.attach_model(root))  # type: ignore[misc]

    def remove(self) -> None:
        """Takes every hook and tap out again."""
        for handle in self._handles:
            self._guard.run("hook removal", handle.remove)
        for tap in reversed(self._taps):
            self._guard.run("tap removal", tap.remove)
        self._handles.clear()
        self._taps.clear()
        self._modules.clear()
        self._optimizers.clear()
        self._watches_all_optimizers = False


def _no_token(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The begin of taps that need only the end."""


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
