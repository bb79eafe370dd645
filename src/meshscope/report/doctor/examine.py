"""Runs all checks; none of them can stop the others."""

import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

from meshscope import __version__
from meshscope.capture.guard import Guard
from meshscope.report.doctor import installed, machine, run_folder
from meshscope.report.doctor.check import Check, Examination, State

_INSTALLED: dict[str, Callable[[], Check]] = {
    "python": installed.check_python,
    "packages that read": installed.check_readers,
    "torch": installed.check_torch,
    "compiled recorder": installed.check_compiled_recorder,
    "compiled readers": installed.check_compiled_readers,
    "frameworks": installed.check_frameworks,
}
_RECORDED: dict[str, Callable[[], Check]] = {
    "system": machine.check_system,
    "devices": machine.check_devices,
    "clock": machine.check_clock,
    "launcher": machine.check_launcher,
    "stacks": machine.check_stacks,
}
_FOLDER: dict[str, Callable[[Path], Check]] = {
    "permission": run_folder.check_permission,
    "space": run_folder.check_space,
    "file system": run_folder.check_file_system,
}


def examine(folder: Path, *, asks_torch: bool = False) -> Examination:
    """Looks at this installation, this machine and `folder`. Raises nothing."""
    recorded = dict(_RECORDED)
    if asks_torch:
        recorded["torch, asked"] = machine.ask_torch
    checks = _run_all(_INSTALLED)
    places = _run_all({name: partial(check, folder) for name, check in _FOLDER.items()})
    return Examination(
        meshscope_version=__version__,
        python_version=platform.python_version(),
        can_record=not _find_broken(places),
        can_read=not _find_broken(checks),
        installed=checks,
        recorded=_run_all(recorded),
        folder=places,
    )


def _find_broken(checks: tuple[Check, ...]) -> list[Check]:
    return [check for check in checks if check.state == State.BROKEN]


def _run_all(checks: dict[str, Callable[[], Check]]) -> tuple[Check, ...]:
    guard = Guard()
    found = ((name, guard.run(name, check)) for name, check in checks.items())
    return tuple(
        check
        or Check(
            name=name,
            state=State.LIMITED,
            found=f"cannot be found out: {guard.first_messages.get(name, 'no reason')}",
        )
        for name, check in found
    )
