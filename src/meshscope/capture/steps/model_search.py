"""Finds the modules whose calls are the forward pass, from what the program calls and makes.

A model is whatever module holds parameters that an optimizer steps; its forward is the call of the
outermost such module, so that a wrapper wins over what it wraps, whenever it was made, and so that
of a root that is never called itself (`model.loss(x)`, an agent with an actor and a critic) those
parts are timed that are called. No object of the program is searched for: a hook on all calls of
modules looks at each outermost one until every parameter of the optimizers has been met, which is
most often the first call, and is then gone.

Compiled code must never see that hook: what torch.compile traces with it would be compiled again
without it. Once something is compiled, the hook is gone for good, and compiled modules
themselves say who calls them. A compiled function is a forward pass if backward comes after it on
what it returned, or inside it, and no forward was seen: from its next call on.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.steps import hooks as step_hooks
from meshscope.capture.steps.hooks import Hooks
from meshscope.capture.steps.module_hook import (
    CompiledCall,
    CompiledFunction,
    ModuleHook,
    find_compiled_calls,
)

_MAX_UPDATES = 4
"""Updates after which parameters that were in no call are given up."""
_MAX_REOPENINGS = 5
"""How often backward without a known forward opens the search again."""
MAX_MODELS = 64
"""A root that calls hundreds of parts by itself would pay for timing each."""
_COMPILED_TYPE = "OptimizedModule"


class ModelSearch:
    """Looks at calls of modules while some parameter of an optimizer is not accounted for."""

    def __init__(
        self,
        torch: Any,
        hooks: Hooks,
        guard: Guard,
        *,
        attach: Callable[[Any], None],
        models: Any,
        timed: Any,
        count_updates: Callable[[], int],
    ) -> None:
        """`attach` times a module's calls; `models` holds those that are timed, `timed` also what
        they wrap."""
        self._torch = torch
        self._hooks = hooks
        self._caught = guard.caught
        self._attach = attach
        self._models = models
        self._timed = timed
        self._count_updates = count_updates
        self._handles: list[Any] = []
        self._call_hook: Any = None
        self._trained: set[int] = set()
        """Parameters of all optimizers, by id."""
        self._missing: set[int] = set()
        """Those of them that no training call of a known model could have used."""
        self._done: set[int] = set()
        """Modules, by id, whose calls say nothing new."""
        self._num_optimizers = 0
        self._last_update = 0
        self._reopenings_left = _MAX_REOPENINGS
        self._trusts_optimizers = True
        """False for optimizers that step copies of the parameters."""
        self._has_compiled = False
        self._newest: weakref.ref[Any] | None = None
        """The module that last got a part: most often the root, when an optimizer is made."""
        self._foreseen: tuple[weakref.ref[Any], set[int]] | None = None
        """The newest module and its parameters, by id, looked at ahead of its first call."""
        self._in_place: weakref.WeakSet[Any] = weakref.WeakSet()
        self._unmet: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """Hooks on compiled modules that were not called yet."""
        self._functions: dict[Any, CompiledFunction] = {}
        """By what torch keeps of a compiled function."""
        self.timed_function: CompiledFunction | None = None
        """The one whose forward pass is going on."""

    @property
    def is_open(self) -> bool:
        """Whether calls of modules are looked at."""
        return self._call_hook is not None

    def watch_registrations(self) -> None:
        """Wrappers register what they wrap: compiled ones, and others made late, are seen so."""
        module = self._torch.nn.modules.module
        self._handles.append(module.register_module_module_registration_hook(self._registered))

    def add_optimizer(self, optimizer: Any) -> None:
        """Its parameters are what is trained."""
        found = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._num_optimizers += 1
        self._trained |= found
        self._open()
        self._foresee()

    def _foresee(self) -> None:
        """Walks the module that will most likely be called now rather than in its first step."""
        root = None if self._newest is None else self._newest()
        if root is not None and self._call_hook is not None:
            self._foreseen = (weakref.ref(root), set(map(id, list_parameters(root))))

    def _list_held(self, module: Any) -> set[int]:
        """Parameters of a module and its parts, by id."""
        if self._foreseen is not None and self._foreseen[0]() is module:
            return self._foreseen[1]
        return set(map(id, list_parameters(module)))

    def meet_unseen_forward(self) -> None:
        """Backward came and no forward had been seen: look again."""
        open_now = [context for context, _ in find_compiled_calls()] if self._functions else []
        functions = list(self._functions.items())
        unread = [function for _, function in functions if function.unread_ns is not None]
        # Torch before 2.13 does not keep results: what was called last made the loss,
        # where backward does not come from inside a compiled function.
        last = None
        if unread and not open_now:
            last = max(unread, key=lambda function: function.unread_ns or 0)
        for context, function in functions:
            made_loss = function.makes_gradients or function is last
            function.is_forward |= made_loss or context in open_now
            function.makes_gradients, function.unread_ns = False, None
        if self._reopenings_left:
            self._reopenings_left -= 1
            self._trusts_optimizers = self._trusts_optimizers and bool(self._models)
            self._open(num_unfinished=1)  # the update that this backward is for

    def _open(self, num_unfinished: int = 0) -> None:
        self._missing |= self._trained
        self._done.clear()
        num_updates = min(max(self._num_optimizers, 1), _MAX_UPDATES)
        self._last_update = self._count_updates() + num_unfinished + num_updates
        if self._call_hook is None and not self._has_compiled:
            module = self._torch.nn.modules.module
            self._call_hook = module.register_module_forward_pre_hook(self._called)

    def close(self) -> None:
        """Calls of modules cost what they cost without us."""
        if self._call_hook is not None:
            self._call_hook.remove()
            self._call_hook = self._foreseen = None

    def compile_begins(self) -> None:
        """Called before torch traces: it must not see the hook, and never will."""
        self._has_compiled = True
        self.close()
        for context, ends in find_compiled_calls():
            if len(self._functions) < MAX_MODELS and context not in self._functions:
                function = self._functions[context] = CompiledFunction(
                    self._hooks, self._time_function
                )
                context.enter_exit_hooks.append(function)
                ends.append(function.see_result)  # of the call under way

    def _time_function(self, function: CompiledFunction | None) -> None:
        self.timed_function = function

    def remove(self) -> None:
        self.close()
        for handle in (*self._handles, *self._unmet.values()):
            handle.remove()
        self._handles.clear()
        self._unmet.clear()
        for module in self._in_place:
            if type(module._compiled_call_impl) is CompiledCall:
                module._compiled_call_impl = module._compiled_call_impl.compiled
        self._in_place.clear()
        for context, function in self._functions.items():
            context.enter_exit_hooks.remove(function)
        self._functions.clear()

    # --- calls ----------------------------------------------------------------------------

    def _called(self, module: Any, args: Any) -> None:
        """Before any module's call, while the search is open."""
        if step_hooks.is_compiling():
            return
        try:
            if self._hooks.is_inside_pass() or self._is_traced():
                return
            if isinstance(module, self._torch.jit.ScriptModule):
                return  # it takes no hooks, and may be a copy of the model beside the training
            if self._count_updates() >= self._last_update:
                self.close()
                return
            if id(module) in self._done:
                return
            if self._meets(module) and module.__dict__.get("_compiled_call_impl") is None:
                # Its own hook comes too late for this call; the one at its end does not.
                self._hooks.forward_begins(module, args, _read_keywords(sys._getframe(1)))
        except Exception as error:  # noqa: BLE001 - the guard's: hooks of modules may not raise
            self._caught("model search", error)

    def _is_traced(self) -> bool:
        """Whether torch.export, fx or jit runs the module: that is no forward of the training."""
        torch = self._torch
        fx = sys.modules.get("torch.fx._symbolic_trace")  # its own question warns
        return bool(
            torch.compiler.is_compiling()
            or getattr(fx, "_is_fx_tracing_flag", False)
            or torch._C._get_tracing_state()
        )

    def _meets(self, module: Any) -> bool:
        """Times this module's calls if it trains; whether that is new."""
        is_known, is_training = module in self._models, self._torch.is_grad_enabled()
        if is_known and not is_training:
            return False
        held = self._list_held(module)
        if not self._is_trained(module, held) and not (is_training and self._is_part(module, held)):
            self._done.update(map(id, _walk(module)))
            return False
        if not is_known and len(self._models) < MAX_MODELS:
            self._attach(module)
        if is_training:  # an evaluation may call what a wrapper wraps
            self._done.add(id(module))
            self._missing -= held
            if not self._missing:
                self.close()
        return not is_known and module in self._models

    def _is_trained(self, module: Any, held: set[int]) -> bool:
        if self._trained and self._trusts_optimizers:
            return not held.isdisjoint(self._trained)
        return any(p is not None and p.requires_grad for p in list_parameters(module))

    def _is_part(self, module: Any, held: set[int]) -> bool:
        """Whether a module without parameters, such as an activation, is called by the trained
        module that it is a part of: a root that is not called itself."""
        caller = None if held else _find_caller(self._torch)
        if not isinstance(caller, self._torch.nn.Module):
            return False
        is_child = any(child is module for child in caller.children())
        return is_child and self._is_trained(caller, set(map(id, list_parameters(caller))))

    # --- wrappers and compiled modules ----------------------------------------------------

    def _registered(self, parent: Any, name: str, child: Any) -> None:
        """Before a module becomes another one's part."""
        if step_hooks.is_compiling():
            return
        try:
            self._newest = weakref.ref(parent)
            if self._foreseen is not None:
                self._foresee_wrapper(parent, child)
            if type(parent).__name__ == _COMPILED_TYPE:
                self.compile_begins()
                hook = ModuleHook(self._compiled_called)
                if parent not in self._unmet:
                    self._unmet[parent] = parent.register_forward_pre_hook(hook, with_kwargs=True)
            elif child in self._models or child in self._timed:
                # A wrapper around what is known, also one after another: it may be called now.
                self._open()
        except Exception as error:  # noqa: BLE001 - the guard's: hooks of modules may not raise
            self._caught("model search", error)

    def _foresee_wrapper(self, parent: Any, child: Any) -> None:
        """A module that wraps the foreseen one holds what that holds; others are walked."""
        assert self._foreseen is not None
        root, held = self._foreseen
        is_wrapper = child is root() and not (parent._modules or parent._parameters)
        self._foreseen = (weakref.ref(parent), held) if is_wrapper else None

    def _compiled_called(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Before the calls of a compiled module, until it is settled who calls it."""
        if step_hooks.is_compiling():
            return
        try:
            was_known = module in self._models
            if self._is_caller_known(module):
                self._unmet.pop(module).remove()
            if module in self._models and not was_known:
                self._hooks.forward_begins(module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the guard's: hooks of modules may not raise
            self._caught("model search", error)

    def compiled_in_place(self, module: Any) -> None:
        """After `module.compile()`: its call is watched from around."""
        self.compile_begins()
        if module in self._models:
            self.time_compiled(module)
        else:
            self._put_around(module).ask = self._ask_for_caller

    def time_compiled(self, module: Any) -> None:
        """Times the calls of a module that was compiled in place."""
        self._put_around(module).hooks = self._hooks

    def _put_around(self, module: Any) -> CompiledCall:
        call = module._compiled_call_impl
        if type(call) is not CompiledCall:
            call = module._compiled_call_impl = CompiledCall(module, call)
            self._in_place.add(module)
        return call

    def _ask_for_caller(self, call: CompiledCall) -> None:
        try:
            if self._is_caller_known(call.module):
                call.ask = None
        except Exception as error:  # noqa: BLE001 - the guard's: the program's call goes on
            call.ask = None
            self._caught("model search", error)

    def _is_caller_known(self, module: Any) -> bool:
        """Times the outermost module whose call this one's is part of; False to ask again.

        Where that is another module, torch has passed by its hooks already: from its next call on.
        """
        outermost = find_outermost(self._torch, module)
        if not self._hooks.is_inside_pass() and id(outermost) not in self._done:
            self._meets(outermost)
        return bool(self._torch.is_grad_enabled() and outermost in self._models)


def find_outermost(torch: Any, module: Any) -> Any:
    """The module that is being called now inside of no other module's call."""
    code = torch.nn.Module._wrapped_call_impl.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            module = frame.f_locals["self"]
        frame = frame.f_back
    return module


def _find_caller(torch: Any) -> Any:
    """Whose method makes the innermost call of a module that is going on; None of a function."""
    code = torch.nn.Module._wrapped_call_impl.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return None if caller is None else caller.f_locals.get("self")


def list_callable(torch: Any, module: Any) -> list[Any]:
    """The module, or of a list or dict of modules, which cannot be called, those in it."""
    is_container = issubclass(type(module), (torch.nn.ModuleList, torch.nn.ModuleDict))
    if not is_container or type(module).forward is not torch.nn.Module.forward:
        return [module]
    return [one for child in module.children() for one in list_callable(torch, child)]


def list_parameters(module: Any) -> list[Any]:
    """Its parameters and those of its parts, some more than once, and None for those not set."""
    return [p for one in _walk(module) for p in vars(one).get("_parameters", {}).values()]


def _walk(module: Any) -> Iterable[Any]:
    """The module and its parts; in a quarter of the time of `Module.modules`."""
    found = {id(module): module}
    pending = [module]
    while pending:
        for child in vars(pending.pop()).get("_modules", {}).values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                pending.append(child)
    return found.values()


def _read_keywords(frame: Any) -> dict[str, Any]:
    """Keyword arguments of the call whose hooks are being run: torch hands them to no hook on all
    modules. They are read for the number of tokens only."""
    found = frame.f_locals.get("kwargs")
    return found if isinstance(found, dict) else {}
