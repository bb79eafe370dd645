"""What runs inside every step: the bodies of the hooks that `automatic` installs.

Written for a cold cache. After a step's matrix products nothing of Python is left in the caches,
and every function called here costs microseconds, not nanoseconds. Hence few and flat functions,
fields instead of dicts, and the guard's try/except inside the hot hooks instead of around them:
all errors still end in `Guard.caught`.

The begins and ends of the usual phases repeat what `Timeline.enter` and `leave` do, with numbers in
place of names: phase 1 is forward, 2 backward, 3 optimizer; `stamps[2p]` and `stamps[2p + 1]` are
its begin and end, `stored[3 + 2p]` and `stored[4 + 2p]` the same on disk, times 257 (see
`store.open_step`). `tests/property/test_timeline_properties.py` holds `Timeline` to a plain stack.

`hot_steps.c` does what a usual step needs of this in C, where it was compiled; a change here that
a usual step would notice is made there too.
"""

from collections import deque
from collections.abc import Callable, Mapping
from operator import index
from threading import get_ident
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.steps.step_inference import StepInference, is_mapped, wraps_training
from meshscope.capture.steps.timeline import Timeline
from meshscope.store.schema import BUILTIN_NAMES

DATA = BUILTIN_NAMES["data"]
FORWARD = BUILTIN_NAMES["forward"]
BACKWARD = BUILTIN_NAMES["backward"]
OPTIMIZER = BUILTIN_NAMES["optimizer"]
CLIP = BUILTIN_NAMES["clip"]
EVAL = BUILTIN_NAMES["eval"]

_MAX_OLDER = 512
"""Losses that are kept until numbers are taken again."""
_MAX_SIGNALS_NS = 400_000_000
"""After so long a step's numbers are taken, whatever its own number is."""


def is_compiling() -> bool:
    """True only while torch.compile traces the caller: it then sees hooks that do nothing.

    Replaced by torch's own function when hooks are made, which the tracer knows by sight; without
    it a compiled function that calls a watched model would break its graph at our clock.
    """
    return False


def _keeps_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `torch.autograd.backward` leaves its graph to a further one."""
    given = dict(zip(("retain_graph", "create_graph"), args[2:4], strict=False)) | kwargs
    return bool(given.get("retain_graph") or given.get("create_graph"))


class Hooks:
    """Forward, backward, optimizer, loader and clipping, turned into phases and steps."""

    __slots__ = (
        "_backward_depth",
        "_batch_module",
        "_calls_backward",
        "_caught",
        "_clock",
        "_ends_after_backward",
        "_fetch_phase",
        "_forward_depth",
        "_forward_module",
        "_forward_phase",
        "_is_grad_enabled",
        "_is_gradient",
        "_is_normalized",
        "_list_transforms",
        "_loss_step",
        "_next_signals_ns",
        "_next_signals_step",
        "_norm",
        "_num_forwards",
        "_older",
        "_open_optimizer",
        "_optimizer_depth",
        "_optimizer_microbatch",
        "_previous",
        "_rate",
        "_recent",
        "_retained",
        "_signal_ns",
        "_signalled",
        "_steps",
        "_takes_signals",
        "_tensor",
        "_thread",
        "_timeline",
        "_token_types",
        "_trains_in_eval_mode",
        "_unscaled",
        "_was_eval_with_grad",
        "is_evaluation",
        "losses",
        "on_pass_end",
        "on_unseen_forward",
    )

    def __init__(
        self,
        torch: Any,
        timeline: Timeline,
        steps: StepInference,
        guard: Guard,
        clock: Callable[[], int],
        losses: Any,
    ) -> None:
        """`losses` is told of losses, norms and rates: a `capture.model.losses.Losses`."""
        global is_compiling
        is_compiling = torch.compiler.is_dynamo_compiling
        self._timeline = timeline
        self._steps = steps
        self._caught = guard.caught
        self._clock = clock
        self.losses = losses
        self._is_grad_enabled = torch.is_grad_enabled
        self._tensor = torch.Tensor
        functional = getattr(getattr(torch, "_C", None), "_functorch", None)
        self._list_transforms = getattr(functional, "get_interpreter_stack", None)
        """Transforms of torch.func that are going on; None for none."""
        self._token_types = frozenset((torch.int64, torch.int32, torch.int16, torch.uint8))
        self.is_evaluation: Callable[[Any], bool] | None = None
        """Whether what a loader's iterator gives next is for an evaluation."""
        self.on_pass_end: Callable[[], None] | None = None
        """Called after each backward pass."""
        self.on_unseen_forward: Callable[[], None] | None = None
        """Called when backward comes although no training forward was seen."""
        self._thread = 0
        """The training thread, once known."""
        self.reset()

    def reset(self) -> None:
        """Drops what is open, together with the timeline's own reset."""
        self._fetch_phase = DATA
        self._forward_depth = 0
        self._forward_module: Any = None
        """The root whose training forward is going on: its replicas are other objects."""
        self._forward_phase = FORWARD
        self._backward_depth = 0
        self._batch_module = 0
        """Whose input, by id, counts as the step's samples."""
        self._num_forwards = 0
        self._was_eval_with_grad = False
        self._trains_in_eval_mode = False
        self._open_optimizer = 0
        self._optimizer_depth = 0
        self._optimizer_microbatch = 0
        self._ends_after_backward: tuple[int, ...] = ()
        self._takes_signals = False
        """Whether the numbers of the open step are taken."""
        self._next_signals_ns = 0
        self._next_signals_step = 0
        self._signalled: tuple[int, ...] = ()
        """Of several optimizers those, by id, whose numbers have been taken in this round."""
        self._loss_step = -1
        """The step in which backward was called; -1 again after its update."""
        self._recent: list[Any] = []
        """What backward was called on in that step, if its numbers are not taken."""
        self._previous: list[Any] = []
        """The same of the step before."""
        self._older: deque[float] = deque(maxlen=2 * _MAX_OLDER)
        """Of steps whose numbers were not taken, as far as they are on the host: step, loss, step,
        loss … Plain numbers: Python's collector counts what holds other objects, tensors too."""
        self._norm: Any = None
        self._rate: Any = None
        """Gradient norm and learning rate of the last step, if its numbers were not taken."""
        self._signal_ns = 0
        """What taking the numbers of this step has cost so far."""
        self._unscaled: Any = None
        """What a gradient scaler was given, until backward is called on what it returned."""
        self._retained = (-1, -1)
        """Step and microbatch of the last backward that kept its graph for another one."""
        self._is_gradient = False
        self._calls_backward = False
        """Then what `torch.autograd.grad` is called on is no loss."""
        self._is_normalized = False
        """Whether the model was told the tokens of the whole step."""
        self.losses.reset()

    def ask_for_signals(self) -> None:
        """Takes them in the next step, whenever the last ones were."""
        self._next_signals_ns = 0

    def is_inside_pass(self) -> bool:
        """Whether a call of a module now is part of a pass that is timed, or another thread's."""
        if self._forward_depth or self._backward_depth:
            return True
        return bool(self._thread and get_ident() != self._thread)

    # --- pipeline actions -----------------------------------------------------------------

    def action_begins(self, phase_id: int) -> None:
        """Called when the program marks an action: forwards and backwards inside are part of it."""
        if phase_id == BACKWARD:
            self._backward_depth += 1
        else:
            self._forward_depth += 1

    def action_ends(self, phase_id: int) -> None:
        """Called when a marked action ends: the hooks time again."""
        if phase_id == BACKWARD:
            self._backward_depth = max(self._backward_depth - 1, 0)
        else:
            self._forward_depth = max(self._forward_depth - 1, 0)

    # --- forward --------------------------------------------------------------------------

    def forward_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a root module's forward."""
        if is_compiling():
            return
        try:
            now_ns = self._clock()
            if (
                self._forward_depth
                or self._backward_depth
                or not self._is_grad_enabled()
                or not (module.training or self._trains_in_eval_mode or wraps_training(module))
                or (self._thread and get_ident() != self._thread and not self._moves_here())
            ):
                self._unusual_forward_begins(now_ns)
                return
            timeline = self._timeline
            self._forward_depth = self._num_forwards = 1
            self._forward_module = module
            self._forward_phase = FORWARD
            if not timeline.step_start_ns:
                steps = self._steps
                if steps.has_several or steps.has_fetched or steps.is_explicit:
                    steps.training_begins(now_ns)
                else:
                    timeline.begin_step(now_ns)
            if (
                timeline.open_phase < 0
                and timeline.done_phase < 1
                and not (timeline.stack.name_id or timeline.microbatch)
            ):
                timeline.open_phase = 1  # as `Timeline.enter` does, without the call
                timeline.stamps[2] = now_ns
                timeline.stored[5] = (now_ns - timeline.epoch_ns) * 257
            else:
                timeline.enter(timeline.stack, FORWARD, now_ns)
            given: Any = args[0] if args else kwargs.get("input_ids")
            if self._open_optimizer and timeline.microbatch > self._optimizer_microbatch:
                pass  # the same batch again, for the same update
            elif type(given) is not self._tensor:
                self._count_batch(module, given, kwargs)
            elif num_dimensions := given.ndim:
                # Models that are called one after the other have the same batch: the first counts.
                if not timeline.input_samples or self._batch_module == id(module):
                    self._batch_module = id(module)
                    # Of a model that is being traced by torch.jit even sizes are tensors.
                    timeline.input_samples += index(given.size(0))
                # A two-dimensional integer input is a batch of token ids.
                if num_dimensions == 2 and given.dtype in self._token_types:
                    timeline.input_tokens += index(given.numel())
            self._is_normalized = kwargs.get("num_items_in_batch") is not None
            if timeline.is_sampled:
                timeline.own_ns += self._clock() - now_ns
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("forward begin", error)

    def _moves_here(self) -> bool:
        """Whether steps go on in this thread: executors give each to whichever is free. In a step
        that is open, another thread's forward is a replica's."""
        if not self._timeline.step_start_ns:
            self._thread = get_ident()
        return self._thread == get_ident()

    def _count_batch(self, module: Any, given: Any, kwargs: dict[str, Any]) -> None:
        """Samples and tokens of a batch that is no tensor, or that comes by keyword."""
        listed: Any = given if isinstance(given, (list, tuple)) else ()  # as a loader gives it
        if listed and isinstance(listed[0], Mapping):
            given = listed[0]
        named = given if isinstance(given, Mapping) else kwargs
        preferred = (named.get("input_ids"), named.get("inputs_embeds"))
        batch: Any = next(
            (
                value
                for value in (*preferred, *listed, *named.values())
                if type(value) is self._tensor and value.ndim
            ),
            None,
        )
        if batch is None:
            return
        if not self._timeline.input_samples or self._batch_module == id(module):
            self._batch_module = id(module)
            self._timeline.input_samples += index(batch.size(0))
        is_embedded = batch.ndim == 3 and batch is named.get("inputs_embeds")
        if is_embedded or (batch.ndim == 2 and batch.dtype in self._token_types):
            self._timeline.input_tokens += index(batch.size(0)) * index(batch.size(1))

    def _unusual_forward_begins(self, now_ns: int) -> None:
        """Recomputation, a replica's thread, a root inside another root, or evaluation."""
        if self._backward_depth or (self._thread and get_ident() != self._thread):
            return
        self._forward_depth += 1
        if self._forward_depth > 1:
            return
        self._was_eval_with_grad = self._is_grad_enabled()
        self._forward_module = None
        self._forward_phase = EVAL
        self._steps.evaluation_begins()
        self._timeline.enter(self._timeline.stack_here(), EVAL, now_ns)

    def forward_ends(self, module: Any, args: Any, output: Any) -> None:
        """After a root module's forward, also when it raised."""
        if is_compiling():
            return
        try:
            now_ns = self._clock()
            timeline = self._timeline
            if timeline.open_phase != 1 or self._forward_module is not module:
                self._unusual_forward_ends(now_ns, output)
                return
            self._forward_depth = 0
            self._forward_module = None
            timeline.open_phase = -1  # as `Timeline.leave` does, without the call
            timeline.done_phase = 1
            timeline.stamps[3] = now_ns
            timeline.stored[6] = (now_ns - timeline.epoch_ns) * 257
            if self._takes_signals or self._is_signal_due(now_ns):
                self.losses.see_output(output)
            if timeline.is_sampled:
                timeline.own_ns += self._clock() - now_ns
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("forward end", error)

    def _unusual_forward_ends(self, now_ns: int, output: Any) -> None:
        if self._backward_depth or (self._thread and get_ident() != self._thread):
            return
        self._forward_depth -= 1
        if self._forward_depth <= 0:
            self._forward_depth = 0
            self._forward_module = None
            self._timeline.leave(self._timeline.stack_here(), self._forward_phase, now_ns)
            if self._takes_signals or self._is_signal_due(now_ns):
                self.losses.see_output(output)

    # --- backward -------------------------------------------------------------------------

    def backward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before `torch.autograd.backward` or `grad`."""
        try:
            now_ns = self._clock()
            self._backward_depth += 1
            if self._backward_depth > 1:
                return
            timeline = self._timeline
            if not self._num_forwards:
                self._meet_unseen_forward()
            if not timeline.step_start_ns:
                self._steps.training_begins(now_ns)
            if (
                timeline.open_phase < 0
                and timeline.done_phase < 2
                and not (timeline.stack.name_id or timeline.microbatch)
            ):
                timeline.open_phase = 2  # as `Timeline.enter` does, without the call
                timeline.stamps[4] = now_ns
                timeline.stored[7] = (now_ns - timeline.epoch_ns) * 257
            else:
                timeline.enter(timeline.stack, BACKWARD, now_ns)
            self._take_loss(now_ns, args[0] if args else kwargs.get("tensors"))
            if _keeps_graph(args, kwargs):
                self._retained = (timeline.step, timeline.microbatch)
            if timeline.is_sampled:
                timeline.own_ns += self._clock() - now_ns
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("backward begin", error)

    def _meet_unseen_forward(self) -> None:
        """Backward came without a training forward: learn why, for the next time."""
        self._timeline.stack_here()
        if self._was_eval_with_grad:  # fine-tuning in eval mode: what we called eval was training
            self._trains_in_eval_mode = True
        elif self.on_unseen_forward is not None:
            self.on_unseen_forward()

    def _take_loss(self, now_ns: int, loss: Any) -> None:
        """In some steps all numbers; in the others the loss, in case it is the last one: detached,
        since a graph would hold what the program has let go. Of an optimizer that computes the
        loss itself, several times, the first is the step's: `step` returns it."""
        if self._open_optimizer and self._timeline.microbatch > self._optimizer_microbatch:
            self._unscaled = None
            return
        if isinstance(loss, (list, tuple)) and len(loss) == 1:  # a pipeline's, torch.func's
            loss = loss[0]
        if self._loss_step != self._timeline.step:
            self._loss_step = self._timeline.step
            self._previous, self._recent = self._recent, []
            self._takes_signals = self._is_signal_due(now_ns) or bool(self._signalled)
            if self._takes_signals:
                self._next_signals_ns = now_ns + _MAX_SIGNALS_NS
                self._thread = self._thread or get_ident()
                self.losses.begin()
        if self._takes_signals:
            is_normalized, is_gradient = self._is_normalized, self._is_gradient
            self._calls_backward = self._calls_backward or not is_gradient
            before = (self._timeline.step, self._timeline.microbatch - 1)
            self.losses.take(
                loss,
                self._unscaled,
                is_normalized=is_normalized,
                is_gradient=is_gradient,
                is_further=not self._num_forwards and self._retained == before,
            )
            self._signal_ns += self._clock() - now_ns
        elif self._is_gradient and self._calls_backward:
            pass
        elif type(loss) is self._tensor and loss.numel() == 1:
            kept = loss.detach() if self._unscaled is None else self._unscaled
            self._recent.append(kept)
            self._remember(loss, kept)
        self._unscaled = None

    def _remember(self, loss: Any, kept: Any) -> None:
        """Reads a loss, where that waits for nothing."""
        if loss.is_cpu:
            value = kept.item()
            self._older.append(self._timeline.step)
            self._older.append(value)

    def _look_back(self) -> None:
        """Hands on the losses of the steps since numbers were last taken."""
        older: dict[int, list[float]] = {}
        numbers = iter(self._older)
        for step, loss in zip(numbers, numbers, strict=True):
            if step <= self._timeline.last_step:
                older.setdefault(int(step), []).append(loss)
        self._older.clear()
        if not self._steps.has_several:
            self.losses.look_back(older)

    def grad_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before `torch.autograd.grad`: of a penalty most often, and not of the loss."""
        self._is_gradient = True
        if is_mapped(self._list_transforms):
            # A tensor stands for many there: it hides their number and their values.
            self._timeline.input_samples = self._timeline.input_tokens = 0
            args = ()
        elif not args:  # as the stages of torch's zero-bubble schedules call it
            args = (kwargs.get("outputs"),)
        self.backward_begins(args, {})
        self._is_gradient = False

    def backward_raised(self, token: None) -> None:
        """After a backward that raised: it was no microbatch, and its loss is nobody's."""
        now_ns = self._clock()
        self._backward_depth -= 1
        if self._backward_depth:
            return
        timeline = self._timeline
        timeline.abort_open(BACKWARD, now_ns)
        if not timeline.microbatch:  # else it is not known how much of the step was this one's
            timeline.input_samples = timeline.input_tokens = 0
        self._num_forwards = 0
        self._was_eval_with_grad = False
        self._ends_after_backward = ()
        if self._takes_signals:
            self.losses.forget_loss()
        elif len(self._recent) > timeline.microbatch:
            self._recent.pop()
            if self._older and self._older[-2] == timeline.step:
                self._older.pop()
                self._older.pop()

    def backward_ends(self, token: None) -> None:
        """After `torch.autograd.backward`."""
        try:
            now_ns = self._clock()
            self._backward_depth -= 1
            if self._backward_depth:
                return
            timeline = self._timeline
            if timeline.open_phase == 2:
                timeline.open_phase = -1  # as `Timeline.leave` does, without the call
                timeline.done_phase = 2
                timeline.stamps[5] = now_ns
                timeline.stored[8] = (now_ns - timeline.epoch_ns) * 257
            else:
                timeline.leave(timeline.stack, BACKWARD, now_ns)
            if self.on_pass_end is not None:
                self.on_pass_end()
            timeline.microbatch += timeline.microbatch_stride
            self._num_forwards = 0
            self._was_eval_with_grad = False
            if self._ends_after_backward:
                self._settle(None, now_ns)
                self._steps.optimizers_end(self._ends_after_backward, now_ns)
                self._ends_after_backward = ()
            if timeline.is_sampled:
                timeline.own_ns += self._clock() - now_ns
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("backward end", error)

    def grad_ends(self, token: None) -> None:
        """After `torch.autograd.grad`: part of a backward pass, not a separate microbatch."""
        now_ns = self._clock()
        self._backward_depth -= 1
        if not self._backward_depth:
            self._timeline.leave(self._timeline.stack, BACKWARD, now_ns)

    def write_last_losses(self) -> None:
        """At the end: those of the last step, if they were not taken."""
        step = self._timeline.last_step
        if not self._steps.has_several:
            is_over = self._loss_step <= step  # else a microbatch was left over
            losses = self._recent if is_over else self._previous
            self.losses.keep(None, (losses, self._norm, self._rate), step)
        self._recent = self._previous = []
        self._look_back()
        self.losses.write_last()

    # --- optimizer ------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before an optimizer's step."""
        if is_compiling():
            return
        try:
            now_ns = self._clock()
            timeline = self._timeline
            if self._open_optimizer and not self._is_stale_optimizer(id(optimizer), now_ns):
                return
            self._open_optimizer = id(optimizer)
            self._optimizer_depth = 1
            self._optimizer_microbatch = timeline.microbatch
            # Inside backward (parameter by parameter) there is nothing to decide before its end.
            if not self._backward_depth and (self._steps.has_several or not timeline.step_start_ns):
                self._steps.optimizer_begins(self._open_optimizer, now_ns)
            if timeline.open_phase < 0 and timeline.done_phase < 3 and not timeline.stack.name_id:
                timeline.open_phase = 3  # as `Timeline.enter` does, without the call
                timeline.stamps[6] = now_ns
                timeline.stored[9] = (now_ns - timeline.epoch_ns) * 257
            else:
                timeline.enter(timeline.stack, OPTIMIZER, now_ns)
            if timeline.is_sampled:
                timeline.own_ns += self._clock() - now_ns
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("optimizer begin", error)

    def _is_stale_optimizer(self, key: int, now_ns: int) -> bool:
        """Whether the open optimizer phase is one whose step raised, so that its end never came.

        Otherwise this begin is nested: a subclass calling its parent's step, or a wrapper.
        """
        if self._open_optimizer != key:
            return False
        if self._timeline.microbatch == self._optimizer_microbatch:
            self._optimizer_depth += 1
            return False
        self._timeline.abort_open(OPTIMIZER, now_ns)
        return True

    def optimizer_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After an optimizer's step: usually the end of the training step."""
        if is_compiling():
            return
        try:
            now_ns = self._clock()
            if self._open_optimizer != id(optimizer):
                return
            self._optimizer_depth -= 1
            if self._optimizer_depth:
                return
            self._open_optimizer = 0
            timeline = self._timeline
            if timeline.open_phase == 3:
                timeline.open_phase = -1  # as `Timeline.leave` does; the step's record follows
                timeline.done_phase = 3
                timeline.stamps[7] = now_ns
                timeline.stored[10] = (now_ns - timeline.epoch_ns) * 257
            else:
                timeline.leave(timeline.stack, OPTIMIZER, now_ns)
            steps = self._steps
            if not self._backward_depth:
                self._settle(optimizer, now_ns)
            elif self._takes_signals:
                self.losses.take_rate(optimizer)
            if self._backward_depth:
                self._ends_after_backward += (id(optimizer),)
            elif steps.has_several or steps.is_explicit:
                steps.optimizers_end((id(optimizer),), now_ns)
            else:
                steps.num_updates += 1
                timeline.end_step(now_ns)
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("optimizer end", error)

    def _settle(self, optimizer: Any, now_ns: int) -> None:
        """An update: what came by since the last one is this optimizer's."""
        has_several = self._steps.has_several and optimizer is not None
        self._loss_step = -1
        if not self._takes_signals:
            self._rate = None if optimizer is None else optimizer.param_groups[0].get("lr")
            if self._steps.has_several:
                kept = (self._recent, self._norm, self._rate)
                self.losses.keep(optimizer, kept, self._timeline.current_step)
                self._recent, self._norm = [], None  # one that steps after it has no part in them
            return
        self._rate = self._norm = None
        self.losses.settle(optimizer, has_several=has_several)
        if self._older:
            self._look_back()
        if has_several and id(optimizer) not in self._signalled:
            self._signalled += (id(optimizer),)
            return
        self._takes_signals = False
        self._signalled = ()
        spent_ns = self._signal_ns + self._clock() - now_ns
        self._next_signals_step = self.losses.choose_next_step(now_ns, spent_ns)
        self._signal_ns = 0

    def _is_signal_due(self, now_ns: int) -> bool:
        return now_ns >= self._next_signals_ns or self._timeline.step >= self._next_signals_step

    def scale_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a gradient scaler scales a loss."""
        return args[1] if len(args) > 1 else kwargs.get("outputs")

    def scale_ends(self, given: Any, scaled: Any) -> None:
        """After it. Two that wait for their backward could be mistaken for one another."""
        is_one = self._unscaled is None and type(given) is self._tensor and given.numel() == 1
        self._unscaled = given.detach() if is_one and scaled is not given else None

    def scaler_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any]:
        """Before a gradient scaler's step, which may or may not call the optimizer."""
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        return self._steps.num_updates, optimizer

    def scaler_ends(self, token: tuple[int, Any] | None) -> None:
        """After it: if no optimizer stepped, the update was skipped."""
        if token is not None and self._steps.num_updates == token[0]:
            now_ns = self._clock()
            self._settle(token[1], now_ns)
            self._steps.update_skipped(id(token[1]), now_ns)

    # --- loader, clipping -----------------------------------------------------------------

    def fetch_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Before a loader's next batch; False when this fetch is not ours to time."""
        now_ns = self._clock()
        timeline = self._timeline
        stack = timeline.stack_here()
        if stack is not timeline.stack or timeline.is_inside(DATA) or timeline.is_inside(EVAL):
            return False
        if self._open_optimizer:
            timeline.abort_open(OPTIMIZER, now_ns)
            self._open_optimizer = 0
        is_evaluation = self.is_evaluation is not None and self.is_evaluation(args[0])
        self._fetch_phase = EVAL if is_evaluation else DATA
        if is_evaluation:
            self._steps.evaluation_begins()
        elif not timeline.step_start_ns:
            self._steps.batch_fetch_begins(now_ns)
        timeline.enter(stack, self._fetch_phase, now_ns)
        if timeline.is_sampled:
            timeline.own_ns += self._clock() - now_ns
        return True

    def fetch_ends(self, is_ours: bool | None, batch: Any) -> None:  # noqa: FBT001
        """After a loader's next batch; None when there was none."""
        if not is_ours:
            return
        now_ns = self._clock()
        timeline = self._timeline
        timeline.leave(timeline.stack, self._fetch_phase, now_ns)
        if batch is None:
            self._steps.batch_fetch_was_empty()
        if timeline.is_sampled:
            timeline.own_ns += self._clock() - now_ns

    def clip_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before gradient clipping."""
        timeline = self._timeline
        timeline.enter(timeline.stack_here(), CLIP, self._clock())

    def clip_ends(self, token: None, norm: Any) -> None:
        """After gradient clipping; the norm it returns is a signal worth keeping."""
        timeline = self._timeline
        timeline.leave(timeline.stack_here(), CLIP, self._clock())
        # A sharded norm (DTensor) would need communication to read: only plain tensors are taken.
        if type(norm) is self._tensor and self._takes_signals:
            self.losses.take_norm(norm)
        elif type(norm) is self._tensor:
            self._norm = norm
