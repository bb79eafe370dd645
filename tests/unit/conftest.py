"""Real processes, of which the kernel tells what a rank does."""

from collections.abc import Iterator

import pytest

from hang_builders import Process, Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    found.end()


@pytest.fixture(scope="module")
def waiter(processes: Processes) -> Process:
    """One process that waits stands for every rank that does."""
    return processes.waiter()


@pytest.fixture(scope="module")
def sleeper(processes: Processes) -> Process:
    return processes.sleeper()
