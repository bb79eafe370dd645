"""Forks programs of this folder, with torch imported: each would take some four seconds for that.

    python -W error -m tests.distributed.fork_programs

Reads a request a line, runs it in a process of its own and writes how that ended; `run_program`
asks. Nothing is done here but importing: a process whose torch has used its threads hangs its
children. What was imported is frozen, so that ranks do not look through it and copy its pages.
"""

import gc
import json
import os
import runpy
import signal
import sys
import time
import warnings
from typing import Any

from tests.distributed.fork_ranks import import_everything


def main() -> None:
    import_everything()
    import torch.distributed.checkpoint  # noqa: F401 - most of the engine's programs save

    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _run(request)
        print(json.dumps(_wait_for(pid, request["timeout_s"])), flush=True)


def _run(request: dict[str, Any]) -> None:
    """As `python -m` would; does not return."""
    os.setpgid(0, 0)
    output = os.open(request["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, nothing), (1, output), (2, output)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    if not request["is_strict"]:
        warnings.simplefilter("default")
    sys.argv = [request["module"], *request["arguments"]]
    code = 1
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the exit code tells
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for(pid: int, timeout_s: float) -> int | None:
    """The exit code; None when it took too long, and was killed with all its ranks."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    main()
