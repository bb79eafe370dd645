"""Plain values become the dataclasses that they came from, and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import msgspec
import pytest

from meshscope.core.rebuild import make_rebuilder
from meshscope.core.unavailable import Unavailable


class Number(IntEnum):
    ONE = 1


class Word(StrEnum):
    YES = "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int | Unavailable
    share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner | Unavailable
    all: tuple[Inner, ...]
    pair: tuple[int, str]
    by_name: Mapping[str, list[int]]
    number: Number
    word: Word | None


WHOLE = Outer(
    inner=Inner(size=3),
    all=(Inner(size=Unavailable("why")), Inner(size=0, share=1.0)),
    pair=(1, "a"),
    by_name={"x": [1, 2]},
    number=Number.ONE,
    word=Word.YES,
)
LACKING = Outer(
    inner=Unavailable("no"), all=(), pair=(0, ""), by_name={}, number=Number.ONE, word=None
)


@pytest.mark.parametrize("value", [WHOLE, LACKING])
def test_what_was_written_comes_back(value):
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    assert make_rebuilder(Outer)(plain) == value


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("inner", {"size": "3", "share": 0.5}),
        ("inner", {"size": 3}),
        ("inner", {"size": 3, "share": 0.5, "more": 1}),
        ("inner", None),
        ("all", {}),
        ("pair", [1]),
        ("pair", [1, "a", 2]),
        ("by_name", {"x": 1}),
        ("number", 7),
        ("word", "no"),
    ],
)
def test_what_does_not_fit_is_refused(name, wrong):
    plain = msgspec.to_builtins(WHOLE)
    with pytest.raises(ValueError, match=r"expected|types|fields|zip|not a valid"):
        make_rebuilder(Outer)({**plain, name: wrong})


def test_a_type_without_plain_values_is_the_caller_s_mistake():
    with pytest.raises(TypeError, match="bytes"):
        make_rebuilder(tuple[bytes, ...])


def test_many_pairs_of_numbers_are_rebuilt_and_checked():
    rebuild = make_rebuilder(tuple[tuple[int, int], ...])
    assert rebuild([[1, 2], [3, 4]]) == ((1, 2), (3, 4))
    assert rebuild([]) == ()
    for wrong in ([[1]], [[1, 2, 3]], [[1, "2"]], [1, 2], [{}], {}, [[1, 2], None], [[1, 2.5]]):
        with pytest.raises(ValueError, match="expected"):
            rebuild(wrong)
