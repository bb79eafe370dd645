import signal

import pytest

from meshscope.engine.launch.failures import (
    RankFailure,
    attempt_folder,
    describe_error,
    explain,
    find_exit_failure,
    find_failure,
    find_first,
    is_consequence,
    note_step,
    read_failure,
    share_steps,
    write_failure,
)
from meshscope.engine.pipeline.pipeline import PipelineError
from meshscope.errors import UsageError

# As torch 2.13 wrote them when a peer was killed, left, stopped, or had not come.
CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
    "[127.0.0.1]:29718. This means that the remote side closed"
)
TIMED_OUT = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms "
    "for recv operation to complete"
)
RESET = "[pair.cc:1] Read error [127.0.0.1]:1: Connection reset by peer"
NOT_THERE = "Gloo connectFullMesh failed with [pair.cc:144] no error"


@pytest.fixture(autouse=True)
def no_step():
    share_steps(None)
    yield
    share_steps(None)


def label(rank):
    return f"dp{rank}"


def failure(rank, at=0, **values):
    return RankFailure(rank=rank, summary="it broke", time_unix_ns=at, **values)


def raised(text, cause=None):
    try:
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            raise (cause or error) from error
    except (RuntimeError, PipelineError) as error:
        return error


@pytest.mark.parametrize("text", [CLOSED, TIMED_OUT, RESET, NOT_THERE])
def test_errors_that_tell_of_another_rank_are_consequences(text):
    assert is_consequence(RuntimeError(text))


def test_so_is_what_was_raised_from_one():
    assert is_consequence(raised(CLOSED, PipelineError("2F0 failed")))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad batch"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        UsageError(CLOSED),  # ours are never
        KeyError("peer"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_errors_of_ones_own_are_causes(error):
    assert not is_consequence(error)


def test_a_description_is_one_line_without_places_in_sources():
    assert describe_error(RuntimeError(CLOSED)).startswith(
        "RuntimeError: Connection closed by peer [127.0.0.1]:29718. This means"
    )
    assert describe_error(ValueError("two\n lines\x1b[1m")) == "ValueError: two lines[1m"
    assert describe_error(KeyError()) == "KeyError"
    assert len(describe_error(ValueError("x" * 10_000))) < 400


def test_the_first_cause_counts_even_when_consequences_were_seen_before():
    late = failure(5, at=30)
    failures = [failure(1, at=10, is_consequence=True), late, failure(2, at=40)]
    assert find_first(failures) is late


def test_an_abort_is_a_cause_only_when_there_is_no_better_one():
    abort = failure(0, at=1, is_abort=True)
    assert find_first([abort, failure(3, at=9)]).rank == 3
    assert find_first([abort, failure(3, at=9, is_consequence=True)]) is abort


def test_a_failure_is_left_in_a_file_with_its_traceback(tmp_path):
    folder = attempt_folder(tmp_path, 2)
    note_step(12)
    error = raised("out of luck")
    written = write_failure(folder, find_failure(error, 3), error)
    path = tmp_path / "failures" / "attempt_2" / "rank_3.txt"
    assert written == read_failure(folder, 3)
    assert (written.rank, written.step, written.path) == (3, 12, str(path))
    text = path.read_text()
    assert "Traceback (most recent call last)" in text
    assert "RuntimeError: out of luck" in text


def test_nothing_to_read_is_none(tmp_path):
    assert read_failure(tmp_path, 0) is None
    (tmp_path / "rank_0.txt").write_text("half a li")
    assert read_failure(tmp_path, 0) is None


def test_a_failure_that_cannot_be_written_is_still_one(tmp_path):
    (tmp_path / "taken").write_text("")
    error = ValueError("x")
    found = write_failure(tmp_path / "taken", find_failure(error, 0), error)
    assert (found.summary, found.path) == ("ValueError: x", None)


@pytest.mark.parametrize(
    ("code", "summary"),
    [
        (9, "exited with code 9"),
        (-signal.SIGKILL, "was ended by SIGKILL, perhaps for lack of memory"),
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (-63, "was ended by signal 63"),
    ],
)
def test_a_rank_that_could_not_speak_is_described_by_its_exit(code, summary):
    assert find_exit_failure(1, code, 4).summary == summary


def test_only_wrong_settings_are_permanent():
    assert find_failure(UsageError("x"), 0).is_permanent
    assert not find_failure(ValueError("x"), 0).is_permanent


def test_one_line_says_who_where_when_and_what():
    first = failure(5, at=1, step=7, path="f/rank_5.txt")
    others = [failure(rank, at=2, is_consequence=True) for rank in range(3)]
    others = [RankFailure(**{**_values(one), "summary": "closed"}) for one in others]
    line = explain([*others, first], label=label, still_running=[6])
    assert line == (
        "rank 5 (dp5) failed in step 7: it broke; 4 ended because of it; traceback in f/rank_5.txt"
    )


def test_ranks_that_failed_alike_are_counted():
    line = explain([failure(rank, at=rank) for rank in range(4)], label=label)
    assert line == ("rank 0 (dp0) failed: it broke; 3 more failed alike; it left no traceback")


def test_when_all_waited_in_vain_the_one_that_did_not_is_named():
    waited = find_failure(RuntimeError(TIMED_OUT), 0)
    line = explain([waited], label=label, still_running=[2, 1])
    assert line.startswith(
        "rank 1 (dp1), rank 2 (dp2) did not go on, and rank 0 (dp0) waited in vain: "
        "RuntimeError: Timed out waiting 5000ms"
    )


def _values(one):
    return {name: getattr(one, name) for name in one.__dataclass_fields__}
