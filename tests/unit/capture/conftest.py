"""Recorders, on the real clock and on one that stands still, and a process group for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_clock import FakeClock
from meshscope.capture.config import RecorderConfig
from meshscope.capture.recorder import Recorder


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    yield made
    made.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def rec(tmp_path: Path, clock: FakeClock) -> Iterator[Recorder]:
    """A recorder whose times are those of `clock`."""
    made = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False), clock=clock)
    yield made
    made.close()


@pytest.fixture
def alone() -> Iterator[None]:
    """A gloo group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
