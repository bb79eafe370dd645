"""`meshscope trace` on small traces with known answers, and on files that are none."""

import gzip
import json
import os

import pytest
from click.testing import CliRunner

from meshscope.analyze.device.trace_summary import summarize_trace
from meshscope.cli import main, trace_summaries
from meshscope.cli.trace_summaries import load_summary, store_summary, summary_path
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.trace_cache import cache_path, read_stamp


def invoke(*arguments):
    return CliRunner().invoke(main, ["trace", *(str(argument) for argument in arguments)])


def make_trace(path, rank=0, shift_us=0.0, late_us=0.0, num=4, world_size=2):
    """`num` all-reduces that all ranks end together; this one may begin late, its clock be off."""
    events = []
    for place in range(num):
        begin = 1000.0 + 100 * place + shift_us
        events += [
            {
                "ph": "X",
                "cat": "kernel",
                "name": "gemm",
                "pid": rank,
                "tid": 7,
                "ts": begin,
                "dur": 40,
                "args": {"device": rank, "stream": 7, "correlation": 10 + place},
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
                "pid": rank,
                "tid": 20,
                "ts": begin + 50 + late_us,
                "dur": 30 - late_us,
                "args": {
                    "device": rank,
                    "stream": 20,
                    "Collective name": "allreduce",
                    "dtype": "Float",
                    "In msg nelems": 1_000_000,
                    "Out msg nelems": 1_000_000,
                    "Group size": 2,
                    "Process Group Name": "0",
                    "Process Group Ranks": "[0, 1]",
                },
            },
        ]
    header = {"distributedInfo": {"rank": rank, "world_size": world_size, "backend": "nccl"}}
    data = json.dumps({**header, "traceEvents": events}).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_a_trace_is_explained_and_kept_beside_it(tmp_path):
    path = make_trace(tmp_path / "a.json.gz")
    first, second = invoke(path), invoke(path)
    assert first.exit_code == 0, first.output
    assert "recognised 8 kernels, 4 collectives" in first.output
    assert "rank 0 of 2" in first.output
    assert first.output == second.output
    assert summary_path(path).exists()
    assert not cache_path(path).exists()  # the summary is all that is asked for again


def test_several_traces_keep_their_columns(tmp_path):
    paths = [make_trace(tmp_path / f"r{rank}.json", rank=rank) for rank in range(2)]
    first, second = invoke(tmp_path, "--json"), invoke(tmp_path, "--json")
    assert first.output == second.output
    assert all(cache_path(path).exists() for path in paths)


def test_no_cache_leaves_nothing_behind(tmp_path):
    path = make_trace(tmp_path / "a.json")
    assert invoke(path, "--no-cache").exit_code == 0
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_stale_or_damaged_cache_is_not_used(tmp_path):
    path = make_trace(tmp_path / "a.json")
    invoke(path)
    make_trace(path, num=7)
    assert "recognised 14 kernels" in invoke(path).output
    for damaged in (b"", b"nonsense", b"\x80", summary_path(path).read_bytes()[:-1]):
        summary_path(path).write_bytes(damaged)
        assert "recognised 14 kernels" in invoke(path).output


def test_damaged_columns_are_not_used(tmp_path):
    paths = [make_trace(tmp_path / f"r{rank}.json", rank=rank) for rank in range(2)]
    expected = invoke(tmp_path, "--json").output
    cache_path(paths[0]).write_bytes(b"PK\x03\x04 nonsense")
    assert invoke(tmp_path, "--json").output == expected


def test_the_same_length_and_time_of_change_do_not_make_it_the_same_file(tmp_path):
    """Of one trace, which keeps its summary, and of two, which keep their columns."""
    path = make_trace(tmp_path / "a.json")
    other = make_trace(tmp_path / "b" / "b.json", rank=1)
    before = path.stat()
    for arguments in ([path], [path, other]):
        path.write_bytes(path.read_bytes().replace(b'"dur": 41', b'"dur": 40'))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        invoke(*arguments)
        path.write_bytes(path.read_bytes().replace(b'"dur": 40', b'"dur": 41'))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = path.stat()
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        document = json.loads(invoke(*arguments, "--json").stdout)
        assert document["traces"][0]["devices"][0]["breakdown"]["time"]["compute_ns"] == 164_000


def test_a_kept_summary_is_of_one_layout_and_code(tmp_path, monkeypatch):
    path = make_trace(tmp_path / "a.json")
    assert '"axis": "tp"' in invoke(path, "--layout", "tp=2", "--json").stdout
    assert '"axis": "dp"' in invoke(path, "--layout", "dp=2", "--json").stdout
    changed = load_summary(path, read_stamp(path))
    assert changed is not None
    monkeypatch.setattr(trace_summaries, "code_stamp", lambda: "another")
    assert load_summary(path, read_stamp(path)) is None


@pytest.mark.parametrize("has_device", [True, False])
def test_a_summary_is_kept_whole(tmp_path, has_device):
    """A field of a type that cannot be rebuilt would never be kept."""
    path = make_trace(tmp_path / "a.json")
    if not has_device:
        path.write_bytes(path.read_bytes().replace(b'"kernel"', b'"cpu_op"'))
    stamp = read_stamp(path)
    summary = summarize_trace(read_trace(path))
    assert bool(summary.devices) == has_device
    assert store_summary(path, stamp, None, summary)
    kept = load_summary(path, stamp)
    assert kept is not None
    assert kept.summary == summary


def test_json_has_the_numbers(tmp_path):
    result = invoke(make_trace(tmp_path / "a.json"), "--json")
    document = json.loads(result.stdout)
    time = document["traces"][0]["devices"][0]["breakdown"]["time"]
    assert time["compute_ns"] == 160_000
    assert time["communication_ns"] == time["exposed_ns"] == 120_000
    assert document["across_ranks"] == {
        "unavailable": "it takes traces of two ranks or more, of the same steps"
    }


def test_clocks_are_aligned_and_the_late_rank_is_named(tmp_path):
    """Rank 1's clock is 5 ms ahead and it comes 12 µs late: closed form."""
    make_trace(tmp_path / "r0.json", rank=0)
    make_trace(tmp_path / "r1.json", rank=1, shift_us=5000, late_us=12)
    document = json.loads(invoke(tmp_path, "--json").stdout)
    across = document["across_ranks"]
    assert across["clocks"][1]["offset_ns"] == 5_000_000
    assert across["late"] == [{"rank": 1, "num_last": 4, "caused_wait_ns": 48_000}]
    assert (across["num_matched"], across["num_unmatched"]) == (4, 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"hello", "no event in it"),
        (b'{"a": 1}', "JSON without `traceEvents`"),
        (gzip.compress(b'{"traceEvents": [', mtime=0)[:-9], "cut off"),
    ],
    ids=["empty", "text", "json", "cut"],
)
def test_what_is_no_trace_gets_one_line(tmp_path, content, words):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    result = invoke(path)
    assert result.exit_code in (0, 3), result.output
    if result.exit_code == 3:
        assert result.stderr.count("\n") == 1
    assert words in result.output


def test_a_cut_trace_gives_what_was_whole_with_a_warning(tmp_path):
    path = make_trace(tmp_path / "a.json")
    path.write_bytes(path.read_bytes()[:-200])
    result = invoke(path)
    assert result.exit_code == 0
    assert "warning: the JSON is cut off" in result.output
    assert "recognised 7 kernels" in result.output


def test_a_missing_path_and_an_empty_folder_are_said(tmp_path):
    assert "there is no such file" in invoke(tmp_path / "x").output
    result = invoke(tmp_path)
    assert result.exit_code == 3
    assert "no trace below this folder" in result.output


def test_one_bad_file_among_several_is_left_out(tmp_path):
    make_trace(tmp_path / "a.json")
    (tmp_path / "b.json").write_bytes(b"nothing")
    result = invoke(tmp_path)
    assert result.exit_code == 0
    assert "left out" in result.output


def test_hostile_names_reach_no_terminal(tmp_path):
    event = {"ph": "X", "cat": "kernel", "name": "\x1b[31mred\x07\u202e", "ts": 1, "dur": 2}
    path = tmp_path / "a.json"
    path.write_text(json.dumps([event]), encoding="utf-8")
    assert "\x1b" not in invoke(path).output
    assert "\u202e" not in invoke(path).output


def test_a_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("meshscope.ingest.compressed.FREE_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (1 << 24)))
    result = invoke(path)
    assert "expands more than 400 times" in result.output


def test_a_rank_that_has_no_trace_is_a_usage_error(tmp_path):
    for rank in (0, 1):
        make_trace(tmp_path / f"r{rank}.json", rank=rank)
    result = invoke(tmp_path, "--rank", 7)
    assert result.exit_code == 2
    assert "--rank 7: this rank has no trace; there are traces of ranks 0-1" in result.output


def test_traces_of_one_rank_are_told_apart_by_their_files(tmp_path):
    for name in ("first", "second", "third"):
        make_trace(tmp_path / f"{name}.json", rank=0)
    result = invoke(tmp_path)
    assert result.exit_code == 0
    table = result.output.split("Ranks  ")[1]
    assert [line.split()[:2] for line in table.splitlines()[2:5]] == [
        ["0", "first.json"],
        ["0", "second.json"],
        ["0", "third.json"],
    ]


@pytest.mark.parametrize("command", ["memory", "trigger", "compact", "hang"])
def test_what_takes_no_traces_names_the_path_it_was_given(tmp_path, command):
    trace = make_trace(tmp_path / "r0.json")
    for path in (tmp_path, trace):
        result = CliRunner().invoke(main, [command, str(path)])
        assert result.exit_code == 3
        (line,) = result.output.splitlines()
        assert str(path) in line


def test_one_rank_of_several_says_what_it_cannot_tell(tmp_path):
    words = "To split communication into waiting for other ranks and transfer"
    alone = make_trace(tmp_path / "r0.json")
    assert words in " ".join(invoke(alone).output.split())
    make_trace(tmp_path / "r1.json", rank=1)
    assert words not in " ".join(invoke(tmp_path).output.split())
    single = make_trace(tmp_path / "single.json", world_size=1)
    assert words not in " ".join(invoke(single).output.split())


def test_two_collectives_in_common_are_matched(tmp_path):
    for rank in (0, 1):
        make_trace(tmp_path / f"r{rank}.json", rank=rank, num=2)
    output = " ".join(invoke(tmp_path).output.split())
    assert "2 operations matched; 0 kernels or calls have no partner" in output
    assert "in 0 % of their time" not in output


def test_devices_that_differ_are_said_before_what_changed(tmp_path):
    now = make_trace(tmp_path / "now.json")
    (tmp_path / "old").mkdir()
    for rank in (0, 1):
        make_trace(tmp_path / "old" / f"r{rank}.json", rank=rank)
    assert "before 2 devices, now 1 device" in invoke(now, "--against", tmp_path / "old").output
    assert "before" not in invoke(now, "--against", now).output.splitlines()[1].split()[:1]


def test_events_that_are_not_the_profilers_are_said_to_be_none(tmp_path):
    path = tmp_path / "t.json"
    events = [{"ph": "X", "name": "work", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]
    path.write_text(json.dumps({"traceEvents": events}))
    result = invoke(path)
    assert result.exit_code == 0
    assert "n/a: the trace has no operator and no annotation" in result.output
    report = CliRunner().invoke(main, ["report", str(path)])
    assert report.exit_code == 3
    assert "nothing to make a run of" in report.output


def test_operators_of_one_name_show_their_shapes_on_a_narrow_screen(tmp_path, monkeypatch):
    """Shapes as re-dumped traces have them, over several lines."""
    monkeypatch.setenv("COLUMNS", "80")
    trace = make_trace(tmp_path / "r0.json")
    document = json.loads(trace.read_text())
    for number, dims in enumerate(([[8, 4], [4, 2], []], [[16, 4], [4, 2], []])):
        base = {"ph": "X", "pid": 9, "tid": 9}
        begin = 900 + 10 * number
        arguments = {"External id": number + 1, "Input Dims": dims}
        document["traceEvents"] += [
            {**base, "cat": "cpu_op", "name": "aten::mm", "ts": begin, "dur": 5, "args": arguments},
            {
                **base,
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": begin + 1,
                "dur": 1,
                "args": {"correlation": 10 + number},
            },
        ]
    trace.write_text(json.dumps(document, indent=4))
    output = invoke(trace).output
    assert "8×4 4×2" in output
    assert "16×4 4×2" in output


def test_two_sets_are_compared_part_by_part(tmp_path):
    make_trace(tmp_path / "before.json", num=4)
    make_trace(tmp_path / "now.json", num=6)
    result = invoke(tmp_path / "now.json", "--against", tmp_path / "before.json", "--json")
    found = json.loads(result.stdout)["difference"]
    parts = {row["part"]: (row["first_ns"], row["second_ns"]) for row in found["parts"]}
    assert parts["compute"] == (160_000, 240_000)
    assert parts["exposed communication"] == (120_000, 180_000)
    assert {row["name"]: row["second_count"] for row in found["kernels"]}["gemm"] == 6
    text = invoke(tmp_path / "now.json", "--against", tmp_path / "before.json").output
    assert "+80.0 µs" in text


def test_a_layout_names_the_axes(tmp_path):
    path = make_trace(tmp_path / "a.json")
    document = json.loads(invoke(path, "--layout", "tp=2", "--json").stdout)
    assert document["layout"]["tp"] == 2
    (row,) = document["traces"][0]["devices"][0]["communication"]
    assert (row["axis"], row["kind"], row["count"]) == ("tp", "all_reduce", 4)
    assert row["exposed_ns"] == 120_000
    assert row["size_bytes"] == 16_000_000


def test_folders_names_tell_the_layout_and_the_rank(tmp_path):
    for rank in range(2):
        folder = tmp_path / f"rank{rank}_dp0_tp{rank}_pp0"
        folder.mkdir()
        make_trace(folder / "t.pt.trace.json.gz", rank=rank)
    document = json.loads(invoke(tmp_path, "--no-cache", "--json").stdout)
    assert (document["layout"]["dp"], document["layout"]["tp"]) == (1, 2)
    assert document["across_ranks"]["num_matched"] > 0
    assert document["traces"][0]["devices"][0]["communication"][0]["axis"] == "tp"
    assert "Layout tp2\n" in invoke(tmp_path, "--no-cache").output
    report = CliRunner().invoke(main, ["report", str(tmp_path), "--json"])
    assert json.loads(report.stdout)["layout"]["source"] == "from the folders' names"
    alone = invoke(tmp_path / "rank0_dp0_tp0_pp0", "--no-cache", "--json")
    assert "several meshes fit" in json.loads(alone.stdout)["layout"]["unavailable"]
    # Compared with the other rank, whose name tells, both name axes alike.
    both = invoke(
        tmp_path / "rank0_dp0_tp0_pp0", "--against", tmp_path / "rank1_dp0_tp1_pp0", "--json"
    )
    (row,) = json.loads(both.stdout)["difference"]["communication"]
    assert (row["axis"], row["change_ns"]) == ("tp", 0)


@pytest.mark.parametrize(
    ("layout", "words"),
    [("dp=4", "the world size is 2"), ("xp=2", "is not part of a layout")],
)
def test_a_layout_that_cannot_be_is_a_usage_error(tmp_path, layout, words):
    result = invoke(make_trace(tmp_path / "a.json"), "--layout", layout)
    assert result.exit_code == 2
    assert words in result.output


def test_a_layout_is_of_the_traces_not_of_what_they_are_compared_with(tmp_path):
    now = make_trace(tmp_path / "now.json")
    before = make_trace(tmp_path / "before.json", world_size=8)
    result = invoke(now, "--against", before, "--layout", "tp=2", "--json")
    rows = json.loads(result.stdout)["difference"]["communication"]
    assert {row["axis"] for row in rows} == {"tp", "other"}


def test_json_splits_exposed_communication_across_ranks(tmp_path):
    make_trace(tmp_path / "r0.json", rank=0)
    make_trace(tmp_path / "r1.json", rank=1, shift_us=5000, late_us=12)
    exposed = json.loads(invoke(tmp_path, "--json").stdout)["across_ranks"]["exposed"]
    assert [one["split"] for one in exposed] == [
        {"exposed_ns": 120_000, "wait_ns": 48_000, "transfer_ns": 72_000, "unmatched_ns": 0},
        {"exposed_ns": 72_000, "wait_ns": 0, "transfer_ns": 72_000, "unmatched_ns": 0},
    ]
