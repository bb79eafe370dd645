"""Lines of sampled stacks, by phase and by interval."""

import numpy as np
import pytest

from builders import MS, make_writer, put_span, put_step
from meshscope.analyze.rank.stacks import count_lines, describe_frame, read_stacks
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from meshscope.store.schema import SampleReason

LOGS = "my/train.py:88 log_metrics > item < my/train.py:140 main"
FETCHES = "my/train.py:30 main > __next__"
COMPUTES = "my/model.py:12 forward > matmul < my/train.py:31 main"


def put_stack(writer, text, step, time_ns):
    words = writer.name_id(text) | SampleReason.GAP << 16
    writer.table("stacks").put(words, step, time_ns, 0, 0, 0, 0)


@pytest.fixture
def recording(tmp_path):
    """Two steps of 100 ms, 50 ms apart: data 20, forward 60 with a compilation of 10 inside."""
    writer = make_writer(tmp_path)
    for step, start in enumerate((1000 * MS, 1150 * MS)):
        put_span(writer, "data", start, 20 * MS)
        put_span(writer, "compile", start + 30 * MS, 10 * MS, depth=1)
        put_span(writer, "forward", start + 20 * MS, 60 * MS, self_ns=50 * MS)
        put_step(writer, step, start, start + 100 * MS)
    for at in (1145, 1110, 1120):  # not in order
        put_stack(writer, LOGS, 0, at * MS)
    put_stack(writer, FETCHES, 0, 1155 * MS)
    put_stack(writer, COMPUTES, 1, 1175 * MS)
    put_stack(writer, COMPUTES, 1, 1185 * MS)  # while compiling
    put_stack(writer, FETCHES, 1, 1249 * MS)  # in the step, in no phase
    put_stack(writer, LOGS, 1, 1300 * MS)  # after the last step
    writer.close(end_host_mono_ns=1400 * MS)
    return open_run(tmp_path).last_attempt.ranks[0]


def test_samples_lie_in_steps_gaps_and_phases(recording):
    samples = read_stacks(recording)
    assert samples.step.tolist() == [1, 1, 1, 1, 1, 1, 1, -1]
    assert samples.is_between.tolist() == [True] * 3 + [False] * 5
    assert samples.phases == ("", "", "", "data", "forward", "compile", "", "")


def test_lines_of_a_gap_are_counted(recording):
    samples = read_stacks(recording)
    found = count_lines([(samples, samples.find_in_phase("", is_between=True))])
    (line,) = found.lines
    assert (line.text, line.num_samples) == ("my/train.py:88 in log_metrics, which calls item", 3)
    everywhere = count_lines([(samples, samples.find_in_phase(""))])
    assert [one.num_samples for one in everywhere.lines] == [4, 1]
    assert everywhere.num_samples == 5


def test_lines_inside_intervals_are_those_of_the_calls_there(recording):
    samples = read_stacks(recording)
    chosen = samples.find_in_intervals(np.array([1108]) * MS, np.array([1112]) * MS)
    assert samples.time_ns[chosen].tolist() == [1110 * MS]
    # A long interval that begins before a short one still holds what comes after that.
    start, end = np.array([1150, 1100]) * MS, np.array([1152, 1180]) * MS
    assert samples.find_in_intervals(start, end).tolist() == [True] * 5 + [False] * 3
    assert not samples.find_in_intervals(start[:0], end[:0]).any()


def test_a_rank_without_samples_says_so(tmp_path):
    writer = make_writer(tmp_path)
    put_step(writer, 0, 1000 * MS, 1100 * MS)
    writer.close(end_host_mono_ns=1400 * MS)
    recording = open_run(tmp_path).last_attempt.ranks[0]
    assert isinstance(read_stacks(recording), Unavailable)


@pytest.mark.parametrize("text", ["", " > ", " < ", "(unnamed 7)", "x" * 500])
def test_any_text_is_a_line(text):
    assert len(describe_frame(text)) <= 160


def test_a_line_of_a_package_has_the_programs_line_beside_it():
    text = "~tracker/client.py:210 send > recv < ~tracker/api.py:7 log < my/train.py:88 main"
    assert describe_frame(text) == (
        "tracker/client.py:210 in send, which calls recv, from my/train.py:88"
    )
    assert describe_frame("~tracker/client.py:210 send") == "tracker/client.py:210 in send"
