"""What the README and the recorder's pages show runs, and says what the benchmarks found."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshscope.cli import COMMANDS
from meshscope.store.reader import open_run

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/recorder.md", "docs/monitor.md")
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


SNIPPETS = [
    pytest.param(code, id=f"{page}-{number}")
    for page in PAGES
    for number, code in enumerate(RUNNABLE.findall(read(page)))
]


def test_the_pages_have_snippets_that_run():
    assert all(RUNNABLE.search(read(page)) for page in PAGES)


@pytest.mark.parametrize("code", SNIPPETS)
def test_a_snippet_runs_and_records_every_step(code, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM + code, encoding="utf-8")
    ours = ("MESHSCOPE_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_")
    alone = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    env = {k: v for k, v in os.environ.items() if k not in alone and not k.startswith(ours)}
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (run_dir,) = (tmp_path / "runs").iterdir()
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
    assert sum(mode["num_kills"] for mode in modes) == 500
    assert f"{acknowledged:,} acknowledged records, 0 lost, 0 wrong" in read("README.md")
