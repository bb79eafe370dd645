"""Builds the documentation site with Zensical; a warning is an error.

    python docs/build_site.py    # from build/site-source into build/site

Pages link to each other as they do in the repository, also across its folders. So they are gathered
in the same folders, with the files they link to, and no link is rewritten.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build" / "site-source"
PAGES = ("*.md", "docs/**/*.md", "benchmarks/*.md")
LINK = re.compile(r"\]\(([^)\s#:]+)[^)\s]*\)")


def list_files() -> list[Path]:
    """All pages, and what they link to."""
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    linked = {
        (page.parent / link).resolve()
        for page in pages
        for link in LINK.findall(page.read_text(encoding="utf-8"))
    }
    return sorted({*pages, *(path for path in linked if path.is_file() and ROOT in path.parents)})


def find_unlisted(pages: list[Path]) -> list[str]:
    """Pages that the navigation does not have; those of rules are reached from their list."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    names = (page.relative_to(ROOT).as_posix() for page in pages if page.suffix == ".md")
    return [name for name in names if f"- {name}\n" not in navigation and "rules/" not in name]


def main() -> int:
    files = list_files()
    unlisted = find_unlisted(files)
    if unlisted:
        sys.stderr.write(f"docs/build_site.py: not in mkdocs.yml: {', '.join(unlisted)}\n")
        return 1
    shutil.rmtree(SOURCE, ignore_errors=True)
    for path in files:
        target = SOURCE / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    zensical = Path(sys.executable).with_name("zensical")
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.call([zensical, "build", "--strict", "--clean"], cwd=ROOT, env=environment)


if __name__ == "__main__":
    sys.exit(main())
