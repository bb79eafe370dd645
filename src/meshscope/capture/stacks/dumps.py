"""Lets `meshscope hang` ask a stuck process where it is.

`faulthandler` writes the Python stacks of all threads behind what `now_file` holds when a real-time
signal arrives; its handler is plain C and needs neither the interpreter lock nor a responsive
program. Only an unclaimed signal is taken. The sender first checks in the journal that it was
registered, and that the process is still the one that did.
"""

import faulthandler
import os
import signal
from pathlib import Path

_SIGNAL_OFFSET = 6
"""From the highest real-time signal downwards; low ones are used by the C library and runtimes."""


class StackDumps:
    def __init__(self, path: Path) -> None:
        """OSError or ValueError when the file or the signal cannot be had."""
        if not hasattr(signal, "SIGRTMAX"):
            raise ValueError("this system has no real-time signals")
        self.signal_number = int(signal.SIGRTMAX) - _SIGNAL_OFFSET
        if signal.getsignal(self.signal_number) is not signal.SIG_DFL:
            raise ValueError(f"signal {self.signal_number} is in use by the program")
        # A descriptor and not a file object: a recorder that is dropped need not be closed.
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        faulthandler.register(self.signal_number, file=self._fd, all_threads=True, chain=False)

    def remove(self) -> None:
        faulthandler.unregister(self.signal_number)
        os.close(self._fd)
