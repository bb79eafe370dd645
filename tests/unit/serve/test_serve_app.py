"""What the server answers, over real HTTP, from the process that analyses."""

import json
import struct
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from meshscope.page.document import compare_pages, describe_page
from meshscope.page.file import encode_page
from meshscope.page.heat.cells import measure_cells
from meshscope.page.heat.matrix import restore
from meshscope.page.step_spans import cut_step
from meshscope.report.encode import as_plain
from meshscope.report.run_compare import compare_runs
from meshscope.report.run_study import study
from meshscope.serve.openapi import render_openapi
from serve_builders import HOSTILE, SECRET, Served


def without_time(page: dict) -> dict:
    page["meta"]["made_unix_ns"] = 0
    return page


def test_every_run_is_a_row_and_what_cannot_be_read_says_why(served: Served) -> None:
    rows = served.rows()
    assert set(rows) >= {"slow", HOSTILE, "linked", "foreign", "below"}
    assert "link_to_run" not in rows
    assert rows["slow"]["state"] == "finished"
    assert (rows["slow"]["num_ranks"], rows["slow"]["num_steps"]) == (4, 12)
    assert rows["foreign"]["state"] == "unreadable"
    assert "not a meshscope manifest" in rows["foreign"]["problem"]
    assert rows["below"]["state"] == "finished"  # a foreign run.json hides nothing below it


def test_a_folder_of_traces_is_a_row_and_opens_like_a_run(served: Served) -> None:
    row = served.rows()["profiled"]
    assert (row["state"], row["num_steps"]) == ("traces", None)  # not read for the list
    files = sorted((served.folder / "profiled").glob("*trace*.json*"))
    assert row["num_ranks"] == len(files) > 1
    page = served.get("profiled", "page").json()
    assert page["meta"]["is_from_traces"] is True
    assert page["report"]["run"]["num_ranks"] == len(files)
    assert page["report"]["steps"]["num_steps"] > 0
    assert len(page["timelines"]) > 0
    step = page["timelines"][0]["step"]
    assert served.get("profiled", f"timeline?step={step}").json()["step"] == step
    assert served.get("profiled", "hang").status_code == 422


def test_a_run_with_a_link_out_of_the_served_folders_is_not_read(served: Served) -> None:
    row = served.rows()["linked"]
    assert row["state"] == "unreadable"
    assert "leads out of the served folders" in row["problem"]
    for what in ("page", "report", "timeline?step=1", "events"):
        answer = served.get("linked", what)
        assert answer.status_code == 422
        assert SECRET not in answer.text


def test_the_page_is_the_document_of_the_offline_page(served: Served) -> None:
    answer = served.get("slow", "page")
    expected = encode_page(describe_page(study(served.folder / "slow").report().content))
    assert without_time(answer.json()) == without_time(json.loads(json.dumps(expected)))
    again = served.client.get(answer.url, headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_report_and_hang_are_the_documents_of_the_commands(served: Served) -> None:
    expected = json.loads(study(served.folder / "slow").report().to_json())
    assert served.get("slow", "report").json() == expected
    hang = served.get("slow", "hang").json()
    assert hang["document"] == "meshscope-hang"


def test_a_matrix_comes_as_a_head_and_layers_of_codes(served: Served) -> None:
    answer = served.get("slow", "matrix?metric=work&steps=3-8")
    length = struct.unpack_from("<I", answer.content)[0]
    head = json.loads(answer.content[4 : 4 + length])
    rows, columns = head["shape"]
    assert (answer.headers["x-matrix-rows"], answer.headers["x-matrix-columns"]) == ("4", "6")
    codes = np.frombuffer(answer.content, "<u2", rows * columns, 4 + length).reshape(rows, columns)
    cells = measure_cells(study(served.folder / "slow").study, "work")
    wanted = cells.value[:, (cells.steps >= 3) & (cells.steps <= 8)]
    assert head["step_edges"] == list(range(3, 10))
    np.testing.assert_allclose(restore(codes, lo=head["lo"], hi=head["hi"]), wanted, rtol=4e-4)
    small = served.get("slow", "matrix?metric=work&w=2&h=2")
    assert small.headers["x-matrix-layers"] == "max,mean"
    assert (small.headers["x-matrix-rows"], small.headers["x-matrix-columns"]) == ("2", "2")
    assert served.get("slow", "matrix?metric=none").json()["unavailable"].startswith("there is no")


def test_timeline_series_and_memory(served: Served) -> None:
    whole = study(served.folder / "slow").study
    timeline = served.get("slow", "timeline?step=5&ranks=1-2").json()
    assert timeline == json.loads(json.dumps(as_plain(cut_step(whole, 5, ranks=(1, 2)))))
    cut = served.get("slow", "timeline?step=5&ranks=1-2&t0=1&t1=2").json()
    assert 0 < len(cut["pieces"]["rank"]) < len(timeline["pieces"]["rank"])
    loss = served.get("slow", "series?name=loss").json()
    assert loss["mean"] == pytest.approx([4.0 - step / 10 for step in range(12)])
    assert "profile" in served.get("slow", "memory").json()["unavailable"]


def test_tables_come_as_json_csv_and_parquet(served: Served) -> None:
    rows = served.get("slow", "table/steps.json").json()
    assert [row["step"] for row in rows if row["rank"] == 1] == list(range(12))
    csv = served.get("slow", "table/steps.csv")
    assert csv.headers["content-disposition"] == 'attachment; filename="slow.steps.csv"'
    assert csv.text.count("\n") == 1 + 4 * 12
    assert served.get("slow", "table/steps.parquet").content[:4] == b"PAR1"
    for wrong in ("table/none.csv", "table/steps.exe", "table/..%2fsteps.csv"):
        assert served.get("slow", wrong).status_code in (400, 404)


def test_the_page_comes_as_one_file(served: Served) -> None:
    answer = served.get("slow", "page.html")
    assert answer.headers["content-disposition"] == 'attachment; filename="slow.html"'
    assert 'id="meshscope-data"' in answer.text


def test_compare_is_the_page_of_the_command(served: Served) -> None:
    a, b = served.find("slow"), served.find("below")
    answer = served.client.get("/api/v1/compare", params={"a": a, "b": b})
    first, second = study(served.folder / "slow"), study(served.folder / "foreign" / "below")
    compared = compare_runs(first, second, names=("slow", "below"))
    page = compare_pages(compared, first.report().content, second.report().content)
    expected = json.loads(json.dumps(encode_page(page)))
    assert without_time(answer.json()) == without_time(expected)


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("timeline", 400),
        ("timeline?step=x", 400),
        ("timeline?step=1&ranks=5-1", 400),
        ("timeline?step=1&ranks=0-99999999", 400),
        ("matrix?w=0", 400),
        ("matrix?h=999999", 400),
        ("matrix?steps=9-3", 400),
        ("matrix?agg=sum", 400),
        ("series?name=none", 400),
        ("page?attempt=7", 400),
        ("page?attempt=-1", 400),
        ("nothing", 404),
    ],
)
def test_wrong_questions_get_one_sentence(served: Served, what: str, status: int) -> None:
    answer = served.get("slow", what)
    assert answer.status_code == status
    assert len(answer.json()["error"]) > 10


@pytest.mark.parametrize(
    "run",
    [
        "none",
        "..",
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "slow",
        "slow%00",
        "slow/../slow",
        "a" * 9000,
    ],
)
def test_only_ids_of_the_list_lead_to_runs(served: Served, run: str) -> None:
    answer = served.client.get(f"/api/v1/runs/{run}/page")
    assert answer.status_code == 404
    assert "error" in answer.json()


def test_names_of_runs_never_reach_html(served: Served) -> None:
    run_id = served.find(HOSTILE)
    assert run_id.replace("-", "").replace(".", "").replace("_", "").isalnum()
    page = served.client.get(f"/run/{run_id}").text
    assert f'content="{run_id}"' in page
    hostile = served.client.get("/run/%22%3E%3Cscript%3Ealert(1)%3C%2Fscript%3E".replace("%2F", ""))
    assert "<script>alert" not in hostile.text
    assert served.get(HOSTILE, "page").json()["meta"]["title"] == HOSTILE


def test_the_bundle_is_served_with_a_version_and_may_be_kept(served: Served) -> None:
    page = served.client.get("/").text
    address = page.split('<script src="./')[1].split('"')[0]
    answer = served.client.get(f"/{address}")
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "immutable" in answer.headers["cache-control"]
    assert len(answer.content) > 50_000
    assert served.client.get("/assets/x/../../secret").status_code == 404
    plain = served.client.get(f"/{address}", headers={"accept-encoding": "identity"})
    assert plain.content == answer.content


def test_answers_fit_their_schemas(served: Served) -> None:
    document = served.client.get("/api/v1/openapi.json").json()
    assert document == json.loads(json.dumps(render_openapi()))
    schemas = document["components"]["schemas"]
    rows = served.client.get("/api/v1/runs").json()
    jsonschema.validate(rows, schemas["meshscope-runs"])
    jsonschema.validate(served.get("slow", "page").json(), schemas["meshscope-page"])
    jsonschema.validate(served.get("slow", "timeline?step=5").json(), schemas["meshscope-timeline"])
    jsonschema.validate(served.get("slow", "series?name=loss").json(), schemas["meshscope-curve"])
    jsonschema.validate(
        served.get("slow", "matrix?format=json").json(), schemas["meshscope-matrix"]
    )


def test_every_address_of_the_api_is_in_the_document(served: Served) -> None:
    for path in render_openapi()["paths"]:
        address = path.replace("{run}", "none").replace("{name}.{form}", "steps.csv")
        answer = served.client.get(address)
        assert answer.status_code in (200, 400, 404)
        assert answer.json().get("error") != "there is nothing at this address"


def test_the_server_changes_nothing(served: Served, tmp_path: Path) -> None:
    def look() -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_size)
            for path in (served.folder / "slow").rglob("*")
        }

    before = look()
    for what in ("page", "report", "hang", "matrix", "timeline?step=5", "series", "memory"):
        served.get("slow", what)
    assert look() == before
