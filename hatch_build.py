"""Compiles the readers of traces and snapshots when meshscope is built, if there is a compiler.

Without one the package is complete all the same: `ingest.python_scanner` and
`ingest.snapshot_pickle` read then, many times slower. Nothing is compiled when meshscope runs.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src", "meshscope", "ingest")
LIBRARIES = {"scanner.c": "_scanner_native.so", "snapshot_machine.c": "_snapshot_native.so"}


class ScannerBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Puts the shared libraries beside their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called for wheels and editable installs; a source distribution takes only the source."""
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / FOLDER
        built = [
            library
            for source, library in LIBRARIES.items()
            if compile_library(folder / source, folder / library)
        ]
        if len(built) < len(LIBRARIES):
            self.app.display_warning("no C compiler: traces and snapshots will be read slower")
        build_data["artifacts"].extend(str(FOLDER / library) for library in built)
        if built and version != "editable":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


def compile_library(source: Path, library: Path) -> bool:
    """Whether it could be compiled. An old library never stays behind."""
    library.unlink(missing_ok=True)
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None or sys.platform == "win32":
        return False
    flags = ["-O3", "-std=c99", "-shared", "-fPIC", "-fvisibility=default"]
    built = library.with_suffix(".tmp")
    result = subprocess.run(
        [compiler, *flags, "-o", str(built), str(source), "-lm"], check=False, capture_output=True
    )
    if result.returncode:
        built.unlink(missing_ok=True)
        return False
    built.replace(library)
    return True
