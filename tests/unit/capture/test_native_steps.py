"""The compiled way through a step leaves what the way in Python leaves: every byte and every field.

Both are driven with the same random calls: usual steps, and anything else that torch, a program or
another thread may do, with errors in whatever they call. After each call all fields are compared,
at the end the bytes of all tables and of the stamps.
"""

import gc
import random
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshscope.capture import native_steps
from meshscope.capture.guard import Guard
from meshscope.capture.steps.hooks import BACKWARD, FORWARD, Hooks
from meshscope.capture.steps.step_inference import StepInference
from meshscope.capture.steps.timeline import PhaseStack, Timeline
from meshscope.store.read.files import read_file
from meshscope.store.schema import TABLES
from meshscope.store.write.native import SWITCH_VARIABLE
from meshscope.store.write.now_file import NOW_NAME, NowFile
from meshscope.store.write.open_step import OpenStepWriter
from meshscope.store.write.pack import PACK_NAME, PackedTable, PackWriter
from meshscope.store.write.table_file import HEADER_BYTES, TableWriter

START_NS = 5_000_000_000
TOKENS = torch.zeros(3, 4, dtype=torch.int64)
INPUTS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((TOKENS,), {}),
    ((), {"input_ids": TOKENS}),
    ((TOKENS.float(),), {}),
    ((TOKENS[0],), {"input_ids": TOKENS}),
    ((), {"num_items_in_batch": 3}),
    ((None,), {}),
    ((TOKENS.sum(),), {}),
)
IDS = (1, 2, 3, 4, 5, 64)
USUAL = [
    "forward_begins", "forward_ends", "backward_begins", "backward_ends", "optimizer_begins",
    "optimizer_ends",
]  # fmt: skip
LOADED = ["fetch_begins", "fetch_ends", *USUAL]
RARE = [
    "grad_ends", "clip_begins", "clip_ends", "enter", "leave", "leave_aborted", "begin_step",
    "end_step", "abort_step", "microbatch", "pause", "resume", "reset", "action_begins",
    "action_ends", "several", "explicit", "grad_mode", "train_mode", "stride", "other_thread",
    "clock_fails", "model_fails", "visit_fails", "pass_end_fails", "sink_fails", "visit",
    "detail", "scaler", "scale", "grad_begins", "sampled", "back_in_time", "long_after",
    "years_after", "mark", *USUAL,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if native_steps._load() is None:
        pytest.skip("no compiled helper here: meshscope was installed without a compiler")


class Failing:
    """Something that the hooks call, and that raises when it was told to."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def fail(self) -> None:
        if self.errors:
            raise self.errors.pop()


class Model(Failing):
    """What the hooks ask of a module."""

    is_training = True

    @property
    def training(self) -> bool:
        """Asked twice where a step turns out to be unusual: it fails until told otherwise."""
        if self.errors:
            raise self.errors[0]
        return self.is_training


class Optimizer:
    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.5}]


class World(Failing):
    """One timeline with its hooks, tables and a clock that goes on by itself."""

    def __init__(self, folder: Path, *, is_native: bool) -> None:
        super().__init__()
        self.now_ns = START_NS
        self.guard = Guard()
        self.calls: list[object] = []
        self.is_grad_enabled = True
        self.models = (Model(), Model())
        self.optimizers = (Optimizer(), Optimizer())
        known = (*self.optimizers, *self.models)
        self.numbers = {id(one): number for number, one in enumerate(known, 1)}
        self.sink_fails, self.visit_fails, self.pass_end_fails = Failing(), Failing(), Failing()
        folder.mkdir()
        self.pack = folder / PACK_NAME
        pack = PackWriter(self.pack, {}, mapped=True)
        self.tables = {
            name: TableWriter(PackedTable(pack, name), TABLES[name], {})
            for name in ("steps", "phases", "spans")
        }
        self.timeline = (native_steps.choose_timeline() if is_native else Timeline)(self.read_clock)
        self.timeline._sample_every_steps = 3
        self.stamps = OpenStepWriter(NowFile(folder / NOW_NAME, mapped=True), START_NS)
        self.connect()
        self.timeline.on_visit = self.visit
        self.steps = (native_steps.choose_inference() if is_native else StepInference)(
            self.timeline
        )
        hooks_type = native_steps.choose_hooks(self.timeline, self.steps) if is_native else Hooks
        fake = SimpleNamespace(
            compiler=torch.compiler,
            is_grad_enabled=lambda: self.is_grad_enabled,
            Tensor=torch.Tensor,
            int64=torch.int64, int32=torch.int32, int16=torch.int16, uint8=torch.uint8,
        )  # fmt: skip
        self.hooks = hooks_type(
            fake, self.timeline, self.steps, self.guard, self.read_clock, self.make_losses()
        )
        self.hooks.on_pass_end = self.end_pass
        self.steps.has_several = False

    def connect(self) -> None:
        timeline = self.timeline
        timeline.store_stamps(self.stamps)
        for name, table in self.tables.items():
            setattr(timeline, name, self if name == "spans" else table)

    def put(self, *words: int) -> None:
        """Spans pass here, so that a sink in Python is there too."""
        self.sink_fails.fail()
        self.tables["spans"].put(*words)

    def read_clock(self) -> int:
        self.fail()
        self.now_ns += 7
        return self.now_ns

    def visit(self, step: int, end_ns: int) -> None:
        self.calls.append(("visit", step, end_ns))
        self.visit_fails.fail()
        self.timeline.next_visit_ns = end_ns + 400

    def end_pass(self) -> None:
        self.calls.append("pass end")
        self.pass_end_fails.fail()

    def make_losses(self) -> Any:
        """Writes down what is asked of it."""

        def hear(what: str, *given: object, **more: object) -> None:
            given = tuple(one for one in given if not isinstance(one, torch.Tensor | Optimizer))
            self.calls.append((what, *given, more) if what != "keep" else what)

        names = ("reset", "begin", "take", "take_norm", "take_rate", "see_output", "settle", "keep")
        heard = {name: partial(hear, name) for name in names}
        return SimpleNamespace(**heard, choose_next_step=lambda now_ns, _: now_ns % 7)

    # --- what happens ---------------------------------------------------------------------

    def do(self, what: str, number: int, error: BaseException) -> object:
        """Does it; what came out, an error of ours included."""
        try:
            return repr(self._do(what, number, error))
        except BaseException as raised:  # noqa: BLE001 - compared with the other's
            return f"raised {type(raised).__name__} {raised}"

    def _do(self, what: str, number: int, error: BaseException) -> object:
        hooks, timeline, steps = self.hooks, self.timeline, self.steps
        model, optimizer = self.models[number == 9], self.optimizers[number == 9]
        args, kwargs = INPUTS[number % len(INPUTS)]
        stack, name_id = timeline.stack_here(), IDS[number % len(IDS)]
        self.now_ns += 100
        match what:
            case "forward_begins":
                return hooks.forward_begins(model, args, kwargs)
            case "forward_ends":
                return hooks.forward_ends(model, args, None)
            case "backward_begins" | "grad_begins":
                return getattr(hooks, what)(args, kwargs)
            case "scale":
                hooks.scale_ends(hooks.scale_begins((None, *args), kwargs), TOKENS)
            case "backward_ends" | "grad_ends":
                return getattr(hooks, what)(None)
            case "optimizer_begins" | "optimizer_ends":
                return getattr(hooks, what)(optimizer, args, kwargs)
            case "fetch_begins" | "clip_begins":
                return getattr(hooks, what)(args, kwargs)
            case "fetch_ends":
                return hooks.fetch_ends(bool(number), number or None)
            case "clip_ends":
                return hooks.clip_ends(None, TOKENS)
            case "enter":
                return timeline.enter(stack, name_id, self.read_clock())
            case "leave":
                return timeline.leave(stack, name_id, self.read_clock())
            case "leave_aborted":
                return timeline.leave(stack, name_id, self.read_clock(), 1)
            case "begin_step":
                return timeline.begin_step(self.read_clock())
            case "end_step":
                return timeline.end_step(self.read_clock(), number & 7)
            case "abort_step":
                return timeline.abort_step(self.read_clock())
            case "microbatch":
                return timeline.set_microbatch(number - 3, number % 2)
            case "pause":
                timeline.flush_stamps()
                timeline.store_stamps(None)
            case "resume":
                self.connect()
            case "reset":
                timeline.reset(), steps.reset(), hooks.reset()
            case "action_begins" | "action_ends":
                getattr(hooks, what)(BACKWARD if number % 2 else FORWARD)
            case "several":
                steps.has_several = number == 0
            case "explicit":
                steps.is_explicit = number == 0
            case "grad_mode":
                self.is_grad_enabled = number > 2
            case "train_mode":
                model.is_training = number > 2
            case "stride":
                timeline.microbatch_stride = int(number > 0)
            case "clock_fails":
                self.errors = [error]
            case "model_fails":
                model.errors = [] if model.errors else [AttributeError("training")]
            case "visit_fails" | "pass_end_fails" | "sink_fails":
                getattr(self, what).errors = [error]
            case "visit":
                timeline.next_visit_ns = 0
            case "detail":
                timeline.put_detail(name_id, self.now_ns - 5, self.now_ns, 0)
            case "scaler":
                hooks.scaler_ends(hooks.scaler_begins((None, optimizer), {}))
            case "sampled":
                timeline.is_sampled = True
            case "back_in_time":
                self.now_ns -= 150
            case "long_after":  # longer than a packed phase can be
                self.now_ns += 5 * 10**9
            case "years_after":  # more than fits a stamp
                self.now_ns += 500 * 86_400 * 10**9 if number > 3 else 0
            case "mark":  # as a device would: nothing takes the short cut
                timeline.flush_stamps()
                timeline.done_phase = 4
        return None

    def fields(self) -> dict[str, object]:
        """Everything the three objects hold, in terms that two worlds can share."""
        found: dict[str, object] = {"now": self.now_ns, "counts": dict(self.guard.counts)}
        found |= {"messages": dict(self.guard.first_messages), "calls": self.calls[-3:]}
        for owner, plain in ((self.timeline, Timeline), (self.steps, StepInference),
                             (self.hooks, Hooks), (self.timeline.stack, PhaseStack)):  # fmt: skip
            for name in plain.__slots__:
                found[f"{plain.__name__}.{name}"] = self.describe(name, getattr(owner, name))
        return found

    def describe(self, name: str, value: object) -> object:
        if name in {"stamps", "stored"}:
            return list(value)  # type: ignore[call-overload]
        if name == "_forward_module":
            return value if value is None else self.models.index(value)  # type: ignore[arg-type]
        if name in {"_recent", "_previous"}:
            return len(value)  # type: ignore[arg-type]
        if isinstance(value, tuple):
            return tuple(self.numbers.get(one, one) for one in value)
        if isinstance(value, int):
            return self.numbers.get(
                value, "thread" if name in {"_thread", "_own_thread"} else value
            )
        return value if isinstance(value, (str, list, type(None))) else type(value).__name__

    def finish(self) -> dict[str, bytes]:
        self.sink_fails.errors.clear()
        self.timeline.flush_stamps()
        for table in self.tables.values():
            table.close()
        return {name: read_file(self.pack / f"{name}.tbl")[HEADER_BYTES:] for name in self.tables}


def make_script(seed: int) -> list[tuple[str, int, BaseException]]:
    chance = random.Random(seed)
    script: list[str] = []
    while len(script) < 120:
        kind = chance.random()
        part = list(LOADED if kind < 0.2 else USUAL)
        if chance.random() < 0.15:
            part.insert(chance.randrange(len(part)), "long_after")
        if kind < 0.5:
            script += part
        elif kind < 0.6:
            script += part[: chance.randrange(len(part))]
        else:
            script += chance.choices(RARE, k=chance.randint(1, 4))
    errors = (ValueError("no"), KeyboardInterrupt("stop"), TypeError("not so"))
    weights = (12, 3, 2, 1, 1, 1, 1, 1, 1, 1)
    return [(what, chance.choices(range(10), weights)[0], chance.choice(errors)) for what in script]


def do_in_both(worlds: tuple[World, World], what: str, *parts: Any) -> list[object]:
    """What came out of each. Another thread is the same for both: idents are used again."""
    outcomes: list[object] = []

    def work(what: str) -> None:
        outcomes.extend(world.do(what, *parts) for world in worlds)

    if what == "other_thread":
        thread = threading.Thread(target=work, args=(USUAL[parts[0] % len(USUAL)],))
        thread.start()
        thread.join()
    else:
        work(what)
    return outcomes


def run_usual_step(world: World) -> None:
    for what in USUAL:
        world.do(what, 0, ValueError())


def test_any_calls_leave_the_same_fields_and_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(40):
        native = World(tmp_path / f"{seed}native", is_native=True)
        monkeypatch.setenv(SWITCH_VARIABLE, "0")
        plain = World(tmp_path / f"{seed}plain", is_native=False)
        monkeypatch.delenv(SWITCH_VARIABLE)
        script = make_script(seed)
        for index, happening in enumerate(script):
            outcomes = do_in_both((native, plain), *happening)
            done = [one[0] for one in script[: index + 1]]
            assert outcomes[0] == outcomes[1], f"seed {seed}: {done}"
            assert native.fields() == plain.fields(), f"seed {seed}: {done}"
        assert native.calls == plain.calls
        assert native.finish() == plain.finish()


def test_a_usual_step_does_not_go_through_python(tmp_path: Path) -> None:
    world = World(tmp_path / "run", is_native=True)
    world.timeline.on_visit = lambda step, end_ns: setattr(world.timeline, "next_visit_ns", 1 << 62)
    world.timeline.next_visit_ns = 0
    for _ in range(3):  # the training thread is learned, the first signals are taken
        run_usual_step(world)
    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(f"{event} {frame.f_code.co_name}"))
    try:
        run_usual_step(world)
    finally:
        sys.setprofile(None)
    ours = {"_do", "do", "read_clock", "fail", "stack_here", "<lambda>", "training", "end_pass"}
    ways_in = {*USUAL, "is_dynamo_compiling", "run_usual_step"}
    called = {text.removeprefix("call ") for text in seen if text.startswith("call ")}
    assert called <= ours | ways_in, called - ours - ways_in
    assert "put" not in called


def test_steps_leave_nothing_behind_in_memory(tmp_path: Path) -> None:
    world = World(tmp_path / "run", is_native=True)
    watched = (*world.models, *world.optimizers, world.guard, TOKENS, None, INPUTS[0][0])
    errors = [ValueError("no") for _ in range(300)]

    def run_steps() -> None:
        for error in errors:
            run_usual_step(world)
            world.calls.clear()
            for what in ("clock_fails", "forward_begins", "pass_end_fails", *USUAL, "reset"):
                world.do(what, 0, error)
            error.__traceback__ = None

    def measure() -> tuple[list[int], int]:
        gc.collect()
        return [sys.getrefcount(one) for one in watched], sys.getallocatedblocks()

    def leaks() -> bool:
        references, num_blocks = measure()
        run_steps()
        now, num_blocks_now = measure()
        return now != references or num_blocks_now - num_blocks >= 150  # a leak a step: 300

    run_steps()
    # Threads of earlier tests may end, or begin something, in one of three rounds.
    assert not all(leaks() for _ in range(3))


def test_what_is_dropped_is_collected(tmp_path: Path) -> None:
    """Timeline, hooks and inference hold each other, and a program's model."""
    world = World(tmp_path / "run", is_native=True)
    run_usual_step(world)
    world.do("forward_begins", 0, ValueError())
    model = weakref.ref(world.models[0])
    mapped = weakref.ref(world.stamps.words.obj)
    del world
    gc.collect()
    assert model() is None
    assert mapped() is None


def test_a_half_made_object_raises_and_does_not_crash() -> None:
    native = native_steps._load()
    assert native is not None
    timeline_type, _, hooks_type = native_steps._classes(native)
    timeline, empty = timeline_type(lambda: 0), timeline_type.__new__(timeline_type)
    with pytest.raises(AttributeError):
        empty.enter(timeline.stack, FORWARD, 1)
    empty.step_start_ns = 1
    with pytest.raises(AttributeError):
        empty.end_step(1)
    hooks = hooks_type.__new__(hooks_type)
    for what, count in zip(USUAL, (3, 3, 2, 1, 3, 3), strict=True):
        with pytest.raises((AttributeError, TypeError)):
            getattr(hooks, what)(*[None] * count)
        with pytest.raises(TypeError):
            getattr(hooks, what)()


@pytest.mark.parametrize(
    ("name", "value"),
    [("stack", None), ("stack", PhaseStack(0)), ("stamps", [0] * 8), ("stamps", bytearray(8)),
     ("stored", b"0" * 128), ("step", 1 << 70), ("step", "x"), ("is_sampled", 1)],
)  # fmt: skip
def test_a_field_takes_nothing_that_c_could_not_read(name: str, value: object) -> None:
    timeline = native_steps.choose_timeline()(lambda: 0)
    with pytest.raises((TypeError, ValueError, OverflowError, BufferError)):
        setattr(timeline, name, value)


def test_hooks_are_compiled_only_if_what_they_work_on_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Timeline(lambda: 0)
    native = native_steps.choose_timeline()(lambda: 0)
    steps = native_steps.choose_inference()(native)
    assert native_steps.choose_hooks(plain, StepInference(plain)) is Hooks
    assert native_steps.choose_hooks(native, steps) is not Hooks
    assert (plain.is_native, native.is_native) == (False, True)
    monkeypatch.setenv(SWITCH_VARIABLE, "0")
    assert native_steps.choose_timeline() is Timeline
    assert native_steps.choose_inference() is StepInference
