"""What frameworks were told and what they log, without a line in the program.

Taps on a few methods of classes that the program imports: argument objects as they are made and as
training begins, and the numbers given to a framework's own `log`. Only attributes are read: a
method of the program's objects may change them. Nothing is known of a framework that is not in the
table, nor of values changed after training began.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import ModuleType
from typing import Any

from meshscope.capture.frameworks.logged_values import LoggedValues
from meshscope.capture.frameworks.module_watch import ModuleWatch
from meshscope.capture.guard import Guard
from meshscope.capture.model.settings import Settings
from meshscope.capture.steps.taps import Tap

Group = tuple[object, str, str]
"""A configuration, its name, and how it is known."""
Logged = tuple[str, object, object]
"""A framework, what it logs by name, and its own step."""
Read = Callable[[tuple[Any, ...], Mapping[str, Any]], Iterator[Group]]

_ACCELERATOR = (
    "mixed_precision", "gradient_accumulation_steps", "num_processes", "distributed_type",
    "split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler",
    "step_scheduler_with_optimizer", "project_dir",
)  # fmt: skip
_LIGHTNING = (
    "max_epochs", "min_epochs", "max_steps", "min_steps", "accumulate_grad_batches",
    "gradient_clip_val", "gradient_clip_algorithm", "precision", "num_devices", "num_nodes",
    "world_size", "limit_train_batches", "limit_val_batches", "val_check_interval",
    "check_val_every_n_epoch", "log_every_n_steps", "overfit_batches", "fast_dev_run",
    "reload_dataloaders_every_n_epochs",
)  # fmt: skip
_LIGHTNING_PARTS = ("strategy", "accelerator")


def read_trainer(trainer: Any) -> Iterator[Group]:
    """The arguments of a Trainer of transformers or TRL, and its model's configuration."""
    yield from read_arguments(getattr(trainer, "args", None), "as training began")
    yield from read_model_config(getattr(trainer, "model", None))


def read_arguments(args: Any, moment: str) -> Iterator[Group]:
    """`TrainingArguments` and its subclasses."""
    if is_dataclass(args) and not isinstance(args, type):
        kind = type(args)
        yield args, kind.__name__, f"{kind.__name__} of {_package(kind)}, {moment}"


def read_model_config(model: Any) -> Iterator[Group]:
    """The configuration of a model of transformers, wrapped or not."""
    config = getattr(getattr(model, "module", model), "config", None)
    kind = type(config)
    if kind.__module__.partition(".")[0] == "transformers":
        values = {name: value for name, value in vars(config).items() if name[:1] != "_"}
        yield values, kind.__name__, "the model's configuration, as training began"


def read_accelerator(accelerator: Any) -> Iterator[Group]:
    """What an Accelerator was made with, as far as it keeps it, and its plugins."""
    values = _read_names(accelerator, _ACCELERATOR)
    state = getattr(accelerator, "state", None)
    for name in ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "dynamo_plugin"):
        plugin = getattr(state, name, None)
        if plugin is not None:
            values[name] = plugin
    yield values, "Accelerator", "Accelerate's Accelerator, as it was made"


def read_trackers(config: Any) -> Iterator[Group]:
    """What the program gave to Accelerate's trackers."""
    if config is not None:
        yield config, "init_trackers", "given to Accelerate's init_trackers"


def read_lightning(trainer: Any, module: Any) -> Iterator[Group]:
    """A Lightning Trainer's settings, and what module and data saved of theirs."""
    values = _read_names(trainer, _LIGHTNING)
    for name in _LIGHTNING_PARTS:
        part = getattr(trainer, name, None)
        if part is not None:
            values[name] = type(part).__name__
    yield values, "Trainer", "Lightning's Trainer, as training began"
    for owner in (module, getattr(trainer, "datamodule", None)):
        saved = getattr(owner, "hparams", None)
        if isinstance(saved, Mapping) and saved:
            name = type(owner).__name__
            yield saved, f"{name} hparams", f"save_hyperparameters of {name}"


def _read_names(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: getattr(owner, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs.get(name)


def _deepspeed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Group]:
    values = getattr(args[0], "_param_dict", None)
    if isinstance(values, Mapping):
        yield values, "DeepSpeedConfig", "DeepSpeed's configuration, as it was read"


def _megatron(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Group]:
    yield _argument(args, kwargs, 0, "args"), "megatron", "Megatron's arguments, as they were set"


def _trackers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Group]:
    return read_trackers(_argument(args, kwargs, 2, "config"))


def _lightning(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Group]:
    return read_lightning(args[0], _argument(args, kwargs, 1, "model"))


def _transformers_log(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Logged:
    return "transformers", _argument(args, kwargs, 1, "logs"), args[0].state.global_step


def _accelerate_log(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Logged:
    step = _argument(args, kwargs, 2, "step")
    return "Accelerate", _argument(args, kwargs, 1, "values"), object() if step is None else step


def _of_self(read: Callable[..., Iterator[Group]], *more: str) -> Read:
    return lambda args, kwargs: read(args[0], *more)


_BEFORE, _AFTER = "before", "after"
_SOURCES: tuple[tuple[str, str, str, str, Read], ...] = (
    ("transformers.training_args", "TrainingArguments", "__post_init__", _AFTER,
     _of_self(read_arguments, "as they were made")),
    ("transformers.trainer", "Trainer", "train", _BEFORE, _of_self(read_trainer)),
    ("accelerate.accelerator", "Accelerator", "__init__", _AFTER, _of_self(read_accelerator)),
    ("accelerate.accelerator", "Accelerator", "init_trackers", _BEFORE, _trackers),
    # Not `fit`, whose signature command lines are made of.
    ("lightning.pytorch.trainer.trainer", "Trainer", "_run", _BEFORE, _lightning),
    ("pytorch_lightning.trainer.trainer", "Trainer", "_run", _BEFORE, _lightning),
    ("deepspeed.runtime.config", "DeepSpeedConfig", "__init__", _AFTER, _deepspeed),
    ("megatron.training.global_vars", "", "set_global_variables", _BEFORE, _megatron),
    ("megatron.global_vars", "", "set_global_variables", _BEFORE, _megatron),
)  # fmt: skip
"""Module, class (or none), function, when it is read, and what."""


_LOGS: tuple[tuple[str, str, str, Callable[[tuple[Any, ...], Mapping[str, Any]], Logged]], ...] = (
    ("transformers.trainer", "Trainer", "log", _transformers_log),
    ("accelerate.accelerator", "Accelerator", "log", _accelerate_log),
)
"""Module, class, function, and what it is given. Lightning's callback hears of what it logs."""


class ArgumentObjects:
    """Stores what frameworks in this process were told, and what they log."""

    def __init__(self, settings: Settings, guard: Guard, logged: LoggedValues) -> None:
        self._settings = settings
        self._guard = guard
        self._logged = logged
        self._taps: list[Tap] = []
        names = {source[0] for source in _SOURCES} | {source[0] for source in _LOGS}
        self._watch = ModuleWatch({name: guard.protect("arguments", self._tap) for name in names})

    def watch(self) -> None:
        """From now on, in modules that the program has imported or will import."""
        self._watch.install()

    def visit(self) -> None:
        """Cheap: call it often."""
        self._watch.visit()

    def remove(self) -> None:
        self._watch.remove()
        for tap in reversed(self._taps):
            self._guard.run("tap removal", tap.remove)
        self._taps.clear()

    def _tap(self, module: ModuleType) -> None:
        for name, owner_name, function, moment, read in _SOURCES:
            owner = getattr(module, owner_name, None) if owner_name else module
            if module.__name__ == name and callable(getattr(owner, function, None)):
                store = self._guard.protect("arguments", partial(self._store, read))
                begins = store if moment == _BEFORE else _hand_on
                ends = _do_nothing if moment == _BEFORE else partial(_unpack, store)
                self._taps.append(Tap(owner, function, begins, ends, wants_result=False))
        for name, owner_name, function, find in _LOGS:
            owner = getattr(module, owner_name, None)
            if module.__name__ == name and callable(getattr(owner, function, None)):
                log = self._guard.protect("logged values", partial(self._log, find))
                self._taps.append(Tap(owner, function, log, _do_nothing, wants_result=False))

    def _log(
        self,
        find: Callable[[tuple[Any, ...], Mapping[str, Any]], Logged],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        framework, values, step = find(args, kwargs)
        if isinstance(values, Mapping):
            self._logged.log(framework, values, step)

    def _store(self, read: Read, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for value, name, known_by in read(args, kwargs):
            self._settings.add(value, name, known_by)


def _hand_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args, kwargs


def _unpack(store: Callable[..., object], token: Any) -> None:
    store(*token)


def _do_nothing(token: Any) -> None: ...
