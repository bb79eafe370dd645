"""Saves a model in training, on all ranks together, and loads it on any other layout.

    path = save_checkpoint(folder, step=100, stages=stages, optimizer=optimizer,
                           state={"config": …, "num_tokens": …})
    loaded = load_checkpoint(path, stages=stages, optimizer=optimizer)
    loaded.step, loaded.state

Tensors go through `torch.distributed.checkpoint` as pieces of the full ones
(`pieces`), by names that no layout changes (`content`), into a folder that is
complete or not there (`folder`). Degrees, number and sizes of stages, FSDP2 or not may
all differ between saving and loading, as may dtypes: values are cast to the loading parameter's.

All ranks of the group call each function together and raise together, whichever of them failed.
`stages` are this rank's, by index; parameters must have the names of the whole model. Hyper-
parameters of the optimizer are not stored: they are the configuration's.

Wrong when data-parallel ranks have drifted apart: which rank's copy is stored is left open.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from meshscope.engine.checkpoint.content import (
    BUFFER,
    MODEL,
    Content,
    Masters,
    NamedParameter,
    collect_model,
    collect_optimizer_state,
    describe_optimizers,
    find_parameters,
    prepare_optimizer_state,
    require_known,
)
from meshscope.engine.checkpoint.description import (
    DescribedReader,
    describe_tensors,
    list_names,
    read_description,
)
from meshscope.engine.checkpoint.folder import (
    DESCRIPTION,
    CheckpointError,
    DamagedCheckpointError,
    Json,
    Manifest,
    StoredFile,
    describe_file,
    discard,
    final_path,
    find_checkpoints,
    incomplete_path,
    publish,
    read_manifest,
    remove_old_if_possible,
    require_undamaged,
    set_aside,
    start_writing,
)
from meshscope.engine.checkpoint.folder_lock import locked
from meshscope.engine.checkpoint.pieces import (
    PieceLoadPlanner,
    PieceSavePlanner,
    whole_tensor,
)
from meshscope.engine.checkpoint.random_state import capture_random_state, restore_random_state
from meshscope.engine.model.tensor_regions import Group
from meshscope.errors import MeshscopeError, UsageError

T = TypeVar("T")
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None

_RANDOM = "random/"

# torch has no types for them.
_save: Any = save
_load: Any = load


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What was loaded beside parameters and optimizer state."""

    path: Path
    step: int
    state: dict[str, Json]
    """What was given to `save_checkpoint`."""
    num_ranks: int
    """Ranks that saved it."""
    has_random_state: bool
    """Whether generators were set; False on another number of ranks, where theirs mean nothing."""


def save_checkpoint(
    folder: Path | str,
    *,
    step: int,
    stages: Mapping[int, nn.Module],
    optimizer: Optimizers = None,
    state: Mapping[str, Json] | None = None,
    masters: Masters | None = None,
    process_group: Group = None,
    keep: int | None = None,
) -> Path:
    """Writes `folder/step-…` and hands back its path; a checkpoint of the same step is replaced.

    `state` is JSON and rank 0's is stored. With `masters`, those are stored in the parameters'
    place. `keep` removes all but so many of the latest checkpoints, this one included. On failure
    all ranks raise CheckpointError and earlier checkpoints are as they were.
    """
    ranks = _Ranks(process_group)
    optimizers = _list_optimizers(optimizer)
    final = final_path(folder, step)
    incomplete = incomplete_path(final)
    held = ExitStack()

    def prepare() -> Content:
        _require_valid(step, state, keep)
        parameters = find_parameters(stages, masters)
        content = Content()
        collect_model(stages, parameters, content)
        collect_optimizer_state(optimizers, parameters, content)
        content.tensors[f"{_RANDOM}{ranks.rank}"] = whole_tensor(capture_random_state())
        if ranks.rank == 0:
            held.enter_context(locked(final.parent))
            start_writing(final)
        return content

    def describe_own() -> dict[str, StoredFile]:
        own = sorted(incomplete.glob(f"__{ranks.rank}_*"))
        if ranks.rank == 0:
            own.append(incomplete / DESCRIPTION)
        return {path.name: describe_file(path) for path in own}

    def complete() -> None:
        if ranks.rank != 0:
            return
        manifest = Manifest(
            step=step,
            num_ranks=ranks.size,
            optimizers=sorted({name for names in kinds for name in names}),
            files={name: file for files in described for name, file in files.items()},
            state=dict(state or {}),
            torch_version=torch.__version__,
        )
        publish(incomplete, final, manifest)
        if keep is not None:
            remove_old_if_possible(final.parent, keep)

    failed = f"the checkpoint {final} could not be saved"
    with held:
        content = ranks.run(failed, prepare)
        try:
            with _one_error(failed):
                _save(
                    {},
                    storage_writer=FileSystemWriter(incomplete, sync_files=True, overwrite=False),
                    planner=PieceSavePlanner(content.tensors),
                    process_group=process_group,
                    no_dist=not ranks.is_distributed,
                )
            kinds = ranks.gather(describe_optimizers(optimizers), failed)
            described = ranks.gather(ranks.run(failed, describe_own), failed)
            ranks.run(failed, complete)
        except CheckpointError:
            if ranks.rank == 0:
                discard(incomplete)
            raise
    return final


@contextmanager
def hold_checkpoints(folder: Path, process_group: Group = None) -> Iterator[None]:
    """Keeps other jobs from saving into a folder; CheckpointError on all ranks if one does."""
    ranks = _Ranks(process_group)

    def hold() -> None:
        if ranks.rank == 0:
            held.enter_context(locked(folder))

    with ExitStack() as held:
        ranks.run(f"{folder} could not be held", hold)
        yield


def load_newest(
    folder: Path, load_one: Callable[[Path], None], process_group: Group = None
) -> list[str] | None:
    """Loads the newest checkpoint that is undamaged; a sentence for each that is set aside.

    None where there is no checkpoint. CheckpointError when all of them are damaged.
    """
    ranks = _Ranks(process_group)
    damaged: dict[Path, DamagedCheckpointError] = {}

    def set_damaged_aside() -> None:
        for path in damaged if ranks.rank == 0 else ():
            set_aside(path)

    for saved in reversed(find_checkpoints(folder)):
        try:
            load_one(saved.path)
        except DamagedCheckpointError as error:
            damaged[saved.path] = error
        else:
            ranks.run("a damaged checkpoint could not be set aside", set_damaged_aside)
            return [
                f"{str(error).split('; load another', maxsplit=1)[0]}; it is set aside, and "
                f"{saved.path.name} is resumed from"
                for error in damaged.values()
            ]
    if damaged:
        raise next(iter(damaged.values()))
    return None


def load_checkpoint(
    path: Path | str,
    *,
    stages: Mapping[int, nn.Module],
    optimizer: Optimizers = None,
    masters: Masters | None = None,
    process_group: Group = None,
    verify: bool = True,
) -> LoadedCheckpoint:
    """Fills parameters, masters, persistent buffers and optimizer state from a checkpoint.

    Without an optimizer the model alone is loaded. Everything is checked before anything changes:
    that files are as they were written (unless `verify` is False: this reads each once more, spread
    over ranks), and that names, shapes and kind of optimizer agree.
    """
    ranks = _Ranks(process_group)
    optimizers = _list_optimizers(optimizer)
    path = Path(path)
    failed = f"the checkpoint {path} could not be loaded"
    manifest = ranks.run(failed, lambda: read_manifest(path))
    if verify:
        names = sorted(manifest.files)[ranks.rank :: ranks.size]
        ranks.run(failed, lambda: require_undamaged(path, manifest.files, names))

    def prepare() -> tuple[Metadata, dict[str, TensorStorageMetadata], list[NamedParameter]]:
        metadata = read_description(path)
        parameters = find_parameters(stages, masters)
        require_known(optimizers, parameters)
        _require_kinds(path, manifest, describe_optimizers(optimizers))
        return metadata, describe_tensors(path, metadata), parameters

    metadata, stored, parameters = ranks.run(failed, prepare)
    content = Content()
    ranks.run(failed, lambda: collect_model(stages, parameters, content))
    shapes = {key: tensor.full_shape for key, tensor in content.tensors.items()}
    needed = {k: v for found in ranks.gather(shapes, failed) for k, v in found.items()}
    _require_same(path, needed, stored)
    states = ranks.run(
        failed, lambda: prepare_optimizer_state(optimizers, parameters, stored, content)
    )
    ranks.run(failed, lambda: _require_shapes(path, content, stored))
    random_key = f"{_RANDOM}{ranks.rank}"
    has_random_state = manifest.num_ranks == ranks.size and random_key in stored
    random_state = torch.empty(0, dtype=torch.uint8)
    if has_random_state:
        random_state = torch.empty(stored[random_key].size, dtype=torch.uint8)
        content.tensors[random_key] = whole_tensor(random_state)
    with _one_error(f"{failed}, and parameters are partly changed"), torch.no_grad():
        _load(
            {},
            storage_reader=DescribedReader(path, metadata),
            planner=PieceLoadPlanner(content.tensors),
            process_group=process_group,
            no_dist=not ranks.is_distributed,
        )
    with torch.no_grad():
        content.copy_tied()
        for named in parameters:
            if named.stepped is not named.parameter:
                named.parameter.copy_(named.stepped)
    for loaded_optimizer, state in states.items():
        loaded_optimizer.state.clear()
        loaded_optimizer.state.update({p: dict(values) for p, values in state.items() if values})
    if has_random_state:
        restore_random_state(random_state)
    return LoadedCheckpoint(
        path=path,
        step=manifest.step,
        state=manifest.state,
        num_ranks=manifest.num_ranks,
        has_random_state=has_random_state,
    )


# --- checks ---------------------------------------------------------------------------------------


def _require_valid(step: int, state: Mapping[str, Json] | None, keep: int | None) -> None:
    problems = []
    if step < 0:
        problems.append(f"step is {step}, expected 0 or more")
    if keep is not None and keep < 1:
        problems.append(f"keep is {keep}, expected at least 1, or None to keep all")
    try:
        json.dumps(dict(state or {}))
    except (TypeError, ValueError) as error:
        problems.append(f"state is not JSON ({error}); give numbers, texts, lists and mappings")
    if problems:
        raise UsageError("; ".join(problems))


def _require_kinds(path: Path, manifest: Manifest, kinds: list[str]) -> None:
    if not kinds or set(kinds) <= set(manifest.optimizers):
        return
    stored = f"state of {', '.join(manifest.optimizers)}" if manifest.optimizers else "no state"
    raise CheckpointError(
        f"checkpoint {path} has {stored} of an optimizer, but this run's is {', '.join(kinds)}; "
        "train with the same one, or load without optimizer to begin its state anew"
    )


def _require_same(
    path: Path, needed: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorStorageMetadata]
) -> None:
    """Every name of the model of all ranks against every name of the checkpoint."""
    held = {key: tuple(stored[key].size) for key in stored if key.startswith((MODEL, BUFFER))}
    problems = list_names("it lacks", [k for k in needed if k not in held])
    problems += list_names("the model lacks", [k for k in held if k not in needed])
    differing = [k for k in needed if k in held and held[k] != needed[k]]
    problems += list_names(
        "shapes differ of", differing, lambda k: f" ({held[k]} stored, {needed[k]} in the model)"
    )
    if problems:
        raise CheckpointError(
            f"checkpoint {path} is of another model: {'; '.join(problems)}; build the model with "
            "the configuration that the checkpoint was saved with"
        )


def _require_shapes(
    path: Path, content: Content, stored: Mapping[str, TensorStorageMetadata]
) -> None:
    differing = [k for k, t in content.tensors.items() if tuple(stored[k].size) != t.full_shape]
    if differing:
        listed = "; ".join(list_names("shapes differ of", differing))
        raise CheckpointError(f"checkpoint {path} does not fit the optimizer: {listed}")


# --- ranks ----------------------------------------------------------------------------------------


class _Ranks:
    """The ranks that save or load together; one, where no process group is."""

    def __init__(self, group: Group) -> None:
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self._group = group
        self.rank = dist.get_rank(group) if self.is_distributed else 0
        self.size = dist.get_world_size(group) if self.is_distributed else 1

    def gather(self, value: T, failed: str) -> list[T]:
        """The values of all ranks, in order."""
        if not self.is_distributed:
            return [value]
        gathered: list[Any] = [None] * self.size
        with _one_error(failed):
            dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def run(self, failed: str, action: Callable[[], T]) -> T:
        """Runs `action`; raises on all ranks when it raised on any."""
        result: Any = None
        error: MeshscopeError | None = None
        try:
            result = action()
        except MeshscopeError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - other ranks must not wait for this one
            error = CheckpointError(f"{failed}: rank {self.rank}: {_describe_error(raised)}")
            error.__cause__ = raised
        errors = [found for found in self.gather(error, failed) if found is not None]
        if errors:  # one of them, the same everywhere; this rank's own is its cause
            raise errors[0] from error
        return result  # type: ignore[no-any-return]  # of the action


@contextmanager
def _one_error(failed: str) -> Iterator[None]:
    """Turns what DCP and process groups raise into one sentence."""
    try:
        with warnings.catch_warnings():
            # DCP says that one process is one process, and old names of collectives are old.
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as error:
        causes = [
            f"rank {rank}: {_describe_error(cause)}"
            for rank, (cause, _) in sorted(error.failures.items())
        ]
        raise CheckpointError(f"{failed}: {'; '.join(causes)}") from error
    except RuntimeError as error:  # a process group lost a rank, or its patience
        raise CheckpointError(
            f"{failed}, as a rank does not answer: {_describe_error(error)}"
        ) from error


def _describe_error(error: BaseException) -> str:
    sentences = [line.split(". ")[0] for line in str(error).strip().splitlines()[:1]]
    return ": ".join([type(error).__name__, *sentences])


def _list_optimizers(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
