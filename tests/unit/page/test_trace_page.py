"""The page of traces says nothing that a trace does not tell."""

import json
import re

from command_line import invoke
from meshscope.analyze.rank.not_in_traces import NO_COST, NO_DROPPED, NO_END
from strange_traces import plain
from trace_builders import write_traces


def make_page(traces):
    page = traces.parent / "page.html"
    done = invoke("report", traces, "--html", page)
    assert done.exit_code == 0, done.output
    text = page.read_text(encoding="utf-8")
    found = re.search(r'id="meshscope-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_whether_the_job_went_on_is_not_known(tmp_path):
    write_traces(tmp_path / "traces", num_ranks=2, num_steps=4)
    page = make_page(tmp_path / "traces")
    (lamp,) = (one for one in page["lamps"] if one["key"] == "move")
    assert (lamp["value"], lamp["state"]) == ("not known", "not known")
    assert page["meta"]["state"]["text"] == "Traces"


def test_between_pieces_of_work_a_device_idles(tmp_path):
    page = make_page(plain(tmp_path / "traces"))
    shares = {
        step["lines"][line]["share"]
        for step in page["timelines"]
        for line in step["pieces"]["line"]
    }
    assert "idle" in shares
    assert not any("not split" in share for share in shares)


def test_ranks_have_a_trace_and_are_not_said_to_have_finished(tmp_path):
    *_, last = write_traces(tmp_path / "traces", num_ranks=4, num_steps=4)
    last.unlink()
    done = invoke("report", tmp_path / "traces", "--section", "run")
    assert "3 of 4 have a trace" in done.output
    assert "finished" not in done.output


def test_how_ranks_ended_is_not_known(tmp_path):
    write_traces(tmp_path / "traces", num_ranks=2, num_steps=4)
    page = make_page(tmp_path / "traces")
    assert page["meta"]["state"]["kind"] == "traces"
    reason = {"unavailable": NO_END}
    assert [rank["state"] for rank in page["ranks"]] == [reason, reason]
    assert [rank["state"] for rank in page["report"]["ranks"]] == [reason, reason]


def test_nothing_is_said_of_a_recorder(tmp_path):
    write_traces(tmp_path / "traces", num_ranks=2, num_steps=4)
    health = make_page(tmp_path / "traces")["report"]["health"]
    for name in ("overhead", "opening_cost_ns", "sampling_cost_ns"):
        assert health[name] == {"unavailable": NO_COST}
    assert health["num_dropped"] == {"unavailable": NO_DROPPED}
    assert health["is_complete"]
    done = invoke("report", tmp_path / "traces", "--all")
    assert "The traces themselves" in done.output
    assert "recorder" not in done.output
    assert "RSS" not in done.output


def test_the_device_is_named(tmp_path):
    write_traces(tmp_path / "traces", num_ranks=2, num_steps=4)
    page = make_page(tmp_path / "traces")
    assert page["report"]["run"]["device_name"] == "NVIDIA H100 80GB HBM3"
