import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

from torch import nn  # noqa: E402

from meshscope.core.unavailable import Unavailable  # noqa: E402
from meshscope.engine.data_parallel.compression import (  # noqa: E402
    COMPRESSORS,
    CastCompressor,
    Int8Compressor,
    PowerSgdCompressor,
    TopKCompressor,
    _dequantize,
    _quantize,
    make_compressor,
)
from meshscope.engine.data_parallel.gradient_buckets import make_bucket  # noqa: E402
from meshscope.errors import UsageError  # noqa: E402


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_has_its_name_and_has_compressed_nothing_yet(name: str) -> None:
    compressor = make_compressor(name)
    assert compressor.name == name
    bucket = make_bucket(0, [nn.Parameter(torch.zeros(3))])
    assert compressor.read_error(bucket) == Unavailable("nothing was compressed yet")


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_compressor("gzip"),
        lambda: CastCompressor(torch.float32),
        lambda: TopKCompressor(0.0),
        lambda: TopKCompressor(1.5),
        lambda: Int8Compressor(0),
        lambda: Int8Compressor(bits=1),
        lambda: make_compressor("int8", bits=16),
        lambda: PowerSgdCompressor(0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make) -> None:
    with pytest.raises(UsageError, match="expected"):
        make()


def test_int8_is_right_to_half_a_level_of_each_block() -> None:
    blocks = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    blocks *= torch.logspace(-6, 4, 15).view(3, 5, 1)
    blocks[1, 2] = 0.0
    payload = _quantize(blocks)
    assert payload.shape == (3, 5 * 16 + 5 * 4)
    levels = blocks.abs().amax(-1, keepdim=True) / 127
    found = _dequantize(payload, (5, 16))
    assert ((found - blocks).abs() <= 0.5001 * levels).all()


def test_fewer_bits_are_fewer_levels() -> None:
    blocks = torch.linspace(-1, 1, 64).view(1, 1, 64)
    for bits, levels in ((2, 3), (4, 15), (8, 255)):
        num_levels = Int8Compressor(bits=bits).num_levels
        found = _dequantize(_quantize(blocks, num_levels), (1, 64))
        assert len(found.unique()) == min(levels, 64)


def test_without_feedback_nothing_is_carried_on() -> None:
    bucket = make_bucket(0, [nn.Parameter(torch.zeros(3))])
    bucket.buffer.fill_(1.0)
    for keeps, twice in ((True, 2.0), (False, 1.0)):
        compressor = make_compressor("topk", ratio=0.5, keeps_errors=keeps)
        compressor._take_left_out(bucket)
        assert compressor._take_left_out(bucket).tolist() == [twice] * 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_int8_spoils_the_block_of_a_bad_value_only(bad: float) -> None:
    blocks = torch.ones(1, 2, 4)
    blocks[0, 0, 1] = bad
    found = _dequantize(_quantize(blocks), (2, 4))
    assert not found[0, 0].isfinite().any()
    assert torch.equal(found[0, 1], torch.ones(4))


@pytest.mark.parametrize(
    ("num_elements", "num_ranks", "shape"),
    [(4096, 4, (1, 1024)), (4097, 4, (2, 1024)), (5, 4, (1, 2)), (1, 8, (1, 1)), (0, 2, (1, 1))],
)
def test_int8_cuts_into_whole_blocks(num_elements: int, num_ranks: int, shape: object) -> None:
    assert Int8Compressor(1024).chunk_shape(num_elements, num_ranks) == shape


def test_topk_sends_at_least_one_element() -> None:
    assert [TopKCompressor(0.01).count_sent(n) for n in (1, 100, 101, 229_952)] == [1, 1, 2, 2300]


def test_powersgd_compresses_what_shrinks() -> None:
    compressor = PowerSgdCompressor(4)
    shapes = [(64, 64), (8, 8), (64,), (16, 4, 4), (5, 4, 5), (0, 3), ()]
    assert [compressor.is_compressed(torch.Size(s)) for s in shapes] == [
        True, False, False, True, False, False, False,
    ]  # fmt: skip
