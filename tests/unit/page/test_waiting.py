"""A stuck job: the tree of who waits for whom, and that its report and page lead with it."""

import pytest

from command_line import invoke
from hang_builders import Job
from meshscope.core.layout import Layout
from meshscope.page.document import describe_page
from meshscope.page.file import encode_page
from meshscope.report.run_study import study


@pytest.fixture(scope="module")
def stuck(tmp_path_factory, waiter, sleeper):
    """Rank 3 of four sleeps; rank 2 waits for it along tp, rank 1 along dp, and rank 0 for 2."""
    path = tmp_path_factory.mktemp("stuck") / "run"
    job = Job(path, layout=Layout(dp=2, tp=2))
    for rank in range(4):
        job.rank(rank, sleeper if rank == 3 else waiter)
        job.rank(rank).finishes("all_reduce", job.world, ago_s=9)
    job.rank(2).enters("all_reduce", job.axis_group("tp", 2), ago_s=8, size_bytes=4 << 20)
    job.rank(1).enters("all_reduce", job.axis_group("dp", 1), ago_s=7)
    job.rank(0).enters("all_reduce", job.axis_group("dp", 0), ago_s=6)
    return path


def test_the_tree_leads_from_the_culprit_to_all_who_wait(stuck):
    page = encode_page(describe_page(study(stuck).report().content))
    tree = page["hang"]["tree"]
    assert [(node["rank"], node["parent"], node["depth"]) for node in tree] == [
        (3, None, 0),
        (2, 3, 1),
        (1, 3, 1),
        (0, 2, 2),
    ]
    assert [node["is_culprit"] for node in tree] == [True, False, False, False]
    assert tree[0]["waited_ns"] is None
    assert tree[1]["waited_ns"] > tree[2]["waited_ns"] > tree[3]["waited_ns"] > 0


def test_the_page_leads_with_the_hang(stuck):
    page = encode_page(describe_page(study(stuck).report().content))
    assert (page["meta"]["kind"], page["meta"]["state"]["kind"]) == ("hang", "stuck")
    assert page["verdict"]["title"].startswith("Rank 3 (dp1.tp1) has not entered all_reduce")
    assert page["lamps"][1]["state"] == "bad"


def test_the_report_leads_with_the_hang(stuck):
    lines = invoke("report", stuck).stdout.splitlines()
    assert lines[0].startswith("Rank 3 (dp1.tp1) has not entered all_reduce")
