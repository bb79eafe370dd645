"""Batches: the same samples in the same order for any layout, each once an epoch."""

import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

from meshscope.engine.data.token_data import Prefetch, TokenData, make_data, split_tokens  # noqa: E402
from meshscope.engine.data.token_sources import TokenFile  # noqa: E402
from meshscope.errors import UsageError  # noqa: E402


@pytest.fixture
def source(tmp_path: Path) -> TokenFile:
    """30 samples of 4 tokens; the first token tells the sample."""
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.arange(121, dtype="<u2").tobytes())
    return TokenFile(path, 200, 4)


def make(source: TokenFile, **fields: object) -> TokenData:
    return TokenData(**{"source": source, "global_batch_size": 12, "microbatch_size": 1, **fields})


@pytest.mark.parametrize("shuffles", [True, False])
def test_ranks_together_have_the_same_batch_for_any_dp(
    source: TokenFile, *, shuffles: bool
) -> None:
    data = make(source, shuffles=shuffles)
    for step in (0, 1, 2, 7):  # the third and the last reach over the end of an epoch
        whole = data.batch(step).flatten(0, 1)
        for dp in (1, 2, 3, 4, 6, 12):
            parts = [data.batch(step, rank, dp).flatten(0, 1) for rank in range(dp)]
            assert torch.equal(torch.cat(parts), whole)


def test_microbatches_are_cut_in_the_order_of_samples(source: TokenFile) -> None:
    whole = make(source).batch(3)
    cut = make(source, microbatch_size=3).batch(3, 1, 2)
    assert cut.shape == (2, 3, 5)
    assert cut.dtype == torch.int64
    assert torch.equal(cut.flatten(0, 1), whole[6:, 0])


def test_every_sample_comes_once_in_an_epoch(source: TokenFile) -> None:
    data = make(source)
    places = np.concatenate([data.find_indices(step) for step in range(15)])
    epochs = places.reshape(6, 30)  # 15 steps of 12 are 6 epochs of 30
    assert [sorted(epoch) for epoch in epochs.tolist()] == [list(range(30))] * 6
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 6, "each in an order of its own"


def test_without_shuffling_samples_come_in_the_order_of_the_file(source: TokenFile) -> None:
    data = make(source, shuffles=False)
    assert data.find_indices(2).tolist() == [24, 25, 26, 27, 28, 29, 0, 1, 2, 3, 4, 5]
    assert data.batch(0)[:, 0, 0].tolist() == list(range(0, 48, 4))


def test_held_out_samples_are_never_trained_on(source: TokenFile) -> None:
    data = make(source, global_batch_size=5, num_held_out=10)
    trained = {index for step in range(20) for index in data.find_indices(step).tolist()}
    assert trained == set(range(20))
    assert data.num_evaluation_batches == 2
    evaluated = torch.cat([data.evaluation_batch(index) for index in range(2)])[:, 0, 0] // 4
    assert evaluated.tolist() == list(range(20, 30))
    with pytest.raises(UsageError, match="10 held-out samples make 2 batches of 5"):
        data.evaluation_batch(2)


def test_targets_are_inputs_moved_by_one(source: TokenFile) -> None:
    inputs, targets = split_tokens(make(source, shuffles=False).batch(0))
    assert inputs.shape == targets.shape == (12, 1, 4)
    assert torch.equal(targets, inputs + 1)


def test_what_dp_does_not_divide_is_refused(source: TokenFile) -> None:
    data = make(source, microbatch_size=2)
    with pytest.raises(UsageError) as caught:
        data.batch(-1, 5, 5)
    assert str(caught.value) == (
        "global_batch_size (12) is no multiple of dp (5) * microbatch_size (2); "
        "dp_rank is 5, expected 0..4; step is -1; steps are counted from 0"
    )
    with pytest.raises(UsageError, match="30 samples are to be held out of 30"):
        make(source, num_held_out=30)
    with pytest.raises(UsageError, match="global_batch_size is 0"):
        make(source, global_batch_size=0)


def test_data_is_made_by_its_kind(source: TokenFile) -> None:
    sizes = {
        "vocab_size": 200,
        "sequence_length": 4,
        "global_batch_size": 12,
        "microbatch_size": 1,
    }
    file = make_data("file", path=source.path, held_out_ratio=0.2, seed=3, **sizes)
    assert (file.num_samples, file.num_held_out) == (24, 6)
    synthetic = make_data("synthetic", held_out_ratio=0.2, seed=3, **sizes)
    first, held_out = synthetic.batch(0), synthetic.evaluation_batch(0)
    assert first.shape == held_out.shape == (12, 1, 5)
    assert not torch.equal(first, held_out)
    whole = make_data("synthetic", seed=3, **sizes)
    assert torch.equal(whole.batch(0), first), "holding out changes nothing in training"
    with pytest.raises(UsageError, match="expected one of synthetic, file"):
        make_data("web", **sizes)
    with pytest.raises(UsageError, match="needs path"):
        make_data("file", **sizes)
    with pytest.raises(UsageError, match="held_out_ratio is 1"):
        make_data("synthetic", held_out_ratio=1, **sizes)


# --- ahead of time --------------------------------------------------------------------------------


def test_prefetched_batches_are_those_of_the_steps_in_order(source: TokenFile) -> None:
    data = make(source)
    num_threads = threading.active_count()
    with Prefetch(data.batch, first_step=3) as batches:
        for step in range(3, 9):
            assert torch.equal(batches.take(), data.batch(step))
    assert threading.active_count() == num_threads


def test_no_more_batches_than_asked_for_are_read_ahead() -> None:
    read: list[int] = []
    third = threading.Event()

    def read_step(step: int) -> torch.Tensor:
        read.append(step)
        if step == 3:
            third.set()
        return torch.tensor(step)

    with Prefetch(read_step, first_step=0, depth=3) as batches:
        batches.take()
        assert third.wait(30)
    assert read == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="after the prefetch was closed"):
        batches.take()


def test_what_reading_raises_comes_out_where_the_batch_would() -> None:
    def read_step(step: int) -> torch.Tensor:
        if step == 1:
            raise UsageError("planted")
        return torch.tensor(step)

    with Prefetch(read_step, first_step=0) as batches:
        assert batches.take() == 0
        for _ in range(2):
            with pytest.raises(UsageError, match="planted"):
                batches.take()
