import json
import re
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.presets import PRESETS
from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.core.config.train_config import ParallelConfig, TrainConfig
from meshscope.engine.config.toml_file import from_document, list_keys, load_config, to_document
from meshscope.errors import UsageError

TINY = {"preset": "llama-tiny"}
TIMED = {
    "kind": "timed",
    "num_layers": 4,
    "forward_ms": 1,
    "input_grad_ms": [1.0, 2.0, 1.0, 1.0],
    "weight_grad_ms": 1.0,
}


def write(folder: Path, text: str) -> Path:
    path = folder / "train.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(document) -> list[str]:
    with pytest.raises(UsageError) as caught:
        from_document(document)
    return str(caught.value).split("; ")


# --- what is read --------------------------------------------------------------------------------


def test_a_file_becomes_the_typed_configuration(tmp_path):
    path = write(
        tmp_path,
        """
        num_steps = 7
        [model]
        vocab_size = 100
        num_layers = 2
        hidden_size = 48
        num_heads = 4
        sequence_length = 16
        [parallel]
        tp = 2
        order = ["dp", "tp", "pp"]
        stage_sizes = [2]
        [optimizer]
        betas = [0.9, 0.99]
        learning_rate = 1
        max_gradient_norm = "none"
        [data]
        kind = "file"
        path = "tokens.bin"
        [checkpoint]
        folder = "/elsewhere/kept"
        """,
    )
    config = load_config(path)
    assert config.model == ModelConfig(
        vocab_size=100,
        num_layers=2,
        hidden_size=48,
        num_heads=4,
        num_kv_heads=4,  # as many as heads
        ffn_hidden_size=128,  # 8/3 of 48, as a multiple of 64
        sequence_length=16,
    )
    assert config.num_steps == 7
    assert config.parallel == ParallelConfig(tp=2, order=("dp", "tp", "pp"), stage_sizes=(2,))
    assert config.optimizer.betas == (0.9, 0.99)
    assert config.optimizer.learning_rate == 1.0
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.optimizer.max_gradient_norm is None
    assert config.data.path == tmp_path / "tokens.bin"
    assert config.checkpoint.folder == Path("/elsewhere/kept")
    assert config.batch == TrainConfig(model=config.model).batch


def test_gelu_is_four_times_as_wide():
    model = {**TINY, "activation": "gelu", "hidden_size": 32}
    assert from_document({"model": model}).model.ffn_hidden_size == 128


def test_a_preset_can_be_overridden():
    config = from_document({"model": {**TINY, "num_layers": 2}})
    assert config.model.num_layers == 2
    assert config.model.vocab_size == PRESETS["llama-tiny"]["vocab_size"]


@pytest.mark.parametrize(
    ("preset", "num_parameters"),
    [
        # As published with the models.
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset, num_parameters):
    assert from_document({"model": {"preset": preset}}).model.num_parameters == num_parameters


def test_a_timed_model():
    model = from_document({"model": TIMED}).model
    assert model == TimedModelConfig(
        num_layers=4, forward_ms=1.0, input_grad_ms=(1.0, 2.0, 1.0, 1.0), weight_grad_ms=1.0
    )


def test_faults_are_read_as_tables_and_as_lines():
    table = {"kind": "slow", "rank": 1, "ms": 5}
    config = from_document({"model": TINY, "faults": [table, "slow rank=1 ms=5"]})
    assert config.faults[0] == config.faults[1]
    assert config.faults[0].delay_ns == 5_000_000


# --- overrides -----------------------------------------------------------------------------------


def test_overrides_win_over_the_file_and_need_no_quotes(tmp_path):
    path = write(tmp_path, '[model]\npreset = "llama-tiny"\n[parallel]\ndp = 2\n')
    config = load_config(
        path,
        [
            "parallel.dp=4",
            "parallel.schedule=gpipe",
            "batch.num_microbatches = 8",
            "optimizer.betas=[0.5, 0.6]",
            "compile=true",
            "checkpoint.folder=kept",
            "data.path=none",
            'faults=["leak mb=1"]',
        ],
    )
    assert (config.parallel.dp, config.parallel.schedule) == (4, "gpipe")
    assert config.num_microbatches == 8
    assert config.optimizer.betas == (0.5, 0.6)
    assert config.compile is True
    assert config.checkpoint.folder == Path("kept")  # here, not beside the file
    assert config.data.path is None
    assert len(config.faults) == 1


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("parallel.dp", "'parallel.dp' is not an override; write a key and a value"),
        ("=3", "'=3' is not an override"),
        ("seed.x=1", "seed.x: seed is not a table"),
        ("parallel.dp=two", 'parallel.dp: got "two", expected a whole number'),
        ("parallel.oder=2", "parallel.oder: there is no such key, did you mean order?"),
    ],
)
def test_what_is_wrong_with_an_override_is_said(tmp_path, override, text):
    path = write(tmp_path, 'seed = 1\n[model]\npreset = "llama-tiny"\n')
    with pytest.raises(UsageError, match=str(path)) as caught:
        load_config(path, [override])
    assert text in str(caught.value)


# --- problems ------------------------------------------------------------------------------------


def test_all_problems_are_told_at_once_by_their_path():
    found = problems_of(
        {
            "model": {"vocab_size": 100, "num_heads": 4.5, "norm": "batchnorm"},
            "parallel": {"tp": "two", "schedul": 2, "sequence_parallel": 1},
            "batch": 3,
            "num_step": 10,
            "tp": 2,
            "optimizer": {"betas": [0.9], "learning_rate": True},
        }
    )
    assert found == [
        "num_step: there is no such key, did you mean num_steps?",
        "tp: there is no such key here, did you mean parallel.tp?",
        "model.num_heads: got 4.5, expected a whole number",
        'model.norm: got "batchnorm", expected "rmsnorm" or "layernorm"',
        "model.num_layers: is missing, expected a whole number",
        "model.hidden_size: is missing, expected a whole number",
        "model.sequence_length: is missing, expected a whole number",
        "parallel.schedul: there is no such key, did you mean schedule?",
        'parallel.tp: got "two", expected a whole number',
        "parallel.sequence_parallel: got 1, expected true or false",
        "batch: got 3, expected a table",
        "optimizer.learning_rate: got true, expected a number",
        "optimizer.betas: got [0.9], expected a list of 2 numbers",
    ]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({}, "model: is missing, expected a table"),
        ({"model": 3}, "model: got 3, expected a table"),
        ({"model": {"kind": "rnn"}}, 'model.kind: got "rnn", expected "transformer" or "timed"'),
        ({"model": {"preset": "gpt5"}}, 'model.preset: got "gpt5", expected "llama-tiny" or'),
        ({"model": {**TIMED, "preset": "gpt2-small"}}, "model.preset: a timed model has none"),
        ({"model": TINY, "faults": ["slow"]}, "faults[0]: "),
        ({"model": TINY, "faults": [3]}, "faults[0]: got 3, expected a table or a line"),
        ({"model": TINY, "faults": 3}, "faults: got 3, expected tables"),
        (
            {"model": TINY, "optimizer": {"max_gradient_norm": float("inf")}},
            "optimizer.max_gradient_norm: got inf, expected a number",
        ),
        (
            {"model": TINY, "parallel": {"stage_sizes": [1, "a"]}},
            "parallel.stage_sizes: got [1, 'a'], expected a list of whole numbers",
        ),
    ],
)
def test_a_problem_says_what_was_got_and_what_was_expected(document, text):
    with pytest.raises(UsageError) as caught:
        from_document(document)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed = \n", "is not TOML, line 1, column 8: invalid value; correct it there"),
        ("[model\n", "is not TOML, line 1, column 7: "),
        ("seed = 1\nseed = 2\n", "line 2"),
    ],
)
def test_a_slip_in_the_syntax_is_one_sentence_with_its_line(tmp_path, text, expected):
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path} ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file or directory"):
        load_config(tmp_path / "no.toml")


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "train.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        load_config(tmp_path / "train.toml")


# --- documents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [TINY, TIMED, {"preset": "gpt2-small"}])
def test_a_document_survives_json(model, tmp_path):
    config = from_document(
        {
            "model": model,
            "parallel": {"dp": 2, "stage_sizes": [3, 1], "pp": 2},
            "data": {"kind": "file", "path": "tokens.bin"},
            "faults": ["slow rank=1 ms=5 steps=3-5", {"kind": "nan", "steps": 4}],
            "optimizer": {"max_gradient_norm": None},
        },
        folder=tmp_path,
    )
    assert from_document(json.loads(json.dumps(to_document(config)))) == config


@given(
    seed=st.integers(min_value=0),
    name=st.text(),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    sizes=st.none() | st.lists(st.integers()).map(tuple),
    keep=st.none() | st.integers(),
)
def test_any_value_of_the_right_type_survives(seed, name, rate, sizes, keep):
    config = from_document({"model": TINY})
    config = replace(
        config,
        seed=seed,
        name=name,
        optimizer=replace(config.optimizer, learning_rate=rate),
        parallel=replace(config.parallel, stage_sizes=sizes),
        checkpoint=replace(config.checkpoint, keep=keep),
    )
    assert from_document(json.loads(json.dumps(to_document(config)))) == config


def test_keys_are_all_fields_of_all_tables():
    keys = list_keys()
    hints = get_type_hints(TrainConfig)
    tables = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    tables["model"] = ModelConfig
    assert set(keys) == {name for name in hints if name not in tables} | {
        f"{name}.{field.name}" for name, kind in tables.items() for field in fields(kind)
    }


# --- documentation -------------------------------------------------------------------------------


def test_the_page_lists_every_key_with_its_default():
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \|(.*?)\|", page, flags=re.M))
    ruled = {"model.num_kv_heads", "model.ffn_hidden_size"}
    assert set(rows) == set(list_keys())
    for key, shown in rows.items():
        if key not in ruled:
            assert shown.strip(" `") == show_default(key), key


def show_default(key):
    kind, name = TrainConfig, key
    if "." in key:
        table, name = key.split(".")
        kind = ModelConfig if table == "model" else get_type_hints(TrainConfig)[table]
    (field,) = [field for field in fields(kind) if field.name == name]
    if field.default is MISSING and field.default_factory is MISSING:
        return ""
    value = field.default_factory() if field.default is MISSING else field.default
    if value is None or value == ():
        return "none"
    return json.dumps(list(value) if isinstance(value, tuple) else value)
