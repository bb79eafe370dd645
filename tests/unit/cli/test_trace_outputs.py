"""What else is made of traces: verdicts, tables, flame graphs; and bad input, one message each."""

import gzip
import json
import os

import pytest

from command_line import invoke
from made_traces import call, host, kernel, step


def module(name, begin, length):
    return host("python_function", f"nn.Module: {name}", begin, length, Python_id=1)


def operator(name, begin, length, number, thread=1, **args):
    said = {key.replace("_", " "): value for key, value in args.items()}
    return host("cpu_op", name, begin, length, thread, **{"External id": number, **said})


def launched(name, at, begin, length, number, *, thread=1):
    """A kernel of operator `number`."""
    return [
        call("cudaLaunchKernel", at, number, 2, thread=thread),
        {**kernel(name, begin, length, correlation=number)},
    ]


def write(path, events, **header):
    path.write_text(json.dumps({"traceEvents": events, **header}), encoding="utf-8")
    return path


SHAPES = {"Input_Dims": [[1024, 1024], [1024, 1024]], "Input_type": ["float", "float"]}


@pytest.fixture
def trace(tmp_path):
    """A model of two layers whose device waits for its host half of the time."""
    events = [
        step(1, 0, 1000),
        module("Net_0", 0, 400),
        module("Linear_0", 10, 100),
        operator("aten::mm", 20, 50, 1, **SHAPES, Sequence_number=7),
        *launched("ampere_sgemm_128x64_nn", 30, 100, 200, 1),
        module("Linear_1", 200, 100),
        operator("aten::mm", 210, 50, 2, **SHAPES, Sequence_number=8),
        *launched("ampere_sgemm_128x64_nn", 220, 300, 100, 2),
        operator(
            "autograd::engine::evaluate_function: MmBackward0", 690, 60, 3, 2, Sequence_number=7
        ),
        operator("aten::mm", 695, 40, 4, 2, **SHAPES),
        *launched("ampere_sgemm_128x64_nt", 700, 800, 100, 4, thread=2),
    ]
    properties = [{"id": 0, "name": "NVIDIA A100-SXM4-40GB"}]
    return write(tmp_path / "t.json", events, deviceProperties=properties)


def test_the_first_lines_say_what_limits_the_device(trace):
    text = invoke("trace", trace, "--no-cache").output
    assert text.splitlines()[1].strip() == "The device waits for its host 40 % of the time."
    document = json.loads(invoke("trace", trace, "--json", "--no-cache").output)
    (verdict,) = document["verdicts"]
    assert verdict["cause"] == "host"
    # From 400 to the call's end at 702, and 20 µs that a launch may take, of 800.
    assert verdict["share_ratio"] == pytest.approx(322 / 800)


def test_modules_have_what_their_backward_launched(trace):
    document = json.loads(invoke("trace", trace, "--json", "--no-cache").output)
    (device,) = document["traces"][0]["devices"]
    found = {row["path"]: (row["device_ns"], row["backward_ns"]) for row in device["modules"]}
    assert found == {"Net_0/Linear_0": (300_000, 100_000), "Net_0/Linear_1": (100_000, 0)}
    classes = {
        row["name"]: (row["num_modules"], row["device_ns"]) for row in device["module_classes"]
    }
    assert classes == {"Net": (1, 400_000), "Linear": (2, 400_000)}


def test_rates_are_counted_by_hand(trace):
    document = json.loads(invoke("trace", trace, "--json", "--no-cache").output)
    (device,) = document["traces"][0]["devices"]
    (rate,) = device["rates"]
    assert rate["flops"] == 3 * 2 * 1024**3
    assert rate["flops_per_s"] == pytest.approx(3 * 2 * 1024**3 / 400e-6)
    assert rate["peak_ratio"] == pytest.approx(rate["flops_per_s"] / 19.5e12)
    assert device["coverage"]["ratio"] == 1


def test_a_device_may_be_named(tmp_path, trace):
    document = json.loads(trace.read_text())
    del document["deviceProperties"]
    unnamed = write(tmp_path / "unnamed.json", document["traceEvents"])
    assert "H100 NVL" in invoke("trace", unnamed, "--device", "H100").output
    shown = invoke("trace", unnamed, "--device", "NVIDIA H100 80GB HBM3", "--json", "--no-cache")
    (device,) = json.loads(shown.output)["traces"][0]["devices"]
    assert device["rates"][0]["peak_ratio"] == pytest.approx(
        device["rates"][0]["flops_per_s"] / 66.9e12
    )
    assert invoke("trace", unnamed, "--device", "toaster").exit_code == 2


def test_tables_answer_sql_and_become_files(tmp_path, trace):
    found = invoke("sql", trace, "SELECT category, count FROM trace_categories", "--csv")
    assert found.stdout.splitlines() == ["category,count", "GEMM,3"]
    target = tmp_path / "kernels.csv"
    assert invoke("export", trace, "--table", "trace_kernels", "-o", target).exit_code == 0
    assert len(target.read_text().splitlines()) == 3
    assert invoke("export", trace, "--table", "trace_nothing").exit_code == 2


def test_a_trace_without_a_device_has_tables_of_its_host(tmp_path):
    group = {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    events = [
        step(1, 0, 100),
        operator("aten::mm", 10, 50, 1, **SHAPES),
        host("user_annotation", "gloo:all_reduce", 70, 20, 2),
    ]
    path = write(tmp_path / "t.json", events, distributedInfo=group)

    def ask(query):
        return invoke("sql", path, query, "--csv").stdout.splitlines()[1:]

    assert ask("SELECT device, name, count, self_ns FROM trace_host_operators") == [
        "-1,aten::mm,1,50000"
    ]
    columns = "step, total_ns, operator_ns, exposed_ns, other_ns"
    assert ask(f"SELECT {columns} FROM trace_host_steps") == ["1,100000,50000,20000,30000"]
    assert ask("SELECT kind, duration_ns FROM trace_collectives") == ["all_reduce,20000"]
    assert ask("SELECT axis, kind, exposed_ns FROM trace_axes") == ["world,all_reduce,20000"]
    refused = invoke("trace", path, "--no-cache", "--flame", tmp_path / "f.svg")
    assert refused.exit_code == 2
    assert "the trace has no device" in refused.output


def test_flame_graphs_have_all_device_time(tmp_path, trace):
    folded = tmp_path / "f.folded"
    assert invoke("trace", trace, "--flame", folded).exit_code == 0
    lines = folded.read_text().splitlines()
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == 400_000
    assert "Net_0;Linear_0;backward;GEMM;ampere_sgemm_128x64_nt 100000" in lines
    drawn = tmp_path / "f.svg"
    assert invoke("trace", trace, "--flame", drawn).exit_code == 0
    assert drawn.read_text().startswith("<svg")


def test_names_in_a_flame_graph_are_inert(tmp_path):
    events = [
        module("</title><script>alert(1)</script>", 0, 100),
        *launched("evil;</svg>\x1b[31m", 10, 20, 50, 1),
    ]
    path = write(tmp_path / "t.json", events)
    drawn, folded = tmp_path / "f.svg", tmp_path / "f.folded"
    invoke("trace", path, "--flame", drawn)
    assert "<script" not in drawn.read_text()
    assert "\x1b" not in drawn.read_text()
    invoke("trace", path, "--flame", folded)
    assert folded.read_text().count("\n") == 1


KERNEL = kernel("k", 1, 2)
PLAIN = json.dumps(KERNEL).encode()
MANY = gzip.compress(json.dumps({"traceEvents": [KERNEL] * 900}).encode())
NOT_A_NUMBER = b'[{"ph":"X","cat":"kernel","name":"k","ts":NaN,"dur":1},' + PLAIN + b"]"
TWICE = b'[{"ph":"X","ph":"X","name":"a","name":"b","cat":"kernel","ts":1,"ts":2,"dur":1}]'


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"", 3, "the file is empty"),
        (b"[1, 2, 3]", 3, "a list with no events"),
        (b'["a"]', 3, "a list with no events"),
        (b"[]", 3, "a list with no events"),
        (b"42", 3, "expected"),
        (b"null", 3, "expected"),
        (b"\x00\x01\x02", 3, "expected"),
        (b'{"traceEvents": 5}', 3, "expected"),
        (MANY[:200], None, "cut off"),
        (json.dumps([KERNEL]).encode("utf-16"), 0, "1 kernel"),
        (b"\xef\xbb\xbf" + json.dumps([KERNEL]).encode(), 0, "1 kernel"),
        (json.dumps([{**KERNEL, "dur": -5}, KERNEL]).encode(), 0, "left out"),
        (json.dumps([{**KERNEL, "ts": 1e300}, KERNEL]).encode(), 0, "left out"),
        (NOT_A_NUMBER, None, ""),
        (TWICE, 0, "1 kernel"),
        (
            json.dumps(
                [{**KERNEL, "ph": "B"}, {**KERNEL, "ph": "E", "ts": 9}]
            ).encode(),
            0,
            "1 kernel",
        ),
    ],
)  # fmt: skip
def test_odd_files_get_one_clear_answer(tmp_path, data, code, words):
    path = tmp_path / ("t.json.gz" if data[:2] == b"\x1f\x8b" else "t.json")
    path.write_bytes(data)
    found = invoke("trace", path, "--no-cache")
    assert found.exception is None or isinstance(found.exception, SystemExit)
    assert code is None or found.exit_code == code
    assert words in " ".join(found.output.split())


def test_a_pipe_is_no_trace(tmp_path):
    os.mkfifo(tmp_path / "t.json")
    found = invoke("trace", tmp_path / "t.json")
    assert found.exit_code == 3
    assert "not a regular file" in found.output


def test_a_file_that_is_no_trace_leaves_the_others_their_comparison(tmp_path, trace):
    (tmp_path / "numbers.json").write_text("[1, 2, 3]")
    found = invoke("trace", tmp_path, "--no-cache", "--json")
    document = json.loads(found.stdout)
    assert len(document["traces"]) == 1
    assert any("numbers.json" in text for text in document["not_known"])


def test_thousands_of_devices_take_few_lines(tmp_path):
    events = [
        {**kernel("k", n, 1), "args": {"device": n, "stream": 7}, "pid": n} for n in range(2000)
    ]
    text = invoke("trace", write(tmp_path / "t.json", events), "--no-cache").output
    assert len(text.splitlines()) < 300
    assert "and 1,992 devices more" in text


def test_ranks_are_sorted_as_numbers(tmp_path):
    for rank in (10, 2, 100, 1):
        information = {"rank": rank, "world_size": 128}
        write(tmp_path / f"rank{rank}.json", [KERNEL], distributedInfo=information)
    document = json.loads(invoke("trace", tmp_path, "--json", "--no-cache").stdout)
    assert [one["rank"] for one in document["traces"]] == [1, 2, 10, 100]
    assert any("4 of 128 ranks" in text for text in document["not_known"])
