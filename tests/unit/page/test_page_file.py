"""The file: one script, one style, data that cannot act, and nothing else."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from builders import make_run
from command_line import invoke
from meshscope.core.layout import Layout
from meshscope.errors import MeshscopeError
from meshscope.page import file as page_file
from meshscope.page.document import describe_page
from meshscope.page.file import write_page
from meshscope.report.run_study import study

HOSTILE = "</script><script>alert(1)</script><!--\u2028\u202e<img src=x onerror=alert(2)>"
SCRIPT = "document.title = 'drawn';"


@pytest.fixture(autouse=True)
def bundle(tmp_path, monkeypatch):
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "page.js").write_text(SCRIPT)
    (folder / "page.css").write_text("body { margin: 0 }")
    monkeypatch.setattr(page_file, "find_bundle", lambda: folder)
    return folder


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self._in_script = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in_script = tag == "script"

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts.append(data)


def make_page(path, **options):
    return write_page(describe_page(study(path).report().content), **options)


def read_data(text):
    found = re.search(r'<script type="application/json" id="meshscope-data">(.*?)</script>', text)
    return json.loads(found[1])


def test_the_policy_allows_the_one_script_and_nothing_outside(tmp_path):
    make_run(tmp_path / "run", layout=Layout(dp=2), num_steps=6)
    text = make_page(tmp_path / "run")
    page = Elements(text)
    (policy,) = [a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert not [a for _, a in page.tags if {"src", "href"} & a.keys()]
    assert page.scripts[-1] == SCRIPT


def test_hostile_names_stay_text(tmp_path):
    name = f"run{HOSTILE.replace('/', '')}"
    phases = ((HOSTILE, 1_000_000),)
    make_run(tmp_path / name, num_steps=6, host=lambda rank: HOSTILE, phases=phases)
    text = make_page(tmp_path / name)
    page = Elements(text)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in page.tags]
    assert "\u2028" not in text
    assert read_data(text)["ranks"][0]["host"] == HOSTILE


def test_a_missing_bundle_is_one_clear_message(tmp_path, bundle):
    make_run(tmp_path / "run", num_steps=6)
    (bundle / "page.js").unlink()
    with pytest.raises(MeshscopeError, match=r"page\.js is not installed.*make web"):
        make_page(tmp_path / "run")


def test_redacted_names_no_host_path_or_argument(tmp_path):
    make_run(
        tmp_path / "secret_place" / "run",
        layout=Layout(dp=2),
        num_steps=6,
        host=lambda rank: "node-17.corp",
        header={"provenance": {"argv": ["/home/someone/train.py", "--key", "hunter2"]}},
    )
    plain, redacted = (
        make_page(tmp_path / "secret_place" / "run", is_redacted=is_redacted)
        for is_redacted in (False, True)
    )
    for word in ("node-17.corp", "secret_place", "someone", "hunter2"):
        assert word in plain
        assert word not in redacted
    data = read_data(redacted)
    assert data["meta"]["is_redacted"] is True
    assert data["ranks"][0]["host"] == "host 1"
    assert data["report"]["run"]["argv"] == []
    assert data["report"]["budget"] == read_data(plain)["report"]["budget"]


def test_report_writes_it_beside_the_text_or_instead(tmp_path):
    make_run(tmp_path / "run", layout=Layout(dp=2), num_steps=6)
    beside = invoke("report", tmp_path / "run", "--html", tmp_path / "x.html")
    assert "6 steps on 2 ranks" in beside.stdout
    instead = invoke("report", tmp_path / "run", "-o", tmp_path / "y.html", "--redact")
    assert (instead.exit_code, instead.stdout) == (0, "")
    pages = [read_data((tmp_path / name).read_text()) for name in ("x.html", "y.html")]
    assert [page["meta"]["is_redacted"] for page in pages] == [False, True]
    refused = invoke("report", tmp_path / "run", "--redact")
    assert refused.exit_code == 2
    assert "--html FILE" in refused.stderr


def test_compare_and_hang_write_it_too(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / name, layout=Layout(dp=2), num_steps=6)
    done = invoke("compare", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "c.html")
    assert done.exit_code == 0
    assert read_data((tmp_path / "c.html").read_text())["meta"]["kind"] == "compare"
    done = invoke("hang", tmp_path / "a", "--html", tmp_path / "h.html")
    assert done.exit_code == 0
    data = read_data((tmp_path / "h.html").read_text())
    assert (data["meta"]["kind"], data["hang"]["kind"]) == ("run", "finished")


def test_every_package_that_the_bundle_is_built_with_is_pinned_by_its_hash():
    lock = json.loads((Path(__file__).parents[3] / "web" / "package-lock.json").read_text())
    packages = {name: one for name, one in lock["packages"].items() if name}
    assert len(packages) > 10
    assert [name for name, one in packages.items() if "integrity" not in one] == []
