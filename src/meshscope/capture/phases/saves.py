"""Checkpoints and logs as phases: functions that save or log, tapped where they are loaded.

Only modules that the program has imported are touched. A save inside a save (the writer of
torch.distributed.checkpoint calls torch.save) counts once. Of an asynchronous save the phase is
what holds the caller up. Not seen: a function that the program had bound to a name of its own
before it was tapped; safetensors is therefore tapped below its public functions.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.steps.taps import Tap
from meshscope.capture.steps.timeline import PhaseStack, Timeline
from meshscope.store.schema import BUILTIN_NAMES

CHECKPOINT = BUILTIN_NAMES["checkpoint"]
LOGGING = BUILTIN_NAMES["logging"]

_Table = tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...]
_SAVES: _Table = (
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
_WRITER = (
    "add_scalar", "add_scalars", "add_histogram", "add_image", "add_images", "add_figure",
    "add_video", "add_audio", "add_text", "add_graph", "add_embedding", "add_hparams", "flush",
)  # fmt: skip
_LOGS: _Table = (
    ("torch.utils.tensorboard.writer", "SummaryWriter", _WRITER, ()),
    ("tensorboardX.writer", "SummaryWriter", _WRITER, ()),
    ("wandb.sdk.wandb_run", "Run", ("log",), ()),
    ("mlflow", "", ("log_metric", "log_metrics"), ("mlflow.tracking.fluent",)),
    ("transformers.trainer", "Trainer", ("log",), ()),
    ("accelerate.accelerator", "Accelerator", ("log",), ()),
    *(
        (
            f"{package}.trainer.connectors.logger_connector.logger_connector",
            "_LoggerConnector",
            ("log_metrics",),
            (),
        )
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
)
"""The same of what hands metrics to a logger. What a program prints is not among them."""


class Saves:
    """Taps on what saves and what logs, for one recorder."""

    def __init__(self, timeline: Timeline, guard: Guard, clock: Callable[[], int]) -> None:
        self._timeline = timeline
        self._guard = guard
        self._clock = clock
        self._taps: list[Tap] = []
        self._tapped: set[str] = set()

    def find(self) -> None:
        """Taps what the program has loaded by now. Cheap: call it often."""
        for phase, table in ((CHECKPOINT, _SAVES), (LOGGING, _LOGS)):
            for name, kind, functions, others in table:
                module = sys.modules.get(name)
                key = f"{phase} {name}"
                if module is None or key in self._tapped or not _is_loaded(module):
                    continue
                self._tapped.add(key)
                owner = getattr(module, kind, None) if kind else module
                aliases = tuple(found for other in others if (found := sys.modules.get(other)))
                self._taps += self._tap(phase, owner, functions, aliases)

    def _tap(
        self, phase: int, owner: Any, functions: tuple[str, ...], aliases: tuple[Any, ...]
    ) -> Iterator[Tap]:
        for function in functions:
            if callable(getattr(owner, function, None)):
                yield Tap(
                    owner,
                    function,
                    self._guard.protect(f"{function} begin", partial(self._begins, phase)),
                    self._guard.protect(f"{function} end", partial(self._ends, phase)),
                    wants_result=False,
                    aliases=aliases,
                )

    def _begins(
        self, phase: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PhaseStack | None:
        timeline = self._timeline
        stack = timeline.stack_here()
        if stack.has(CHECKPOINT) or stack.has(LOGGING):
            return None
        timeline.enter(stack, phase, self._clock())
        return stack

    def _ends(self, phase: int, stack: PhaseStack | None) -> None:
        if stack is not None:
            self._timeline.leave(stack, phase, self._clock())

    def remove(self) -> None:
        for tap in reversed(self._taps):
            self._guard.run("tap removal", tap.remove)
        self._taps.clear()
        self._tapped.clear()


def _is_loaded(module: Any) -> bool:
    """Whether a module has been imported to its end, not one that is being imported."""
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)
