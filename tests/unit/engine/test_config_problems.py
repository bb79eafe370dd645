"""What keeps a run from working is found before it starts; each [run] defect of the founding
library's configuration is among it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshscope.core.schedule_builders import BUILDERS
from meshscope.engine.config.problems import find_notes, find_problems, require_valid_config
from meshscope.engine.config.toml_file import from_document, load_config
from meshscope.errors import UsageError

EXAMPLES = Path(__file__).parents[3] / "examples"


def make_config(model=None, **tables):
    return from_document({"model": {"preset": "llama-tiny", **(model or {})}, **tables})


def problems(model=None, given=None, **tables):
    return find_problems(make_config(model, **tables), **(given or {}))


def test_the_examples_have_no_problems():
    for path, gpus in (("train_2x2x2.toml", 0), ("train_350m.toml", 1)):
        config = load_config(EXAMPLES / path)
        memory_bytes = 80 * 2**30
        assert find_problems(config, device_memory_bytes=memory_bytes, num_gpus=gpus) == []
        assert find_notes(config) == []


@pytest.mark.parametrize("schedule", BUILDERS)
def test_every_schedule_can_be_used(schedule):
    parallel = {"schedule": schedule, "pp": 2, "dp": 2, "tp": 2}
    batch = {"num_microbatches": 4}
    assert problems(parallel=parallel, batch=batch, given={"world_size": 8}) == []


@pytest.mark.parametrize(
    ("tables", "given", "texts"),
    [
        # Recordings go into a folder of that name.
        ({"name": ""}, {}, ["name is , expected a name without slashes"]),
        ({"name": "../a"}, {}, ["name is ../a, expected a name without slashes"]),
        # No degree is zero, and nothing divides by it.
        ({"parallel": {"pp": 0}}, {}, ["parallel: pp is 0, but a degree is a whole number"]),
        ({"parallel": {"dp": -1, "tp": 0}}, {}, ["dp is -1", "tp is 0"]),
        ({"parallel": {"dp": 4}}, {"world_size": 8}, ["= 4, but the world size is 8"]),
        ({"parallel": {"order": ["dp"], "tp": 2}}, {}, ["tp has degree 2 but is not in order"]),
        # tp must divide heads, kv heads and the MLP's width.
        ({"parallel": {"tp": 3}}, {}, ["num_heads (4) is not div", "num_kv_heads (2) is not div"]),
        ({"parallel": {"tp": 4}}, {}, ["model: num_kv_heads (2) is not divisible by tp (4)"]),
        ({"parallel": {"pp": 8}}, {}, ["4 layers cannot fill 8 stages"]),
        (
            {"parallel": {"pp": 2, "schedule": "interleaved_1f1b", "chunks_per_rank": 4}},
            {},
            ["4 layers cannot fill 8 stages"],
        ),
        (
            {"parallel": {"pp": 2, "stage_sizes": [1, 1, 2]}},
            {},
            ["3 stage sizes are given for 2 stages"],
        ),
        (
            {"parallel": {"pp": 2, "stage_sizes": [1, 2]}},
            {},
            ["stage sizes [1, 2] sum to 3, but the model has 4 layers"],
        ),
        (
            {"parallel": {"schedule": "2f2b"}},
            {},
            ["parallel.schedule: there is no schedule '2f2b'"],
        ),
        (
            {"parallel": {"schedule": "1f1b", "chunks_per_rank": 2}},
            {},
            ["1f1b puts 1 chunk(s) on each rank"],
        ),
        (
            {
                "parallel": {"schedule": "interleaved_1f1b", "pp": 2},
                "batch": {"num_microbatches": 5},
            },
            {},
            ["interleaved_1f1b cannot divide 5 microbatches"],
        ),
        (
            {"batch": {"microbatch_size": 0}},
            {},
            ["batch.microbatch_size is 0, expected at least 1"],
        ),
        (
            {"batch": {"global_batch_size": 6, "microbatch_size": 2}, "parallel": {"dp": 2}},
            {},
            ["is 6, which is no multiple of microbatch_size(2) * dp(2) = 4"],
        ),
        (
            {"batch": {"global_batch_size": 8, "num_microbatches": 3}},
            {},
            ["num_microbatches(3) = 3; leave one of them out"],
        ),
        (
            {"parallel": {"sequence_parallel": True, "tp": 2}, "model": {"sequence_length": 63}},
            {},
            ["sequence_length (63) is not divisible by tp (2)"],
        ),
        (
            {"parallel": {"data_parallel": "ddp", "dp": 2, "pp": 2, "schedule": "zb_h1"}},
            {},
            ["zb_h1 computes weight gradients apart from backward"],
        ),
        (
            {"parallel": {"data_parallel": "fsdp"}, "communication": {"compression": "int8"}},
            {},
            ["compression is 'int8', but FSDP2 reduces gradients itself"],
        ),
        (
            {"parallel": {"data_parallel": "ddp"}, "communication": {"strategy": "ring"}},
            {},
            ["the communication strategy is 'ring', but DDP has its own"],
        ),
        (
            {"parallel": {"tensor_parallel": "dtensor", "tp": 2, "dp": 2}},
            {},
            ["data_parallel is 'reducer' with dp 2, which does not average DTensors"],
        ),
        ({"parallel": {"zero_stage": 4}}, {}, ["parallel.zero_stage is 4, expected 1, 2 or 3"]),
        (
            {"communication": {"ranks_per_node": 3}, "parallel": {"dp": 4}},
            {},
            ["ranks_per_node is 3, which does not divide the 4 ranks"],
        ),
        ({"device": "cuda"}, {"num_gpus": 0}, ["device is cuda, but torch finds no GPU"]),
        (
            {"memory": {"strategy": "cpu_offload"}, "device": "cpu"},
            {},
            ["memory: cpu_offload moves activations"],
        ),
        ({"memory": {"strategy": "cpu_offload"}}, {"device_type": "cuda"}, []),
        ({"memory": {"strategy": "cpu_offload"}, "device": "cuda"}, {}, []),
        ({"data": {"kind": "file"}}, {}, ["data.kind is file, but data.path is missing"]),
        (
            {"data": {"kind": "file", "path": "/no/such"}},
            {},
            ["data.path is /no/such, but there is no such file"],
        ),
        ({"checkpoint": {"every": 5}}, {}, ["checkpoint.every is set, but checkpoint.folder is"]),
        ({"checkpoint": {"load": "/no/such"}}, {}, ["there is no such checkpoint"]),
        (
            {"checkpoint": {"folder": "/proc/x"}},
            {},
            ["checkpoint.folder is /proc/x, but /proc cannot be"],
        ),
        ({"checkpoint": {"folder": "/etc/passwd"}}, {}, ["which is a file; give a folder"]),
        (
            {"faults": ["crash rank=9 steps=3"]},
            {},
            ["fault 0 (crash rank=9 steps=3): there is no rank 9"],
        ),
        (
            {"num_steps": 0, "optimizer": {"betas": [0.9, 1.0], "learning_rate": 0}},
            {},
            ["num_steps is 0", "optimizer.learning_rate is 0.0", "optimizer.betas is [0.9, 1.0]"],
        ),
        (
            {"num_steps": 5, "optimizer": {"num_warmup_steps": 6}},
            {},
            ["num_warmup_steps is 6, but the run has 5 steps"],
        ),
    ],
)
def test_each_problem_is_told_in_one_sentence(tables, given, texts):
    found = problems(given=given, **tables)
    assert len(found) == len(texts), found
    for text, sentence in zip(texts, found, strict=True):
        assert text in sentence
        assert "\n" not in sentence


def test_problems_of_all_kinds_are_told_together():
    config = make_config(
        parallel={"dp": 2, "tp": 3, "data_parallel": "ddp"},
        batch={"global_batch_size": 3},
        communication={"compression": "topk"},
        checkpoint={"every": 2},
        num_steps=0,
    )
    with pytest.raises(UsageError) as caught:
        require_valid_config(config, world_size=4)
    text = str(caught.value)
    assert text.count("; ") >= 3
    for part in ("num_steps is 0", "the world size is 4", "checkpoint.every is set"):
        assert part in text
    text = " ".join(find_problems(config))
    for part in ("no multiple of", "compression is 'topk'", "not divisible by tp (3)"):
        assert part in text


# --- memory: the founding library let its default of 108 GiB pass a cap of 8 --------------------


def test_a_model_that_does_not_fit_its_cap_is_refused_with_its_worst_rank():
    found = problems(model={"preset": "llama-3-8b"}, memory={"cap_gib": 8})
    assert len(found) == 1
    assert "memory: pipeline rank 0 needs about" in found[0]
    assert "but memory.cap_gib allows 8 GiB" in found[0]
    assert "raise pp or tp" in found[0]


def test_so_is_one_that_does_not_fit_the_device():
    given = {"device_memory_bytes": 16 * 2**30}
    found = problems(model={"preset": "gpt2-xl"}, batch={"microbatch_size": 8}, given=given)
    assert len(found) == 1
    assert "but a rank's device has 16 GiB" in found[0]
    assert problems(model={"preset": "gpt2-small"}, given=given) == []


def test_activations_that_do_not_fit_have_a_remedy_of_their_own():
    batch = {"microbatch_size": 256}
    found = problems(model={"preset": "gpt2-small"}, batch=batch, memory={"cap_gib": 40})
    assert "lower batch.microbatch_size, or use memory.strategy standard" in found[0]


def test_the_smaller_of_cap_and_device_counts():
    given = {"device_memory_bytes": 2**40}
    model = {"preset": "gpt2-xl"}
    assert "memory.cap_gib allows 1 GiB" in problems(model, given, memory={"cap_gib": 1})[0]


def test_a_users_own_model_is_not_judged_by_the_configured_one():
    config = make_config({"preset": "llama-3-8b"}, memory={"cap_gib": 1})
    assert find_problems(config, has_own_model=True) == []


# --- data ----------------------------------------------------------------------------------------


def test_a_file_with_too_few_tokens_is_refused(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(10, dtype=np.uint16).tofile(path)
    (found,) = problems(data={"kind": "file", "path": str(path)})
    assert "has 10 tokens, but one sample needs 65" in found
    np.zeros(1000, dtype=np.uint16).tofile(path)
    assert problems(data={"kind": "file", "path": str(path)}) == []


def test_an_evaluation_that_would_have_too_few_samples_is_refused(tmp_path):
    path = tmp_path / "tokens.bin"
    np.zeros(64 * 100 + 1, dtype=np.uint16).tofile(path)  # 100 samples of llama-tiny
    data = {"kind": "file", "path": str(path), "evaluate_every": 2, "held_out_fraction": 0.1}
    assert problems(data=data, batch={"global_batch_size": 10}) == []
    assert problems(data={**data, "evaluate_every": 2}, batch={"global_batch_size": 5}) == []
    for more in ({"batch": {"global_batch_size": 11}}, {"data": {"num_evaluation_batches": 11}}):
        (found,) = problems(data=data | more.get("data", {}), batch=more.get("batch", {}))
        assert "of the 100 samples" in found
        assert "10 are held out" in found
        assert "= 11 are needed" in found


def test_a_folder_that_can_be_made_is_fine(tmp_path):
    assert problems(checkpoint={"folder": str(tmp_path / "a" / "b"), "every": 2}) == []


# --- notes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"parallel": {"sequence_parallel": True}}, "sequence_parallel has no effect with tp 1"),
        ({"communication": {"compression": "fp16"}}, "compression has no effect with dp 1"),
        ({"parallel": {"pp": 4}}, "1 microbatches cannot fill 4 pipeline ranks"),
        ({"max_restarts": 2}, "a restart begins at step 0"),
        (
            {
                "parallel": {"dp": 2},
                "communication": {"compression": "topk", "strategy": "ring"},
            },
            "communication.strategy ring has no effect with compression topk",
        ),
        ({"data": {"path": "tokens.bin"}}, "data.path has no effect with data.kind synthetic"),
    ],
)
def test_what_runs_but_not_as_meant_is_a_note(tables, text):
    config = make_config(**tables)
    assert find_problems(config) == []
    (note,) = find_notes(config)
    assert text in note


def test_tp_that_reaches_over_nodes_is_a_note():
    config = make_config(parallel={"tp": 2, "dp": 4, "order": ["tp", "pp", "dp"]})
    (note,) = find_notes(config, local_world_size=4)
    assert "4 tp groups reach over nodes of 4 ranks" in note
    near = replace(config, parallel=replace(config.parallel, order=("pp", "dp", "tp")))
    assert find_notes(near, local_world_size=4) == []


def test_one_wrong_number_hides_no_other():
    found = problems(
        num_steps=0,
        parallel={"tp": 3, "chunks_per_rank": 0},
        batch={"microbatch_size": 0, "global_batch_size": 7},
        communication={"compression_bits": 9, "max_buckets": 0},
        compile=True,
        memory={"strategy": "extreme"},
    )
    for text in (
        "num_steps is 0", "chunks_per_rank is 0", "microbatch_size is 0", "compression_bits is 9",
        "max_buckets is 0", "num_heads (4) is not divisible by tp (3)", "compile is on",
    ):  # fmt: skip
        assert sum(text in problem for problem in found) == 1, (text, found)
    assert not any("global_batch_size" in problem for problem in found)  # of a size that is wrong


def test_a_wrong_type_hides_no_wrong_number():
    document = {"model": {"preset": "llama-tiny"}, "num_steps": -1, "device": "tpu"}
    with pytest.raises(UsageError, match=r"device: got .*; num_steps is -1"):
        from_document({**document, "parallel": {"pp": 0, "dp": "x"}})
