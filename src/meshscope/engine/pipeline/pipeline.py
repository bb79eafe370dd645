"""Runs a pipeline schedule, whichever it is: one rank's row of actions, one after the other.

    executor = PipelineExecutor(schedule, stages, pp_group, hidden_shape=stage.hidden_shape(4))
    losses = executor.run_step([(inputs, targets), …])     # gradients are in the parameters

A stage is a module that maps its input to a hidden state; the last one is called with the targets
too and gives the loss, a scalar. The step's loss is the weighted sum of the microbatches' losses,
by default their mean. Stages that follow each other on one rank hand over without sending.

Between forward and backward a microbatch holds its input and its autograd graph, nothing else:
outputs go when they have been sent. W is what `put_off_gradients` leaves for later, so of layers
that do not take part in it (plain `nn.Linear`, norms, embeddings) the weight gradients are computed
in I; that is correct with any layer, and the split's gain is that of the others.

Gradients stay where they were computed: a table tied over first and last stage, parts of a sequence
and data-parallel copies are for the caller to sum.

Wrong where stages talk past the pipeline (skip connections), or microbatches differ in size.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshscope.core.config.memory_model import MAX_RECEIVES_AHEAD
from meshscope.core.schedule import (
    Action,
    ActionKind,
    Output,
    Product,
    Schedule,
    output_of,
    require_valid,
)
from meshscope.core.schedule_transfers import Transfer, order_transfers
from meshscope.engine.model.put_off_gradients import LaterGradients, PutOffGradients
from meshscope.engine.model.tensor_parallel import put_off_weight_gradients
from meshscope.engine.pipeline.transfers import DirectTransfers, StepTransfers
from meshscope.errors import MeshscopeError, UsageError

Microbatch = tuple[Tensor | None, Tensor | None]
"""Inputs and targets; None on ranks that hold neither the first nor the last stage."""


class PipelineError(MeshscopeError):
    """An action failed. The other ranks wait for what it would have made, up to their timeout."""


class ActionRecorder(Protocol):
    """Records what a rank does; both are entered and left once for each call."""

    def run(self, action: Action) -> AbstractContextManager[object]:
        """Around the computation of an action."""

    def wait(self, action: Action) -> AbstractContextManager[object]:
        """Around waiting for what it needs from another rank, just before it."""


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """When an action ran, or was waited for."""

    action: Action
    begin_host_mono_ns: int
    end_host_mono_ns: int


class ActionLog:
    """Keeps everything in lists: for tests, measurements and small runs."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self.runs: list[ActionSpan] = []
        self.waits: list[ActionSpan] = []

    def run(self, action: Action) -> AbstractContextManager[None]:
        return self._span(action, self.runs)

    def wait(self, action: Action) -> AbstractContextManager[None]:
        return self._span(action, self.waits)

    @contextmanager
    def _span(self, action: Action, spans: list[ActionSpan]) -> Iterator[None]:
        start_ns = self._clock()
        yield
        spans.append(ActionSpan(action, start_ns, self._clock()))


class Transfers(Protocol):
    """Brings what other pipeline ranks make here, and takes there what this one makes."""

    def issue_ahead(self) -> None:
        """Begins to receive what nothing needs yet."""

    def receive(self, output: Output) -> Tensor:
        """Waits for what another rank made."""

    def send(self, output: Output, tensor: Tensor) -> None:
        """Begins to send; `tensor` must not change any more."""

    def finish(self) -> None:
        """Waits until everything sent has been taken."""


class NoRecorder:
    def run(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext()


class PipelineExecutor:
    """One rank's part in a schedule. Every rank of the group makes one and runs the same steps."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        pp_group: dist.ProcessGroup | None = None,
        *,
        hidden_shape: Sequence[int] | Mapping[int, Sequence[int]] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        record: ActionRecorder | None = None,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        put_off: Mapping[int, PutOffGradients] | None = None,
        max_receives_ahead: int = MAX_RECEIVES_AHEAD,
    ) -> None:
        """`stages`: this rank's, by index. `hidden_shape`: what one stage hands to the next, for
        one microbatch; a mapping gives it for each stage's output where they differ.
        `forward_context` is entered for forwards only, such as autocast. `put_off` tells how
        modules of one's own leave weight gradients for W."""
        self.schedule = require_valid(schedule)
        self.rank = 0 if pp_group is None else pp_group.rank()
        num_ranks = 1 if pp_group is None else pp_group.size()
        _check_placement(schedule, stages, self.rank, num_ranks)
        self.stages = dict(stages)
        self.device = torch.device(device)
        self.dtype = dtype
        self.record: ActionRecorder = record or NoRecorder()
        self.forward_context = forward_context
        self.peak_activations = 0
        """The most stage activations held at once in the latest step; in stages × microbatches."""
        self._group = pp_group if num_ranks > 1 else None
        # gloo sends and receives in the host's memory only.
        is_gloo = self._group is not None and dist.get_backend(self._group) == "gloo"
        self.wire_device = torch.device("cpu") if is_gloo else self.device
        self._hidden_shape = hidden_shape
        self._max_receives_ahead = max_receives_ahead
        split = {a.stage for a in schedule.actions[self.rank] if a.kind is ActionKind.INPUT_GRAD}
        self.put_off = {
            stage: (put_off or {}).get(stage) or put_off_weight_gradients(self.stages[stage])
            for stage in sorted(split)
        }
        self._transfers = order_transfers(schedule)
        self._forwards = _keep_forwards(schedule)
        self._forward_transfers = order_transfers(self._forwards)
        self._failure = ""

    def run_step(
        self, microbatches: Sequence[Microbatch], *, loss_weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Forward and backward of all microbatches; adds to the parameters' gradients.

        Hands back the loss of each microbatch, unweighted, where the last stage is, and nothing
        elsewhere. `loss_weights`, by default 1/m each, are the losses' parts in the step's loss:
        for microbatches of unequal numbers of targets, and for the factor of a gradient scaler.
        """
        if not torch.is_grad_enabled():
            raise UsageError("gradients are off, but a step needs them; call evaluate instead")
        num_microbatches = self.schedule.num_microbatches
        weights = loss_weights or [1 / num_microbatches] * num_microbatches
        _check_count("loss_weights", len(weights), num_microbatches)
        step = self._begin(self.schedule, self._transfers, microbatches)
        step.loss_weights = weights
        self._run(step)
        self.peak_activations = step.peak_activations
        return step.take_results()

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Forwards only: losses, or without targets the last stage's outputs, where it is.

        On gloo what was sent is held until the end. Modes (`eval()`) are the caller's.
        """
        step = self._begin(self._forwards, self._forward_transfers, microbatches)
        self._run(step)
        return step.take_results()

    def begin_by_hand(
        self, microbatches: Sequence[Microbatch], loss_weights: Sequence[float] | None = None
    ) -> "PipelineStep":
        """A step whose actions the caller runs, in one order of microbatches on all ranks."""
        num_microbatches = self.schedule.num_microbatches
        step = self._begin(self.schedule, (), microbatches, is_by_hand=True)
        step.loss_weights = loss_weights or [1 / num_microbatches] * num_microbatches
        return step

    def shape_after(self, stage: int) -> tuple[int, ...]:
        """The shape of what `stage` hands to the next one."""
        shape = self._hidden_shape
        if isinstance(shape, Mapping):
            if stage not in shape:
                raise UsageError(
                    f"hidden_shape has no shape for stage {stage}'s output, only for "
                    f"{sorted(shape)}; add it"
                )
            shape = shape[stage]
        return tuple(shape)

    def _begin(
        self,
        schedule: Schedule,
        transfers: Sequence[Transfer],
        microbatches: Sequence[Microbatch],
        *,
        is_by_hand: bool = False,
    ) -> "PipelineStep":
        if self._failure:
            raise PipelineError(
                f"an earlier step failed ({self._failure}), and the ranks are no longer in step; "
                f"start the processes again"
            )
        _check_count("microbatches", len(microbatches), schedule.num_microbatches)
        queue: Transfers | None = None
        if self._group is not None and is_by_hand:
            queue = DirectTransfers(schedule, self._group, self._make_buffer)
        elif self._group is not None:
            queue = StepTransfers(
                transfers, self._group, self._make_buffer, max_ahead=self._max_receives_ahead
            )
        return PipelineStep(self, schedule, queue, microbatches)

    def _run(self, step: "PipelineStep") -> None:
        try:
            step.run_all()
        except BaseException as error:
            self.note_failure(str(error) or type(error).__name__)
            raise

    def note_failure(self, what: str) -> None:
        """Later steps raise: receives that are still out would take the next step's data."""
        if self._group is not None:
            self._failure = self._failure or what

    def _make_buffer(self, output: Output) -> Tensor:
        product, stage, _ = output
        sender = stage if product is Product.ACTIVATION else stage - 1
        return torch.empty(self.shape_after(sender), dtype=self.dtype, device=self.wire_device)


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """What a microbatch leaves at a stage for its backward."""

    input: Tensor | None
    """None at the first stage, whose input needs no gradient."""
    edge: GradientEdge | None
    """Where backward begins; None when nothing in the stage needs a gradient, and after I."""
    loss_grad: Tensor | None = None
    """At the last stage, what backward begins with."""
    later: LaterGradients | None = None
    """After I."""


class PipelineStep:
    """One run over the schedule, all at once or action by action."""

    def __init__(
        self,
        executor: PipelineExecutor,
        schedule: Schedule,
        transfers: "Transfers | None",
        microbatches: Sequence[Microbatch],
    ) -> None:
        self.loss_weights: Sequence[float] = ()
        self.peak_activations = 0
        self._executor = executor
        self._schedule = schedule
        self._last = schedule.num_stages - 1
        self._transfers = transfers
        self._microbatches = microbatches
        self._live: dict[tuple[int, int], _Forwarded] = {}
        self._has_begun: set[tuple[int, int]] = set()
        """Stages and microbatches whose forward has been called."""
        self._handed_over: dict[Output, Tensor] = {}
        self._results: dict[int, Tensor] = {}
        self._awaited: Output | None = None
        self._compute = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUT_GRAD: self._input_grad,
            ActionKind.WEIGHT_GRAD: self._weight_grad,
        }

    def run_all(self) -> None:
        for action in self._schedule.actions[self._executor.rank]:
            self.run(action)
        self.finish()

    def run(self, action: Action) -> None:
        """One action; what it needs has been run, here or on another rank."""
        self._check_turn(action)
        with self._naming(action):
            self._run(action)

    def finish(self) -> None:
        """Waits until everything sent has been taken. Raises UsageError while something is left."""
        self._check_complete()
        if self._transfers is not None:
            with self._naming(None):
                self._transfers.finish()

    def take_results(self) -> list[Tensor]:
        """What the last stage made of each microbatch that has come there."""
        return [self._results[index] for index in sorted(self._results)]

    def result(self, index: int) -> Tensor:
        """What the last stage, which is on this rank, made of one microbatch."""
        return self._results[index]

    def _check_turn(self, action: Action) -> None:
        """Before anything is sent or awaited, so that a caller who drives by hand may go on."""
        key = action.stage, action.microbatch
        if action.kind is ActionKind.FORWARD:
            if key in self._has_begun:
                raise UsageError(f"{_describe(action)} has been called before; call it once a step")
            self._has_begun.add(key)
        elif key not in self._live:
            why = "its backward has been called" if key in self._has_begun else "it had no forward"
            raise UsageError(
                f"{_describe(action)} was called, but {why}; call forward, then backward, once each"
            )

    def _check_complete(self) -> None:
        num_microbatches = self._schedule.num_microbatches
        everything = {(s, i) for s in self._executor.stages for i in range(num_microbatches)}
        problems = [
            f"{what} of microbatches {', '.join(map(str, sorted({i for _, i in left})))}"
            for what, left in (
                ("forward", everything - self._has_begun),
                ("backward", self._live),
            )
            if left
        ]
        if problems:
            raise UsageError(
                f"the step is not complete: it had no {' and no '.join(problems)}; call these first"
            )

    def _run(self, action: Action) -> None:
        received = self._take(action)
        if self._transfers is not None:
            self._transfers.issue_ahead()
        with self._executor.record.run(action):
            made = self._compute[action.kind](action, received)
        if made is not None:
            self._hand_over(output_of(action), made)

    def _take(self, action: Action) -> Tensor | None:
        """What another stage made for this action; waits where that was on another rank."""
        for output in self._schedule.needs(action):
            if output[1] == action.stage:
                continue
            if output in self._handed_over:
                return self._handed_over.pop(output)
            assert self._transfers is not None, "with one rank all is handed over"
            self._awaited = output
            with self._executor.record.wait(action):
                received = self._transfers.receive(output)
            self._awaited = None
            return received.to(self._executor.device)
        return None

    def _hand_over(self, output: Output, made: Tensor) -> None:
        product, stage, _ = output
        user = stage + 1 if product is Product.ACTIVATION else stage - 1
        if self._schedule.stage_ranks[user] == self._executor.rank:
            self._handed_over[output] = made
            return
        expected = self._executor.shape_after(min(stage, user))
        if tuple(made.shape) != expected or made.dtype != self._executor.dtype:
            raise UsageError(
                f"stage {stage} made {made.dtype} of shape {tuple(made.shape)}, but stage {user} "
                f"waits for {self._executor.dtype} of shape {expected}; correct hidden_shape and "
                f"dtype, or make all microbatches the same size"
            )
        assert self._transfers is not None, "with one rank all is handed over"
        self._transfers.send(output, made.to(self._executor.wire_device).contiguous())

    def _forward(self, action: Action, received: Tensor | None) -> Tensor | None:
        stage, index = action.stage, action.microbatch
        is_training = torch.is_grad_enabled()
        inputs, targets = self._microbatches[index]
        x = received if stage > 0 else inputs
        if x is None:
            raise UsageError(
                f"microbatch {index} has no inputs; give them where the first stage is"
            )
        if stage > 0 and is_training:
            x.requires_grad_()
        module = self._executor.stages[stage]
        with self._executor.forward_context():
            if stage < self._last or targets is None:
                output: Tensor = module(x)
            else:
                output = module(x, targets)
        if is_training:
            loss_grad = self._weigh(output, index, targets) if stage == self._last else None
            self._live[stage, index] = _Forwarded(
                input=x if stage > 0 else None,
                edge=get_gradient_edge(output) if output.requires_grad else None,
                loss_grad=loss_grad,
            )
            self.peak_activations = max(self.peak_activations, len(self._live))
        if stage == self._last:
            self._results[index] = output.detach()
            return None
        return output.detach()

    def _weigh(self, loss: Tensor, index: int, targets: Tensor | None) -> Tensor:
        """The gradient of the step's loss by that of one microbatch."""
        if targets is None or loss.ndim:
            found = "no targets" if targets is None else f"a loss of shape {tuple(loss.shape)}"
            raise UsageError(
                f"microbatch {index} has {found}, but the last stage must make a scalar from its "
                f"input and the targets; give targets where the last stage is"
            )
        return torch.full_like(loss, self.loss_weights[index])

    def _backward(self, action: Action, received: Tensor | None) -> Tensor | None:
        saved = self._live.pop((action.stage, action.microbatch))
        return _run_backward(saved, received)

    def _input_grad(self, action: Action, received: Tensor | None) -> Tensor | None:
        saved = self._live[action.stage, action.microbatch]
        with self._executor.put_off[action.stage].collect() as later:
            made = _run_backward(saved, received)
        self._live[action.stage, action.microbatch] = replace(
            saved, input=None, edge=None, loss_grad=None, later=later
        )
        return made

    def _weight_grad(self, action: Action, _: Tensor | None) -> None:
        later = self._live.pop((action.stage, action.microbatch)).later
        assert later is not None, "a valid schedule has I before W"
        later.compute()

    @contextmanager
    def _naming(self, action: Action | None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            what = "waiting for the last sends" if action is None else _describe(action)
            if self._awaited is not None:
                product, stage, _ = self._awaited
                what += (
                    f", waiting for the {product.name.lower()} of stage {stage} from pipeline rank "
                    f"{self._schedule.stage_ranks[stage]},"
                )
            message = (
                f"{what} failed on pipeline rank {self._executor.rank}, schedule "
                f"{self._schedule.name}: {type(error).__name__}: {error}"
            )
            self._executor.note_failure(message)
            raise PipelineError(message) from error


_KIND_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "input gradient",
    ActionKind.WEIGHT_GRAD: "weight gradient",
}


def _describe(action: Action) -> str:
    name = _KIND_NAMES[action.kind]
    return f"{action} ({name} of stage {action.stage}, microbatch {action.microbatch})"


def _run_backward(saved: _Forwarded, received: Tensor | None) -> Tensor | None:
    """The gradient of the stage's input; None at the first stage."""
    grad = saved.loss_grad if received is None else received
    if saved.edge is not None:
        torch.autograd.backward([saved.edge], [grad])
    if saved.input is None:
        return None
    # A stage may not use its input; the one before still waits for a gradient.
    return torch.zeros_like(saved.input) if saved.input.grad is None else saved.input.grad


def _keep_forwards(schedule: Schedule) -> Schedule:
    rows = [[a for a in row if a.kind is ActionKind.FORWARD] for row in schedule.actions]
    return replace(schedule, actions=tuple(tuple(row) for row in rows))


def _check_placement(
    schedule: Schedule, stages: Mapping[int, nn.Module], rank: int, num_ranks: int
) -> None:
    problems = []
    if num_ranks != schedule.num_ranks:
        problems.append(
            f"schedule {schedule.name} is for {schedule.num_ranks} pipeline ranks, but the group "
            f"has {num_ranks}; build it for {num_ranks}"
        )
    elif sorted(stages) != list(schedule.stages_of(rank)):
        problems.append(
            f"pipeline rank {rank} got stages {sorted(stages)}, but schedule {schedule.name} "
            f"places {list(schedule.stages_of(rank))} there; build these"
        )
    if problems:
        raise UsageError("; ".join(problems))


def _check_count(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise UsageError(
            f"got {found} {what}, but the schedule has {expected} microbatches; give that many"
        )
