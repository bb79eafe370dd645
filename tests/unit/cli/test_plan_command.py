"""The command: a screen, a document, files for other programs, and all errors at once."""

import json
import tomllib

import pytest
from click.testing import CliRunner

from meshscope.cli import main

SMALL = ["plan", "llama-3.2-1b", "--device", "H100-80GB", "--devices", "8", "--batch", "16", "-q"]
FEW = ["--tp", "1,2", "--pp", "1,2", "--microbatch", "1", "--chunks", "1", "--schedule", "1f1b"]


def run(*args):
    return CliRunner().invoke(main, list(args))


def test_the_screen_names_the_best_why_not_the_others_and_sources():
    result = run(*SMALL, *FEW, "--why", "--explain", "--tokens", "1T", "--price-per-hour", "2")
    assert result.exit_code == 0
    for text in (
        "Best layouts", "Not chosen", "Where the numbers come from", "Megatron-LM: --tensor",
        "allowances", "gemm_half_size", "assumed", "Cost", "Energy", "Time against memory",
    ):  # fmt: skip
        assert text in result.output


def test_the_document_has_intervals_and_sources():
    result = run(*SMALL, *FEW, "--json", "--tokens", "300B")
    answer = json.loads(result.output)
    assert answer["document"] == "meshscope-plan"
    best = answer["choices"][0]
    assert best["step_s"]["low"] < best["step_s"]["value"] < best["step_s"]["high"]
    assert best["headroom_bytes"] == answer["memory_bytes"] - best["peak_bytes"]
    assert best["budget"]["cost"]["unavailable"]
    assert {one["source"] for one in answer["constants"]}
    assert set(answer["sources"]) >= {"step_s", "memory", "mfu_ratio", "exposed"}
    assert json.loads(run(*SMALL, *FEW, "--json", "--tokens", "300B").output) == answer


def test_a_written_file_is_a_configuration_that_the_engine_takes(tmp_path):
    from meshscope.engine.config.problems import find_problems
    from meshscope.engine.config.toml_file import load_config

    path = tmp_path / "train.toml"
    result = run(*SMALL, *FEW, "--stack", "meshscope", "--write", str(path))
    assert result.exit_code == 0, result.output
    config = load_config(path)
    assert not find_problems(config, device_type="cuda")
    assert config.layout.world_size == 8
    assert config.global_batch_size == 16
    assert tomllib.loads(path.read_text())["model"]["hidden_size"] == 2048


def test_all_that_is_wrong_is_said_at_once():
    result = run(
        "plan", "no-model", "--device", "Z9", "--devices", "0", "--batch", "-1", "--stack", "x",
        "--precision", "y", "--tp", "two", "--tokens", "many", "--memory-share", "2",
    )  # fmt: skip
    assert result.exit_code == 2
    for text in ("no-model", "Z9", "devices is 0", "--batch is -1", "stack 'x'", "precision 'y'",
                 "--tp is 'two'", "--tokens is 'many'", "--memory-share is 2"):  # fmt: skip
        assert text in result.output
    assert "MODEL is missing" in run("plan").output


def test_words_where_numbers_are_meant_come_with_all_else_that_is_wrong():
    result = run(
        "plan", "llama-3-8b", "--device", "Z9", "--devices", "eight", "--batch", "1.5", "--top",
        "nan", "--memory-share", "inf", "--price-per-hour", "-1", "--sequence", "8k", "--adapters",
        "", "--per-node", "0", "--schedule", "zigzag", "--tokens", "1e99", "--write",
        "no/such/folder/x.toml",
    )  # fmt: skip
    assert result.exit_code == 2
    for text in (
        "Z9", "--devices is eight", "--batch is 1.5", "--top is nan", "--memory-share is inf",
        "--price-per-hour is -1", "--sequence is 8k", "--adapters is empty", "--per-node is 0",
        "zigzag", "--tokens is '1e99'", "no folder no/such/folder",
    ):  # fmt: skip
        assert text in result.output
    assert "is missing" not in result.output


def test_names_may_be_in_capitals():
    result = run(
        "plan", "LLAMA-3.2-1B", "--device", "h100-80gb", "--devices", "8", "--batch", "16", "-q",
        "--stack", "Megatron", "--precision", "BF16", "--optimizer", "AdamW", "--recompute",
        "Full", "--schedule", "1F1B", *FEW[:-2],
    )  # fmt: skip
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--tp", "3"), "degrees do not multiply to the devices"),
        (("--ep", "2"), "no experts to cut over ep"),
    ],
)
def test_where_nothing_is_possible_the_first_line_says_why(more, why):
    result = run(*SMALL, *more)
    first = " ".join(result.output.split("\n\n")[0].split())
    assert "No layout is possible: " in first
    assert why in first


def test_a_device_without_bfloat16_is_planned_in_float16():
    asked = ("plan", "llama-3.2-1b", "--device", "V100-SXM2-32GB", "--devices", "8", "--batch", "8")
    assert "--precision bf16" in run(*asked, *FEW, "-q").output
    result = run(*asked, *FEW, "-q", "--precision", "fp16")
    assert result.exit_code == 0, result.output


def test_fits_says_everything_that_is_wrong_at_once():
    result = run("plan", "--fits", "no-such.toml", "--device", "Z9")
    assert result.exit_code == 2
    assert "no-such.toml" in result.output
    assert "Z9" in result.output


@pytest.mark.parametrize("device", ["80GiB", "V100-SXM2-32GB"])
def test_a_device_without_a_peak_is_refused_in_words(device):
    result = run("plan", "llama-3-8b", "--device", device, "--devices", "8", "--batch", "8")
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_fits_answers_yes_and_no_with_the_nearest(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(
        '[model]\npreset = "llama-3-8b"\n[parallel]\ndp = 8\n[batch]\nmicrobatch_size = 4\n'
        'global_batch_size = 64\n[precision]\ncompute = "bf16"\n'
    )
    no = run("plan", "--fits", str(path), "--device", "H100-80GB")
    assert no.exit_code == 2
    assert "does not fit" in no.output
    assert "The nearest that fits: " in no.output
    answer = json.loads(run("plan", "--fits", str(path), "--device", "H100-80GB", "--json").output)
    changes = answer["nearest"]["change"].split(", ")
    text = path.read_text()
    yes = run("plan", "--fits", str(path), "--device", "8000GiB")
    assert yes.exit_code == 0
    # The head says what the table below it adds up to.
    head, _, table = yes.output.partition("stage")
    assert "It fits" in head
    assert f"with allowances {' '.join(table.splitlines()[1].split()[-2:])}." in head
    overrides = [part for one in changes for part in ("--set", one)]
    checked = run(
        "train", str(path), "--check", "--device", "H100-80GB", *overrides,
        "--set", "batch.num_microbatches=none",
    )  # fmt: skip
    assert checked.exit_code == 0, checked.output
    assert path.read_text() == text


def test_train_refuses_what_cannot_fit_with_the_nearest_that_does(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(
        '[model]\npreset = "llama-3-8b"\n[parallel]\ndp = 8\n[batch]\nglobal_batch_size = 64\n'
        '[precision]\ncompute = "bf16"\n'
    )
    asked = ("train", str(path), "--check", "--device", "H100-80GB")
    refused = run(*asked)
    assert refused.exit_code == 2
    assert "the nearest that fits needs" in refused.output
    assert "--set parallel.data_parallel=fsdp" in refused.output
    assert run(*asked, "--ignore-memory").exit_code == 0


def test_a_degree_that_no_layout_can_have_is_what_the_first_line_names():
    """Not what most requests rule out anyway."""
    asked = ("plan", "mixtral-8x7b", "--device", "H100-80GB", "--devices", "32", "--batch", "256")
    found = run(*asked, "--ep", "3")
    assert "because ep must divide the experts" in " ".join(found.output.split())
    odd = run("plan", "llama-3-8b", *asked[2:-1], "63", "--tp", "1", "--pp", "1")
    assert "because the global batch is no multiple of dp" in " ".join(odd.output.split())


def test_a_program_plans_in_what_it_can_train_in():
    refused = run(*SMALL, *FEW, "--stack", "meshscope", "--precision", "fp8")
    assert refused.exit_code == 2
    assert "meshscope trains in autocast or fp32, not in fp8" in refused.output
    assert "below a million" in run(*SMALL, "--tp", "1000000").output
