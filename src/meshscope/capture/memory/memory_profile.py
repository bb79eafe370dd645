"""A memory profile of chosen steps: puts hooks on a model, takes points, and takes itself out.

Points: `construction`; of each profiled step `after_forward` of every microbatch, `at_peak` (the
operator of forward, loss, backward or optimizer after which most was in use), `after_backward`,
`after_step`; and those the program asks for with `point`. A step begins with the first forward
that autograd watches and ends when every optimizer has stepped, or when the next step begins.

Between profiled steps one forward hook on each given model is left; after the last, nothing. In a
profiled step every operator, every module's call, every saved tensor and every node of backward
costs a Python call and a reading of the allocator. What an operator makes and drops inside of
itself is not seen: the allocator's own peak is written beside it where there is one.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.memory.allocator import make_allocator
from meshscope.capture.memory.heap import find_instances
from meshscope.capture.memory.holdings import COMMUNICATION, Holdings, WeakList, unwrap
from meshscope.capture.memory.hook_exemptions import HookExemptions
from meshscope.capture.memory.host_memory import resident_bytes
from meshscope.capture.memory.module_calls import (
    ModuleCalls,
    eager_modules,
    is_compiled,
    keep_eager,
)
from meshscope.capture.memory.operators import Operators
from meshscope.capture.memory.points import CATEGORIES, PointFiles, choose_categories
from meshscope.capture.memory.quiet_guard import QuietGuard
from meshscope.capture.memory.saved_tensors import SavedTensors
from meshscope.capture.memory.storages import Ledger, WeakStorages, in_backward, tensors_in
from meshscope.capture.steps.module_hook import ModuleHook
from meshscope.core.memory_point import MemoryPoint
from meshscope.core.unavailable import known
from meshscope.store.schema import MISSING

PEAK_GROWTH_RATIO = 0.005
"""How much more must be in use for the peak to be attributed again: each costs a walk over all
that is alive."""
_HELD_BEFORE = "(before the step, by no tensor of Python's)"
"""Path of what a device's allocator had handed out: workspaces of libraries, graphs."""
_MAX_POINTS_PER_STEP = 200
"""Microbatches without end must not fill the disk."""
MAX_FORWARDS_PER_STEP = 1000
"""A step that nothing ends, such as one whose optimizer was given and never steps, ends here."""
_MAX_SEARCH_NS = 1_000_000_000
"""A heap that took longer to search is not searched a second time."""


class MemoryProfile:
    """See the module's docstring. Made by `Recorder.profile_memory`."""

    def __init__(
        self,
        torch: Any,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        *,
        guard: Guard,
        folder: Path | None = None,
        steps: int | Collection[int] = 1,
        communication: Sequence[Any] = (),
        header: Mapping[str, Any] | None = None,
        find_step: Callable[[], int] | None = None,
        note_step: Callable[[int, int, int | None], None] | None = None,
    ) -> None:
        """`steps`: how many from now on, or their numbers as `find_step` counts, where it says -1
        from 0. Without a folder points are kept in `points` and not written. `note_step` gets a
        profiled step's number, begin and, when it is over, end, monotonic ns."""
        self._torch = torch
        self._models, self._optimizers = WeakList(models), WeakList(optimizers)
        self._guard = guard = QuietGuard(torch, guard)
        self._holdings = Holdings(torch, models, optimizers, communication)
        self._calls = ModuleCalls(torch, self, guard)
        self._saved = SavedTensors(
            torch,
            lambda: self._calls.path,
            guard,
            is_delicate=lambda: self._operators.is_delicate,
            on_unpack=lambda is_delicate: self._operators.step_aside(is_delicate),
        )
        self._exemptions = HookExemptions(torch, self._saved, guard)
        self._inputs, self._outputs = WeakStorages(torch), WeakStorages(torch)
        self._gradients = WeakStorages(torch)
        self._before = WeakStorages(torch)
        self._device = self._holdings.find_device()
        self._allocator = make_allocator(torch, self._device)
        self._operators = Operators(
            torch,
            guard,
            self._allocator,
            find_path=lambda: self._calls.path,
            device=str(self._device),
            sample=self._sample_operator,
        )
        self._wanted = frozenset(steps) if not isinstance(steps, int) else None
        self._num_left = steps if isinstance(steps, int) else 0
        self._num_seen = 0
        self._ask_step = find_step
        self._note_step = note_step
        self._step_start_ns = 0
        self._start_ns = time.monotonic_ns()
        self._handles: list[Any] = []
        self._optimizer_handles: list[Any] = []
        self._stepped: set[int] = set()
        self._is_open = False
        self._is_in_step = False
        self._is_in_backward = False
        self._is_in_optimizer = False
        self._step = -1
        self._microbatch = -1
        self._num_points = 0
        self._search_ns = 0
        self._sampled_peak_bytes = -1
        self._peak: MemoryPoint | None = None
        self.points: list[MemoryPoint] = []
        """All that were taken."""
        self._files = self._make_files(folder, header or {})

    def _make_files(self, folder: Path | None, header: Mapping[str, Any]) -> PointFiles | None:
        if folder is None:
            return None
        facts = {
            "device": str(self._device),
            "allocator": self._allocator.name,
            "allocator_missing": self._allocator.why_missing,
            **header,
        }
        return PointFiles(folder, facts)

    # --- opening and closing ------------------------------------------------------------------

    def open(self) -> "MemoryProfile":
        """Takes the first point and puts the hooks in."""
        self._remember_tensors()
        ledger = self._attribute()
        self._allocator.settle(ledger.total_bytes)
        self._is_open = True
        self.point("construction", layouts=CATEGORIES)
        protect = self._guard.protect
        for model in self._models:
            begins = keep_eager(self._torch, model, protect("memory profile", self._forward_begins))
            ends = keep_eager(self._torch, model, protect("memory profile", self._forward_ends))
            self._handles.append(
                model.register_forward_pre_hook(ModuleHook(begins), prepend=True, with_kwargs=True)
            )
            self._handles.append(model.register_forward_hook(ModuleHook(ends), always_call=True))
        for index, optimizer in enumerate(self._optimizers):
            begins = protect("memory profile", self._optimizer_begins)
            ends = protect("memory profile", lambda *_, index=index: self._optimizer_ends(index))
            self._optimizer_handles += [
                optimizer.register_step_pre_hook(ModuleHook(begins)),
                optimizer.register_step_post_hook(ModuleHook(ends)),
            ]
        self.flush()
        return self

    def _remember_tensors(self) -> None:
        """What the program holds already and no category claims: a batch, another model."""
        if self._search_ns > _MAX_SEARCH_NS:
            return
        start_ns = time.monotonic_ns()
        remember = self._guard.protect("memory of others", self._before.add)
        for found in find_instances(self._torch.Tensor):
            remember("", found)
        self._search_ns = time.monotonic_ns() - start_ns

    def close(self) -> None:
        """Removes all hooks and writes what is left. May be called at any time."""
        if not self._is_open:
            return
        if self._is_in_step:
            self._leave_step()
        self._is_open = False
        self._remove_hooks()
        self._forget()
        self._before.clear()
        self._holdings.release()
        self.flush()

    def tidy(self) -> bool:
        """Removes, after the end, what could not be removed then; whether nothing is left."""
        if not self._is_open:
            self._remove_hooks()
        return not (self._is_open or self._handles or self._optimizer_handles)

    def abandon(self) -> None:
        """Drops, in a forked child, the parent's profile. Nothing is written."""
        self._files = None
        self._is_open = self._is_in_step = False
        self._note_step = None
        self._calls.remove()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        """All of them; inside of an optimizer's hooks only if that cannot disturb the others', and
        not as long as a mode or saved-tensor hooks wait for another thread, for others' to go from
        on top of them, or for backward to end: the next forward then tries again."""
        if not self._take_out():
            return
        if self._is_in_optimizer and not all(map(_is_last_hook, self._optimizer_handles)):
            return  # torch walks through them now
        for handle in (*self._handles, *self._optimizer_handles):
            handle.remove()
        self._handles.clear()
        self._optimizer_handles.clear()

    def _take_out(self) -> bool:
        """Mode and saved-tensor hooks; whether they are out. Until then torch's functions that mind
        them stay replaced."""
        self._saved.end()
        self._operators.end()
        if self._saved.is_out:
            self._exemptions.remove()
        return self._saved.is_out and self._operators.is_out

    @property
    def has_begun(self) -> bool:
        """Whether a step was or is being profiled."""
        return self._step >= 0

    @property
    def is_open(self) -> bool:
        """Whether more steps are to come."""
        return self._is_open

    def end_step(self) -> None:
        """Ends a step by hand, where no optimizer was given."""
        self._guard.run("memory profile", self._end_step)

    # --- points -------------------------------------------------------------------------------

    def point(self, name: str, *, layouts: str | Collection[str] = ()) -> MemoryPoint | None:
        """Takes a point now; None if that was not possible. `memory.log` shows the `layouts` of
        these categories, a line per module: `parameters,gradients`, or `all`."""
        return self._guard.run("memory point", self._put, name, layouts)

    def _put(self, name: str, layouts: str | Collection[str]) -> MemoryPoint | None:
        layouts = choose_categories(layouts)
        if not self._is_open or self._num_points >= _MAX_POINTS_PER_STEP:
            return None
        found = self._take(name)
        self._keep(found, layouts)
        return found

    def _keep(self, point: MemoryPoint, layouts: Collection[str]) -> None:
        self._num_points += 1
        self.points.append(point)
        if self._files is not None:
            self._files.put(point, layouts)

    def _take(self, name: str, *, during: str = "") -> MemoryPoint:
        counters = self._allocator.read()
        allocated_bytes = counters.get("allocated_bytes", MISSING)
        ledger = self._attribute(allocated_bytes)
        if self._is_in_step:
            counters["sampled_peak_bytes"] = max(self._sampled_peak_bytes, allocated_bytes)
        counters["rss_bytes"] = resident_bytes()
        return MemoryPoint(
            name=name,
            step=self._step if self._is_in_step else -1,
            microbatch=self._microbatch if self._is_in_step else -1,
            seconds=(time.monotonic_ns() - self._start_ns) / 1e9,
            during=during,
            modules_bytes=ledger.categories,
            elsewhere_bytes=ledger.elsewhere,
            **{name: value for name, value in counters.items() if value >= 0},
        )

    def _attribute(self, allocated_bytes: int = 0) -> Ledger:
        ledger = Ledger(str(self._device))
        sent, before = list(self._operators.sent()), list(self._before.alive())
        self._holdings.claim(ledger, [*sent, *before])
        for path, key, num_bytes in self._inputs.alive():
            ledger.add("inputs", path, key, num_bytes)
        self._saved.claim(ledger)
        for category, storages in (
            ("outputs", self._outputs),
            ("activation_gradients", self._gradients),
        ):
            for path, key, num_bytes in storages.alive():
                ledger.add(category, path, key, num_bytes)
        for path, key, num_bytes in sent:
            ledger.add(COMMUNICATION, path, key, num_bytes)
        for path, key, num_bytes in self._operators.made():
            ledger.add("temporaries", path, key, num_bytes)
        for path, key, num_bytes in (*self._operators.used(), *before):
            ledger.add("other", path, key, num_bytes)
        ledger.add_bytes("other", _HELD_BEFORE, self._allocator.held_bytes)
        ledger.add_bytes("allocator_rounding", "", self._allocator.rounding_bytes())
        # All threads share malloc: another thread may have used it during an operator, and given it
        # back. Only what is there can be a library's.
        room = max(allocated_bytes - ledger.total_bytes, 0)
        for path, num_bytes in self._operators.libraries.items():
            taken = num_bytes if self._allocator.counts_tensors_only else min(num_bytes, room)
            ledger.add_bytes("libraries", path, taken)
            room -= min(taken, room)
        return ledger

    def _sample(self, operator: str = "") -> None:
        """Takes the peak's point again when clearly more is in use than then."""
        allocated = self._allocator.allocated_bytes()
        self._sampled_peak_bytes = max(self._sampled_peak_bytes, allocated)
        peak = None if self._peak is None else known(self._peak.allocated_bytes)
        peak_bytes = MISSING if peak is None else peak
        if allocated > peak_bytes * (1 + PEAK_GROWTH_RATIO):
            during = self._describe_moment(operator)
            self._peak = self._take("at_peak", during=during)

    def _sample_operator(self) -> None:
        if self._is_in_step:
            self._sample(self._operators.last_name)

    def _describe_moment(self, operator: str) -> str:
        is_backward = in_backward(self._torch)
        phase = "optimizer" if self._is_in_optimizer else "backward" if is_backward else "forward"
        return ", ".join(part for part in (phase, self._calls.path, operator) if part)

    # --- a step -------------------------------------------------------------------------------

    def _forward_begins(self, model: Any, args: Any, kwargs: Any) -> None:
        if not self._is_open:
            self._remove_hooks()
        if not self._torch.is_grad_enabled() or not self._is_open:
            return
        self._holdings.note_call(model)
        if self._is_in_step and self._is_step_over():
            self._end_step()  # an update was skipped without a call of the optimizer
        if not self._is_in_step and self._is_over():
            self.close()
        elif not self._is_in_step and self._is_wanted():
            self._begin_step()
        if not self._is_in_step:
            return
        self._microbatch += 1
        for tensor in tensors_in(self._torch, (args, kwargs)):
            if not tensor.requires_grad:
                self._inputs.add("", tensor)
        if not self._microbatch:
            # What libraries and threads took since the profile was made is not this step's.
            self._remember_tensors()
            self._allocator.settle(self._attribute(self._allocator.allocated_bytes()).total_bytes)
        self._saved.begin()  # again each time: others' hooks may have been there before
        self._operators.begin()

    def _find_step(self) -> int:
        step = -1 if self._ask_step is None else self._ask_step()
        return step if step >= 0 else self._num_seen

    def _is_step_over(self) -> bool:
        return self._find_step() != self._step or self._microbatch >= MAX_FORWARDS_PER_STEP

    def _is_over(self) -> bool:
        return self._wanted is not None and self._find_step() > max(self._wanted, default=-1)

    def _is_wanted(self) -> bool:
        if self._wanted is None:
            return self._num_left > 0
        return self._find_step() in self._wanted

    def _begin_step(self) -> None:
        self._is_in_step = True
        self._step = self._find_step()
        self._step_start_ns = time.monotonic_ns()
        self._holdings.refresh()
        self._tell_step(None)
        self._microbatch = -1
        self._num_points = 0
        self._peak, self._sampled_peak_bytes = None, -1
        self._stepped.clear()
        self._calls.install(self._named_modules())
        self._exemptions.install()

    def _named_modules(self) -> list[tuple[str, Any]]:
        return [
            named
            for prefix, model in self._holdings.named_models()
            if not is_compiled(model)
            for named in eager_modules(prefix.rstrip("."), unwrap(model))
        ]

    def _forward_ends(self, model: Any, args: Any, output: Any) -> None:
        if not self._is_in_step or not self._torch.is_grad_enabled():
            return
        outputs = list(tensors_in(self._torch, output))
        for tensor in outputs:
            self._outputs.add("", tensor)
        # The root's own hooks were put in while it was being called.
        self._calls.watch_graph("", outputs)
        begins: Any = self._guard.protect("memory profile", self._backward_begins)
        begins.__torch_unserializable__ = True  # else torch warns when the output is saved
        for tensor in outputs:
            if tensor.grad_fn is not None:  # on a parameter a hook would stay
                tensor.register_hook(begins)
        if not self._is_in_backward:
            self._holdings.refresh()  # DDP builds its buckets anew in a forward
        self._sample()
        if not self._is_in_backward:
            self.point("after_forward")
        self._operators.end_forward()

    def _optimizer_begins(self, *_: Any) -> None:
        self._is_in_optimizer = True

    def _optimizer_ends(self, index: int) -> None:
        self._stepped.add(index)
        if self._is_open and len(self._stepped) == len(self._optimizers):
            self._end_step()
        elif not self._is_open:
            self._remove_hooks()
        self._is_in_optimizer = False

    def _end_step(self) -> None:
        if not self._is_in_step:
            self._num_seen += 1
            self._stepped.clear()
            return
        if self._peak is not None:
            self._keep(self._peak, CATEGORIES)
        is_last = self._num_left == 1 or self._step == max(self._wanted or {-1})
        self.point("after_step", layouts=CATEGORIES if is_last else ())
        self._leave_step()
        self.flush()
        self._num_left -= 1
        if (self._wanted is None and self._num_left <= 0) or (self._wanted and is_last):
            self.close()

    def _tell_step(self, end_ns: int | None) -> None:
        if self._note_step is not None:
            self._note_step(self._step, self._step_start_ns, end_ns)

    def _leave_step(self) -> None:
        self._tell_step(time.monotonic_ns())
        self._is_in_step = self._is_in_backward = False
        self._num_seen += 1
        self._stepped.clear()
        self._take_out()
        self._calls.remove()
        self._forget()

    def _forget(self) -> None:
        self._saved.forget()
        self._operators.forget()
        for storages in (self._inputs, self._outputs, self._gradients):
            storages.clear()
        self._peak = None

    def flush(self) -> None:
        """Writes the points taken so far."""
        if self._files is not None:
            self._guard.run("memory files", self._files.flush)

    # --- what modules and backward tell -------------------------------------------------------

    def module_begins(self) -> bool:
        """Called when a module's forward starts; whether others' hooks are now watched."""
        if not self._is_in_step:
            return False
        self._sample()
        return self._saved.enter_module()

    def module_ends(self, path: str, outputs: list[Any], *, has_begun: bool) -> None:
        """Called when a module's forward ends or raises."""
        if has_begun:
            self._saved.leave_module()
        if not self._is_in_step:
            return
        if self._torch.is_grad_enabled():
            for tensor in outputs:
                self._outputs.add(path, tensor)
            self._calls.watch_graph(path, outputs)
        self._sample()

    def gradients_arrive(self, path: str, gradients: Sequence[Any]) -> None:
        """A node of backward has run: what it made, and what it was given."""
        if not self._is_in_step:
            return
        for gradient in gradients:
            if gradient is not None:
                self._gradients.add(path, gradient)
        self._sample()

    def _backward_begins(self, _gradient: Any) -> None:
        """Backward has come to the model's output. Before any of its nodes: reentrant checkpointing
        has nested backwards, whose end is not this one's."""
        if self._is_in_step and not self._is_in_backward:
            self._is_in_backward = True
            self._queue_callback(lambda: self._queue_callback(self._backward_ends))

    def _queue_callback(self, function: Callable[[], None]) -> None:
        """At the end of backward. Queued there once more, so as to come after DDP and FSDP2, which
        wait for their communication there."""
        engine = self._torch.autograd.Variable._execution_engine
        engine.queue_callback(self._guard.protect("memory profile", function))

    def _backward_ends(self) -> None:
        self._is_in_backward = False
        if self._is_in_step:
            self.point("after_backward")


def _is_last_hook(handle: Any) -> bool:
    """Whether no other hook comes after it: it may then be removed while hooks are being called."""
    hooks = handle.hooks_dict_ref()
    return not hooks or handle.id not in hooks or next(reversed(hooks)) == handle.id
