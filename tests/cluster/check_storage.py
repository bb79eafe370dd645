"""A run on an object store: every command reads it there, writes there, and it is shipped there."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest

import builders
from builders import MS, make_writer, put_step
from conftest import BIN
from late_runs import STEADY, LateRun
from meshscope.cli import main
from meshscope.core.layout import Layout
from meshscope.store.remote import mirror
from meshscope.store.remote.mirror import mirror_root

MESHSCOPE = str(BIN / "meshscope")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("storage") / "run"
    LateRun(
        layout=Layout(dp=4),
        work=lambda rank, step: {**STEADY, "forward": STEADY["forward"] * (1 + (rank == 2))},
    ).record(path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHSCOPE_CACHE", str(tmp_path / "cache"))
    mirror_root.cache_clear()
    mirror._prefix.cache_clear()
    mirror._mounts.clear()
    return tmp_path / "cache"


@dataclass
class Done:
    stdout: str
    stderr: str


@pytest.fixture
def call(capfd):
    """The command line, in this process: starting one takes longer than what is checked."""

    def run_command(*words: object, code: int = 0) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main([str(word) for word in words], "meshscope")
        done = Done(*capfd.readouterr())
        assert (ended.value.code or 0) == code, done.stderr
        return done

    return run_command


@pytest.fixture
def report(call):
    """Its JSON, byte by byte, but for the place that it names."""

    def make(place: object) -> str:
        return call("report", place, "--json").stdout.replace(f'"path": "{place}"', '"path": "RUN"')

    return make


def put(folder: Path, url: str) -> None:
    fsspec.filesystem("s3").put(f"{folder}/", f"{url}/", recursive=True)


def test_folder_parquet_objects_and_archive_give_one_json(call, report, run, bucket, tmp_path):
    compact = tmp_path / "compact"
    shutil.copytree(run, compact)
    call("compact", compact, "--include-unfinished", "--remove-raw")
    assert not list(compact.rglob("*.pack"))
    put(run, f"{bucket}/plain")
    put(compact, f"{bucket}/parquet")
    call("archive", run, f"{bucket}/archived")
    expected = report(run)
    assert json.loads(expected)["run"]["path"] == "RUN"
    for place in (compact, f"{bucket}/plain", f"{bucket}/parquet", f"{bucket}/archived"):
        assert report(place) == expected, place


def test_every_command_that_reads_takes_the_url(call, run, bucket, tmp_path):
    url = f"{bucket}/jobs/run"
    call("archive", run, url)
    same = [
        ("sql", "select rank, count(*) from steps group by rank order by rank"),
        ("simulate", "--json"),
        ("compare", str(run), "--json"),
        ("hang", "--json"),
    ]
    for name, *words in same:
        here = call(name, run, *words).stdout
        there = call(name, url, *words).stdout
        there = there.replace(url, str(run))
        if name == "hang":  # says when it looked
            here, there = (re.sub(r"\b1\d{18}\b", "NOW", text) for text in (here, there))
        assert there == here, name
    listed = json.loads(call("ls", bucket, "--json").stdout)["runs"]
    assert [one["path"] for one in listed] == [url]
    assert "step 39" in call("watch", url, "--once").stdout


def test_pages_and_exports_are_written_to_the_url(call, run, bucket, tmp_path):
    url = f"{bucket}/run"
    put(run, url)
    call("report", url, "--html", f"{bucket}/pages/run.html", "-o", f"{bucket}/pages/run.md")
    call("export", url, "--table", "steps", "-o", f"{bucket}/tables/steps.parquet")
    call("export", url, "--perfetto", f"{bucket}/run.pftrace")
    call("report", run, "--html", tmp_path / "run.html")
    system = fsspec.filesystem("s3")
    system.invalidate_cache()
    assert system.cat(f"{bucket}/pages/run.html")[:15].lower() == b"<!doctype html>"
    assert system.cat(f"{bucket}/pages/run.md")
    assert system.cat(f"{bucket}/tables/steps.parquet")[:4] == b"PAR1"
    assert system.size(f"{bucket}/run.pftrace") > 1000


def test_what_was_read_once_is_not_sent_again(report, run, bucket, cache):
    url = f"{bucket}/run"
    put(run, url)
    report(url)
    copies = {path: path.stat().st_mtime_ns for path in cache.rglob("*.pack")}
    assert copies
    report(url)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.pack")} == copies


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("report", "s3://no-such-bucket-here/run"), 3, "s3://no-such-bucket-here/run"),
        (("report", "nowhere://run"), 3, "no storage is called nowhere"),
        (("report", "gs://bucket/run"), 4, "pip install 'meshscope[gs]'"),
        (("compact", "s3://bucket/run"), 2, "needs a run on this machine"),
        (("archive", "RUN", "bucket/run"), 2, "is no URL"),
        (("archive", "RUN", "s3://no-such-bucket-here/run"), 3, "s3://no-such-bucket-here/run"),
    ],
)
def test_a_bad_place_is_one_line(call, words, code, says, run, s3):
    done = call(*[str(run) if word == "RUN" else word for word in words], code=code)
    assert says in done.stderr
    assert done.stderr.count("\n") <= 2


def test_no_credentials_is_one_line(call, s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    done = call("report", "s3://bucket/run", code=3)
    assert done.stderr.count("\n") == 1
    assert "credentials" in done.stderr


def test_a_server_that_is_down_is_one_line(call, s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    done = call("report", "s3://bucket/run", code=3)
    assert done.stderr.count("\n") == 1


# --- shipping ------------------------------------------------------------------------------------

WRITER = """
import sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
import builders
from builders import MS, make_writer, put_step
writer = make_writer(Path(sys.argv[1]))
for step in range(int(sys.argv[2])):
    put_step(writer, step, 100 * MS * step, 100 * MS * (step + 1))
    print(step, flush=True)
    time.sleep(0.01)
writer.close()
"""


def start_ship(run: Path, url: str, *words: object) -> subprocess.Popen:
    command = [MESHSCOPE, "ship", run, url, "--every", 0.3, "--idle", 1, *words]
    with run.with_suffix(".said").open("w") as said:
        return subprocess.Popen([str(word) for word in command], stderr=said)


def test_shipping_survives_kills_of_both_sides(call, report, bucket, tmp_path):
    run, url = tmp_path / "run", f"{bucket}/shipped"
    program = tmp_path / "writer.py"
    program.write_text(WRITER.format(paths=[str(Path(builders.__file__).parent)]), "utf-8")
    writer = subprocess.Popen(
        [sys.executable, str(program), str(run), "2000"], stdout=subprocess.PIPE, text=True
    )
    while not (run / "rank00000").is_dir():
        assert writer.poll() is None
        time.sleep(0.05)
    for _ in range(3):
        ship = start_ship(run, url)
        time.sleep(3)
        ship.send_signal(signal.SIGKILL)
        ship.wait()
    writer.send_signal(signal.SIGKILL)
    with writer:
        acknowledged = [int(line) for line in writer.stdout.read().split()]
    ship = start_ship(run, url)
    time.sleep(3)
    ship.send_signal(signal.SIGTERM)
    assert ship.wait(60) == 0, run.with_suffix(".said").read_text()
    assert "all there" in run.with_suffix(".said").read_text()
    count = call("sql", url, "select max(step) from steps", "--csv").stdout.split()
    assert int(count[-1]) >= acknowledged[-1]
    assert report(url) == report(run)


def test_shipping_ends_by_itself_and_keeps_to_its_rate(bucket, tmp_path):
    run = tmp_path / "run"
    writer = make_writer(run)
    for step in range(200):
        put_step(writer, step, 100 * MS * step, 100 * MS * (step + 1))
    writer.close()
    (run / "big.bin").write_bytes(os.urandom(8 << 20))
    begun = time.monotonic()
    ship = start_ship(run, f"{bucket}/slow", "--max-rate", "4MB")
    assert ship.wait(60) == 0, run.with_suffix(".said").read_text()
    assert time.monotonic() - begun > 1.0


TORCHRUN = Path(__file__).parents[2] / ".venv" / "bin" / "torchrun"
PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn

# A store for each launch: torchrun's own has addresses of the ranks that failed, and gloo was seen
# to wait for those for minutes.
store = f"file://{sys.argv[2]}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
    if is_first and rank == 1 and step == 100:
        os._exit(7)
dist.destroy_process_group()
"""


def find_shipper(url: str) -> int | None:
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"ship" in words and url.encode() in words and b"run" not in words:
            return int(folder.name)
    return None


@pytest.mark.skipif(not TORCHRUN.exists(), reason="needs torch: `make test` installs it in .venv")
def test_run_ships_real_ranks_whose_job_and_shipper_fail(call, report, bucket, tmp_path):
    """Rank 1 fails once and torchrun starts both again; the shipper is killed meanwhile. In the end
    all is there, thinned to its size, and both places tell the same."""
    run, url = tmp_path / "run", f"{bucket}/real"
    program = tmp_path / "train.py"
    program.write_text(PROGRAM, "utf-8")
    words = [MESHSCOPE, "run", "--no-progress", "-o", run, "--ship", url, "--max-disk", "16MB"]
    words += ["--", TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    with (tmp_path / "said").open("w") as said:
        words += [program, 400, tmp_path / "store"]
        job = subprocess.Popen([*map(str, words)], stdout=said, stderr=said)
    text = (tmp_path / "said").read_text
    while not (run / "rank00000" / "attempt001" / "tables.pack").exists():
        assert job.poll() is None, text()
        time.sleep(0.1)
    shipper = find_shipper(url)
    assert shipper is not None
    os.kill(shipper, signal.SIGKILL)
    assert job.wait(200) == 0, text()
    assert "not all of the run" not in text()
    rows = "select attempt, rank, count(*) from steps group by all order by all"
    counts = [line.split(",") for line in call("sql", url, rows, "--csv").stdout.split()[1:]]
    assert [line[:2] for line in counts] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert [int(line[2]) for line in counts[2:]] == [400, 400]
    assert min(int(line[2]) for line in counts) >= 100
    assert report(url) == report(run)
