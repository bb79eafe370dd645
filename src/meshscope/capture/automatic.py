"""Calls the timeline from torch's hooks, so that a training loop need not be changed.

Forward: hooks on the root modules. Backward: a tap on `torch.autograd.backward` and `grad`, which
`Tensor.backward` and the pipeline schedules go through; nested calls (reentrant checkpointing)
count once, and forward calls inside it are recomputation, not forward passes. Optimizer: torch's
own step hooks. Loader: a tap on the loader iterator's next. What cannot be found is said once in
the journal, never assumed.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from importlib import import_module
from threading import get_ident
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.step_inference import StepInference
from meshscope.capture.taps import Tap
from meshscope.capture.timeline import Timeline
from meshscope.store.schema import BUILTIN_NAMES

DATA = BUILTIN_NAMES["data"]
FORWARD = BUILTIN_NAMES["forward"]
BACKWARD = BUILTIN_NAMES["backward"]
OPTIMIZER = BUILTIN_NAMES["optimizer"]
CLIP = BUILTIN_NAMES["clip"]
EVAL = BUILTIN_NAMES["eval"]

SIGNALS_EVERY_NS = 100_000_000
"""Reading a loss costs microseconds; ten times a second is plenty for a curve."""
MAX_ROOT_SEARCHES = 5
"""How often the heap is searched for models when backward comes without a known forward."""


class Automatic:
    """Hooks and taps of one recorder. Everything installed is undone by `remove`."""

    def __init__(
        self,
        torch: Any,
        timeline: Timeline,
        steps: StepInference,
        guard: Guard,
        clock: Callable[[], int],
        *,
        signal: Callable[[str, Any], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._torch = torch
        self._timeline = timeline
        self._steps = steps
        self._guard = guard
        self._clock = clock
        self._signal = signal
        self._note = note
        self._handles: list[Any] = []
        self._taps: list[Tap] = []
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watches_all_optimizers = False
        self._searches_left = 0
        self._is_grad_enabled = torch.is_grad_enabled
        self._tensor = torch.Tensor
        self._token_types = frozenset((torch.int64, torch.int32, torch.int16, torch.uint8))
        self._thread = 0
        """The training thread, once known."""
        self.forget_open()

    @property
    def models(self) -> list[Any]:
        """The modules whose forward passes are timed and that still exist."""
        return list(self._modules)

    def forget_open(self) -> None:
        """Drops what was open, with the timeline's own reset."""
        self._forward_depth = 0
        self._forward_phase = FORWARD
        self._backward_depth = 0
        self._num_forwards = 0
        self._was_eval_with_grad = False
        self._trains_in_eval_mode = False
        self._open_optimizers: list[int] = []
        self._ends_after_backward = 0
        self._takes_signals = False
        self._next_signals_ns = 0

    # --- installing -----------------------------------------------------------------------

    def install_taps(self) -> None:
        """The taps every mode needs. Safe to call again."""
        if self._taps:
            return
        torch = self._torch
        self._tap(torch.autograd, "backward", self._backward_begins, self._backward_ends)
        self._tap(torch.autograd, "grad", self._backward_begins, self._grad_ends)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._tap(torch.nn.utils, name, self._clip_begins, self._clip_ends, wants_result=True)
        loader = getattr(torch.utils.data, "dataloader", None)
        iterator = getattr(loader, "_BaseDataLoaderIter", None)
        self._tap(iterator, "__next__", self._fetch_begins, self._fetch_ends)
        scaler = getattr(getattr(torch, "amp", None), "GradScaler", None)
        self._tap(scaler, "step", self._scaler_begins, self._scaler_ends)

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
        protect = self._guard.protect
        begins = protect(f"{attribute} begin", begins)
        ends = protect(f"{attribute} end", ends)
        self._taps.append(Tap(owner, attribute, begins, ends, wants_result=wants_result))

    def attach_model(self, model: Any) -> None:
        """Times the forward passes of a module."""
        if model in self._modules:
            return
        self._modules.add(model)
        protect = self._guard.protect
        self._handles.append(
            model.register_forward_pre_hook(
                protect("forward begin", self._forward_begins), with_kwargs=True
            )
        )
        self._handles.append(
            model.register_forward_hook(
                protect("forward end", self._forward_ends), always_call=True
            )
        )

    def attach_optimizer(self, optimizer: Any) -> None:
        """Times an optimizer's steps; its last one ends the training step."""
        if self._watches_all_optimizers or optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        protect = self._guard.protect
        self._handles.append(
            optimizer.register_step_pre_hook(protect("optimizer begin", self._optimizer_begins))
        )
        self._handles.append(
            optimizer.register_step_post_hook(protect("optimizer end", self._optimizer_ends))
        )

    def watch_everything(self) -> None:
        """For a program that knows nothing of us: every optimizer, and models as they are found."""
        self.install_taps()
        if self._watches_all_optimizers:
            return
        # By its full name: torch.optim deletes its own attribute for this submodule.
        optimizer = import_module("torch.optim.optimizer")
        protect = self._guard.protect
        self._handles.append(
            optimizer.register_optimizer_step_pre_hook(
                protect("optimizer begin", self._optimizer_begins)
            )
        )
        self._handles.append(
            optimizer.register_optimizer_step_post_hook(
                protect("optimizer end", self._optimizer_ends)
            )
        )
        self._watches_all_optimizers = True
        self._searches_left = MAX_ROOT_SEARCHES
        # An optimizer is made after its model: by then the model can be found and the very first
        # forward is timed.
        self._tap(
            self._torch.optim.Optimizer, "__init__", _no_token, lambda token: self._attach_roots()
        )

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

    def _attach_roots(self) -> None:
        for root in find_root_modules(self._torch, gc.get_objects()):
            self.attach_model(root)

    # --- forward --------------------------------------------------------------------------

    def _forward_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now_ns = self._clock()
        if self._backward_depth or (self._thread and get_ident() != self._thread):
            return  # recomputation, or a replica's thread
        self._forward_depth += 1
        if self._forward_depth > 1:
            return
        timeline = self._timeline
        has_grad = self._is_grad_enabled()
        if has_grad and (module.training or self._trains_in_eval_mode):
            self._num_forwards += 1
            self._was_eval_with_grad = False
            self._forward_phase = FORWARD
            if not timeline.step_start_ns:
                self._steps.training_begins(now_ns)
            timeline.enter(FORWARD, now_ns)
            # A two-dimensional integer input is a batch of token ids.
            ids = args[0] if args else kwargs.get("input_ids")
            if type(ids) is self._tensor and ids.ndim == 2 and ids.dtype in self._token_types:
                timeline.input_tokens = max(timeline.input_tokens, 0) + ids.numel()
        else:
            self._was_eval_with_grad = has_grad
            self._forward_phase = EVAL
            self._steps.evaluation_begins()
            timeline.enter(EVAL, now_ns)
        if timeline.is_sampled:
            timeline.own_ns += self._clock() - now_ns

    def _forward_ends(self, module: Any, args: Any, output: Any) -> None:
        now_ns = self._clock()
        if self._backward_depth or (self._thread and get_ident() != self._thread):
            return
        self._forward_depth -= 1
        if self._forward_depth > 0:
            return
        self._forward_depth = 0
        timeline = self._timeline
        timeline.leave(self._forward_phase, now_ns)
        if timeline.is_sampled:
            timeline.own_ns += self._clock() - now_ns

    # --- backward -------------------------------------------------------------------------

    def _backward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now_ns = self._clock()
        self._backward_depth += 1
        if self._backward_depth > 1:
            return
        if not self._num_forwards:
            self._meet_unseen_forward()
        timeline = self._timeline
        if not timeline.step_start_ns:
            self._steps.training_begins(now_ns)
        timeline.enter(BACKWARD, now_ns)
        if now_ns >= self._next_signals_ns:
            self._take_signals(now_ns, args[0] if args else kwargs.get("tensors"))
        if timeline.is_sampled:
            timeline.own_ns += self._clock() - now_ns

    def _meet_unseen_forward(self) -> None:
        """Backward came without a training forward: learn why, for the next time."""
        self._thread = self._thread or get_ident()
        if self._was_eval_with_grad:  # fine-tuning in eval mode: what we called eval was training
            self._trains_in_eval_mode = True
        elif self._searches_left:
            self._searches_left -= 1
            self._attach_roots()

    def _take_signals(self, now_ns: int, loss: Any) -> None:
        """At most ten times a second: the loss now, the gradient norm and rate of this step."""
        self._next_signals_ns = now_ns + SIGNALS_EVERY_NS
        self._takes_signals = True
        self._thread = self._thread or get_ident()
        self._signal("backward_loss", loss)

    def _backward_ends(self, token: None) -> None:
        if self._leave_backward():
            self._timeline.microbatch += 1
            if self._ends_after_backward:
                self._steps.optimizer_ends(self._ends_after_backward, self._clock())
                self._ends_after_backward = 0

    def _grad_ends(self, token: None) -> None:
        self._leave_backward()

    def _leave_backward(self) -> bool:
        now_ns = self._clock()
        self._backward_depth -= 1
        if self._backward_depth:
            return False
        timeline = self._timeline
        timeline.leave(BACKWARD, now_ns)
        self._num_forwards = 0
        if timeline.is_sampled:
            timeline.own_ns += self._clock() - now_ns
        return True

    # --- optimizer ------------------------------------------------------------------------

    def _optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        now_ns = self._clock()
        key = id(optimizer)
        timeline = self._timeline
        open_optimizers = self._open_optimizers
        if key in open_optimizers:  # its last step raised, so its end never came
            timeline.abort_open(OPTIMIZER, now_ns)
            open_optimizers.clear()
        open_optimizers.append(key)
        if len(open_optimizers) > 1:
            return  # a wrapper around another optimizer
        self._steps.optimizer_begins(key, now_ns)
        timeline.enter(OPTIMIZER, now_ns)
        if timeline.is_sampled:
            timeline.own_ns += self._clock() - now_ns

    def _optimizer_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        now_ns = self._clock()
        key = id(optimizer)
        open_optimizers = self._open_optimizers
        if key not in open_optimizers:
            return
        open_optimizers.remove(key)
        if open_optimizers:
            return
        self._timeline.leave(OPTIMIZER, now_ns)
        if self._takes_signals:
            self._takes_signals = False
            self._signal("lr", optimizer.param_groups[0].get("lr"))
        if self._backward_depth:  # an optimizer that runs inside backward, parameter by parameter
            self._ends_after_backward = key
        else:
            self._steps.optimizer_ends(key, now_ns)

    def _scaler_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        return self._steps.num_updates, id(optimizer)

    def _scaler_ends(self, token: tuple[int, int] | None) -> None:
        if token is not None and self._steps.num_updates == token[0]:
            self._steps.update_skipped(token[1], self._clock())

    # --- loader, clipping -----------------------------------------------------------------

    def _fetch_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        now_ns = self._clock()
        timeline = self._timeline
        if timeline.stack.name_id == DATA or (self._thread and get_ident() != self._thread):
            return False
        if self._open_optimizers:
            timeline.abort_open(OPTIMIZER, now_ns)
            self._open_optimizers.clear()
        if not timeline.step_start_ns:
            self._steps.batch_fetch_begins(now_ns)
        timeline.enter(DATA, now_ns)
        if timeline.is_sampled:
            timeline.own_ns += self._clock() - now_ns
        return True

    def _fetch_ends(self, is_ours: bool | None) -> None:  # noqa: FBT001
        if is_ours:
            self._timeline.leave(DATA, self._clock())

    def _clip_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._timeline.enter(CLIP, self._clock())

    def _clip_ends(self, token: None, norm: Any) -> None:
        self._timeline.leave(CLIP, self._clock())
        # A sharded norm (DTensor) would need communication to read: only plain tensors are taken.
        if self._takes_signals and type(norm) is self._tensor:
            self._signal("grad_norm", norm)


def _no_token(*args: Any, **kwargs: Any) -> None:
    """For taps that only care about the end."""


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
    """Compiled in place, a module traces its hooks into the graph: leave it alone."""
    return module.__dict__.get("_compiled_call_impl") is None and "_modules" in module.__dict__
