"""Every JSON document is what its schema says."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from builders import Faults, make_run
from command_line import invoke
from meshscope.core.layout import Layout
from meshscope.core.schedule_builders import build_schedule
from meshscope.report.documents import DOCUMENTS
from meshscope.report.encode import describe
from pipeline_builders import Recipe, make_pipeline_run, stage_cost
from snapshot_builders import make_random_snapshot


def check(document: dict[str, Any], name: str) -> None:
    """Valid, and without a key that the schema does not name."""
    schema = describe(name, *DOCUMENTS[name])
    Draft202012Validator.check_schema(schema)
    for part in (schema, *schema["$defs"].values()):
        part["additionalProperties"] = False
    errors = list(Draft202012Validator(schema).iter_errors(document))
    assert not errors, [(error.json_path, error.message[:200]) for error in errors[:5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("documents")
    make_run(path / "a", layout=Layout(dp=2, pp=2), num_steps=12)
    make_run(path / "b", layout=Layout(dp=2, pp=2), num_steps=12)
    point = {"kind": "point", "point": "at_peak", "modules_bytes": {"parameters": {"w": 7}}}
    (path / "a" / "memory" / "rank0").mkdir(parents=True)
    (path / "a" / "memory" / "rank0" / "memory.jsonl").write_text(json.dumps(point))
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1, "dur": 40}
    trace = {"traceEvents": [kernel | {"args": {"device": 0, "stream": 7, "correlation": 1}}]}
    (path / "t.pt.trace.json").write_text(json.dumps(trace))
    (path / "s.pickle").write_bytes(pickle.dumps(make_random_snapshot(1), protocol=4))
    return path


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("compare", "{}/a", "{}/b", "--fail-on", "5"), "meshscope-compare"),
        (("hang", "{}/a", "--all-ranks"), "meshscope-hang"),
        (("memory", "{}/a"), "meshscope-memory"),
        (("simulate", "{}/a"), "meshscope-simulate"),
        (("snapshot", "{}/s.pickle"), "meshscope-snapshot"),
        (("trace", "{}/t.pt.trace.json", "--no-cache"), "meshscope-trace"),
        (("ls", "{}"), "meshscope-ls"),
        (("rules",), "meshscope-rules"),
        (("rules", "PP001"), "meshscope-rule"),
        (("rules", "--counterparts"), "meshscope-counterparts"),
        (("sql", "{}/a", "select rank, 'nan'::double as x from steps"), "meshscope-sql"),
    ],
)
def test_a_document_is_what_its_schema_says(folder, arguments, name):
    given = [argument.format(folder) for argument in arguments]
    result = invoke(*given, "--json", catch_exceptions=False)
    document = json.loads(result.stdout)
    check(document, name)


def make_slow_run(path: Path) -> Path:
    scalars = {"loss": lambda rank, step: 4.0 - step / 10}
    faults = Faults(slow={3: 1.5}, errors={2: {"scalar": 4}}, damaged={1: "spans"})
    return make_run(path, layout=Layout(dp=4), num_steps=20, scalars=scalars, faults=faults)


def make_staged_run(path: Path) -> Path:
    cost = stage_cost({0: (2, 4), 1: (4, 8)})
    recipe = Recipe(schedule=build_schedule("1f1b", 2, 4), cost=cost, communication_ns=500_000)
    return make_pipeline_run(path, recipe)


def make_empty_run(path: Path) -> Path:
    return make_run(path, num_steps=0)


@pytest.mark.parametrize("make", [make_slow_run, make_staged_run, make_empty_run])
@pytest.mark.parametrize("options", [(), ("--no-diagnosis",)])
def test_a_report_is_what_its_schema_says(tmp_path, make, options):
    run = make(tmp_path / "run")
    result = invoke("report", run, "--json", *options)
    check(json.loads(result.stdout), "meshscope-report")
