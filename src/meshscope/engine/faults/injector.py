"""Makes chosen things go wrong at chosen ranks and steps: a test tool, off by default.

    injector = FaultInjector([parse_fault("slow rank=5 phase=forward ms=20 steps=10-20")],
                             rank, layout.coordinates(rank), attempt=0, record=FaultLog())
    injector.attach(stages)                               # activations and losses that become NaN
    injector.watch_groups({"dp": dp_group, "pp": pp_group})       # slow links, hangs before them
    for step in range(num_steps):
        injector.begin_step(step)
        with injector.phase("data"): …
        executor.run_step(…)      # with record=injector.wrap_recorder(record): each F, B, I, W
        injector.on_gradients(stages.values())            # after they are synchronised
        with injector.phase("optimizer"): …
    injector.close()

`record` gets everything that happens with its true extent, a crash or hang before it comes.
Without faults for this rank each call returns at once, and nothing of torch is touched.

What it is not: delays are on the host. A phase that only queues kernels ends early, and a factor of
it is a factor of the queueing; a slow link holds up the sender, where a real one lets it go on.
"""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshscope.core.layout import Coordinates
from meshscope.core.schedule import Action, ActionKind
from meshscope.engine.faults.kinds import Fault, FaultKind, Phase
from meshscope.engine.faults.links import watch_groups
from meshscope.engine.faults.text import (
    write_fault,
)
from meshscope.engine.pipeline.pipeline import ActionRecorder, NoRecorder
from meshscope.errors import MeshscopeError

_NOTHING: AbstractContextManager[None] = nullcontext()

_PHASES_OF = {
    ActionKind.FORWARD: (Phase.FORWARD,),
    ActionKind.BACKWARD: (Phase.BACKWARD,),
    ActionKind.INPUT_GRAD: (Phase.BACKWARD, Phase.INPUT_GRAD),
    ActionKind.WEIGHT_GRAD: (Phase.WEIGHT_GRAD,),
}


class InjectedFault(MeshscopeError):
    """Raised on purpose, by `crash how=exception`."""


class FaultRecorder(Protocol):
    """Records the faults that happened; `capture.recorder.Recorder` is one."""

    def fault(
        self,
        kind: str,
        *,
        step: int,
        begin_host_mono_ns: int,
        end_host_mono_ns: int | None,
        detail: str,
    ) -> None:
        """`end_host_mono_ns` is None for a crash or a hang, which is recorded before it comes.

        A run of any length has few different details.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpan:
    kind: str
    step: int
    begin_host_mono_ns: int
    end_host_mono_ns: int | None
    """None where it was not over when it was written."""
    detail: str


class FaultLog:
    """Keeps everything in a list."""

    def __init__(self) -> None:
        self.spans: list[FaultSpan] = []

    def fault(self, kind: str, **fields: Any) -> None:
        self.spans.append(FaultSpan(kind=kind, **fields))


class FaultInjector:
    """One rank's faults. Steps are the run's own numbers, counted on over restarts."""

    def __init__(
        self,
        faults: Iterable[Fault],
        rank: int = 0,
        coordinates: Coordinates | None = None,
        attempt: int = 0,
        record: FaultRecorder | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """`device` is where a leak with `device=true` keeps its bytes."""
        here = coordinates or Coordinates()
        self.faults = tuple(fault for fault in faults if fault.concerns(rank, here, attempt))
        """Faults that can happen on this rank in this attempt."""
        self.rank = rank
        self.record: FaultRecorder = record or FaultLog()
        self.device = torch.device(device)
        self.kept: list[object] = []
        """What leaks have kept."""
        self._step = -1
        self._due: tuple[Fault, ...] = ()
        self._happened: set[Fault] = set()
        """Faults that happen once in a step and have happened in this one."""
        self._action: Action | None = None
        self._undo: list[Callable[[], object]] = []

    @property
    def is_waiting(self) -> bool:
        """Whether this rank has faults in this step."""
        return bool(self._due)

    def close(self) -> None:
        """Removes hooks and wrappers, and frees what leaks have kept."""
        while self._undo:
            self._undo.pop()()
        self.kept.clear()
        self._due = ()

    # --- where the engine calls ------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Called first in each step."""
        if not self.faults:
            return
        self._step = step
        self._due = tuple(fault for fault in self.faults if fault.is_due(step))
        self._happened.clear()
        self._action = None
        for fault in self._due:
            if fault.kind is FaultKind.LEAK:
                self._leak(fault)
        for fault in self._find(Phase.STEP):
            self._happen(fault)
            if fault.kind is FaultKind.SLOW:
                self._delay(fault, fault.delay_ns or 0)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around data, optimizer, and without an `action`, forward and backward.

        Nothing happens in phases of other names.
        """
        if not self._due:
            return _NOTHING
        return self._around([fault for fault in self._find(name) if _is_of(fault, None)])

    def action(self, kind: ActionKind, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Around the computation of one action of the pipeline."""
        if not self._due:
            return _NOTHING
        self._action = action = Action(kind, stage, microbatch)
        found = self._find(*_PHASES_OF[kind])
        if kind is ActionKind.WEIGHT_GRAD:
            # Twice as long a backward is twice as long in both halves; 20 ms more come once.
            found += [fault for fault in self._find(Phase.BACKWARD) if fault.factor is not None]
        return self._around([fault for fault in found if _is_of(fault, action)])

    def wrap_recorder(self, record: ActionRecorder | None) -> ActionRecorder:
        """A recorder for the executor that calls `action` inside of each recorded one."""
        inner = record or NoRecorder()
        return _FaultyActions(inner, self) if self.faults else inner

    def before_send(self, peer: int, size_bytes: int = 0, axis: str | None = None) -> None:
        """Before a message to the global rank `peer`; `watch_groups` calls it."""
        self._before(Phase.SEND, (self.rank, peer), size_bytes, axis)

    def before_collective(
        self, ranks: Sequence[int], size_bytes: int = 0, axis: str | None = None
    ) -> None:
        """Before a collective of global ranks; `watch_groups` calls it."""
        self._before(Phase.COLLECTIVE, ranks, size_bytes, axis)

    def on_loss(self, loss: Tensor) -> Tensor:
        """Replaces the loss by NaN, in the graph: gradients become NaN too."""
        return self._spoil(loss, "loss")

    def on_activation(self, activation: Tensor) -> Tensor:
        """Puts NaN into one element of a stage's output."""
        return self._spoil(activation, "activation")

    @torch.no_grad()
    def on_gradients(self, modules: Iterable[nn.Module]) -> None:
        """Puts NaN into one gradient, between synchronisation and optimizer."""
        due = [fault for fault in self._due if _makes_nan(fault, "gradient")]
        if not due:
            return
        named = [pair for module in modules for pair in module.named_parameters()]
        for fault in due:
            start_ns = time.monotonic_ns()
            for name, parameter in named:
                if fault.parameter in name and _put_nan_into(parameter.grad):
                    self._record_span(fault, start_ns, f"gradient of {name}")
                    break

    def attach(self, stages: Mapping[int, nn.Module]) -> None:
        """Calls `on_loss` and `on_activation` with the results of the stages' forwards."""
        if not any(fault.kind is FaultKind.NAN for fault in self.faults):
            return
        for module in stages.values():
            self._undo.append(module.register_forward_hook(self._on_forward).remove)

    def watch_groups(self, groups: Mapping[str, dist.ProcessGroup | None] | None = None) -> None:
        """Has `before_send` and `before_collective` called by what goes through torch's groups.

        `groups`: this rank's, by axis. Sees what Python starts (`torch.distributed.all_reduce`
        and its like), not what C++ does (DDP's reducer, functional collectives, DTensor).
        """
        if not any(_is_of_operations(fault) for fault in self.faults):
            return
        self._undo.append(watch_groups(self, groups or {}))

    # --- what happens ----------------------------------------------------------------------------

    def _find(self, *phases: str) -> list[Fault]:
        return [
            fault
            for fault in self._due
            if fault.point in phases
            and fault.kind not in (FaultKind.LEAK, FaultKind.NAN, FaultKind.SLOW_LINK)
        ]

    @contextmanager
    def _around(self, faults: Sequence[Fault]) -> Iterator[None]:
        for fault in faults:
            self._happen(fault)
        start_ns = time.monotonic_ns()
        yield
        elapsed_ns = time.monotonic_ns() - start_ns
        for fault in faults:
            if fault.kind is FaultKind.SLOW:
                longer_ns = round(((fault.factor or 1) - 1) * elapsed_ns)
                self._delay(fault, fault.delay_ns or longer_ns)

    def _happen(self, fault: Fault) -> None:
        """Runs the faults at the start of a phase, once in a step."""
        if fault in self._happened or fault.kind is FaultKind.SLOW:
            return
        self._happened.add(fault)
        if fault.kind is FaultKind.STALLED_LOADER:
            self._delay(fault, fault.delay_ns or 0)
        elif fault.kind is FaultKind.GC_PAUSE:
            self._collect_garbage(fault)
        elif fault.kind is FaultKind.CRASH:
            self._crash(fault)
        elif fault.kind is FaultKind.HANG:
            self._record_span(fault, time.monotonic_ns(), is_over=False)
            _hang()

    def _before(
        self, phase: Phase, ranks: Sequence[int], size_bytes: int, axis: str | None
    ) -> None:
        for fault in self._due:
            if fault.axis not in (None, axis):
                continue
            if fault.kind is FaultKind.SLOW_LINK:
                if fault.operation in ("all", phase) and _is_between(fault, ranks):
                    transfer_ns = size_bytes * 1e9 / fault.bytes_per_s if fault.bytes_per_s else 0
                    delay_ns = (fault.delay_ns or 0) + round(transfer_ns)
                    self._delay(fault, delay_ns, f"{phase} of {size_bytes} bytes")
            elif fault.point is phase:
                self._happen(fault)

    def _delay(self, fault: Fault, delay_ns: int, what: str = "") -> None:
        start_ns = time.monotonic_ns()
        if fault.burns_cpu:
            while time.monotonic_ns() - start_ns < delay_ns:
                pass
        elif delay_ns > 0:
            time.sleep(delay_ns / 1e9)
        self._record_span(fault, start_ns, what)

    def _leak(self, fault: Fault) -> None:
        start_ns = time.monotonic_ns()
        size_bytes = fault.size_bytes or 0
        # Written to, or the system would not give the pages.
        if fault.on_device:
            self.kept.append(torch.ones(size_bytes, dtype=torch.uint8, device=self.device))
        else:
            self.kept.append(b"\x01" * size_bytes)
        self._record_span(fault, start_ns, f"{size_bytes} bytes kept")

    def _collect_garbage(self, fault: Fault) -> None:
        if fault.delay_ns is not None:
            self._delay(fault, fault.delay_ns)
            return
        start_ns = time.monotonic_ns()
        was_enabled = gc.isenabled()
        gc.disable()  # or it would be collected bit by bit
        _make_garbage(fault.num_objects)
        gc.collect()
        if was_enabled:
            gc.enable()
        self._record_span(fault, start_ns)

    def _crash(self, fault: Fault) -> None:
        self._record_span(fault, time.monotonic_ns(), is_over=False)
        if fault.how == "exception":
            raise InjectedFault(f"injected at step {self._step}: {write_fault(fault)}")
        if fault.how == "exit":
            raise SystemExit(fault.exit_code)
        os.kill(os.getpid(), signal.Signals[fault.how])

    def _on_forward(self, module: nn.Module, _: object, output: Tensor) -> Tensor:
        if not self._due or not torch.is_grad_enabled():
            return output
        return self.on_activation(output) if output.ndim else self.on_loss(output)

    def _spoil(self, made: Tensor, target: str) -> Tensor:
        for fault in self._due:
            if not _makes_nan(fault, target) or fault in self._happened:
                continue
            if not _is_of(fault, self._action):
                continue
            self._happened.add(fault)
            start_ns = time.monotonic_ns()
            factors = torch.ones_like(made)
            _put_nan_into(factors)
            made = made * factors
            self._record_span(fault, start_ns, str(self._action or ""))
        return made

    def _record_span(
        self, fault: Fault, start_ns: int, what: str = "", *, is_over: bool = True
    ) -> None:
        self.record.fault(
            str(fault.kind),
            step=self._step,
            begin_host_mono_ns=start_ns,
            end_host_mono_ns=time.monotonic_ns() if is_over else None,
            detail=write_fault(fault) + (f": {what}" if what else ""),
        )


class _FaultyActions:
    """Recorded actions with faults inside of them."""

    def __init__(self, inner: ActionRecorder, injector: FaultInjector) -> None:
        self._inner = inner
        self._injector = injector

    @contextmanager
    def run(self, action: Action) -> Iterator[None]:
        inside = self._injector.action(action.kind, action.stage, action.microbatch)
        with self._inner.run(action), inside:
            yield

    def wait(self, action: Action) -> AbstractContextManager[object]:
        return self._inner.wait(action)


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)


def _make_garbage(num_objects: int) -> None:
    """Lists that hold themselves; only the collector frees them."""
    for _ in range(num_objects):
        cycle: list[object] = []
        cycle.append(cycle)


def _is_of(fault: Fault, action: Action | None) -> bool:
    if action is None:
        return fault.stage is None and fault.microbatch is None
    return fault.stage in (None, action.stage) and fault.microbatch in (None, action.microbatch)


def _makes_nan(fault: Fault, target: str) -> bool:
    return fault.kind is FaultKind.NAN and fault.target == target


def _put_nan_into(x: Any) -> bool:
    """Puts NaN into the first element; False where this rank has none."""
    local = x.to_local() if hasattr(x, "to_local") else x  # of a DTensor
    if local is None or not local.numel():
        return False
    local[(0,) * local.ndim] = float("nan")
    return True


def _is_of_operations(fault: Fault) -> bool:
    return fault.kind is FaultKind.SLOW_LINK or fault.point in (Phase.SEND, Phase.COLLECTIVE)


def _is_between(fault: Fault, ranks: Sequence[int]) -> bool:
    return fault.link is None or set(fault.link) <= set(ranks)
