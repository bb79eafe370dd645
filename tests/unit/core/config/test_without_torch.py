"""A planner reads configurations and the memory model where torch and numpy are not installed."""

import subprocess
import sys

MODULES = ("memory_model", "model_config", "presets", "timed_model_config", "train_config")

PROGRAM = """
import importlib, sys
for name in {modules!r}:
    importlib.import_module(f"meshscope.core.config.{{name}}")
print(sorted({{"torch", "numpy"}} & set(sys.modules)))
"""


def test_configurations_import_neither_torch_nor_numpy() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(modules=MODULES)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == "[]"
