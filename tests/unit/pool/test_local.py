"""Files go to processes where that is worth it, and come back in their order."""

import os
import subprocess
import sys
from functools import partial

import pytest

from meshscope.errors import UsageError
from meshscope.pool import local
from meshscope.pool.local import begin, choose_processes
from meshscope.pool.pool import map_items, progress, use_engine


def tell(path):
    return path.name, os.getpid()


def die_at(path, *, name, survivor):
    """Kills the process in which it is called, unless that is the first one."""
    if path.name == name and os.getpid() != survivor:
        os._exit(9)
    return path.name


def fail_at(path, *, name):
    if path.name == name:
        raise ValueError(name)
    return path.name


def map_files(files, work):
    return map_items(work, files, [0] * len(files))


@pytest.fixture
def files(tmp_path):
    found = [tmp_path / f"{number}.json" for number in range(100)]
    for path in found:
        path.touch()
    return found


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.mark.usefixtures("two_cores")
def test_what_is_found_is_in_the_order_of_the_files(files):
    found = list(map_files(files, tell))
    assert [name for name, _ in found] == [path.name for path in files]
    processes = {process for _, process in found}
    assert os.getpid() not in processes
    assert len(processes) <= 2


@pytest.mark.usefixtures("two_cores")
def test_a_process_that_dies_costs_nothing_but_time(files):
    work = partial(die_at, name="40.json", survivor=os.getpid())
    assert list(map_files(files, work)) == [path.name for path in files]


@pytest.mark.usefixtures("two_cores")
def test_an_error_comes_back(files):
    with pytest.raises(ValueError, match=r"40\.json"):
        list(map_files(files, partial(fail_at, name="40.json")))


def mark(path):
    path.with_suffix(".done").touch()
    return path.name


@pytest.mark.usefixtures("two_cores")
def test_what_nobody_has_asked_for_yet_is_not_worked_out_far_ahead(files):
    found = local.LocalEngine().map(mark, files, [0] * len(files))
    assert next(found) == files[0].name
    found.close()
    # Parts of 12 files: two for each of two processes, and one for the part that was taken.
    assert 12 <= len(list(files[0].parent.glob("*.done"))) <= 60


@pytest.mark.usefixtures("two_cores")
def test_few_small_files_need_no_process(files):
    assert list(map_files(files[:3], tell)) == [(path.name, os.getpid()) for path in files[:3]]


def test_one_core_needs_no_process(files, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert choose_processes([0] * len(files)) == 1


def test_memory_limits_how_many_work_at_once(monkeypatch):
    """Half of the memory, for processes of 100 MiB and what the largest item takes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    need = 100 * 2**20 + 350_000_000
    for num_processes in (1, 3, 10):
        monkeypatch.setattr(local, "_free_memory", lambda num=num_processes: 2 * num * need + 2)
        assert choose_processes([1, 350_000_000] * 50) == num_processes


def test_progress_counts_what_is_done(files):
    found = map_files(files[:3], tell)
    next(found)
    assert str(progress) == "1 of 3"
    list(found)
    assert str(progress) == "3 of 3"


def test_an_unknown_engine_is_refused():
    with pytest.raises(UsageError, match="there are local, ray, dask"), use_engine("spark"):
        pass


@pytest.mark.usefixtures("two_cores")
def test_parts_get_smaller_towards_the_end():
    parts = local._cut(range(64), 2)
    assert [item for part in parts for item in part] == list(range(64))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-4:]) == (8, [1, 1, 1, 1])


@pytest.mark.usefixtures("two_cores")
def test_work_that_is_begun_is_done_in_another_process(files):
    finish = begin(tell, files[3], 0)
    name, process = finish()
    assert name == "3.json"
    assert process != os.getpid()


def test_work_that_is_begun_is_done_here_where_there_is_one_core(files, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert begin(tell, files[3], 0)() == ("3.json", os.getpid())


@pytest.mark.usefixtures("two_cores")
def test_work_whose_process_dies_is_done_here(files):
    work = partial(die_at, name="3.json", survivor=os.getpid())
    assert begin(work, files[3], 0)() == "3.json"


@pytest.mark.usefixtures("two_cores")
def test_an_error_of_work_that_is_begun_comes_from_its_result(files):
    finish = begin(partial(fail_at, name="3.json"), files[3], 0)
    with pytest.raises(ValueError, match=r"3\.json"):
        finish()


@pytest.mark.usefixtures("two_cores")
def test_a_result_that_nobody_asks_for_does_not_keep_this_process(tmp_path):
    program = (
        "import os, time\n"
        "from meshscope.pool.local import begin\n"
        "os.sched_getaffinity = lambda _: {0, 1}\n"
        "begin(time.sleep, 60, 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
