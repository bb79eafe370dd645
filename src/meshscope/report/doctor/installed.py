"""Packages and compiled parts, found without importing what is large: torch takes seconds."""

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

from meshscope.capture.config import OLDEST_TORCH
from meshscope.report.doctor.check import Check, State
from meshscope.store.write.native import SWITCH_VARIABLE, load_native

READER_PACKAGES = {
    "backports.zstd": "reads compressed traces",
    "click": "the command line",
    "duckdb": "sql, compact, and runs in Parquet",
    "fsspec": "runs and traces in object stores",
    "isal": "reads compressed traces quickly",
    "msgspec": "JSON documents, traces and configurations",
    "numpy": "every analysis",
    "rich": "text of reports in a terminal",
    "starlette": "the dashboard",
    "textual": "watching a run in a terminal",
    "uvicorn": "the dashboard",
}
"""Distributions that reading needs, and for what; the recorder needs none."""
_HAS_OWN_ZSTD = sys.version_info >= (3, 14)

FRAMEWORKS = (
    "transformers", "accelerate", "lightning", "pytorch-lightning", "trl", "deepspeed",
    "megatron-core", "torchtitan", "safetensors", "torchrl", "ray",
)  # fmt: skip
"""Distributions whose programs `meshscope run` knows by name."""

COMPILED_MODULES = (
    "meshscope.store.write._record_slots_native",
    "meshscope.capture.steps._hot_steps_native",
)
COMPILED_LIBRARIES = ("ingest/_scanner_native.so", "ingest/_snapshot_native.so")
_REBUILD = "pip install --force-reinstall --no-deps --no-binary meshscope meshscope"
_PACKAGE = Path(__file__).parents[2]


def find_version(distribution: str) -> str | None:
    """The installed version by its metadata, without an import; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> Check:
    version = f"{sys.implementation.name} {sys.version.split()[0]}"
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return Check(
            name="python",
            state=State.LIMITED,
            found=f"{version}, not CPython with its global lock",
            meaning="compiled parts of the recorder are not used, and records of several threads "
            "may be lost",
            command="run the training with the usual CPython, 3.11 or later",
        )
    return Check(name="python", state=State.OK, found=version)


def check_readers() -> Check:
    """The packages that reports need, in one line."""
    wanted = [n for n in READER_PACKAGES if n != "backports.zstd" or not _HAS_OWN_ZSTD]
    versions = {name: _find_reader(name) for name in wanted}
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if not missing:
        return Check(name="packages that read", state=State.OK, found=found)
    needed = "; ".join(f"{name} ({READER_PACKAGES[name]})" for name in missing)
    return Check(
        name="packages that read",
        state=State.BROKEN,
        found=f"missing: {', '.join(missing)}",
        meaning=f"recording works, reading does not: {needed}",
        command=f"pip install {' '.join(missing)}",
    )


def _find_reader(name: str) -> str | None:
    if name == "backports.zstd":
        return find_version(name) or find_version("backports-zstd")
    return find_version(name)


def check_torch() -> Check:
    """Its version by files alone."""
    version = _find_torch_version()
    if version is None:
        return Check(
            name="torch",
            state=State.ABSENT,
            found="not installed for this Python",
            meaning="runs and traces can be read; a program of another environment can be recorded",
            command="pip install 'meshscope[torch]'",
        )
    oldest = ".".join(map(str, OLDEST_TORCH))
    if parse_version(version) < OLDEST_TORCH:
        return Check(
            name="torch",
            state=State.LIMITED,
            found=f"{version}, older than {oldest}",
            meaning="models, optimizers and torch.distributed are not watched, so `meshscope run` "
            "records no steps; recorder.step, phase, data, log and the reports work",
            command=f"pip install 'torch>={oldest}'",
        )
    return Check(name="torch", state=State.OK, found=f"{version}{_find_toolkit()}")


def parse_version(text: str) -> tuple[int, ...]:
    """Major and minor version; (0, 0) for a text that has none."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _find_torch_version() -> str | None:
    """What torch itself says, then its metadata: builds from source have no metadata."""
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", _read_torch_facts(), re.MULTILINE)
    return found[1] if found else find_version("torch")


def _find_toolkit() -> str:
    """`, CUDA 12.8`, by torch's own file of versions."""
    text = _read_torch_facts()
    for name, title in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        found = re.search(rf"^{name}(?:: [^=]*)? = ['\"]([^'\"]+)", text, re.MULTILINE)
        if found:
            return f", built for {title} {found[1]}"
    return ", built for CPUs" if text else ""


def _read_torch_facts() -> str:
    spec = importlib.util.find_spec("torch")  # a top-level name: nothing is imported
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        path = Path(folder, "version.py")
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace")
    return ""


def check_frameworks() -> Check:
    versions = {name: find_version(name) for name in FRAMEWORKS}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return Check(
        name="frameworks",
        state=State.OK if found else State.ABSENT,
        found=found or "none of those known by name; plain torch is recorded all the same",
    )


def check_compiled_recorder() -> Check:
    reasons = [why for name in COMPILED_MODULES if (why := _explain_module(name))]
    return _describe_compiled(
        "compiled recorder", reasons, "a recorded step costs some 50 µs more; records are the same"
    )


def check_compiled_readers() -> Check:
    reasons = [why for name in COMPILED_LIBRARIES if (why := _explain_library(_PACKAGE / name))]
    return _describe_compiled(
        "compiled readers", reasons, "traces and snapshots are read many times slower"
    )


def _describe_compiled(name: str, reasons: list[str], meaning: str) -> Check:
    if not reasons:
        return Check(name=name, state=State.OK, found="loaded")
    is_switched_off = os.environ.get(SWITCH_VARIABLE) == "0" and SWITCH_VARIABLE in reasons[0]
    return Check(
        name=name,
        state=State.LIMITED,
        found=f"not used: {reasons[0]}",
        meaning=meaning,
        command=f"unset {SWITCH_VARIABLE}" if is_switched_off else _REBUILD,
    )


def _explain_module(name: str) -> str:
    """Why a compiled module is not used; empty where it is."""
    if load_native(name) is not None:
        return ""
    if os.environ.get(SWITCH_VARIABLE) == "0":
        return f"{SWITCH_VARIABLE}=0 is set"
    short = name.rpartition(".")[2]
    if importlib.util.find_spec(name) is None:
        return f"{short} was not compiled when meshscope was installed"
    try:
        importlib.import_module(name)
    except ImportError as error:
        return f"{short} does not load: {error}"
    return f"{short} does not fit this Python, or other sources of meshscope"


def _explain_library(path: Path) -> str:
    if not path.exists():
        return f"{path.name} was not compiled when meshscope was installed"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} does not load: {error}"
    return ""
