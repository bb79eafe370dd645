"""A table that somebody cuts short costs its records, not the training."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ended_process import run_process
from meshscope.store.write.native import load_native

TESTS = Path(__file__).parents[2]
needs_native = pytest.mark.skipif(
    not hasattr(load_native("meshscope.store.write._record_slots_native"), "guard"),
    reason="the compiled recorder is not built here",
)


def run_program(text: str, *words: object) -> subprocess.CompletedProcess:
    """In a process of its own: pytest has a handler of its own for the signal."""
    program = "import os, signal, sys\nfrom pathlib import Path\n" + textwrap.dedent(text)
    return run_process(
        [sys.executable, "-c", program, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        timeout=60,
    )


CUT = """
from builders import MS, make_writer, put_step
from meshscope.store.write.cut_guard import count_cut_pages
writer = make_writer(Path(sys.argv[1]))
for step in range(3000):
    put_step(writer, step, MS * step, MS * (step + 1))
    if step == 1500:
        os.truncate(writer.directory / "tables.pack", int(sys.argv[2]))
table = writer.table("steps")
print(count_cut_pages() > 0, table.num_dropped > 0, table.error)
writer.close()
"""


@needs_native
@pytest.mark.parametrize("size", [0, 100, 4096, 8192 + 4096 + 64 * 700])
def test_a_table_cut_short_does_not_end_the_process(tmp_path, size):
    done = run_program(CUT, tmp_path / "run", size)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True True")
    assert "somebody else cut the file short" in done.stdout


@needs_native
def test_what_is_left_is_read_and_the_cut_is_told(tmp_path):
    import meshscope

    assert run_program(CUT, tmp_path / "run", 8192 + 4096 + 64 * 700).returncode == 0
    study = meshscope.study(tmp_path / "run")
    assert len(study.table("steps")["step"]) >= 700
    assert study.study.health.problems


@needs_native
@pytest.mark.parametrize(
    ("cause", "number"),
    [
        ("os.kill(os.getpid(), signal.SIGBUS)", signal.SIGBUS),
        (
            """
            import mmap, tempfile
            file = tempfile.TemporaryFile()
            file.truncate(4096)
            other = mmap.mmap(file.fileno(), 4096)
            file.truncate(0)
            other[0] = 1
            """,
            signal.SIGBUS,
        ),
    ],
)
def test_every_other_bus_error_ends_the_process_as_before(tmp_path, cause, number):
    begin = "from builders import make_writer\nwriter = make_writer(Path(sys.argv[1]))\n"
    done = run_program(begin + textwrap.dedent(cause), tmp_path / "run")
    assert done.returncode == -number


@needs_native
@pytest.mark.parametrize(
    "earlier",
    [
        "import faulthandler; faulthandler.enable()",
        "signal.signal(signal.SIGBUS, lambda *_: print('called'))",
        "signal.signal(signal.SIGBUS, signal.SIG_IGN)",
    ],
)
def test_a_cut_does_not_end_a_process_that_had_a_handler_before(tmp_path, earlier):
    done = run_program(f"{earlier}\n{CUT}", tmp_path / "run", 4096)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True True")
    assert not done.stderr


@needs_native
def test_python_still_says_where_another_bus_error_was(tmp_path):
    text = """
    import faulthandler, mmap, tempfile
    faulthandler.enable()
    from builders import make_writer
    writer = make_writer(Path(sys.argv[1]))
    file = tempfile.TemporaryFile()
    file.truncate(4096)
    other = mmap.mmap(file.fileno(), 4096)
    file.truncate(0)
    {}
    """
    for cause in ("other[0] = 1", "os.kill(os.getpid(), signal.SIGBUS)"):
        done = run_program(text.format(cause), tmp_path / cause[:2])
        assert done.returncode == -signal.SIGBUS
        assert done.stderr.count("Fatal Python error: Bus error") == 1


@needs_native
def test_a_handler_of_the_program_stays(tmp_path):
    text = """
    from builders import MS, make_writer, put_step
    called = []
    signal.signal(signal.SIGBUS, lambda *_: called.append(1))
    writer = make_writer(Path(sys.argv[1]))
    put_step(writer, 0, 0, MS)
    os.kill(os.getpid(), signal.SIGBUS)
    assert called == [1]
    """
    done = run_program(text, tmp_path / "run")
    assert done.returncode == 0, done.stderr
