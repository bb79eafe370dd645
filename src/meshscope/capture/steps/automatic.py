"""Attaches the hooks to models, optimizers and torch, and takes them off again.

Forward: hooks on the outermost modules (`model_search` finds them). Backward: a tap on
`torch.autograd.backward` and `grad`, which `Tensor.backward` and the pipeline schedules go through;
nested calls (reentrant checkpointing) count once, and forward calls inside it are recomputation,
not forward passes. Optimizer: torch's own step hooks, or a tap on the step of classes that are seen
being used. Loader: a tap on the loader iterator's next.
What cannot be found is noted once in the journal, never assumed.
"""

import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.steps import hooks as step_hooks
from meshscope.capture.steps.hooks import Hooks
from meshscope.capture.steps.model_search import MAX_MODELS, ModelSearch, list_callable
from meshscope.capture.steps.module_hook import (
    WRAPPED,
    ModuleHook,
    hide_hooks,
    show_hooks,
    tell_script_compiler,
    untell_script_compiler,
)
from meshscope.capture.steps.step_inference import StepInference
from meshscope.capture.steps.taps import OptimizerTap, Tap

_MAX_TRAINED = 100_000
"""Parameters that are remembered before those that are gone are forgotten."""
_MAX_OPTIMIZERS_HEARD = 5
"""Programs may make an optimizer per parameter."""


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
        self._timed: weakref.WeakSet[Any] = weakref.WeakSet()
        """Modules that have the hooks: models, and what they wrap."""
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_optimizers = 0
        self._watches_all_optimizers = False
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that train together, as far as the program has shown."""
        self._replaced: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those of before, which have not stepped since others were made in mid-training."""
        self._makes_beside = False
        """One of those has stepped again: the program makes optimizers beside those it has."""
        self._trained: dict[int, weakref.ref[Any]] = {}
        """Parameters of all optimizers made so far, by id."""
        self._num_updates = 0
        """Up to when the last optimizer was made."""
        self._tapped_optimizers: set[type] = set()
        """Classes whose steps are timed from outside of torch's hooks."""
        self._search = ModelSearch(
            torch,
            hooks,
            guard,
            attach=self.attach_model,
            models=self._modules,
            timed=self._timed,
            count_updates=lambda: steps.num_updates,
        )
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
        raised = self._guard.protect("backward raised", hooks.backward_raised)
        self._tap(
            torch.autograd, "backward", hooks.backward_begins, hooks.backward_ends, raised=raised
        )
        self._tap(torch.autograd, "grad", hooks.grad_begins, hooks.grad_ends, raised=raised)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._tap(torch.nn.utils, name, hooks.clip_begins, hooks.clip_ends, wants_result=True)
        loader = getattr(torch.utils.data, "dataloader", None)
        iterator = getattr(loader, "_BaseDataLoaderIter", None)
        self._tap(iterator, "__next__", hooks.fetch_begins, hooks.fetch_ends, wants_result=True)
        scaler = getattr(getattr(torch, "amp", None), "GradScaler", None)
        self._tap(scaler, "step", hooks.scaler_begins, hooks.scaler_ends)
        self._tap(scaler, "scale", hooks.scale_begins, hooks.scale_ends, wants_result=True)
        scripting = getattr(torch.jit, "_recursive", None)
        if hasattr(scripting, "create_script_module"):
            self._tap(scripting, "create_script_module", hide_hooks, show_hooks)

    def _tap(
        self,
        owner: Any,
        attribute: str,
        begins: Callable[..., Any],
        ends: Callable[..., Any],
        *,
        wants_result: bool = False,
        raised: Callable[..., Any] | None = None,
    ) -> None:
        if owner is None or not hasattr(owner, attribute):
            self._note("tap", f"this torch has no {attribute} to watch; that phase is not timed")
            return
        if attribute != "backward":  # the hot one guards itself
            begins = self._guard.protect(f"{attribute} begin", begins)
            ends = self._guard.protect(f"{attribute} end", ends)
        tap = Tap(owner, attribute, begins, ends, wants_result=wants_result, raised=raised)
        self._taps.append(tap)
        tell = tell_script_compiler
        self._guard.run("script compiler", tell, self._torch, tap.original, tap.stand_in)

    def attach_model(self, model: Any) -> None:
        """Times the forward passes of a module, or of those in a list of them: stages, chunks."""
        parts = list_callable(self._torch, model)
        if parts != [model] and len(parts) <= MAX_MODELS:
            for part in parts:
                self.attach_model(part)
            return
        if model in self._modules:
            return
        self._modules.add(model)
        if isinstance(model, self._torch.jit.ScriptModule):
            self._note("attach", "TorchScript's modules take no hooks: their forward is not timed")
            return
        if model.__dict__.get("_compiled_call_impl") is not None:
            self._search.time_compiled(model)
            return
        self._time_calls(model)
        wrapped = model._modules.get(WRAPPED)
        if wrapped is not None and wrapped.__dict__.get("_compiled_call_impl") is None:
            self._time_calls(wrapped)  # an evaluation may call it; in a forward it is a part

    def _time_calls(self, model: Any) -> None:
        if model in self._timed or isinstance(model, self._torch.jit.ScriptModule):
            return
        self._timed.add(model)
        # First of its hooks: FSDP2 gathers parameters in one of them.
        begins = ModuleHook(self._hooks.forward_begins)
        self._handles += [
            model.register_forward_pre_hook(begins, with_kwargs=True, prepend=True),
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
            optimizer.register_optimizer_step_pre_hook(self._optimizer_begins),
            optimizer.register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        self._watches_all_optimizers = True
        self._hooks.on_unseen_forward = self._search.meet_unseen_forward
        self._search.watch_registrations()
        self._tap(self._torch.optim.Optimizer, "__init__", _first_argument, self._optimizer_made)
        self._tap(self._torch.nn.Module, "compile", _first_argument, self._compiled_in_place)

    def _optimizer_made(self, optimizer: Any) -> None:
        # Those of before may be gone already: a sweep deletes its model before it makes the next.
        parameters = _list_parameters(optimizer)
        if self._num_optimizers and self._steps.num_updates > self._num_updates:
            self._replace_optimizers(is_new_model=not any(map(self._is_trained, parameters)))
        self._trained |= {id(one): weakref.ref(one) for one in parameters}
        if len(self._trained) > _MAX_TRAINED:
            self._trained = {key: ref for key, ref in self._trained.items() if ref() is not None}
        self._num_updates = self._steps.num_updates
        self._made.add(optimizer)
        self._count_optimizer()
        # Before the search: torch's compiler, loaded by the first optimizer, tells when it begins.
        if self._num_optimizers <= _MAX_OPTIMIZERS_HEARD and self.on_optimizer is not None:
            self.on_optimizer()
        if "param_groups" in optimizer.__dict__:  # else its constructor raised
            self._search.add_optimizer(optimizer)
            self._tap_optimizer(type(optimizer))

    def _is_trained(self, parameter: Any) -> bool:
        known = self._trained.get(id(parameter))
        return known is not None and known() is parameter

    def _replace_optimizers(self, *, is_new_model: bool) -> None:
        """One that is made after others have stepped is taken to follow them: another fold, the
        next stage of a curriculum. Whose predecessor steps again trains beside it."""
        self._replaced.update(self._made)
        self._made.clear()
        self._num_optimizers = int(self._makes_beside)  # then one of before will step again
        self._steps.forget_optimizers()
        self._hooks.losses.forget_optimizers(is_new_model=is_new_model)

    def _meet_replaced(self, optimizer: Any) -> None:
        if optimizer in self._replaced:
            self._makes_beside = True
            self._made.update(self._replaced)
            self._replaced.clear()
            self._num_optimizers = len(self._made)
            self._steps.has_several = True
            self._hooks.losses.go_on_with_model()

    def _tap_optimizer(self, kind: type) -> None:
        """Times all steps of a class, and of those that inherit its step."""
        if kind in self._tapped_optimizers:
            return
        owner = next((one for one in kind.__mro__ if "step" in vars(one)), None)
        if owner is None or owner is self._torch.optim.Optimizer:
            return
        if owner not in self._tapped_optimizers:
            self._taps.append(OptimizerTap(owner, self._step_begins, self._hooks.optimizer_ends))
        self._tapped_optimizers |= {owner, kind}

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        function = self._search.timed_function
        if function is not None:  # a whole step is compiled: its forward is over
            function.end_forward(None)
        if self._replaced:
            self._meet_replaced(optimizer)
        self._hooks.optimizer_begins(optimizer, args, kwargs)

    def _optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Torch's hook, for optimizers whose class is not tapped."""
        if not step_hooks.is_compiling() and type(optimizer) not in self._tapped_optimizers:
            if self._replaced:
                self._meet_replaced(optimizer)
            self._hooks.optimizer_begins(optimizer, args, kwargs)

    def _optimizer_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not step_hooks.is_compiling() and type(optimizer) not in self._tapped_optimizers:
            self._hooks.optimizer_ends(optimizer, args, kwargs)

    def _compiled_in_place(self, module: Any) -> None:
        if module.__dict__.get("_compiled_call_impl") is not None:
            self._search.compiled_in_place(module)

    def compile_begins(self) -> None:
        """Called before torch.compile traces anything."""
        self._search.compile_begins()

    def remove(self) -> None:
        """Takes every hook and tap out again."""
        self._guard.run("hook removal", self._search.remove)
        for handle in self._handles:
            self._guard.run("hook removal", handle.remove)
        for tap in reversed(self._taps):
            self._guard.run("tap removal", tap.remove)
            forget = untell_script_compiler
            self._guard.run("script compiler", forget, self._torch, tap.stand_in)
        self._handles.clear()
        self._taps.clear()
        self._tapped_optimizers.clear()
        self._modules.clear()
        self._timed.clear()
        self._optimizers.clear()
        self._made.clear()
        self._replaced.clear()
        self._makes_beside = False
        self._trained.clear()
        self._watches_all_optimizers = False


def _list_parameters(optimizer: Any) -> list[Any]:
    """What an optimizer trains; nothing of one whose constructor raised."""
    groups = optimizer.__dict__.get("param_groups", ())
    return [one for group in groups for one in group["params"]]


def _first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The begin of taps on methods that need only the object at the end."""
    return args[0] if args else kwargs.get("self")
