"""Secrets on a command line are not stored; ordinary options are, word for word."""

import json

import pytest

from meshscope.store.write.redaction import HIDDEN, redact_arguments, redact_settings

SECRET = "hunter2Zq9"
SECRET_FORMS = [
    [f"wandb.api_key={SECRET}"],
    [f"+token={SECRET}"],
    ["--auth", SECRET],
    [f"--pw={SECRET}"],
    ["--bearer", SECRET],
    ["-p", SECRET],
    ["--db", f"postgres://trainer:{SECRET}@db.example/runs"],
    [f"https://{SECRET}@git.example/repo.git"],
    ["--header", f"Authorization: Bearer {SECRET}"],
    ["-H", f"X-Api-Key: {SECRET}"],
    ["--config", json.dumps({"lr": 0.1, "hub": {"token": SECRET}})],
    ["--hf-token", f"-{SECRET}"],
    ["--password", SECRET],
    [f"--api-key={SECRET}"],
    ["--secret_key", SECRET],
    [f"++hub.hfToken={SECRET}"],
    [f"-p{SECRET}"],
    ["-u", f"me:{SECRET}"],
    [f"me:{SECRET}@host"],
    ["env", f"WANDB_API_KEY={SECRET}", "torchrun"],
    ["bash", "-c", f"export TOKEN={SECRET}; python train.py"],
    ["--override", f"lr=0.1,token={SECRET}"],
    ["--set", f"optimizer.password={SECRET}"],
    [f"--data=https://s3.example/a?X-Amz-Signature={SECRET}&part=1"],
    ["--log-to", "https://hooks.example/services/T0/B0/a8Fk20sLq93kdPw0Zx77"],
    ["--log-key", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"],
    ["--name", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"],
    ["--name", "hf_aBcDeFgHiJkLmNoP"],
    ["--name", "sk-proj-abc123def456ghi"],
    ["--access-token", "1234567890"],
    ["--pin-auth", "on the table", f"--token:{SECRET}"],
    ["--token", "--", SECRET],
    ["--password=", SECRET],
    [f"sizes=[1],token={SECRET}"],
    ["--kwargs", f"{{'token': '{SECRET}'}}"],
]
ORDINARY = [
    ["--tokenizer", "gpt2"],
    ["--num-tokens", "1024"],
    ["--max-tokens=4096"],
    ["--token-dropout", "0.1"],
    ["--num-key-value-heads", "8"],
    ["--key-dim", "64"],
    ["--pad-token", "<pad>"],
    ["--eos_token_id=2"],
    ["--sort-key", "length"],
    ["--tokens-per-batch", "1e6", "--experts-per-token", "8", "--token-dtype", "uint16"],
    ["--lr", "-3e-4", "--betas", "0.9,0.95"],
    ["--model", "meta-llama/Llama-3.1-8B-Instruct", "--dtype=bf16"],
    ["--data", "/data/c4/shard-{000..127}.tar", "--glob=data/*.bin"],
    ["--rdzv-endpoint=localhost:29500", "--nnodes=1:4", "-m", "pkg.train"],
    ["sizes=[1,2]", "betas=(0.9,0.95)", "--special-tokens", "[CLS],[SEP]"],
    ["model.layers=24", "+trainer.precision=bf16-mixed", "~logger"],
    ["--arch", "Qwen2MoeForCausalLM", "--wrap", "LlamaDecoderLayer"],
    ["--config", '{"lr": 0.1, "sizes": [1, 2]}', "--blocks", "[a,b]"],
    ["--store", "s3://bucket/run/3", "-n", "4", "-lr", "0.1", "--seed=-1"],
    ["--use-auth-token", "--steps", "10", "-s", "42", "-t", "4"],
    ["--task", "mask-prediction-task_instruction", "--data=hf-internal-testing/tiny-random-2"],
    ["--revision", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"],
    ["--run-name", "my first run", "--author", "someone", "--pin-memory", "true"],
    ["-port", "80", "--monkey", "see", "--bypass", "x", "--", "a"],
]


@pytest.mark.parametrize("arguments", SECRET_FORMS, ids=" ".join)
def test_a_secret_is_not_stored(arguments: list[str]) -> None:
    stored = redact_arguments(["train.py", *arguments, "--steps", "10"])
    assert SECRET not in " ".join(stored)
    assert HIDDEN in " ".join(stored)
    if "--" not in arguments:
        assert stored[0] == "train.py"
        assert stored[-2:] == ["--steps", "10"]
    for value in ("9f86d081", "a8Fk20", "aBcDeF", "1234567890", "table", "abc123"):
        assert value not in " ".join(stored)


@pytest.mark.parametrize("arguments", ORDINARY, ids=" ".join)
def test_ordinary_options_are_stored_as_they_are(arguments: list[str]) -> None:
    assert redact_arguments(["train.py", *arguments]) == ["train.py", *arguments]


def test_what_was_stored_stays_as_it_is() -> None:
    for arguments in SECRET_FORMS:
        once = redact_arguments(["train.py", *arguments])
        assert redact_arguments(once) == once


def test_settings_keep_their_types_and_lose_their_secrets() -> None:
    settings = {
        "lr": 1e-4,
        "layers": 12,
        "use_token": True,
        "max_tokens": 512,
        "hub": {"token": SECRET, "key": 7, "name": "org/model"},
        "urls": [f"redis://:{SECRET}@cache:6379/0", "https://host/a"],
        "other": object(),
    }
    stored = redact_settings(settings)
    assert isinstance(stored, dict)
    assert SECRET not in json.dumps(stored)
    assert {k: stored[k] for k in ("lr", "layers", "use_token", "max_tokens")} == {
        "lr": 1e-4, "layers": 12, "use_token": True, "max_tokens": 512,
    }  # fmt: skip
    assert stored["hub"] == {"token": HIDDEN, "key": HIDDEN, "name": "org/model"}
    assert stored["urls"] == [f"redis://{HIDDEN}@cache:6379/0", "https://host/a"]
    assert stored["other"] == HIDDEN
