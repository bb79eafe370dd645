"""The committed bundle is what its source builds, and small."""

import gzip
import shutil
import subprocess

import pytest

from browser_pages import ROOT

BUNDLE = ROOT / "src" / "meshscope" / "page" / "bundle"
MAX_SCRIPT_BYTES = 100_000


def test_the_committed_bundle_matches_its_source(tmp_path):
    if not (ROOT / "web" / "node_modules" / ".installed").is_file():
        pytest.skip("the packages of web/ are not installed: make web/node_modules/.installed")
    web = tmp_path / "web"
    shutil.copytree(ROOT / "web", web, ignore=shutil.ignore_patterns("node_modules"), symlinks=True)
    (web / "node_modules").symlink_to(ROOT / "web" / "node_modules")
    built = tmp_path / "src" / "meshscope" / "page" / "bundle"
    built.parent.mkdir(parents=True)
    done = subprocess.run(
        ["npm", "run", "--silent", "build"], cwd=web, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("page.js", "page.css"):
        assert (built / name).read_bytes() == (BUNDLE / name).read_bytes(), f"{name}: make web"


def test_the_script_is_small():
    assert len(gzip.compress((BUNDLE / "page.js").read_bytes(), 9)) <= MAX_SCRIPT_BYTES
