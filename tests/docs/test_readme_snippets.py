"""What the README and the recorder's pages show runs, and says what the benchmarks found."""

import json
import re
import sys
from pathlib import Path

import pytest

from ended_process import run_process
from meshscope.cli import COMMANDS
from meshscope.store.read.run import open_run

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/recorder.md", "docs/monitor.md", "docs/frameworks.md")
RUNNABLE = re.compile(r"<!-- runnable -->\n```python\n(.*?)```", flags=re.DOTALL)

# What a training program has before a snippet begins.
PROGRAM = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)

def train(model, optimizer):
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


SNIPPETS = {
    f"{page}-{number}": code
    for page in PAGES
    for number, code in enumerate(RUNNABLE.findall(read(page)))
}

# Each in a process of its own, which has torch already and ends as any other does.
RUN_ALL = """
import gc, os, runpy, sys, torch, torch._dynamo
gc.freeze()  # programs need not look through all of torch for garbage, nor at their end
for folder in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        os.chdir(folder)
        for name, place in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), place)
        sys.argv = ["program.py"]
        runpy.run_path("program.py", run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """By snippet: its folder and exit code."""
    folders = {name: tmp_path_factory.mktemp("snippet") for name in SNIPPETS}
    for name, folder in folders.items():
        (folder / "program.py").write_text(PROGRAM + SNIPPETS[name], encoding="utf-8")
    done = run_process([sys.executable, "-c", RUN_ALL, *map(str, folders.values())], check=True)
    codes = [int(line) for line in done.stdout.split()]
    return {
        name: (folder, code) for (name, folder), code in zip(folders.items(), codes, strict=True)
    }


def test_the_pages_have_snippets_that_run():
    assert all(RUNNABLE.search(read(page)) for page in PAGES)


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_runs_and_records_every_step(name, ran):
    folder, code = ran[name]
    assert (code, (folder / "stderr").read_text(encoding="utf-8")) == (0, "")
    (run_dir,) = (folder / "runs").iterdir()
    for attempt in open_run(run_dir).attempts:
        recording = attempt.ranks[0]
        assert len(recording.read("steps")["step"]) in {1, 2, 4}
        assert recording.closing is not None
        assert not recording.closing.get("num_errors")


@pytest.mark.parametrize("page", ["README.md", "docs/recorder.md", "docs/demo.md"])
def test_every_command_shown_exists(page):
    blocks = re.findall(r"^    .*$|```\n.*?```|`meshscope [^`]*`", read(page), re.M | re.S)
    shown = {name for block in blocks for name in re.findall(r"\bmeshscope ([a-z]+)", block)}
    assert shown <= set(COMMANDS)


@pytest.mark.parametrize(
    "name", ["kill_storm", "store_load", "communication_stress", "hang_trials"]
)
def test_numbers_are_those_of_the_committed_results(name):
    results = json.loads(read(f"benchmarks/results/{name}.json"))
    assert results["summary"] in read("benchmarks/README.md")


def test_the_readme_counts_kills_as_the_storm_did():
    modes = json.loads(read("benchmarks/results/kill_storm.json"))["modes"]
    acknowledged = sum(mode["num_acknowledged"] for mode in modes)
    num_kills = sum(mode["num_kills"] for mode in modes)
    assert num_kills >= 500
    assert f"{num_kills} SIGKILLs while recording" in read("README.md")
    assert f"{acknowledged:,} acknowledged records, 0 lost, 0 wrong" in read("README.md")
