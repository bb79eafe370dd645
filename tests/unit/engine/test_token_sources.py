"""Samples by index: their statistics and losses are known, files are checked."""

from math import log
from pathlib import Path

import numpy as np
import pytest

from meshscope.engine.data.token_sources import SyntheticTokens, TokenFile
from meshscope.errors import UsageError


def test_a_sample_depends_on_seed_and_index_alone() -> None:
    source = SyntheticTokens(50, 16, seed=4)
    many = source.read(np.array([7, 3, 1 << 39]))
    assert many.shape == (3, 17)
    assert (source.read(np.array([3]))[0] == many[1]).all()
    assert (SyntheticTokens(50, 16, seed=4).read(np.array([1 << 39]))[0] == many[2]).all()
    assert (SyntheticTokens(50, 16, seed=5).read(np.array([3]))[0] != many[1]).any()


def test_one_token_follows_each_but_for_the_noise() -> None:
    samples = SyntheticTokens(20, 100, noise_ratio=0.2).read(np.arange(200))
    counts = np.zeros((20, 20))
    np.add.at(counts, (samples[:, :-1].ravel(), samples[:, 1:].ravel()), 1)
    usual = counts.max(axis=1) / counts.sum(axis=1)
    # 1 - 0.2 + 0.2 / 20 = 0.81 of about 1000 pairs each: a standard deviation of 0.012.
    assert usual == pytest.approx(np.full(20, 0.81), abs=0.06)
    assert len(set(counts.argmax(axis=1))) == 20, "every token follows some other"


def test_the_best_loss_is_that_of_the_true_chain() -> None:
    source = SyntheticTokens(20, 500, noise_ratio=0.2)
    samples = source.read(np.arange(100))
    usual = source._following[samples[:, :-1]] == samples[:, 1:]
    measured = -np.where(usual, log(0.81), log(0.01)).mean()
    assert source.best_loss == pytest.approx(-(0.81 * log(0.81) + 19 * 0.01 * log(0.01)))
    assert measured == pytest.approx(source.best_loss, rel=0.05)
    assert SyntheticTokens(20, 5, noise_ratio=1.0).best_loss == pytest.approx(log(20))
    assert SyntheticTokens(20, 5, noise_ratio=0.0).best_loss == 0.0


@pytest.mark.parametrize("kind", ["uint16", "uint32", "npy"])
def test_a_file_gives_rows_that_overlap_by_one_token(tmp_path: Path, kind: str) -> None:
    tokens = np.arange(100, 126)
    path = tmp_path / ("tokens.npy" if kind == "npy" else "tokens.bin")
    if kind == "npy":
        np.save(path, tokens)
    else:
        path.write_bytes(tokens.astype(kind).tobytes())
    source = TokenFile(path, 200, 5, dtype="uint16" if kind == "npy" else kind)
    assert (source.num_tokens, source.num_samples) == (26, 5)
    assert source.read(np.array([4, 0])).tolist() == [
        [120, 121, 122, 123, 124, 125],
        [100, 101, 102, 103, 104, 105],
    ]
    source.check_all()


def write_ids(path: Path, ids: list[int]) -> Path:
    path.write_bytes(np.array(ids, dtype="<u2").tobytes())
    return path


def test_an_id_outside_of_the_vocabulary_is_found_with_its_place(tmp_path: Path) -> None:
    path = write_ids(tmp_path / "ids.bin", [1, 2, 3, 4, 5, 6, 99, 8, 9])
    source = TokenFile(path, 50, 4)
    source.read(np.array([0]))
    expected = (
        f"token 6 of {path} is 99, but vocab_size is 50; raise vocab_size, or see whether the file "
        "has another dtype"
    )
    for check in (lambda: source.read(np.array([0, 1])), source.check_all):
        with pytest.raises(UsageError) as caught:
            check()
        assert str(caught.value) == expected


def test_negative_ids_are_outside_as_well(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, -2, 3], dtype=np.int32))
    with pytest.raises(UsageError, match=r"token 1 of .* is -2"):
        TokenFile(tmp_path / "ids.npy", 50, 2).read(np.array([0]))


def test_files_that_cannot_be_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no token file"):
        TokenFile(tmp_path / "none.bin", 10, 4)
    (tmp_path / "odd.bin").write_bytes(b"12345")
    with pytest.raises(UsageError, match="has 5 bytes, which is no multiple of the 2 of uint16"):
        TokenFile(tmp_path / "odd.bin", 10, 4)
    (tmp_path / "empty.bin").touch()
    with pytest.raises(UsageError, match="is empty"):
        TokenFile(tmp_path / "empty.bin", 10, 4)
    path = write_ids(tmp_path / "short.bin", [1, 2, 3, 4])
    with pytest.raises(UsageError, match="has 4 tokens, but one sample needs 5"):
        TokenFile(path, 10, 4)
    (tmp_path / "text.npy").write_text("no array", encoding="utf-8")
    with pytest.raises(UsageError, match=r"cannot be read as \.npy"):
        TokenFile(tmp_path / "text.npy", 10, 4)
    np.save(tmp_path / "real.npy", np.ones((2, 3)))
    with pytest.raises(UsageError, match=r"has float64 of shape \(2, 3\)"):
        TokenFile(tmp_path / "real.npy", 10, 4)


def test_all_problems_of_the_arguments_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        TokenFile(tmp_path, 0, 0, dtype="int8")
    assert str(caught.value) == (
        "vocab_size is 0, expected at least 1; sequence_length is 0, expected at least 1; "
        "dtype is 'int8', expected one of uint16, uint32"
    )
    with pytest.raises(UsageError, match=r"noise_ratio is 2.*; num_samples is 0"):
        SyntheticTokens(5, 5, noise_ratio=2, num_samples=0)
