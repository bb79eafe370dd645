"""What DistributedDataParallel says about itself, in a real process group of one rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshscope.capture.model.replicas import describe_replicas


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_parameters_without_a_gradient_are_told_after_the_second_iteration():
    model = DistributedDataParallel(Halves(), find_unused_parameters=True)
    for _ in range(3):
        assert describe_replicas([model]) == []
        model(torch.ones(2, 8)).sum().backward()
        if describe_replicas([model]):
            break
    (found,) = describe_replicas([nn.Sequential(model)])
    half_bytes = 4 * (8 * 8 + 8)
    assert found["num_parameters"] == 4
    assert (found["parameter_bytes"], found["unused_bytes"]) == (2 * half_bytes, half_bytes)
    assert found["finds_unused"] == 1
    assert found["bucket_cap_bytes"] == 25 << 20
    assert describe_replicas([Halves()]) == []
