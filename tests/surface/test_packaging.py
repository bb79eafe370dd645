"""What an index and an unpacked source distribution get."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from ended_process import run_process

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_everything_that_is_tracked_is_in_the_source_distribution():
    listed = run_process(["git", "-C", str(ROOT), "ls-files"])
    if listed.returncode:
        pytest.skip("not in a git work tree: this is what was distributed")
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    given = {*included, "pyproject.toml", ".gitignore"}
    tops = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    assert tops - given == set()


def test_links_of_the_description_are_absolute(build):
    metadata = {"urls": PROJECT["project"]["urls"]}
    build.DescriptionHook(str(ROOT), {}).update(metadata)
    assert metadata["readme"]["content-type"] == "text/markdown"
    links = re.findall(r"\]\(([^)\s]+)\)", metadata["readme"]["text"])
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    assert f"{PROJECT['project']['urls']['Source']}/blob/main/docs/cli.md" in links


@pytest.mark.parametrize(
    ("is_pure", "compiled", "tag"),
    [
        (False, ".so", r"cp311-abi3-linux_\w+"),
        (False, "_scanner_native.so", r"py3-none-linux_\w+"),  # a compiler, but no Python.h
        (False, "nothing", None),
        (True, ".so", None),
    ],
)
def test_the_tag_says_what_is_inside(build, monkeypatch, is_pure, compiled, tag):
    monkeypatch.setenv("MESHSCOPE_PURE", "1" if is_pure else "0")
    monkeypatch.setattr(
        build, "compile_library", lambda _, library: library.name.endswith(compiled)
    )
    monkeypatch.setattr(build.NativeBuildHook, "app", _Silent(), raising=False)
    hook = build.NativeBuildHook(str(ROOT), {}, None, None, "", "wheel")
    data = {"artifacts": []}
    hook.initialize("standard", data)
    assert bool(data["artifacts"]) == (tag is not None)
    assert data.get("tag") is None if tag is None else re.fullmatch(tag, data["tag"])


class _Silent:
    def display_warning(self, text):
        """What was not compiled is said to the one who builds."""
