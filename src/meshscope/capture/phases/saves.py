"""Checkpoints as the phase `checkpoint`: functions that save, tapped where they are loaded.

Only modules that the program has imported are touched. A save inside a save (the writer of
torch.distributed.checkpoint calls torch.save) counts once. Of an asynchronous save the phase is
what holds the caller up. Not seen: a function that the program had bound to a name of its own
before it was tapped; safetensors is therefore tapped below its public functions.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.steps.taps import Tap
from meshscope.capture.steps.timeline import PhaseStack, Timeline
from meshscope.store.schema import BUILTIN_NAMES

CHECKPOINT = BUILTIN_NAMES["checkpoint"]

_SAVES: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("torch", "", ("save",), ("torch.serialization",)),
    (
        "torch.distributed.checkpoint",
        "",
        ("save", "async_save"),
        ("torch.distributed.checkpoint.state_dict_saver",),
    ),
    ("safetensors.torch", "", ("_flatten", "_flatten_as_ptr", "serialize_file"), ()),
    ("transformers.modeling_utils", "PreTrainedModel", ("save_pretrained",), ()),
    ("transformers.trainer", "Trainer", ("_save_checkpoint", "save_model"), ()),
    ("accelerate.accelerator", "Accelerator", ("save_state", "save_model"), ()),
    ("lightning.pytorch.trainer.trainer", "Trainer", ("save_checkpoint",), ()),
    ("pytorch_lightning.trainer.trainer", "Trainer", ("save_checkpoint",), ()),
)
"""Module, a class in it or nothing, its functions, and other modules that hold the same ones.

Of frameworks the functions that save a whole checkpoint: collecting it is part of saving.
"""


class Saves:
    """Taps on what saves, for one recorder."""

    def __init__(self, timeline: Timeline, guard: Guard, clock: Callable[[], int]) -> None:
        self._timeline = timeline
        self._guard = guard
        self._clock = clock
        self._taps: list[Tap] = []
        self._tapped: set[str] = set()

    def find(self) -> None:
        """Taps what the program has loaded by now. Cheap: call it often."""
        for name, kind, functions, others in _SAVES:
            module = sys.modules.get(name)
            if module is None or name in self._tapped or not _is_loaded(module):
                continue
            self._tapped.add(name)
            owner = getattr(module, kind, None) if kind else module
            aliases = tuple(found for other in others if (found := sys.modules.get(other)))
            self._taps += self._tap(owner, functions, aliases)

    def _tap(
        self, owner: Any, functions: tuple[str, ...], aliases: tuple[Any, ...]
    ) -> Iterator[Tap]:
        for function in functions:
            if callable(getattr(owner, function, None)):
                yield Tap(
                    owner,
                    function,
                    self._guard.protect(f"{function} begin", self._begins),
                    self._guard.protect(f"{function} end", self._ends),
                    wants_result=False,
                    aliases=aliases,
                )

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PhaseStack | None:
        timeline = self._timeline
        stack = timeline.stack_here()
        if stack.has(CHECKPOINT):
            return None
        timeline.enter(stack, CHECKPOINT, self._clock())
        return stack

    def _ends(self, stack: PhaseStack | None) -> None:
        if stack is not None:
            self._timeline.leave(stack, CHECKPOINT, self._clock())

    def remove(self) -> None:
        for tap in reversed(self._taps):
            self._guard.run("tap removal", tap.remove)
        self._taps.clear()
        self._tapped.clear()


def _is_loaded(module: Any) -> bool:
    """Whether a module has been imported to its end, not one that is being imported."""
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)
