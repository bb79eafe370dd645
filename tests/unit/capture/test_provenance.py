"""What is written down of the process: no secret of the command line or the environment."""

import sys
from pathlib import Path

import pytest

from meshscope.capture import provenance
from meshscope.capture.launching.launch import prepare_launch
from meshscope.store.write.redaction import HIDDEN, redact_settings

COMMAND = ["train.py", "--steps", "3", "hub.token=hunter2", "--db=redis://:hunter2@cache/0"]


def test_no_secret_of_the_process_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", COMMAND)
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    facts = provenance.collect_provenance(in_full=False)
    assert "hunter2" not in repr(facts)
    assert facts["environment"]["NCCL_DEBUG"] == "INFO"  # type: ignore[index]
    assert facts["argv"] == [*COMMAND[:3], f"hub.token={HIDDEN}", f"--db=redis://{HIDDEN}@cache/0"]


def test_no_variable_on_the_list_is_named_like_a_secret() -> None:
    for name in provenance._ENVIRONMENT_ALLOW_LIST:
        assert redact_settings("word", name) == "word", name


def test_the_launcher_writes_no_secret(tmp_path: Path) -> None:
    launch = prepare_launch(["python", *COMMAND], {}, run_dir=tmp_path / "run")
    assert launch.command[-2:] == tuple(COMMAND[-2:])  # the program gets them
    written = [path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert written
    assert not any("hunter2" in text for text in written)
