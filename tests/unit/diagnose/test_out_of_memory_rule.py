"""ME006: a full device is told with its sentence and files; other lines about memory are not."""

import json

import pytest
import torch
from torch import nn

from meshscope.analyze.study import Study
from meshscope.capture.memory.out_of_memory import OutOfMemoryWatch
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.rules.out_of_memory import OutOfMemory
from meshscope.diagnose.runner import diagnose
from meshscope.store.read.run import open_run

GIB = 1 << 30


def find(run_dir):
    return list(OutOfMemory().run(Context(Study(open_run(run_dir).last_attempt))))


class FullTorch:
    """torch's face where there is a device, of which nothing but the numbers is needed here."""

    class cuda:
        class memory:
            @staticmethod
            def _snapshot():
                return {"segments": []}

        @staticmethod
        def memory_stats(device):
            return {"allocated_bytes.all.current": 3 * GIB, "reserved_bytes.all.current": 4 * GIB}


def train(recorder, model, num_steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        with recorder.step():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize(("num_more", "severity"), [(0, "critical"), (2, "medium")])
def test_a_full_device_is_told(tmp_path, num_more, severity):
    model = nn.Linear(4, 4)
    config = RecorderConfig(provenance=False, communication=False)
    recorder = Recorder(tmp_path / "run", config=config)
    train(recorder, model, 3)
    watch = OutOfMemoryWatch(
        FullTorch,
        recorder.guard,
        find_folder=recorder.profiles.find_memory_folder,
        find_training=lambda: ([], []),
        find_profile=lambda: None,
        note=recorder.profiles.note_full_device,
    )
    recorder.begin_step()
    watch.observe(0, 2 * GIB, 5 * GIB, 1 * GIB)
    if num_more:
        recorder.end_step()
        train(recorder, model, num_more)
    recorder.close()
    assert recorder.guard.counts == {}
    (finding,) = find(tmp_path / "run")
    assert finding.severity is Severity[severity.upper()]
    assert (finding.code, finding.ranks, finding.first_step) == ("ME006", (0,), 3)
    assert ": cuda:0 is full: 3.00 GiB of 5.00 GiB" in finding.summary
    assert "2.00 GiB were asked for" in finding.summary
    report = "memory/rank0/out_of_memory.json"
    assert f"{report} lists what it held" in finding.summary
    assert json.loads((tmp_path / "run" / report).read_text())["requested_bytes"] == 2 * GIB
    assert (tmp_path / "run" / "memory/rank0/out_of_memory.pickle").exists()


def test_a_healthy_run_is_not_flagged(tmp_path):
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    train(recorder, nn.Linear(4, 4), 3)
    recorder.close()
    assert find(tmp_path / "run") == []


def test_a_line_about_memory_that_could_not_be_read_is_none(tmp_path):
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    train(recorder, nn.Linear(4, 4), 3)
    recorder.session.note_gap(
        "memory", "memory of the device is not read: cuda:0 is full of surprises"
    )
    recorder.guard.caught("memory", MemoryError("out of memory"))
    recorder.close()
    assert find(tmp_path / "run") == []


def test_a_line_of_wrong_kinds_does_no_harm(tmp_path):
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    train(recorder, nn.Linear(4, 4), 1)
    recorder.session.journal("health", cause="memory", text=7, path=["x"], step="1")
    recorder.close()
    (finding,) = find(tmp_path / "run")
    assert finding.first_step is None
    assert "a device was full." in finding.summary


TEXTS = {
    "MemoryError": True,
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": True,
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 400000000 bytes. Error code 12 (Cannot allocate memory)": True,
    "ValueError: not a MemoryError": False,
    "RuntimeError: shape mismatch": False,
}


@pytest.mark.parametrize(("text", "is_told"), TEXTS.items())
def test_a_program_that_ended_for_want_of_memory_is_told_by_its_exception(tmp_path, text, is_told):
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    train(recorder, nn.Linear(4, 4), 3)
    recorder.session.journal("exit", exception=text)
    recorder.close()
    found = find(tmp_path / "run")
    assert len(found) == is_told
    for finding in found:
        assert finding.severity is Severity.CRITICAL
        assert finding.title == "rank 0 ran out of memory after step 2"
        assert text.split(":")[0] in finding.summary


def test_the_rank_that_ended_so_is_not_told_a_second_time(tmp_path):
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    train(recorder, nn.Linear(4, 4), 6)
    recorder.session.journal("exit", exception="MemoryError")
    recorder.close()
    found = diagnose(Context(Study(open_run(tmp_path / "run").last_attempt))).findings
    assert found[0].code == "ME006"
    (stopped,) = [one for one in found if one.code == "HE002"]
    assert (stopped.severity, stopped.explained_by) == (Severity.LOW, found[0].label)
