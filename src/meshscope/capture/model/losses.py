"""Losses, rates and gradient norms of sampled steps, kept until it is known whose they are.

What backward is called on is not always what the program means by its loss. It may have been
divided by the number of microbatches of a step, multiplied by a gradient scaler, or normalised by
the tokens of the whole step. Which of them is in sight without reading a number from a device:
autograd's last nodes hold the divisor, a scaler is given the loss before it scales it, a model that
names its loss returns it, and what normalises over the step was told by how much. All of that is
stored beside the value; readers decide, as only they know how many microbatches a step had.

With several optimizers, a loss belongs to the one that steps next. So nothing is written before an
optimizer's step has ended; what never gets there (a left-over microbatch) belongs to no step.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from meshscope.capture.steps.scalars import ScalarLog, Signal
from meshscope.capture.steps.timeline import Timeline
from meshscope.store.schema import MISSING, ScalarFlag

_MAX_NODES = 12
"""Nodes between what backward is called on and the loss: a few scalings and casts."""
_PASSING = frozenset(
    ("CloneBackward0", "ToCopyBackward0", "SqueezeBackward0", "ViewBackward0", "AliasBackward0",
     "ReshapeAliasBackward0", "UnsqueezeBackward0")
)  # fmt: skip
"""Nodes that leave a number as it is."""
_REDUCING = frozenset(("MeanBackward0", "SumBackward0"))
"""Those that do if they are given a single one."""
_ITEMS = "num_items_in_batch"
"""What transformers, and loops that follow it, call the tokens of all microbatches of a step."""
_MAX_FRAMES = 16
_IS_HOOKED = True
"""What is assumed where torch does not tell whether a saved tensor has hooks."""
_EVERY_NS = 100_000_000
"""Taking a step's numbers costs microseconds; ten times a second is enough for a curve."""
_SHARE = 1000
"""More often where it costs at most one part in so many."""
_MAX_STRIDE = 1024
_MAX_PENDING = 1024
_MIN_JUMP_RATIO = 0.2
"""By which a loss stands out among those between two samples."""
_MAX_LOOKS = 64
"""Times that all losses between two samples are written, of each of two kinds."""
_MAX_MODELS = 1000
"""Of which the journal is told: a program may make one for every picture."""
_MAX_OPTIMIZERS = 8
"""Optimizers whose losses and rates are kept apart; a program may make one per parameter."""


Kept = tuple[list[Any], Any, Any]
"""What backward was called on in a step, the gradient norm and the rate, or None."""


class Losses:
    """What hooks come across of the training's own numbers, for one recorder."""

    def __init__(
        self,
        torch: Any,
        timeline: Timeline,
        clock: Callable[[], int],
        scalars: ScalarLog,
        journal: Callable[..., None],
    ) -> None:
        self._tensor = torch.Tensor
        self._timeline = timeline
        self._clock = clock
        self._scalars = scalars
        self._journal = journal
        self.list_models: Callable[[], list[Any]] = list
        """The modules whose forwards are timed: they name optimizers."""
        self.reset()

    def reset(self) -> None:
        self._pending: list[Signal] = []
        self._pending_step = 0
        self._returned = -1
        """Autograd's number of the loss that the model returned; -1 without one."""
        self._numbers: dict[int, int] = {}
        """Optimizers by the id of their first parameter: one that is made anew stays the same."""
        self._kept: dict[int, tuple[int, Kept]] = {}
        """By optimizer the last step that was not sampled."""
        self._sampled = (0, 0)
        """Step and time of the last step that was sampled."""
        self._num_looks = [0, 0]
        """How often steps were looked back at that had a loss which was no number, or one that
        stood out."""
        self._num_models = 0
        """Times that the journal was told of another model."""
        self._has_told_model = False
        """When optimizers were replaced last."""
        self._last_steps: dict[int, int] = {}
        """By optimizer the last step that was sampled."""
        self._last_kinds: list[tuple[float, int]] = []
        """Divisor and flags of each loss of the last step that was sampled."""
        self._last_gradients: list[tuple[float, int]] = []
        """The same of what `torch.autograd.grad` was called on."""

    # --- what comes by --------------------------------------------------------------------

    def see_output(self, output: Any) -> None:
        """After a training forward: the model may name its loss."""
        self._returned = -1
        if type(output) is self._tensor or output is None:
            return
        is_dict = isinstance(output, dict)
        loss: Any = output.get("loss") if is_dict else getattr(output, "loss", None)
        if type(loss) is self._tensor and loss.numel() == 1 and loss.grad_fn is not None:
            self._returned = loss.grad_fn._sequence_nr()

    def choose_next_step(self, now_ns: int, spent_ns: int) -> int:
        """The next step to sample, after one that cost so much.

        It is a multiple of a power of two: ranks whose steps take alike sample the same ones, so
        that there is a median over ranks.
        """
        step, (last_step, last_ns) = self._timeline.current_step, self._sampled
        self._sampled = (step, now_ns)
        step_ns = (now_ns - last_ns) // max(step - last_step, 1)
        stride = 1
        while stride * step_ns < min(_EVERY_NS, _SHARE * spent_ns) and stride < _MAX_STRIDE:
            stride *= 2
        return (step // stride + 1) * stride

    # --- a sampled step -------------------------------------------------------------------

    def begin(self) -> None:
        """The first backward of a step."""
        self._write_pending()
        self._pending_step = self._timeline.step
        self._last_kinds, self._last_gradients = [], []

    def _write_pending(self) -> None:
        """Without an optimizer's step, the end of the program's own step settles whose they are."""
        pending, self._pending = self._pending, []
        if self._pending_step <= self._timeline.last_step:
            for signal in pending:
                self._write(signal, 1, self._pending_step)

    def take(
        self,
        roots: Any,
        unscaled: Any,
        *,
        is_normalized: bool,
        is_gradient: bool,
        is_further: bool = False,
    ) -> None:
        """What backward is called on, and what a gradient scaler was given for it, or None.

        `is_further`: of the same forward as the backward before.
        """
        if self._scalars.look_at_loss is not None:
            self._scalars.look_at_loss(roots)
        root = roots[0] if isinstance(roots, (list, tuple)) and len(roots) == 1 else roots
        if type(root) is not self._tensor or root.numel() != 1:
            return
        loss, node = root, root.grad_fn
        if unscaled is not None and node is not None:
            loss, node = unscaled, node.next_functions[0][0]
        signal = Signal("backward_loss", loss.detach(), self._clock(), self._timeline.microbatch)
        signal.divisor, is_returned = _find_divisor(node, self._returned)
        signal.flags = (
            is_returned * ScalarFlag.RETURNED
            | (is_normalized or _is_told_items()) * ScalarFlag.NORMALIZED
            | (loss is not root) * ScalarFlag.UNSCALED
            | is_gradient * ScalarFlag.GRADIENT
            | is_further * ScalarFlag.FURTHER
        )
        kinds = self._last_gradients if is_gradient else self._last_kinds
        if len(kinds) < _MAX_PENDING:
            kinds.append((signal.divisor, signal.flags))
        self._add(signal)

    def forget_loss(self) -> None:
        """The backward under way raised: the loss it was called on led to no update."""
        last = self._pending[-1] if self._pending else None
        here = ("backward_loss", self._timeline.microbatch)
        if last is not None and (last.name, last.microbatch) == here:
            self._pending.pop()

    def take_norm(self, norm: Any) -> None:
        """What clipping returned."""
        self._add(Signal("grad_norm", norm, self._clock(), self._timeline.microbatch))

    def take_rate(self, optimizer: Any) -> None:
        """The rate of an optimizer that steps inside of backward, parameter by parameter."""
        if not any(signal.name == "lr" for signal in self._pending):
            rate = optimizer.param_groups[0].get("lr")
            self._add(Signal("lr", rate, self._clock(), self._timeline.microbatch))

    def _add(self, signal: Signal) -> None:
        if len(self._pending) < _MAX_PENDING:
            self._pending.append(signal)

    def settle(self, optimizer: Any, *, has_several: bool) -> None:
        """An optimizer has stepped: what is pending is its own."""
        number = self._number(optimizer) if has_several else 1
        pending, self._pending = self._pending, []
        if optimizer is not None:
            rate = optimizer.param_groups[0].get("lr")
            pending.append(Signal("lr", rate, self._clock(), self._timeline.microbatch))
        self._last_steps[number] = self._timeline.current_step
        self._kept.pop(number, None)
        for signal in pending:
            self._write(signal, number, self._timeline.current_step)
        if has_several:  # those that step less often have not stepped in a sampled step
            self._write_kept()

    def _write(self, signal: Signal, number: int, step: int) -> None:
        if not number:
            return
        name = signal.name if number == 1 else f"{signal.name} {number}"
        self._scalars.take_signal(name, step, signal)

    def _number(self, optimizer: Any) -> int:
        """1 for the first optimizer that stepped; 0 beyond the most that are kept apart."""
        if optimizer is None:
            return 1
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        number = self._numbers.get(id(first))
        if number is None:
            number = len(self._numbers) + 1
            if number > _MAX_OPTIMIZERS:
                return 0
            self._numbers[id(first)] = number
            self._journal("update", optimizer=self._describe(number, optimizer, first))
        return number

    def forget_optimizers(self, *, is_new_model: bool) -> None:
        """Others take over: their series go on with those of before. A loss of another model is no
        course of the one before it: the journal says from which step on."""
        self._numbers.clear()
        self._kept.clear()
        self._has_told_model = is_new_model and self._num_models < _MAX_MODELS
        if self._has_told_model:
            self._num_models += 1
            self._journal("update", new_model_step=self._timeline.step)

    def go_on_with_model(self) -> None:
        """The one of before trains on: what was taken for another one trains beside it."""
        if self._has_told_model:
            self._has_told_model = False
            self._journal("update", new_model_step=MISSING)

    def _describe(self, number: int, optimizer: Any, parameter: Any) -> dict[str, object]:
        models = (
            type(model).__name__
            for model in self.list_models()
            if any(one is parameter for one in model.parameters())
        )
        return {"number": number, "class": type(optimizer).__name__, "model": next(models, "")}

    # --- steps that are not sampled -------------------------------------------------------

    def keep(self, optimizer: Any, numbers: Kept, step: int) -> None:
        """The numbers of a step that is not sampled: it may turn out to be the last one."""
        number = self._number(optimizer)
        if step > self._last_steps.get(number, -1):
            self._kept[number] = (step, numbers)

    def look_back(self, losses_by_step: Mapping[int, list[float]]) -> None:
        """Writes the losses, on the host, of steps that were not sampled, if one stands out.

        A NaN shows where it comes from only in its first step, and a spike lasts one.
        """
        now_ns = self._clock()
        values = [loss for losses in losses_by_step.values() for loss in losses]
        finite = sorted(value for value in values if math.isfinite(value))
        is_finite = len(finite) == len(values)
        usual = finite[len(finite) // 2] if finite else 0.0
        margin = _MIN_JUMP_RATIO * abs(usual)
        if is_finite and not (
            finite and (finite[-1] > usual + margin or finite[0] < usual - margin)
        ):
            return
        if self._num_looks[is_finite] >= _MAX_LOOKS:
            return
        self._num_looks[is_finite] += 1
        for step, losses in losses_by_step.items():
            self._write_losses(losses, 1, step, now_ns)
        last, numbers = self._kept.get(1, (-1, ([], None, None)))
        if last in losses_by_step:  # once is enough: some losses of a step are added up
            self._kept[1] = (last, ([], *numbers[1:]))

    def _write_losses(self, losses: Sequence[Any], number: int, step: int, now_ns: int) -> None:
        """What the program divides by is taken to be what it was in the last sampled step."""
        kinds = self._last_kinds or self._last_gradients or [(0.0, 0)]
        for microbatch, loss in enumerate(losses):
            signal = Signal("backward_loss", loss, now_ns, microbatch)
            signal.divisor, signal.flags = kinds[min(microbatch, len(kinds) - 1)]
            self._write(signal, number, step)

    def write_last(self) -> None:
        """At the end: the numbers of the last step, if it was not sampled."""
        self._write_pending()
        self._write_kept()

    def _write_kept(self) -> None:
        """What is kept of steps that were not sampled."""
        for number, (step, (losses, norm, rate)) in self._kept.items():
            self._last_steps[number] = step
            now_ns = self._clock()
            self._write_losses(losses if _are_readable(losses) else (), number, step, now_ns)
            for name, value in (("grad_norm", norm), ("lr", rate)):
                self._write(Signal(name, value, now_ns, len(losses)), number, step)
        self._kept.clear()


def _are_readable(losses: list[Any]) -> bool:
    """Whether they still hold what they held: a CUDA graph may have used their memory again."""
    try:
        for loss in losses:
            if not loss.is_cpu:  # what torch.func wraps has no address, but its value
                loss.data_ptr()
    except RuntimeError:  # what torch raises then
        return False
    return True


def _is_told_items() -> bool:
    """Whether whoever called backward normalises the loss by the tokens of the whole step."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if _ITEMS in frame.f_code.co_varnames:
            return frame.f_locals.get(_ITEMS) is not None
        frame = frame.f_back
    return False


def _find_divisor(node: Any, returned: int) -> tuple[float, bool]:
    """By what the program divided its loss before it called backward, as far as autograd's nodes
    say so on the host (0.0 where they do not), and whether that loss is the one the model returned.
    """
    divisor, is_scaled = 1.0, False
    for _ in range(_MAX_NODES):
        if node is None:
            break
        if node._sequence_nr() == returned:
            return divisor, True
        name = node.name()
        if name in ("DivBackward0", "MulBackward0"):
            # Hooks on saved tensors may compute again, or work only once: they are not called.
            if getattr(node._raw_saved_other, "unpack_hook", _IS_HOOKED) is not None:
                break
            other = node._saved_other
            if other is None or other.device.type != "cpu" or other.numel() != 1:
                break
            factor = float(other)
            if not factor:
                break
            divisor = divisor * factor if name == "DivBackward0" else divisor / factor
            is_scaled = True
        elif name not in _PASSING and not (
            name in _REDUCING and all(size == 1 for size in node._saved_self_sym_sizes)
        ):
            break
        node = node.next_functions[0][0]
    return divisor if is_scaled else 0.0, False
