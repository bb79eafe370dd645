"""Processes that tests start and wait for."""

import subprocess
from typing import Any


def run_process(
    command: list[str], *, timeout: float = 170, check: bool = False, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """One that has ended; what it wrote is text."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=check, **options
    )
