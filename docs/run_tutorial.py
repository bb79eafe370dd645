"""Runs the commands of the tutorial and compares what they print with what its pages say.

    python docs/run_tutorial.py FOLDER    # a new folder, in which the commands run

A line of a `console` block that starts with `$` is a command, and goes on after a backslash at its
end. The lines below it must be in its output, in this order, where `…` stands for any text.
Pages run in the order of the tutorial's list.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial"
BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
LESSON = re.compile(r"^\d+\. \[[^\]]*\]\(([\w-]+\.md)\)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    page: str
    text: str
    expected: tuple[str, ...]


def list_pages() -> list[Path]:
    """The introduction, then each lesson as its list has them."""
    introduction = TUTORIAL / "README.md"
    names = LESSON.findall(introduction.read_text(encoding="utf-8"))
    return [introduction, *(TUTORIAL / name for name in names)]


def read_commands(page: Path) -> Iterator[Command]:
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            text, *expected = part.replace("\\\n", "").splitlines()
            yield Command(page=page.name, text=text, expected=tuple(expected))


def find_missing(expected: tuple[str, ...], printed: str) -> str | None:
    """The first expected line that the output does not have after the one before."""
    lines = iter(" ".join(line.split()) for line in printed.splitlines())
    for line in expected:
        words = (re.escape(" ".join(part.split())) for part in line.split("…"))
        pattern = re.compile(r"\s*.*?\s*".join(words))
        if not any(pattern.search(printed_line) for printed_line in lines):
            return line
    return None


def run(command: Command, folder: Path) -> str | None:
    """What is wrong with what the command printed, or None."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        ["bash", "-c", command.text],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    if done.returncode:
        return f"exit code {done.returncode}; it printed:\n{done.stdout}"
    missing = find_missing(command.expected, done.stdout)
    if missing is None:
        return None
    return f"the page has {missing!r}, which was not printed:\n{done.stdout}"


def main() -> int:
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.stderr.write("run_tutorial.py: expected one argument, a folder that is not there yet\n")
        return 2
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "examples", folder / "examples")
    commands = [command for page in list_pages() for command in read_commands(page)]
    for command in commands:
        problem = run(command, folder)
        sys.stdout.write(f"{'failed' if problem else 'ok':6}  {command.page}: {command.text}\n")
        sys.stdout.flush()
        if problem:
            sys.stderr.write(f"{problem}\n")
            return 1
    return 0 if commands else 1


if __name__ == "__main__":
    sys.exit(main())
