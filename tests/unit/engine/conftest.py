from collections.abc import Iterator

import pytest


@pytest.fixture
def group() -> Iterator[object]:
    """A gloo group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
