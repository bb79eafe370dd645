"""Puts the classes of a step's hot path on top of compiled fields, where those were built.

The classes in Python stay what defines them: a compiled type holds their fields as plain integers
and does what a usual step needs, and every method it does not have, or hands over, is the one from
Python. Which way it went cannot be seen in a record.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from meshscope.capture.steps import hooks
from meshscope.capture.steps.hooks import Hooks
from meshscope.capture.steps.step_inference import StepInference
from meshscope.capture.steps.timeline import PhaseStack, Timeline
from meshscope.store.write.native import load_native
from meshscope.store.write.open_step import PHASE_IDS

T = TypeVar("T")

_NUM_STAMP_BYTES = 8 * 2 * len(PHASE_IDS)


class UntracedHooks:
    """The way into compiled hooks: torch.compile can follow only Python, and must see nothing."""

    native_forward_begins: Callable[..., None]
    native_forward_ends: Callable[..., None]
    native_optimizer_begins: Callable[..., None]
    native_optimizer_ends: Callable[..., None]

    def forward_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not hooks.is_compiling():
            self.native_forward_begins(module, args, kwargs)

    def forward_ends(self, module: Any, args: Any, output: Any) -> None:
        if not hooks.is_compiling():
            self.native_forward_ends(module, args, output)

    def optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not hooks.is_compiling():
            self.native_optimizer_begins(optimizer, args, kwargs)

    def optimizer_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not hooks.is_compiling():
            self.native_optimizer_ends(optimizer, args, kwargs)


def choose_timeline() -> type[Timeline]:
    """The timeline's class, with compiled fields where they can be had."""
    native = _load()
    return Timeline if native is None else _classes(native)[0]


def choose_inference() -> type[StepInference]:
    native = _load()
    return StepInference if native is None else _classes(native)[1]


def choose_hooks(timeline: Timeline, steps: StepInference) -> type[Hooks]:
    """The hooks' class: compiled if what they work on is."""
    native = _load()
    if native is None:
        return Hooks
    found = _classes(native)
    return found[2] if type(timeline) is found[0] and type(steps) is found[1] else Hooks


def _load() -> ModuleType | None:
    # The record writer first: the compiled step looks it up when it is loaded.
    if load_native("meshscope.store.write._record_slots_native") is None:
        return None
    return load_native("meshscope.capture.steps._hot_steps_native")


@cache
def _classes(native: ModuleType) -> tuple[type[Timeline], type[StepInference], type[Hooks]]:
    native.set_phase_ids(*PHASE_IDS)
    timeline = _put_on(
        native.Timeline,
        Timeline,
        is_native=True,
        _stack_type=_put_on(native.PhaseStack, PhaseStack),
        _new_stamps=staticmethod(lambda: memoryview(bytearray(_NUM_STAMP_BYTES)).cast("q")),
        _no_stamps=memoryview(bytes(_NUM_STAMP_BYTES)).cast("q"),
    )
    entries = {name: value for name, value in vars(UntracedHooks).items() if name[0] != "_"}
    return (
        timeline,
        _put_on(native.StepInference, StepInference),
        _put_on(native.Hooks, Hooks, **entries),
    )


def _put_on(state: type, plain: type[T], **others: Any) -> type[T]:
    """`plain` with the fields of `state` for its own, and its methods where it has quick ones."""
    slots: tuple[str, ...] = plain.__slots__  # type: ignore[attr-defined]
    space = {n: value for n, value in vars(plain).items() if n not in {*slots, "__slots__"}}
    for name, quick in vars(state).items():
        method = name.removeprefix("native_")
        if method != name:
            space[f"plain_{method}"] = space[method]
            space[method] = quick
    space |= others | {"__slots__": tuple(name for name in slots if name not in vars(state))}
    return type(plain.__name__, (state,), space)
