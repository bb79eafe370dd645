"""Pipeline actions: which microbatch went through which stage, when, and what it waited for.

    with rec.action_wait("F", stage=2, microbatch=0): …    # for what another rank makes
    with rec.action("F", stage=2, microbatch=0): …         # the computation

An action is a row of `actions`, and its time is a phase: `forward` for F (`eval` where the program
marks its steps and none is open), `backward` for B, I and W, `pipeline wait` for the wait. What is
recorded inside carries its microbatch. Hooks on models and on backward stay silent inside an
action of a step: its time is known already.

Blocks are taken from a pool and go back when they are left, so nesting and threads get one each and
a long run makes none. Flat for the same reason as `hooks`: they run many times in every step.
"""

from collections.abc import Callable
from operator import index
from types import TracebackType

from meshscope.capture.guard import Guard
from meshscope.capture.steps.hooks import Hooks
from meshscope.capture.steps.step_inference import StepInference
from meshscope.capture.steps.timeline import PhaseStack, Timeline
from meshscope.store.schema import ACTION_KINDS, BUILTIN_NAMES, MISSING, ActionFlag, SpanFlag

_PIPELINE_WAIT = BUILTIN_NAMES["pipeline wait"]
_FORWARD = BUILTIN_NAMES["forward"]
_BACKWARD = BUILTIN_NAMES["backward"]
_EVAL = BUILTIN_NAMES["eval"]
_CODES = {kind: code for code, kind in enumerate(ACTION_KINDS)}
_FORWARD_CODE = _CODES["F"]
_MAX_CHUNK = 0xFFFF
_MAX_STAGE = 0x7FFFFFFF
_NO_WAIT = ("", MISSING, MISSING, MISSING)

_WaitKey = tuple[str, int, int, int]
"""Kind, stage, microbatch, and when the step began: the same action comes again in the next."""


class Actions:
    """The action blocks of one recorder, and the wait that the next action may belong to."""

    __slots__ = (
        "caught",
        "clock",
        "free_actions",
        "free_waits",
        "hooks",
        "steps",
        "timeline",
        "wait_key",
        "wait_ns",
        "wait_start_ns",
    )

    def __init__(
        self, timeline: Timeline, steps: StepInference, guard: Guard, clock: Callable[[], int]
    ) -> None:
        self.timeline = timeline
        self.steps = steps
        self.caught = guard.caught
        self.clock = clock
        self.hooks: Hooks | None = None
        """The recorder's hooks, once a model or optimizer is attached."""
        self.free_actions: list[ActionBlock] = []
        self.free_waits: list[WaitBlock] = []
        self.wait_key: _WaitKey = _NO_WAIT
        self.wait_start_ns = self.wait_ns = MISSING

    def action(self, kind: str, stage: int, microbatch: int, chunk: int) -> "ActionBlock":
        """A block for the computation of an action."""
        try:  # a pop is one step to other threads; asking first would be two
            block = self.free_actions.pop()
        except IndexError:
            block = ActionBlock(self)
        block.kind = kind
        block.stage = stage
        block.microbatch = microbatch
        block.chunk = chunk
        return block

    def wait(self, kind: str, stage: int, microbatch: int) -> "WaitBlock":
        """A block for the wait before it."""
        try:
            block = self.free_waits.pop()
        except IndexError:
            block = WaitBlock(self)
        block.kind = kind
        block.stage = stage
        block.microbatch = microbatch
        return block

    def note_wait(self, key: _WaitKey, start_ns: int, duration_ns: int) -> None:
        """Keeps a wait for the action it belongs to; a second one adds to the first."""
        if key == self.wait_key:
            self.wait_ns += duration_ns
        else:
            self.wait_key = key
            self.wait_start_ns = start_ns
            self.wait_ns = duration_ns


class ActionBlock:
    """Times one action. Made by `Recorder.action`, entered once."""

    __slots__ = (
        "_actions",
        "_before",
        "_code",
        "_hooks",
        "_phase_id",
        "_stack",
        "_start_ns",
        "_step",
        "_wait_ns",
        "_wait_start_ns",
        "chunk",
        "kind",
        "microbatch",
        "stage",
    )

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self.kind = ""
        self.stage = self.microbatch = self.chunk = 0
        self._stack: PhaseStack | None = None
        """Where the phase is open; None when the block was not entered properly."""
        self._hooks: Hooks | None = None
        self._code = self._step = self._before = self._start_ns = self._phase_id = 0
        self._wait_start_ns = self._wait_ns = MISSING

    def __enter__(self) -> None:
        actions = self._actions
        now_ns = actions.clock()
        try:
            timeline = actions.timeline
            code = _CODES[self.kind]
            # Plain integers from any input: nothing after this line may raise.
            stage, chunk = index(self.stage), index(self.chunk)
            self.microbatch = microbatch = index(self.microbatch)
            if not (0 <= chunk <= _MAX_CHUNK and 0 <= stage <= _MAX_STAGE and microbatch >= 0):
                raise ValueError(f"stage {stage}, microbatch {microbatch}, chunk {chunk}")
            self._code = code | chunk << 16 | stage << 32
            is_in_step = bool(timeline.step_start_ns)
            self._step = timeline.step if is_in_step else MISSING
            is_forward = code == _FORWARD_CODE
            phase_id = _FORWARD if is_forward else _BACKWARD
            if is_forward and not is_in_step and actions.steps.is_explicit:
                phase_id = _EVAL
            self._phase_id = phase_id
            key = (self.kind, stage, microbatch, timeline.step_start_ns)
            if key == actions.wait_key:
                self._wait_start_ns = actions.wait_start_ns
                self._wait_ns = actions.wait_ns
            else:
                self._wait_start_ns = self._wait_ns = MISSING
            actions.wait_key = _NO_WAIT
            hooks = actions.hooks
            if hooks is not None and is_in_step:
                hooks.action_begins(phase_id)
                self._hooks = hooks
            self._start_ns = now_ns
            self._before = timeline.microbatch
            timeline.microbatch = microbatch
            self._stack = stack = timeline.stack_here()
            timeline.enter(stack, phase_id, now_ns)
            if timeline.is_sampled:
                timeline.own_ns += actions.clock() - now_ns
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            actions.caught("action begin", error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        actions = self._actions
        now_ns = actions.clock()
        try:
            stack, self._stack = self._stack, None
            if stack is None:
                return
            timeline = actions.timeline
            start_ns = self._start_ns
            timeline.leave(stack, self._phase_id, now_ns, 0 if kind is None else SpanFlag.ABORTED)
            # The step counts the microbatches that came as far as backward.
            is_counted = self._phase_id == _BACKWARD and timeline.step_start_ns
            timeline.microbatch = (
                max(self._before, self.microbatch + 1) if is_counted else self._before
            )
            if self._hooks is not None:
                self._hooks.action_ends(self._phase_id)
                self._hooks = None
            timeline.actions.put(
                self._code if kind is None else self._code | ActionFlag.ABORTED << 8,
                self._step,
                self.microbatch,
                start_ns,
                now_ns - start_ns,
                self._wait_start_ns,
                self._wait_ns,
            )
            if timeline.is_sampled:
                timeline.own_ns += actions.clock() - now_ns
        except Exception as own_error:  # noqa: BLE001 - the guard's, kept inside for speed
            actions.caught("action end", own_error)
        finally:
            actions.free_actions.append(self)


class WaitBlock:
    """Times the wait before an action. Made by `Recorder.action_wait`, entered once."""

    __slots__ = ("_actions", "_before", "_stack", "_start_ns", "kind", "microbatch", "stage")

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self.kind = ""
        self.stage = self.microbatch = 0
        self._stack: PhaseStack | None = None
        self._start_ns = self._before = 0

    def __enter__(self) -> None:
        actions = self._actions
        now_ns = actions.clock()
        try:
            timeline = actions.timeline
            self.microbatch = microbatch = max(index(self.microbatch), 0)
            self._start_ns = now_ns
            self._before = timeline.microbatch
            timeline.microbatch = microbatch
            self._stack = stack = timeline.stack_here()
            timeline.enter(stack, _PIPELINE_WAIT, now_ns)
            if timeline.is_sampled:
                timeline.own_ns += actions.clock() - now_ns
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            actions.caught("action wait begin", error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        actions = self._actions
        now_ns = actions.clock()
        try:
            stack, self._stack = self._stack, None
            if stack is None:
                return
            timeline = actions.timeline
            start_ns = self._start_ns
            timeline.leave(stack, _PIPELINE_WAIT, now_ns, 0 if kind is None else SpanFlag.ABORTED)
            timeline.microbatch = self._before
            key = (self.kind, self.stage, self.microbatch, timeline.step_start_ns)
            actions.note_wait(key, start_ns, now_ns - start_ns)
            if timeline.is_sampled:
                timeline.own_ns += actions.clock() - now_ns
        except Exception as own_error:  # noqa: BLE001 - the guard's, kept inside for speed
            actions.caught("action wait end", own_error)
        finally:
            actions.free_waits.append(self)
