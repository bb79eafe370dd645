"""Compilation, checkpoints and logs of real programs as phases."""

import inspect
import io
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
import torch.distributed.checkpoint as dcp
from recorded import read_recorded

from meshscope.analyze.rank.phases import assign_phases, order_steps, tabulate_phases
from meshscope.capture.config import RecorderConfig
from meshscope.capture.recorder import Recorder
from meshscope.store.read.run import open_run

QUIET = RecorderConfig(provenance=False, communication=False, stack_dumps=False)


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(model, backend="eager", dynamic=False)  # type: ignore[return-value]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> None:
    model(torch.randn(rows, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


TRAIN_LINE = train.__code__.co_firstlineno + 1


@pytest.mark.usefixtures("fresh_compiler")
def test_a_recompilation_is_a_phase_in_forward_with_its_reason(tmp_path: Path) -> None:
    model = compiled(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(tmp_path / "run", config=QUIET).attach(model, optimizer)
    for rows in (2, 2, 3):
        train(model, optimizer, rows)
    torch._dynamo.reset()  # drops all callbacks
    train(model, optimizer, 3)
    recorder.watching.find_phases()  # as is done once a second, when the machine has time for it
    train(model, optimizer, 5)
    recorder.close()
    handler = torch._dynamo.callback_handler
    assert not handler.start_callbacks
    assert not handler.end_callbacks

    found = read_recorded(tmp_path / "run")
    assert [step.counts["compile"] for step in found.steps] == [1, 0, 1, 0, 1]
    step = found.steps[2]
    [forward] = [phase for phase in step.phases if phase.name == "forward"]
    [compiling] = [phase for phase in step.phases if phase.name == "compile"]
    assert forward.start_ns <= compiling.start_ns < compiling.end_ns <= forward.end_ns
    assert forward.self_ns + compiling.self_ns == forward.end_ns - forward.start_ns

    lines = [line["compilation"] for line in found.rank.updates if "compilation" in line]
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert lines[0]["reason"] == ""
    # torch's own words; what was expected and what came are ours to know
    assert "size mismatch at index 0. expected 2, actual 3" in lines[1]["reason"]
    here = f"capture/test_extra_phases.py:{TRAIN_LINE} train > model < "
    assert all(line["where"].startswith(here) for line in lines)
    assert lines[1]["start_host_mono_ns"] == compiling.start_ns
    assert lines[1]["duration_ns"] == compiling.end_ns - compiling.start_ns
    assert recorder.guard.num_errors == 0


@pytest.mark.usefixtures("fresh_compiler")
def test_listening_breaks_no_graph(tmp_path: Path) -> None:
    model = compiled(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    without = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.reset()
    recorder = Recorder(tmp_path / "run", config=QUIET).attach(model, optimizer)
    train(model, optimizer, 2)
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == without
    recorder.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saving_is_the_phase_checkpoint_between_steps(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.save
    recorder = Recorder(tmp_path / "run", config=QUIET).attach(model, optimizer)
    train(model, optimizer, 2)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    train(model, optimizer, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    train(model, optimizer, 2)
    with recorder.phase("checkpoint"):
        torch.save(model.state_dict(), io.BytesIO())
    assert inspect.signature(torch.save) == inspect.signature(plain)
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save
    recorder.close()
    assert torch.save is torch.serialization.save is plain
    assert dcp.save is dcp.state_dict_saver.save

    found = read_recorded(tmp_path / "run")
    on_training_thread = [phase for phase in found.outside if phase.thread == 0]
    assert [phase.name for phase in on_training_thread] == ["checkpoint"] * 3
    assert recorder.guard.num_errors == 0
    assert len(open_run(tmp_path / "run").last_attempt.ranks) == 1


def test_a_save_that_raises_ends_its_phase(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(tmp_path / "run", config=QUIET).attach(model, optimizer)
    train(model, optimizer, 2)
    with pytest.raises(RuntimeError):
        torch.save(model.state_dict(), tmp_path / "no such folder" / "model.pt")
    train(model, optimizer, 2)
    recorder.close()
    found = read_recorded(tmp_path / "run")
    assert [phase.name for phase in found.outside] == ["checkpoint"]
    assert found.steps[1].names == ["forward", "backward", "optimizer"]


class SlowRows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that take a while to read."""

    def __init__(self, num_rows: int, seconds: float) -> None:
        self.num_rows, self.seconds = num_rows, seconds

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.randn(4)


def test_a_slow_validation_loader_is_evaluation_and_no_input_stall(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = torch.utils.data.DataLoader(SlowRows(8, 0.0), batch_size=4)
    validation = torch.utils.data.DataLoader(SlowRows(6, 0.01), batch_size=2)
    recorder = Recorder(tmp_path / "run", config=QUIET).attach(model, optimizer)
    for _ in range(2):
        for batch in training:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for batch in validation:
                model(batch).sum().item()
    recorder.close()
    recording = open_run(tmp_path / "run").last_attempt.ranks[0]
    steps = order_steps(recording.read("steps"))
    placed, _ = assign_phases(steps, recording.read("spans"))
    table = tabulate_phases(placed, recording.names, num_steps=len(steps))
    between = dict(zip(table.phases, table.total_ns[4].tolist(), strict=True))  # after step 1
    assert between["eval"] >= 6 * 10_000_000  # six rows of 10 ms
    assert between["data"] < 10_000_000  # the training loader's end
    assert table.in_steps_ns[:, table.phases.index("eval")].sum() == 0


def test_what_hands_metrics_to_a_logger_is_the_phase_logging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Run:
        """As wandb has it."""

        def log(self, values: dict[str, float]) -> int:
            return self.write(values)

        def write(self, values: dict[str, float]) -> int:
            torch.save(values, io.BytesIO())  # part of logging, not a checkpoint
            return len(values)

    monkeypatch.setitem(sys.modules, "wandb.sdk.wandb_run", SimpleNamespace(Run=Run))
    original = Run.log
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(tmp_path / "run", config=QUIET).attach(model, optimizer)
    for _ in range(2):
        train(model, optimizer, 2)
        assert Run().log({"loss": 1.0}) == 1
    recorder.close()
    assert Run.log is original
    assert [phase.name for phase in read_recorded(tmp_path / "run").outside] == ["logging"] * 2


def test_a_frameworks_own_saving_is_one_phase(tmp_path: Path, monkeypatch) -> None:
    """All of it, with the files that it writes by torch.save inside."""

    class Trainer:
        def _save_checkpoint(self, path: Path) -> None:
            time.sleep(0.002)
            torch.save({}, path)

    monkeypatch.setitem(sys.modules, "transformers.trainer", SimpleNamespace(Trainer=Trainer))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(tmp_path / "run", config=QUIET).attach(model, optimizer)
    train(model, optimizer, 2)
    Trainer()._save_checkpoint(tmp_path / "model.pt")
    recorder.close()
    [saving] = read_recorded(tmp_path / "run").outside
    assert saving.name == "checkpoint"
    assert saving.self_ns >= 2_000_000
    assert recorder.guard.num_errors == 0
