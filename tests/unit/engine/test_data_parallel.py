import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

from fake_group import FakeGroup  # noqa: E402
from torch import nn  # noqa: E402

from meshscope.engine.data_parallel.channel import Traffic  # noqa: E402
from meshscope.engine.data_parallel.data_parallel import GradientReducer  # noqa: E402
from meshscope.errors import UsageError  # noqa: E402


def test_without_a_group_nothing_happens() -> None:
    model = nn.Linear(2, 1)
    reducer = GradientReducer(model.parameters(), None, strategy="ring", compression="int8")
    with reducer.accumulating():
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    reducer.finish()
    assert model.weight.grad.tolist() == [[2.0, 2.0]]
    assert reducer.buckets == []
    assert reducer.statistics.traffic == Traffic()
    reducer.close()


def test_unknown_compressors_are_refused() -> None:
    with pytest.raises(UsageError, match="'zip' is no compressor; expected one of fp16, bf16"):
        GradientReducer([], None, compression="zip")


def test_buckets_grow_until_they_are_few_enough() -> None:
    parameters = [nn.Parameter(torch.zeros(256)) for _ in range(8)]  # 1 KiB each
    for max_buckets, number in ((None, 8), (8, 8), (3, 2), (1, 1)):
        reducer = GradientReducer(parameters, None, bucket_bytes=1024, max_buckets=max_buckets)
        assert len(reducer._build_buckets(parameters)) == number


def test_without_overlap_backward_sends_nothing() -> None:
    weight = nn.Parameter(torch.zeros(4))
    reducer = GradientReducer([weight], FakeGroup(2), overlaps=False)
    weight.sum().backward()
    assert reducer._transfers == []
    assert weight.grad is not None
