"""Compiles the C parts when meshscope is built, if there is a compiler, and writes its description.

Without one the package is complete all the same: each part has a twin in Python. Traces and
snapshots are then read many times slower, and a recorded step costs some ten microseconds more.
MESHSCOPE_PURE=1 builds the wheel without them, for every platform. Nothing is compiled when
meshscope runs.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGE = Path("src", "meshscope")
LIBRARIES = {
    "ingest/scanner.c": "_scanner_native.so",
    "ingest/snapshot_machine.c": "_snapshot_native.so",
    # Extension modules, by the stable ABI: one build serves every CPython from 3.11 on.
    "store/write/record_slots.c": "_record_slots_native.abi3.so",
    "capture/steps/hot_steps.c": "_hot_steps_native.abi3.so",
}


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Puts the shared libraries beside their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called for wheels and editable installs; a source distribution takes only the source."""
        if self.target_name != "wheel":
            return
        if os.environ.get("MESHSCOPE_PURE", "0") not in {"", "0"}:
            return
        package = Path(self.root) / PACKAGE
        pairs = [(Path(source), Path(source).with_name(name)) for source, name in LIBRARIES.items()]
        built = [lib for source, lib in pairs if compile_library(package / source, package / lib)]
        if len(built) < len(LIBRARIES):
            missing = sorted(lib.name for _, lib in pairs if lib not in built)
            self.app.display_warning(f"not compiled, Python does it slower: {', '.join(missing)}")
        build_data["artifacts"].extend(str(PACKAGE / library) for library in built)
        if built and version != "editable":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            # Where no extension module was compiled, any Python may load what there is by ctypes.
            has_modules = any(library.name.endswith(".abi3.so") for library in built)
            build_data["tag"] = f"{'cp311-abi3' if has_modules else 'py3-none'}-{platform}"


class DescriptionHook(MetadataHookInterface):  # type: ignore[misc]
    """The README with links that also lead somewhere on an index, where no file is beside it."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        pages = f"{metadata['urls']['Source']}/blob/main/"
        # Of a picture an index needs the file itself, not the page that shows it.
        text = re.sub(
            r"(!\[[^\]]*\]\()(?!https?://)", rf"\1{pages.replace('/blob/', '/raw/')}", text
        )
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": re.sub(r"\]\((?!https?://|#)", f"]({pages}", text),
        }


def compile_library(source: Path, library: Path) -> bool:
    """Whether it could be compiled. An old library never stays behind."""
    library.unlink(missing_ok=True)
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None or sys.platform == "win32":
        return False
    flags = ["-O3", "-std=c11", "-fwrapv", "-shared", "-fPIC", "-fvisibility=default"]
    flags.append(f"-I{sysconfig.get_path('include')}")
    built = library.with_name(f"{library.name}.tmp")
    result = subprocess.run(
        [compiler, *flags, "-o", str(built), str(source), "-lm"], check=False, capture_output=True
    )
    if result.returncode:
        built.unlink(missing_ok=True)
        return False
    built.replace(library)
    return True


if __name__ == "__main__":
    for part, name in LIBRARIES.items():
        source_path = PACKAGE / part
        if not compile_library(source_path, source_path.with_name(name)):
            sys.stderr.write(f"not compiled, Python does it slower: {name}\n")
