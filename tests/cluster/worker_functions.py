"""What `check_engines.py` has workers do: a module that they can import."""

import os
import signal
import time
from pathlib import Path


def die_once(number: int, *, mark: str, driver: int) -> tuple[int, int]:
    """Kills its worker at one item, the first time."""
    time.sleep(0.02)
    if number == 13 and os.getpid() != driver and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number, os.getpid()


def die_always(number: int, *, driver: int) -> int:
    if number == 3 and os.getpid() != driver:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def sleep_long(number: int) -> int:
    time.sleep(5 if number else 0)
    return number
