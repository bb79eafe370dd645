"""What a model, its optimizer and its communication hold, claimed in an order that settles
who owns a storage that several could claim.

Parameters come before gradients, those before optimizer state, and so on: an optimizer that trains
the model's own tensors holds no second copy, one with float32 masters does. FSDP2 keeps sharded
parameters and, while a module is in use, gathered ones; both are read from its own objects, since
`named_parameters` shows only the kind in use. DDP's buckets cannot be reached; their sizes are
known from its logger unless gradients are views of them, and they are recognised when sent.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from typing import Any

from meshscope.capture.memory.storages import (
    Ledger,
    StorageKey,
    plain_tensors,
    storage_of,
    tensors_in,
)

PARAMETERS = "parameters"
_GATHERED_PARAMETERS = "gathered_parameters"
_BUFFERS = "buffers"
GRADIENTS = "gradients"
_OPTIMIZER_STATE = "optimizer_state"
_MASTER_PARAMETERS = "master_parameters"
COMMUNICATION = "communication"

_WRAPPERS = ("DistributedDataParallel", "OptimizedModule", "DataParallel", "NaiveAMPModel")
"""Modules that hold the real one as `module`, `_orig_mod` or `model`."""
_WRAPPED_NAMES = ("module", "_orig_mod", "model")


def unwrap(model: Any) -> Any:
    """The model inside wrappers that only change how it is run."""
    while type(model).__name__ in _WRAPPERS:
        inner = next((getattr(model, n) for n in _WRAPPED_NAMES if hasattr(model, n)), None)
        if inner is None:
            break
        model = inner
    return model


class WeakList:
    """Objects in their order, none kept alive: a program may drop a model before the profiled step,
    and needs its memory then. What cannot be referred to weakly is held."""

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self._references = [_refer_to(one) for one in objects]

    def __len__(self) -> int:
        return len(self._references)

    def __iter__(self) -> Iterator[Any]:
        return (one for one in self.slots() if one is not None)

    def slots(self) -> list[Any]:
        """All of them, None for those that are gone."""
        return [find() for find in self._references]


def _refer_to(one: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(one)
    except TypeError:
        return lambda: one


class Holdings:
    """The lasting part of a rank's memory: everything but what a step makes and drops."""

    def __init__(
        self,
        torch: Any,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        communication: Sequence[Any] = (),
    ) -> None:
        self._torch = torch
        self._models = WeakList(models)
        self._optimizers = WeakList(optimizers)
        self._communication = list(communication)
        self._prefixes = [""] if len(models) == 1 else [f"{n}." for n in range(len(models))]
        self._bucket_bytes: list[list[int]] = []
        self._threads: set[int] = set()
        """Those that call the models themselves, not replicas of them."""
        self.refresh()

    def note_call(self, model: Any) -> None:
        """A thread calls a model. Of several that train, one may be in backward while another is
        asked for its gradients: torch then writes what we read, which can end the process. So
        gradients are read only while one thread calls models."""
        if any(one is model for one in self._models):
            self._threads.add(get_ident())

    def refresh(self) -> None:
        """Asks DDP for the sizes of its buckets. Not in backward: DDP holds a lock there, and may
        be running an operator that we look at."""
        self._bucket_bytes = [
            [] if model is None else _ddp_bucket_bytes(model) for model in self._models.slots()
        ]

    def release(self) -> None:
        self._models, self._optimizers = WeakList(), WeakList()
        self._prefixes.clear()
        self._communication.clear()
        self._bucket_bytes.clear()

    def named_models(self) -> list[tuple[str, Any]]:
        """The models that are alive, and what their paths begin with: nothing, or the chunk's
        number."""
        pairs = zip(self._prefixes, self._models.slots(), strict=True)
        return [(prefix, model) for prefix, model in pairs if model is not None]

    def find_device(self) -> Any:
        """Where the first parameter or buffer is; the CPU for a model without either."""
        for model in self._models:
            for tensor in (*model.parameters(), *model.buffers()):
                for plain in plain_tensors(tensor):
                    return plain.device
        return self._torch.device("cpu")

    def claim(self, ledger: Ledger, sent: Iterable[tuple[str, StorageKey, int]] = ()) -> None:
        """Adds all of it to a ledger. `sent`: storages that communication may use."""
        names: dict[StorageKey, str] = {}
        named = [(prefix, unwrap(model)) for prefix, model in self.named_models()]
        parameters: list[tuple[str, Any]] = []
        for prefix, model in named:
            parameters += _claim_fully_sharded(ledger, prefix, model)
        for prefix, model in named:
            own = [(prefix + name, one) for name, one in model.named_parameters()]
            for path, parameter in own:
                ledger.add_tensor(PARAMETERS, path, parameter)
            parameters += own
        for path, parameter in parameters:
            for key in _keys_of(parameter):
                names.setdefault(key, path)
        for prefix, model in named:
            for name, buffer in model.named_buffers():
                ledger.add_tensor(_BUFFERS, prefix + name, buffer)
        for path, parameter in parameters:
            gradient = self._gradient_of(parameter)
            if gradient is not None:
                ledger.add_tensor(GRADIENTS, path, gradient)
        for optimizer in self._optimizers:
            self._claim_optimizer(ledger, optimizer, names)
        self._claim_communication(ledger, sent)
        ledger.settle()

    def _claim_optimizer(
        self, ledger: Ledger, optimizer: Any, names: dict[StorageKey, str]
    ) -> None:
        """Its parameters where they are not the model's, their gradients, and its state."""
        groups = getattr(optimizer, "param_groups", ())
        listed = [(g, i, p) for g, group in enumerate(groups) for i, p in enumerate(_params(group))]
        for group, index, parameter in listed:
            path = _name_of(parameter, names) or f"group{group}.{index}"
            for key in _keys_of(parameter):
                names.setdefault(key, path)
            ledger.add_tensor(_MASTER_PARAMETERS, path, parameter)
            gradient = self._gradient_of(parameter)
            if gradient is not None:
                ledger.add_tensor(GRADIENTS, path, gradient)
        # Not state_dict(): it copies, and a sharded optimizer may gather for it.
        for parameter, state in list(getattr(optimizer, "state", {}).items()):
            is_tensor = isinstance(parameter, self._torch.Tensor)
            path = (_name_of(parameter, names) if is_tensor else "") or "(other)"
            for name, value in _state_items(state):
                for tensor in tensors_in(self._torch, value):
                    ledger.add_tensor(_OPTIMIZER_STATE, f"{path}.{name}", tensor)

    def _gradient_of(self, parameter: Any) -> Any:
        """Torch warns when it is asked for that of a tensor which keeps none."""
        is_read = len(self._threads) < 2 and (parameter.is_leaf or parameter.retains_grad)
        return parameter.grad if is_read else None

    def _claim_communication(
        self, ledger: Ledger, sent: Iterable[tuple[str, StorageKey, int]]
    ) -> None:
        for model, sizes in zip(self._models.slots(), self._bucket_bytes, strict=True):
            if model is None:
                continue
            _claim_buckets(ledger, list(sizes), sent)
            for tensor in _fully_sharded_transfers(self._torch, unwrap(model)):
                ledger.add_tensor(COMMUNICATION, "fsdp", tensor, is_part=False)
        for value in self._communication:
            path = type(value).__name__
            for tensor in tensors_in(self._torch, value, with_objects=True):
                ledger.add_tensor(COMMUNICATION, path, tensor, is_part=False)


def _params(group: Any) -> list[Any]:
    return list(group.get("params", ())) if isinstance(group, dict) else []


def _state_items(state: Any) -> list[tuple[str, Any]]:
    if isinstance(state, dict):
        return [(str(name), value) for name, value in state.items()]
    return [("state", state)]


def _keys_of(tensor: Any) -> Iterator[StorageKey]:
    for plain in plain_tensors(tensor):
        found = storage_of(plain)
        if found is not None:
            yield found[0]


def _name_of(parameter: Any, names: dict[StorageKey, str]) -> str:
    return next((names[key] for key in _keys_of(parameter) if key in names), "")


# --- FSDP2 and DDP ---------------------------------------------------------------------------


def _param_groups(model: Any) -> Iterator[Any]:
    """FSDP2's groups of parameters; torch's own objects, so missing attributes are left out."""
    for module in model.modules():
        find_state = getattr(module, "_get_fsdp_state", None)
        state = find_state() if find_state is not None else None
        many = getattr(state, "_fsdp_param_groups", None)
        groups = (
            many if isinstance(many, (list, tuple)) else [getattr(state, "_fsdp_param_group", None)]
        )
        yield from (group for group in groups if group is not None)


def _claim_fully_sharded(ledger: Ledger, prefix: str, model: Any) -> list[tuple[str, Any]]:
    """Gathered and sharded parameters of FSDP2; returns the sharded ones, with their paths."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[tuple[str, Any]] = []
    for group in _param_groups(model):
        for parameter in group.fsdp_params:
            info = parameter._module_info
            module_path = names.get(id(info.module), "")
            path = prefix + ".".join(part for part in (module_path, info.param_name) if part)
            for gathered in _gathered(parameter):
                ledger.add_tensor(_GATHERED_PARAMETERS, path, gathered, is_part=False)
            for sharded in (parameter.sharded_param, parameter._sharded_param_data):
                ledger.add_tensor(PARAMETERS, path, sharded)
            found.append((path, parameter.sharded_param))
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                found.append((path, whole))
            kept = getattr(parameter, "unsharded_accumulated_grad", None)
            if kept is not None:
                ledger.add_tensor(GRADIENTS, path, kept)
    return found


def _gathered(parameter: Any) -> list[Any]:
    found = [*parameter.all_gather_outputs, *getattr(parameter, "_unsharded_inner_tensors", ())]
    own = set(_keys_of(parameter._sharded_param_data))
    whole = getattr(parameter, "_unsharded_param", None)
    if whole is not None:
        found.append(whole)
    # On a mesh of one rank the gathered parameter is the sharded one.
    return [tensor for tensor in found if not own & set(_keys_of(tensor))]


def _fully_sharded_transfers(torch: Any, model: Any) -> Iterator[Any]:
    for group in _param_groups(model):
        context = getattr(group, "comm_ctx", None)
        held = (
            getattr(context, "all_gather_state", None),
            getattr(context, "reduce_scatter_state", None),
            getattr(context, "reduce_scatter_states", None),
            getattr(group, "_all_gather_result", None),
            getattr(group, "_partial_reduce_output", None),
        )
        yield from tensors_in(torch, held, with_objects=True)


def _claim_buckets(
    ledger: Ledger, sizes: list[int], sent: Iterable[tuple[str, StorageKey, int]]
) -> None:
    """Buckets that were seen by their storages, the others by their known sizes."""
    for _, key, num_bytes in sent if sizes else ():
        if num_bytes in sizes and not ledger.claims(key):
            sizes.remove(num_bytes)
            ledger.add(COMMUNICATION, "ddp_buckets", key, num_bytes)
    ledger.add_bytes(COMMUNICATION, "ddp_buckets", sum(sizes))


def _ddp_bucket_bytes(model: Any) -> list[int]:
    """Bytes of each of DDP's buckets that are not gradients as well; none for anything else."""
    if type(model).__name__ != "DistributedDataParallel":
        return []
    if getattr(model, "gradient_as_bucket_view", False):
        return []
    data = model._get_ddp_logging_data()
    text = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
    return [int(part) for part in text.replace(",", " ").split() if part.isdecimal()]
