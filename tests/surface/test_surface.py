"""What users and other programs build on: a change here is a change for them."""

import click

import meshscope
from meshscope.cli import COMMANDS, main
from meshscope.report.documents import DOCUMENTS
from meshscope.store.schema import SCHEMA_VERSION, TABLES

PUBLIC_NAMES = [
    "CommunicationConfig",
    "CommunicationProfiler",
    "Layout",
    "MeshscopeError",
    "Recorder",
    "RecorderConfig",
    "__version__",
    "communication",
    "init_communication",
    "layout_from_mesh",
    "open_run",
    "recorder",
    "start",
    "study",
]

FLAGS = {
    "run": [
        "--flops-per-step",
        "--layout",
        "--name",
        "--no-progress",
        "--no-report",
        "--off",
        "--peak-tflops",
        "--profiling",
        "--report",
        "--run-dir",
        "--total-steps",
        "--trace-windows",
        "-o",
    ],
    "train": [
        "--check",
        "--device",
        "--dp",
        "--fault",
        "--memory",
        "--no-record",
        "--pp",
        "--profiling",
        "--run-dir",
        "--schedule",
        "--seed",
        "--set",
        "--steps",
        "--tp",
        "--trace-windows",
        "-o",
    ],
    "report": [
        "--all",
        "--all-ranks",
        "--attempt",
        "--communication",
        "--explain",
        "--fail-on",
        "--flops-per-step",
        "--json",
        "--no-diagnosis",
        "--output",
        "--peak-tflops",
        "--ranks",
        "--rules",
        "--section",
        "--strict",
        "--threshold",
        "--thresholds",
        "--warmup",
        "-o",
    ],
    "rules": ["--counterparts", "--json", "--rules"],
    "simulate": ["--attempt", "--edit", "--json", "--warmup"],
    "trace": ["--against", "--json", "--layout", "--no-cache", "--rank", "--top"],
    "import": ["--layout", "--no-cache", "--run-dir", "-o"],
    "memory": ["--html", "--json", "--rank", "--top"],
    "snapshot": ["--device", "--json", "--top"],
    "trigger": ["--ranks", "--steps"],
    "compare": [
        "--atol",
        "--attempt-a",
        "--attempt-b",
        "--exact",
        "--fail-on",
        "--fail-on-loss",
        "--json",
        "--junit",
        "--markdown",
        "--rtol",
        "--warmup",
    ],
    "hang": [
        "--after",
        "--all-ranks",
        "--attempt",
        "--flight-recorder",
        "--json",
        "--no-stacks",
        "--stacks",
    ],
    "ls": ["--json"],
    "sql": ["--allow-files", "--attempt", "--csv", "--json", "--memory-limit", "--time-limit"],
    "compact": ["--include-unfinished", "--remove-raw"],
    "doctor": ["--json", "--torch"],
    "glossary": [],
}

STORE_SCHEMA_VERSION = 1
STORE_TABLES = {
    "steps": [
        "step",
        "start_host_mono_ns",
        "end_host_mono_ns",
        "num_microbatches",
        "flags",
        "recorder_ns",
        "input_tokens",
        "input_samples",
    ],
    "phases": [
        "data_start_host_mono_ns",
        "data_end_host_mono_ns",
        "forward_start_host_mono_ns",
        "forward_end_host_mono_ns",
        "backward_start_host_mono_ns",
        "backward_end_host_mono_ns",
        "optimizer_gap_ns",
        "optimizer_ns",
    ],
    "spans": [
        "name_id",
        "depth",
        "flags",
        "thread",
        "start_host_mono_ns",
        "duration_ns",
        "self_ns",
        "microbatch",
    ],
    "device_spans": [
        "name_id",
        "device_index",
        "host_start_host_mono_ns",
        "start_device_ns",
        "duration_ns",
        "offset_min_ns",
        "offset_max_ns",
        "microbatch",
    ],
    "scalars": ["name_id", "step", "time_host_mono_ns", "value", "microbatch", "divisor", "flags"],
    "memory": [
        "step",
        "time_host_mono_ns",
        "rss_bytes",
        "allocated_bytes",
        "reserved_bytes",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
    ],
    "allocator": [
        "step",
        "time_host_mono_ns",
        "active_bytes",
        "inactive_split_bytes",
        "device_free_bytes",
        "device_total_bytes",
        "num_alloc_retries",
        "num_ooms",
    ],
    "clocks": ["time_host_mono_ns", "time_unix_ns", "uncertainty_ns"],
    "collectives": [
        "kind",
        "outcome",
        "end_source",
        "flags",
        "group_id",
        "phase_id",
        "sequence",
        "peer",
        "enqueue_host_mono_ns",
        "start_host_mono_ns",
        "end_host_mono_ns",
        "size_bytes",
        "step",
        "microbatch",
        "dtype",
        "tag",
    ],
    "waits": [
        "source",
        "phase_id",
        "operation_enqueue_host_mono_ns",
        "start_host_mono_ns",
        "duration_ns",
        "device_ns",
        "device_end_host_mono_ns",
        "step",
        "microbatch",
    ],
    "operation_notes": [
        "name_id",
        "code",
        "operation_enqueue_host_mono_ns",
        "time_host_mono_ns",
    ],
    "actions": [
        "kind",
        "flags",
        "chunk",
        "stage",
        "step",
        "microbatch",
        "begin_host_mono_ns",
        "duration_ns",
        "wait_begin_host_mono_ns",
        "wait_ns",
    ],
    "faults": ["kind_id", "detail_id", "step", "begin_host_mono_ns", "end_host_mono_ns"],
    "device_gaps": [
        "step",
        "unknown_ns",
        "start_host_mono_ns",
        "host_ns",
        "synchronising_ns",
        "communicating_ns",
        "launch_ns",
        "dependency_ns",
    ],
    "kernels": [
        "name_id",
        "kind",
        "launch_thread",
        "stream",
        "start_host_mono_ns",
        "duration_ns",
        "launch_host_mono_ns",
        "launch_ns",
        "sample",
        "is_graph",
        "size_bytes",
    ],
    "hardware": [
        "name_id",
        "sm_clock_mhz",
        "memory_clock_mhz",
        "temperature_celsius",
        "time_host_mono_ns",
        "energy_millijoules",
        "power_milliwatts",
        "clock_limits",
        "num_ecc_corrected",
        "num_ecc_uncorrected",
        "num_pcie_replays",
        "num_nvlink_errors",
        "cost_ns",
    ],
    "stacks": ["name_id", "reason", "step", "time_host_mono_ns"],
}


def flags_of(name: str) -> list[str]:
    command = main.get_command(click.Context(main), name)
    options = [p for p in command.params if isinstance(p, click.Option)]
    return sorted(flag for option in options for flag in (*option.opts, *option.secondary_opts))


def test_public_names():
    assert meshscope.__all__ == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(meshscope, name) is not None


def test_commands_and_their_flags():
    assert list(COMMANDS) == list(FLAGS)
    assert {name: flags_of(name) for name in FLAGS} == FLAGS


def test_options_of_the_command_line_itself():
    assert sorted(f for p in main.params for f in p.opts) == ["--no-color", "--version"]


def test_the_store_schema():
    assert SCHEMA_VERSION == STORE_SCHEMA_VERSION
    found = {name: [column.name for column in table.columns] for name, table in TABLES.items()}
    assert found == STORE_TABLES


def test_the_versions_of_documents():
    assert {name: version for name, (version, _, _) in DOCUMENTS.items()} == {
        "meshscope-report": 4,
        "meshscope-compare": 2,
        "meshscope-doctor": 1,
        "meshscope-hang": 2,
        "meshscope-memory": 1,
        "meshscope-simulate": 2,
        "meshscope-snapshot": 1,
        "meshscope-trace": 2,
        "meshscope-ls": 1,
        "meshscope-rules": 1,
        "meshscope-rule": 1,
        "meshscope-counterparts": 1,
        "meshscope-sql": 1,
    }
