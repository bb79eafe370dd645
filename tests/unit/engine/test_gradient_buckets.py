import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

from torch import nn  # noqa: E402

from meshscope.engine.data_parallel.gradient_buckets import (  # noqa: E402
    build_buckets,
    is_reduced_elsewhere,
    make_bucket,
    mark_reduced_elsewhere,
)
from meshscope.errors import UsageError  # noqa: E402


def make_parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def sizes_of(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[int]]:
    buckets = build_buckets(parameters, bucket_bytes)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    return [[p.numel() for p in bucket.parameters] for bucket in buckets]


def test_buckets_take_parameters_in_reverse_order_up_to_their_size() -> None:
    assert sizes_of(make_parameters(1, 2, 3, 4, 5), 4 * 7) == [[5], [4, 3], [2, 1]]


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own() -> None:
    assert sizes_of(make_parameters(1, 100, 1), 8) == [[1], [100], [1]]


def test_dtypes_are_kept_apart_and_buckets_stand_in_the_order_in_which_they_fill() -> None:
    floats, halves = make_parameters(1, 2, 3), make_parameters(10, 20, dtype=torch.float16)
    buckets = build_buckets([floats[0], halves[0], floats[1], floats[2], halves[1]], 1000)
    assert [bucket.buffer.dtype for bucket in buckets] == [torch.float16, torch.float32]
    assert [[p.numel() for p in bucket.parameters] for bucket in buckets] == [[20, 10], [3, 2, 1]]


def test_one_gradient_dtype_puts_all_in_one_bucket() -> None:
    parameters = [*make_parameters(3), *make_parameters(4, dtype=torch.bfloat16)]
    (bucket,) = build_buckets(parameters, 1000, torch.float32)
    assert bucket.buffer.dtype == torch.float32
    parameters[1].grad = torch.full((4,), 3.0, dtype=torch.bfloat16)
    bucket.fill(0.5)
    bucket.write_back()
    assert parameters[1].grad.tolist() == [1.5] * 4
    assert parameters[1].grad.dtype == torch.bfloat16


def test_a_parameter_given_twice_is_in_one_bucket_once() -> None:
    (first,) = make_parameters(3)
    assert sizes_of([first, first], 1000) == [[3]]


def test_missing_gradients_are_zero_and_come_back_as_averages() -> None:
    first, second = make_parameters(2, 3)
    bucket = make_bucket(0, [first, second])
    bucket.buffer.fill_(7.0)
    second.grad = torch.ones(3)
    bucket.fill(1.0)
    assert bucket.buffer.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    bucket.write_back()
    assert first.grad.tolist() == [0.0, 0.0]
    bucket.buffer.fill_(5.0)
    assert first.grad.tolist() == [5.0, 5.0], "a part of the buffer, not a copy"
    assert second.grad.tolist() == [5.0] * 3


def test_gradients_that_are_in_the_buffer_already_are_scaled_in_place() -> None:
    (parameter,) = make_parameters(3)
    bucket = make_bucket(0, [parameter])
    parameter.grad = torch.ones(3)
    bucket.fill(0.5)
    bucket.write_back()
    parameter.grad += 1.0
    bucket.fill(0.5)
    assert bucket.find_stale() == []
    assert bucket.buffer.tolist() == [0.75] * 3


def test_what_no_rank_used_can_stay_without_gradient() -> None:
    first, second = make_parameters(2, 3)
    bucket = make_bucket(0, [first, second])
    bucket.fill(1.0)
    bucket.write_back([False, True])
    assert first.grad is None
    assert second.grad.tolist() == [0.0] * 3


def test_gradients_that_changed_since_they_were_sent_are_found() -> None:
    same, added, replaced, late = make_parameters(1, 1, 1, 1)
    for parameter in (same, added, replaced):
        parameter.grad = torch.ones(1)
    bucket = make_bucket(0, [same, added, replaced, late])
    bucket.fill(1.0)
    assert bucket.find_stale() == []
    added.grad += 1.0
    replaced.grad = torch.ones(1)
    late.grad = torch.ones(1)
    assert [p is q for p, q in zip(bucket.find_stale(), (added, replaced, late), strict=True)] == [
        True
    ] * 3


def test_marked_parameters_are_reduced_elsewhere() -> None:
    first, second = make_parameters(1, 1)
    mark_reduced_elsewhere(first)
    assert [is_reduced_elsewhere(first), is_reduced_elsewhere(second)] == [True, False]


def test_buckets_of_no_size_are_refused() -> None:
    with pytest.raises(UsageError, match="bucket_bytes is 0; expected at least 1"):
        build_buckets(make_parameters(1), 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gradient_s_memory_is_not_used_again_before_the_side_stream_has_copied_it() -> None:
    parameter = nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    bucket = make_bucket(0, [parameter])
    parameter.grad = torch.ones_like(parameter)
    address = parameter.grad.data_ptr()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second in which it only waits
        bucket.fill(1.0)
    others = [torch.full_like(parameter, 5.0) for _ in range(4)]  # what backward makes next
    assert address not in [other.data_ptr() for other in others]
    torch.cuda.synchronize()
    assert bool(bucket.buffer.eq(1.0).all())
