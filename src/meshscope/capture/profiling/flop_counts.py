"""Counts the FLOPs of a few steps of any program, from the operators that it runs anyway.

    step 6: watched and counted    12, 36: again, if that costs less than a thousandth of the run
    30, 60, 180 where a CUDA device is in use, between the first two samples of its kernels

Torch's oldest profiler notes names and shapes, in C++, on the training thread and the engine's: no
code of the program runs again, nothing is copied, no device is asked. In the steps after a watched
one its events are added up, a few in each (`operator_events`), and the median of the steps so far
goes into the journal, for HFU with what was computed again. A watched step takes 2 µs longer for
each begin and end of an operator, once: a program of many small ones sees a step of several times
its length. By more than 3 %, readers leave it out, as those of a trace window. How many there will
be is known before: autograd numbers its nodes, and a step of so many that watching it would take
more than a tenth of it, and more than about 0.15 s, is not watched; reports say so.

Nothing is counted where the program says its FLOPs itself, uses a profiler of its own, or takes
so long for a step that the events would fill its memory. The dtype of the products, which decides
the peak, is that of the graph below a loss, else that of the parameters where it is a half one.
"""

import statistics
import sys
from collections.abc import Iterator
from threading import get_ident
from typing import Any

from meshscope.capture.memory.object_reserve import ObjectReserve
from meshscope.capture.model.model_facts import PER_STEP, ModelFacts
from meshscope.capture.model.operator_events import OperatorCount, count_events, find_graph_dtype
from meshscope.capture.profiling.kernel_window import ProfilerGate
from meshscope.capture.session import Session
from meshscope.capture.steps.model_search import list_parameters
from meshscope.capture.watching import Watching

SITE = "FLOP counts"
FIRST_STEP = 6
"""After so many steps the first one is counted: the first steps are not like the others."""
DEVICE_FIRST_STEP = 30
"""Where a CUDA device is in use. A watched step launches up to a fifth slower, and a device may
wait for that: not in a run so short that it has no kernel sample either, which costs more."""
_FACTORS = (2, 3, 3, 3, 3, 3, 3)
_MAX_COUNTS = 3
_MAX_SHARE = 0.001
"""Of the run's time that counts after the first one may take."""
_COUNTING_SHARE = 0.002
"""Of a step's time that counting may take, in the steps after the watched one."""
_LEAST_COUNTING_NS = 20_000
"""What it may take in any case. What is left when the recording ends is counted then."""
_MOST_COUNTING_NS = 200_000_000
"""Where the recording ends before a count did."""
_EVENT_NS = 1_500
"""What noting an event takes."""
_EVENTS_PER_NODE = 30
"""Begins and ends of operators, forward and backward, for a node of autograd's graph: 17 to 54 in
an LSTM cell, a transformer and a small network."""
_LEAST_MAX_EVENTS = 60_000
"""That are noted however short the step is: a transformer of 30 layers."""
_MAX_STEP_SHARE = 0.1
"""Of a step that noting may take where there are more."""
_MAX_DISTURBANCE = 0.03
"""Of a step: from here on readers leave it out."""
_MAX_STEP_NS = 10_000_000_000
NEVER_NS = 1 << 62
_NUM_OBJECTS = 48
"""That a count makes and keeps until it is over."""
_HALF = ("torch.bfloat16", "torch.float16")


def _uses_device() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _count_nodes() -> int:
    """Nodes of autograd's graph that this thread has made so far; 0 where torch does not tell."""
    torch: Any = sys.modules.get("torch")
    functions = getattr(getattr(torch, "_C", None), "_autograd", None)
    count = getattr(functions, "_get_sequence_nr", None)
    return 0 if count is None else int(count())


class FlopCounts:
    """The counts of one rank, moved on where steps end."""

    def __init__(self, session: Session, facts: ModelFacts, watching: Watching) -> None:
        self._session = session
        self._facts = facts
        self._watching = watching
        self._gate = ProfilerGate(self.give_way)
        self._reserve = ObjectReserve(_NUM_OBJECTS)
        self._is_over = False
        self._thread = 0
        """The one whose operators are watched; 0 while none is."""
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._counts: list[OperatorCount] = []
        self._steps: list[int] = []
        self._num_tries = 0
        self._first_step: int | None = None
        self._next = FIRST_STEP
        self._start_ns = self._window_ns = self._cost_ns = 0
        self._first_node = 0
        """Autograd's number at the end of the first step."""
        self._last_step = -1
        self._shortest_ns = _MAX_STEP_NS
        self._dtype: str | None = None
        self._counting: Iterator[OperatorCount | None] | None = None
        """The events of the last step that was watched, while they are counted."""
        self._counted_step = self._counting_ns = 0

    @property
    def is_open(self) -> bool:
        """Whether torch's profiler is in use by a count."""
        return self._thread != 0

    def warm_up(self) -> None:
        """Makes ahead of the first step what a count needs."""
        torch: Any = sys.modules.get("torch")
        if torch is not None and not self._is_over and self._session.config.flop_counts:
            self._gate.install(torch)
            self._reserve.fill()

    def begin_attempt(self) -> None:
        self.give_way()
        self._begin_attempt()

    def visit(self, step: int, start_ns: int, end_ns: int, *, may_begin: bool) -> int:
        """Called where a step has ended; the time to call again, 0 for the next step."""
        if self._is_over or step == self._last_step:
            return NEVER_NS
        if self._first_step is None:
            self._first_step, self._start_ns = step, end_ns
            self._first_node = _count_nodes()
            if _uses_device():
                self._next = DEVICE_FIRST_STEP
        self._last_step = step
        next_ns = self._session.guard.run(SITE, self._move, step, end_ns - start_ns, may_begin)
        if next_ns is None:  # it raised
            self._end_for_good()
        return NEVER_NS if next_ns is None else next_ns

    def _move(self, step: int, step_ns: int, may_begin: bool) -> int:  # noqa: FBT001 - of one caller
        if self._thread:
            if self._thread == get_ident():
                self._end(step)
            return 0
        if self._counting is not None:
            self._count(max(int(step_ns * _COUNTING_SHARE), _LEAST_COUNTING_NS))
            return NEVER_NS if self._is_over else 0
        done = step + 1 - (self._first_step or 0)
        if "flops" in self._facts.lines and not self._counts:
            self._is_over = True  # the program has said it
            return NEVER_NS
        self._shortest_ns = min(self._shortest_ns, step_ns)  # one that was held up tells little
        if done < self._next:
            pause_ns = max(self._next - done - 1, 0) * self._shortest_ns // 2
            return self._session.clock() + pause_ns if pause_ns else 0
        return 0 if may_begin and self._begin(step_ns) else self._wait_longer(done)

    def _wait_longer(self, done: int) -> int:
        self._next = max(done + 1, self._next * 2)
        self._num_tries += 1
        self._is_over = self._num_tries > len(_FACTORS)
        return NEVER_NS if self._is_over else 0

    def _begin(self, step_ns: int) -> bool:
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return False  # steps by hand, of a program without torch
        now_ns = self._session.clock()
        is_cheap = self._cost_ns <= (now_ns - self._start_ns) * _MAX_SHARE
        if step_ns > _MAX_STEP_NS or not (is_cheap or not self._counts):
            return False
        functions = torch._C._autograd
        if not hasattr(functions, "_enable_profiler_legacy") or not self._gate.install(torch):
            self._is_over = True
            return False
        if self._gate.is_program_profiling or torch.autograd._profiler_enabled():
            return False
        if self._is_too_long(step_ns):
            self._is_over = True
            return False
        kinds = torch._C._profiler
        config = kinds.ProfilerConfig(
            kinds.ProfilerState.CPU, True, False, False, False, False, kinds._ExperimentalConfig()
        )
        if self._dtype is None:
            self._session.scalars.look_at_loss = self._see_loss
            if self._watching.hooks is not None:
                self._watching.hooks.ask_for_signals()
        self._reserve.spend()
        self._window_ns = now_ns
        functions._enable_profiler_legacy(config)
        self._thread = get_ident()
        return True

    def _is_too_long(self, step_ns: int) -> bool:
        """Whether so many operators run in a step that watching one would be felt."""
        num_steps = max(self._last_step - (self._first_step or 0), 1)
        num_events = (_count_nodes() - self._first_node) // num_steps * _EVENTS_PER_NODE
        if num_events <= max(_LEAST_MAX_EVENTS, step_ns * _MAX_STEP_SHARE / _EVENT_NS):
            return False
        self._gate.remove()
        self._session.journal("update", flop_refusal={"num_events": num_events})
        return True

    def _stop(self) -> Any:
        self._thread = 0
        return sys.modules["torch"]._C._autograd._disable_profiler_legacy()

    def _end(self, step: int) -> None:
        """Watching ends with the step; its events are counted from here on, a few in each step."""
        start_ns = self._session.clock()
        events = self._stop()
        num_events = sum(map(len, events))
        fields = {
            "number": self._num_tries,
            "reason": "a count of FLOPs",
            "disturbed_from_step": step,
            "first_step": step,
            "last_step": step,
            "disturbed_to_step": step,
            "begin_host_mono_ns": self._window_ns,
            "end_host_mono_ns": start_ns,
            "num_events": num_events,
        }
        # Short runs have no steps to spare: one that was hardly disturbed counts like others.
        is_disturbed = num_events * _EVENT_NS > _MAX_DISTURBANCE * (start_ns - self._window_ns)
        self._session.journal("update", **{"flop_window" if is_disturbed else "flop_count": fields})
        done = step + 1 - (self._first_step or 0)
        self._next = done * _FACTORS[min(len(self._counts), 1)]
        self._num_tries += 1
        self._counting, self._counted_step = count_events(events), step
        self._counting_ns = self._session.clock() - start_ns

    def _count(self, allowed_ns: int) -> None:
        """Goes on counting for a while."""
        assert self._counting is not None
        start_ns = self._session.clock()
        found: OperatorCount | None = None
        while found is None and self._session.clock() - start_ns < allowed_ns:
            found = next(self._counting)
        self._counting_ns += self._session.clock() - start_ns
        if found is None:
            return
        self._counting = None
        self._cost_ns = max(self._cost_ns, self._counting_ns)
        if found.flops.forward_flops and found.flops.backward_flops:
            self._counts.append(found)
            self._steps.append(self._counted_step)
            self._write()
        if len(self._counts) >= _MAX_COUNTS or self._num_tries > len(_FACTORS):
            self._is_over = True
            self._gate.remove()

    def _write(self) -> None:
        """The median of what was counted, above which the program's own word stays."""
        counts = sorted(self._counts, key=lambda one: one.flops.model_flops)
        middle = counts[(len(counts) - 1) // 2]
        if self._dtype is None:
            self._dtype = self._find_parameter_dtype()
        self._facts.set_flops(
            middle.flops.model_flops,
            middle.flops.hardware_flops,
            per=PER_STEP,
            source=self._describe(middle),
            dtype=self._dtype,
        )

    def _describe(self, middle: OperatorCount) -> str:
        models = [one.flops.model_flops for one in self._counts]
        steps = ", ".join(map(str, self._steps))
        parts = [
            f"counted, {middle.num_products} operators of step{'s' * (len(models) > 1)} {steps}"
        ]
        spread = (max(models) - min(models)) / statistics.median(models)
        if spread:
            parts.append(f"which differ by {spread:.2g} of their median")
        if middle.untrained_flops:
            parts.append(f"without {middle.untrained_flops:.3g} FLOPs made without gradients")
        if middle.flops.uncounted:
            parts.append(f"without {', '.join(middle.flops.uncounted)}")
        if middle.has_compiled:
            parts.append("without what compiled code multiplies in kernels of its own")
        return "; ".join(parts)

    def _find_parameter_dtype(self) -> str | None:
        matrices = [
            p
            for model in self._watching.models
            for p in list_parameters(model)
            if p is not None and p.ndim > 1
        ]
        dtypes = {str(p.dtype) for p in matrices}
        return dtypes.pop() if len(dtypes) == 1 and dtypes <= set(_HALF) else None

    def _see_loss(self, loss: Any) -> None:
        """Hears what backward is called on, once."""
        self._session.scalars.look_at_loss = None
        losses = loss if isinstance(loss, (list, tuple)) else [loss]
        self._dtype = next(filter(None, map(find_graph_dtype, losses)), None)
        if self._dtype is not None and self._counts:
            self._write()

    def give_way(self) -> None:
        """The program is about to use torch's profiler itself, or something else goes first."""
        if self._thread == get_ident():
            self._session.guard.run(SITE, self._stop)

    def _end_for_good(self) -> None:
        self._is_over = True
        self.give_way()
        self._gate.remove()
        why = self._session.guard.first_messages.get(SITE, "unknown")
        self._session.note_gap(SITE, f"FLOPs are not counted: {why}")

    def close(self) -> None:
        """The recording ends: a step under way is not counted, one that was watched is."""
        if self._counting is not None:
            self._session.guard.run(SITE, self._count, _MOST_COUNTING_NS)
        self._is_over = True
        self._session.scalars.look_at_loss = None
        self.give_way()
        self._gate.remove()

    def disarm_after_fork(self) -> None:
        """In a child that was forked inside of a watched step: nothing is to be noted there."""
        self._counting = None
        self._is_over = True
        self.give_way()
