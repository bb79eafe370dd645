"""Checkpoints of one process: pieces against slices, bad input, what changes and what must not."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

from torch import nn  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (  # noqa: E402
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from meshscope.engine.checkpoint.folder import (  # noqa: E402
    CheckpointError,
    find_checkpoints,
    find_latest,
    remove_old,
)
from meshscope.engine.checkpoint.folder_lock import LOCK_NAME  # noqa: E402
from meshscope.engine.checkpoint.pieces import choose_writers, cut_into_pieces  # noqa: E402
from meshscope.engine.checkpoint.random_state import (  # noqa: E402
    capture_random_state,
    restore_random_state,
)
from meshscope.engine.checkpoint.save_load import (  # noqa: E402
    load_checkpoint,
    load_newest,
    save_checkpoint,
)
from meshscope.engine.model.sharding import ParameterShard  # noqa: E402
from meshscope.errors import UsageError  # noqa: E402

STATE = {"config": {"name": "small", "sizes": [1, 2]}, "num_tokens": 10**12, "rate": 0.1}


class Model(nn.Module):
    """Two matrices, a norm with statistics, and a vector that nothing uses."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Linear(width, 1)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


def make_trained(kind: str = "AdamW", *, num_steps: int = 3, width: int = 6) -> tuple[Any, Any]:
    torch.manual_seed(num_steps)
    model = Model(width)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def read_everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"{key} of {name}"] = value.clone()
    return tensors


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of step 3."""
    model, optimizer = make_trained()
    return save_checkpoint(
        tmp_path / "checkpoints", step=3, stages={0: model}, optimizer=optimizer, state=STATE
    )


# --- what comes back ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad", "RMSprop", "NAdam"])
def test_everything_comes_back_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model, optimizer = make_trained(kind)
    expected = read_everything(model, optimizer)
    path = save_checkpoint(tmp_path, step=3, stages={0: model}, optimizer=optimizer, state=STATE)
    other, its_optimizer = make_trained(kind, num_steps=1)
    loaded = load_checkpoint(path, stages={0: other}, optimizer=its_optimizer)
    assert_same(read_everything(other, its_optimizer), expected)
    assert (loaded.path, loaded.step, loaded.state, loaded.num_ranks) == (path, 3, STATE, 1)
    assert path == tmp_path / "step-00000003"


def test_training_goes_on_the_same_with_its_random_numbers(tmp_path: Path) -> None:
    model, optimizer = make_trained()
    path = save_checkpoint(tmp_path, step=3, stages={0: model}, optimizer=optimizer)

    def train_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
        return read_everything(model, optimizer)

    expected = train_on(model, optimizer)
    other = Model()
    its_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    load_checkpoint(path, stages={0: other}, optimizer=its_optimizer)
    assert_same(train_on(other, its_optimizer), expected)


def test_a_parameter_that_was_never_stepped_has_no_state_after_loading(saved: Path) -> None:
    model, optimizer = make_trained(num_steps=1)
    model.unused.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[model.unused]
    load_checkpoint(saved, stages={0: model}, optimizer=optimizer)
    assert not optimizer.state.get(model.unused)


def test_the_model_alone_can_be_loaded(saved: Path) -> None:
    model, optimizer = make_trained(num_steps=1)
    state = {k: v for k, v in read_everything(model, optimizer).items() if " of " in k}
    load_checkpoint(saved, stages={0: model})
    expected, _ = make_trained()
    assert_same(dict(model.state_dict()), dict(expected.state_dict()))
    kept = {k: v for k, v in read_everything(model, optimizer).items() if " of " in k}
    assert_same(kept, state)


def test_masters_are_stored_in_the_place_of_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 5, dtype=torch.bfloat16)
    masters = {p: torch.randn(p.shape) for p in model.parameters()}
    optimizer = torch.optim.AdamW(masters.values())
    for master in masters.values():
        master.grad = torch.randn(master.shape)
    optimizer.step()
    path = save_checkpoint(
        tmp_path, step=1, stages={0: model}, optimizer=optimizer, masters=masters
    )
    full = nn.Linear(5, 5)
    load_checkpoint(path, stages={0: full})
    for found, expected in zip(full.parameters(), masters.values(), strict=True):
        assert torch.equal(found, expected), "no bit is lost to bfloat16"
    again = nn.Linear(5, 5, dtype=torch.bfloat16)
    its_masters = {p: torch.zeros(p.shape) for p in again.parameters()}
    its_optimizer = torch.optim.AdamW(its_masters.values())
    load_checkpoint(path, stages={0: again}, optimizer=its_optimizer, masters=its_masters)
    for (parameter, found), expected in zip(its_masters.items(), masters.values(), strict=True):
        assert torch.equal(found, expected)
        assert torch.equal(parameter, expected.bfloat16())
        assert torch.equal(
            its_optimizer.state[found]["exp_avg"], optimizer.state[expected]["exp_avg"]
        )


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)), nn.Linear(3, 3))
    path = save_checkpoint(tmp_path, step=1, stages={0: model})
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    load_checkpoint(path, stages={0: plain})
    for found, expected in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)


# --- pieces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("shape", "dim", "parts"),
    [((13, 3), 0, (7, 4, 2)), ((3, 10), 1, (10,)), ((5,), 0, (5,)), ((4, 2), None, ())],
)
def test_pieces_of_all_ranks_make_the_full_tensor(
    shape: tuple[int, ...], dim: int | None, parts: tuple[int, ...], num_shards: int
) -> None:
    full = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    found = torch.zeros_like(full)
    num_elements = 0
    for index in range(num_shards):
        shard = ParameterShard(
            full_shape=shape, dim=dim, parts=parts, num_shards=num_shards, shard_index=index
        )
        for piece in cut_into_pieces(shard.take(full), shard).pieces:
            place = tuple(
                slice(begin, begin + size)
                for begin, size in zip(piece.offsets, piece.values.shape, strict=True)
            )
            found[place] = piece.values
            num_elements += piece.values.numel()
    assert torch.equal(found, full)
    assert num_elements == full.numel() * (num_shards if dim is None else 1)


def test_pieces_are_views_so_that_loading_fills_the_parameter() -> None:
    shard = ParameterShard(full_shape=(4, 4), dim=1, parts=(2, 2), num_shards=2, shard_index=1)
    local = torch.zeros(4, 2)
    for number, piece in enumerate(cut_into_pieces(local, shard).pieces):
        assert piece.offsets == (0, 1 + 2 * number)
        piece.values.fill_(number + 1)
    assert local.tolist() == [[1, 2]] * 4


def make_item(name: str, num_elements: int) -> WriteItem:
    size = torch.Size((num_elements,))
    return WriteItem(
        index=MetadataIndex(name, (0,)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size((0,)), sizes=size),
            properties=TensorProperties(dtype=torch.float32),
            size=size,
        ),
    )


def test_writers_share_what_several_hold() -> None:
    shared = [make_item(f"shared {size}", size) for size in (8, 6, 5, 3, 2)]
    plans = [SavePlan([*shared, make_item("own", 10)]), SavePlan(shared), SavePlan(shared)]
    chosen = [[item.index.fqn for item in plan.items] for plan in choose_writers(plans)]
    assert sorted(name for names in chosen for name in names) == sorted(
        ["own", *(item.index.fqn for item in shared)]
    )
    sizes = [sum(int(name.split()[-1]) for name in names if name != "own") for names in chosen]
    assert [sizes[0] + 10, sizes[1], sizes[2]] == [12, 11, 11]


# --- a folder of them -----------------------------------------------------------------------------


def save_steps(folder: Path, *steps: int, **options: Any) -> None:
    for step in steps:
        save_checkpoint(folder, step=step, stages={0: nn.Linear(2, 2)}, **options)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK_NAME)


def test_complete_checkpoints_are_found_in_the_order_of_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, 20, 100, 3)
    (tmp_path / "step-00000200").mkdir()
    (tmp_path / "step-last").mkdir()
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [3, 20, 100]
    assert find_latest(tmp_path).path == tmp_path / "step-00000100"
    assert find_latest(tmp_path / "nothing") is None


def test_old_ones_are_removed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    assert remove_old(tmp_path, keep=2) == [tmp_path / "step-00000001"]
    assert list_names(tmp_path) == ["step-00000002", "step-00000003"]
    save_steps(tmp_path, 4, keep=1)
    assert list_names(tmp_path) == ["step-00000004"]
    with pytest.raises(UsageError, match="keep is 0"):
        remove_old(tmp_path, keep=0)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path, step=1, stages={0: model})
    nn.init.constant_(model.weight, 7.0)
    path = save_checkpoint(tmp_path, step=1, stages={0: model}, state={"attempt": 2})
    other = nn.Linear(2, 2)
    assert load_checkpoint(path, stages={0: other}).state == {"attempt": 2}
    assert torch.equal(other.weight, model.weight)
    assert list_names(tmp_path) == ["step-00000001"]


def test_killed_between_two_renames_the_replaced_one_still_counts(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".replaced-step-00000002")
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [1, 2]
    save_steps(tmp_path, 3)
    assert list_names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


# --- bad input: nothing changes, one sentence -----------------------------------------------------


def assert_refused(path: Path, pattern: str, *, width: int = 6, kind: str = "AdamW") -> None:
    model, optimizer = make_trained(kind, num_steps=1, width=width)
    before = read_everything(model, optimizer)
    with pytest.raises(CheckpointError, match=pattern):
        load_checkpoint(path, stages={0: model}, optimizer=optimizer)
    assert_same(read_everything(model, optimizer), before)


def test_what_is_no_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    assert_refused(
        saved.parent / "step-00000009",
        r"there is no checkpoint at .*; .* holds 1, the latest is step-00000003",
    )
    assert_refused(saved.parent, r"is no complete checkpoint.*the latest is step-00000003")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "is no complete checkpoint, as it has no meshscope.json")


def damage(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_one_flipped_bit_is_seen(saved: Path, name: str, place: float) -> None:
    damage(saved / name, place)
    assert_refused(saved, f"is damaged: {name} has another checksum")


@pytest.mark.parametrize("place", [0.0, 0.05, 0.3, 0.6, 0.9])
def test_one_flipped_bit_of_the_manifest_is_seen(saved: Path, place: float) -> None:
    damage(saved / "meshscope.json", place)
    assert_refused(saved, r"is damaged|has format")


def test_missing_and_cut_files_are_seen(saved: Path) -> None:
    shutil.copytree(saved, saved.parent / "cut")
    (saved / "__0_0.distcp").unlink()
    assert_refused(saved, r"is damaged: __0_0\.distcp is missing")
    file = saved.parent / "cut" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])
    assert_refused(saved.parent / "cut", r"bytes instead of")


def test_a_damaged_newest_checkpoint_is_passed_over_and_does_not_count(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    damage(tmp_path / "step-00000004" / "meshscope.json", 0.5)
    damage(tmp_path / "step-00000003" / "__0_0.distcp", 0.9)
    loaded: list[int] = []

    def load_one(path: Path) -> None:
        loaded.append(load_checkpoint(path, stages={0: nn.Linear(2, 2)}).step)

    notes = load_newest(tmp_path, load_one)
    assert loaded == [2]
    assert notes is not None
    assert all(note.endswith("set aside, and step-00000002 is resumed from") for note in notes)
    assert "meshscope.json" in notes[0]
    assert "__0_0.distcp has another checksum" in notes[1]
    save_steps(tmp_path, 3, keep=1)
    assert list_names(tmp_path) == [
        ".damaged-step-00000003",
        ".damaged-step-00000004",
        "step-00000003",
    ]


def test_without_a_good_checkpoint_nothing_is_begun_anew(tmp_path: Path) -> None:
    assert load_newest(tmp_path, lambda path: None) is None
    save_steps(tmp_path, 1)
    damage(tmp_path / "step-00000001" / "meshscope.json", 0.5)
    with pytest.raises(CheckpointError, match="damaged"):
        load_newest(tmp_path, lambda path: load_checkpoint(path, stages={}) and None)
    assert list_names(tmp_path) == ["step-00000001"]


def test_another_model_is_not_taken_for_damage(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    stages = {0: nn.Linear(3, 3)}
    with pytest.raises(CheckpointError, match="another model"):
        load_newest(tmp_path, lambda path: load_checkpoint(path, stages=stages) and None)
    assert list_names(tmp_path) == ["step-00000001", "step-00000002"]


HOLD = """
import sys
from pathlib import Path
from meshscope.engine.checkpoint.folder_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_job_is_kept_out_until_the_first_has_ended(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            with pytest.raises(CheckpointError, match=rf"in use by process {other.pid} on "):
                save_steps(tmp_path, 2, keep=1)
            assert list_names(tmp_path) == ["step-00000001"]
        finally:
            other.kill()  # a lock ends with its process
    save_steps(tmp_path, 2, keep=1)
    assert list_names(tmp_path) == ["step-00000002"]


def test_a_newer_format_is_refused(saved: Path) -> None:
    manifest = json.loads((saved / "meshscope.json").read_text(encoding="utf-8"))
    manifest["format"] = 2
    (saved / "meshscope.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert_refused(saved, "has format 2, but this meshscope reads up to 1; load it with a newer")


def test_another_model_is_refused_with_what_differs(saved: Path) -> None:
    assert_refused(
        saved,
        r"is of another model: shapes differ of down\.weight \(\(1, 6\) stored, \(1, 5\) in the "
        r"model\), .*and \d more; build the model with",
        width=5,
    )
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved, stages={0: other})
    assert "it lacks 0.bias, 0.weight, 1.bias, 1.weight and 2 more" in str(caught.value)
    assert (
        "the model lacks down.bias, down.weight, norm.bias, norm.num_batches_tracked and 6"
        in str(caught.value)
    )


def test_a_row_is_not_broadcast_into_a_matrix(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(shape))

    path = save_checkpoint(tmp_path, step=1, stages={0: Holder(1, 4)})
    with pytest.raises(CheckpointError, match=r"weight \(\(1, 4\) stored, \(3, 4\) in the model\)"):
        load_checkpoint(path, stages={0: Holder(3, 4)})


def test_another_optimizer_is_refused(saved: Path, tmp_path: Path) -> None:
    assert_refused(saved, r"has state of AdamW .*, but this run's is SGD", kind="SGD")
    path = save_checkpoint(tmp_path / "bare", step=1, stages={0: Model()})
    assert_refused(path, "has no state of an optimizer, but this run's is AdamW")


def test_a_description_that_would_run_code_is_refused(saved: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "was run",))

    (saved / ".metadata").write_bytes(pickle.dumps(Evil()))
    model = Model()
    with pytest.raises(CheckpointError, match="has no place in a checkpoint"):
        load_checkpoint(saved, stages={0: model}, verify=False)
    assert not (tmp_path / "was run").exists()


def test_bad_arguments_of_a_save_are_told_at_once_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        save_checkpoint(tmp_path / "new", step=-1, stages={0: Model()}, state={"a": {1, 2}}, keep=0)
    assert str(caught.value) == (
        "step is -1, expected 0 or more; keep is 0, expected at least 1, or None to keep all; "
        "state is not JSON (Object of type set is not JSON serializable); give numbers, texts, "
        "lists and mappings"
    )
    assert not (tmp_path / "new").exists()


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    _, optimizer = make_trained()
    with pytest.raises(UsageError, match="belong to none of the stages"):
        save_checkpoint(tmp_path, step=1, stages={0: Model()}, optimizer=optimizer)


def test_optimizer_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.weight] = {"row_mean": torch.zeros(3)}
    with pytest.raises(UsageError, match=r"a tensor of shape \(3,\) as row_mean of weight"):
        save_checkpoint(tmp_path, step=1, stages={0: model}, optimizer=optimizer)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"could not be saved: rank 0: \w+Error"):
        save_checkpoint(tmp_path / "file", step=1, stages={0: Model()})


def test_random_generators_go_on_where_they_were() -> None:
    import random

    import numpy as np

    state = capture_random_state()
    drawn = [random.random(), np.random.rand(), torch.rand(()).item(), random.gauss(0, 1)]
    restore_random_state(state)
    again = [random.random(), np.random.rand(), torch.rand(()).item(), random.gauss(0, 1)]
    assert again == drawn
