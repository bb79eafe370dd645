"""Which steps of a long run are taken."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from meshscope.analyze.rank.step_choice import choose_windows


def test_short_run_is_taken_whole() -> None:
    assert choose_windows(1, 99, 1000, 8) == [(1, 99)]


def test_long_run_is_taken_in_windows_the_last_one_longest() -> None:
    windows = choose_windows(1, 9_999, 195, 8)

    assert len(windows) == 8
    assert windows[0][0] == 1
    assert windows[-1][1] == 9_999
    lengths = [last - first + 1 for first, last in windows]
    assert lengths[-1] == 78
    assert set(lengths[:-1]) == {16}


def test_few_steps_make_one_window_at_the_end() -> None:
    assert choose_windows(10, 1_000, 5, 8) == [(996, 1_000)]


def test_nothing_to_choose_from() -> None:
    assert choose_windows(5, 4, 10, 8) == []


@settings(max_examples=200, deadline=None)
@given(
    first=st.integers(0, 50),
    num_steps=st.integers(1, 5_000),
    num_kept=st.integers(1, 600),
    num_windows=st.integers(1, 12),
)
def test_windows_are_in_order_inside_the_run_and_within_the_limit(
    first: int, num_steps: int, num_kept: int, num_windows: int
) -> None:
    last = first + num_steps - 1
    windows = choose_windows(first, last, num_kept, num_windows)

    assert windows[-1][1] == last
    assert all(first <= start <= end <= last for start, end in windows)
    assert all(one[1] + 1 < two[0] for one, two in pairwise(windows))
    assert sum(end - start + 1 for start, end in windows) <= max(num_kept, 1)
