"""Every JSON document is what its schema says."""

import json
import pickle

import pytest
from click.testing import CliRunner

from builders import make_run
from meshscope.cli import main
from meshscope.core.layout import Layout
from meshscope.report.documents import DOCUMENTS
from meshscope.report.encode import describe
from snapshot_builders import make_random_snapshot

TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def find_faults(value, schema, whole, path=""):
    """Where a value is not what the schema allows."""
    if "$ref" in schema:
        return find_faults(value, whole["$defs"][schema["$ref"].rpartition("/")[2]], whole, path)
    if "anyOf" in schema:
        found = [find_faults(value, option, whole, path) for option in schema["anyOf"]]
        return [] if [] in found else min(found, key=len)
    if "enum" in schema or "const" in schema:
        return [] if value in schema.get("enum", [schema.get("const")]) else [f"{path}: {value!r}"]
    kind = schema.get("type")
    if kind in ("integer", "number"):
        kinds = (int, float) if kind == "number" else int
        is_right = isinstance(value, kinds) and not isinstance(value, bool)
    else:
        is_right = kind is None or isinstance(value, TYPES[kind])
    if not is_right:
        return [f"{path}: {value!r} is no {kind}"]
    if isinstance(value, list) and "items" in schema:
        return [f for one in value for f in find_faults(one, schema["items"], whole, f"{path}/*")]
    if isinstance(value, dict) and kind == "object":
        return _find_faults_of_object(value, schema, whole, path)
    return []


def _find_faults_of_object(value, schema, whole, path):
    known = schema.get("properties", {})
    faults = [
        f"{path}/{name} is missing" for name in schema.get("required", ()) if name not in value
    ]
    for name, entry in value.items():
        inner = known.get(name, schema.get("additionalProperties"))
        if inner is None:
            faults.append(f"{path}/{name} is not in the schema")
        else:
            faults += find_faults(entry, inner, whole, f"{path}/{name}")
    return faults


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
    result = CliRunner().invoke(main, [*given, "--json"], catch_exceptions=False)
    document = json.loads(result.stdout)
    version, kind, shapes = DOCUMENTS[name]
    schema = describe(name, version, kind, shapes)
    assert document["document"] == name
    assert find_faults(document, schema, schema) == []
