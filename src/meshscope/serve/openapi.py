"""The OpenAPI document of the JSON API: addresses, parameters, and schemas as in `docs/schemas`."""

import json
from typing import Any

from meshscope import __version__
from meshscope.analyze.memory.memory_attribution import MemoryOverview
from meshscope.export.run_tables import list_tables
from meshscope.export.table_files import FORMATS
from meshscope.page.document import DOCUMENT, SHAPES, PageDocument
from meshscope.page.heat.matrix import MAX_COLUMNS, MAX_ROWS, Matrix
from meshscope.page.series import Curve
from meshscope.page.step_spans import MAX_SPANS, StepSpans
from meshscope.report.documents import DOCUMENTS
from meshscope.report.encode import describe, encode_schema
from meshscope.serve.documents import RUNS, RunsPageDocument

_EVENTS = """Server-sent events. `hello` {server, run, seq}; `status` {state, text, note, attempt, \
step, age_ns, read_unix_ns, num_ranks, world_size, pace_ns, tokens_per_s} each second; `steps` \
{from, to, steps, job_ns, matrix}: new steps, or new columns of the heat map (codes as base64 of \
uint16, rank by rank); `series` {points: [{key, step, value}]}; `report` {etag, number}: the page \
and the report are newer; `hang` {is_stuck, text}; `finding` {change, id, code, severity, title, \
ranks}; `reset` {reason}: ask for everything again; `end` {state}. Comments keep the connection \
open. Give the last id as Last-Event-ID to go on from there."""
_MATRIX = """uint32 (little-endian) with the length of the head; the head, a JSON object as in \
`meshscope-matrix` without layers, with `layers` (names) and `shape`; then each layer as uint16, \
little-endian, row by row: 0 is zero, 65535 not recorded, 65534 left out, others stand for \
lo * (hi / lo) ** ((q - 1) / (levels - 1)). Where a value is not known: JSON with the reason."""
_SCHEMAS = "#/components/schemas/"


def render_schema() -> dict[str, str]:
    """Text of the schema of the list of runs, by the name of its file in `docs/schemas`."""
    return {f"{RUNS[0]}.schema.json": encode_schema(*RUNS, RunsPageDocument)}


def render_openapi() -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "meshscope serve",
            "version": __version__,
            "description": "Reads the runs below some folders. GET only.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": _list_paths(),
        "components": {"schemas": _list_schemas(), "securitySchemes": _SECURITY},
        "security": [{}, {"bearer": []}, {"cookie": []}],
    }


_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "cookie": {"type": "apiKey", "in": "cookie", "name": "meshscope_PORT"},
}


def _list_schemas() -> dict[str, Any]:
    """Each with an address of its own, so that references inside it hold."""
    documents: dict[str, Any] = {
        name: describe(name, version, kind, shapes)
        for name, (version, kind, shapes) in DOCUMENTS.items()
        if name in ("meshscope-report", "meshscope-hang")
    }
    documents[DOCUMENT[0]] = describe(*DOCUMENT, PageDocument, SHAPES)
    documents[RUNS[0]] = describe(*RUNS, RunsPageDocument)
    for name, kind in (
        ("meshscope-matrix", Matrix),
        ("meshscope-timeline", StepSpans),
        ("meshscope-curve", Curve),
        ("meshscope-memory", MemoryOverview),
    ):
        documents[name] = _without_envelope(describe(name, 1, kind))
    found = {name: {"$id": f"{name}.schema.json", **one} for name, one in documents.items()}
    error = {"error": {"type": "string", "description": "One sentence."}}
    found["error"] = {"type": "object", "properties": error, "required": ["error"]}
    return found


def _without_envelope(schema: dict[str, Any]) -> dict[str, Any]:
    envelope = ("document", "document_version")
    properties = {key: one for key, one in schema["properties"].items() if key not in envelope}
    required = [key for key in schema["required"] if key not in envelope]
    return {**schema, "properties": properties, "required": required}


def _number(name: str, text: str, high: int | None = None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer", "minimum": 0}
    if high is not None:
        schema |= {"minimum": 1, "maximum": high}
    return {"name": name, "in": "query", "description": text, "schema": schema}


def _text(name: str, text: str, **schema: Any) -> dict[str, Any]:
    return {
        "name": name,
        "in": "query",
        "description": text,
        "schema": {"type": "string", **schema},
    }


_RUN = {
    "name": "run",
    "in": "path",
    "required": True,
    "description": "Id of a run, as the list of runs has it.",
    "schema": {"type": "string"},
}
_ATTEMPT = _number("attempt", "Which launch of the job, counted from 0; the last by default.")
_ERRORS = {
    "400": "A parameter is wrong.",
    "401": "A token is needed.",
    "404": "There is no such run.",
    "421": "The Host header does not name this server.",
    "422": "The run cannot be read.",
}


def _get(
    summary: str, content: dict[str, Any], *parameters: dict[str, Any], has_run: bool = True
) -> dict[str, Any]:
    errors = {
        status: {
            "description": text,
            "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}error"}}},
        }
        for status, text in _ERRORS.items()
    }
    return {
        "get": {
            "summary": summary,
            "parameters": [*([_RUN, _ATTEMPT] if has_run else []), *parameters],
            "responses": {
                "200": {"description": summary, "content": content},
                "304": {"description": "As the ETag says: not changed."},
                **errors,
            },
        }
    }


def _json(*names: str) -> dict[str, Any]:
    options = [{"$ref": f"{_SCHEMAS}{name}"} for name in names]
    return {"application/json": {"schema": options[0] if len(options) == 1 else {"anyOf": options}}}


def _list_paths() -> dict[str, Any]:
    run = "/api/v1/runs/{run}"
    ranks = _text("ranks", "Ranks: 0,3-5; all by default.")
    binary = {"application/octet-stream": {"schema": {"type": "string", "description": _MATRIX}}}
    return {
        "/api/v1/openapi.json": _get("This document.", _json("error"), has_run=False)
        | {"get": _get_self()},
        "/api/v1/runs": _get("All runs, the newest first.", _json(RUNS[0]), has_run=False),
        "/api/v1/compare": _get(
            "The page of a comparison.",
            _json(DOCUMENT[0]),
            _text("a", "Id of the first run.") | {"required": True},
            _text("b", "Id of the second run.") | {"required": True},
            has_run=False,
        ),
        f"{run}/page": _get("All that a run's page shows.", _json(DOCUMENT[0])),
        f"{run}/page.html": _get(
            "The page as one file that needs no network.",
            {"text/html": {"schema": {"type": "string"}}},
        ),
        f"{run}/table/{{name}}.{{form}}": _get(
            "A table of `meshscope sql` or of the report.",
            {
                "application/json": {"schema": {"type": "array", "items": {"type": "object"}}},
                "text/csv": {"schema": {"type": "string"}},
                "application/vnd.apache.parquet": {"schema": {"type": "string"}},
            },
            {
                "name": "name",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "enum": [name for name, _ in list_tables()]},
            },
            {
                "name": "form",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "enum": list(FORMATS)},
            },
        ),
        f"{run}/report": _get("As `meshscope report --json`.", _json("meshscope-report")),
        f"{run}/hang": _get("As `meshscope hang --json`, now.", _json("meshscope-hang")),
        f"{run}/matrix": _get(
            "One number per rank and step, reduced to a picture.",
            {**binary, **_json("meshscope-matrix")},
            _text("metric", "excess, rise, work, caused, wait, transfer, period or memory."),
            _text("phase", "Only work in this phase."),
            _text("ranks", "First and last rank: 0-63; all by default."),
            _text("steps", "First and last step: 100-199; all by default."),
            _number("w", "Columns at most.", MAX_COLUMNS),
            _number("h", "Rows at most.", MAX_ROWS),
            _text("agg", "What a cell has of what it covers.", enum=["max", "mean", "both"]),
            _text("format", "How it is sent.", enum=["binary", "json"]),
        ),
        f"{run}/timeline": _get(
            "One step of all ranks, or of some, on the aligned clock.",
            _json("meshscope-timeline"),
            _number("step", "Its number.") | {"required": True},
            ranks,
            _number("t0", "Spans that end before are left out; ns from the origin."),
            _number("t1", "Spans that begin later are left out; ns from the origin."),
            _number("max_spans", "Short neighbours are joined above this.", MAX_SPANS),
        ),
        f"{run}/series": _get(
            "Curves over steps, in buckets with the lowest and highest value.",
            _json("meshscope-curve"),
            _text("name", "One of them: step, loss, grad_norm, lr, …; all by default."),
        ),
        f"{run}/memory": _get("What fills memory, by category.", _json("meshscope-memory")),
        f"{run}/events": _get(
            "What is new, while the run goes on.",
            {"text/event-stream": {"schema": {"type": "string", "description": _EVENTS}}},
        ),
    }


def _get_self() -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}}
    return {
        "summary": "This document.",
        "responses": {"200": {"description": "OpenAPI 3.1.", "content": content}},
    }


def render_openapi_file() -> dict[str, str]:
    """Text by the name of its file in `docs/schemas`: schemas that are files there are named only,
    and the version of the package is left out."""
    document = render_openapi()
    document["info"]["version"] = "1"
    schemas = document["components"]["schemas"]
    for name in (*DOCUMENTS, DOCUMENT[0], RUNS[0]):
        if name in schemas:
            schemas[name] = {"$ref": f"{name}.schema.json"}
    return {"meshscope-openapi.json": json.dumps(document, indent=2, ensure_ascii=False) + "\n"}
