"""FLOPs and peak as people type them."""

import pytest

from meshscope.core.config.given_flops import GivenFlops, check_given, read_environment
from meshscope.errors import UsageError


def test_units_are_flops_and_teraflops_per_second():
    found = check_given("6.2e15", "989")
    assert found == GivenFlops(flops_per_step=6.2e15, peak_flops_per_s=989e12)
    assert check_given(10**16, 312.0) == check_given("10_000_000_000_000_000", "312")
    assert check_given() == GivenFlops()


def test_the_environment_carries_both():
    found = check_given("123456789012345678", "0.05")
    assert read_environment(found.to_environment()) == found
    assert read_environment({}) == GivenFlops()


@pytest.mark.parametrize("value", ["", "x", "nan", "inf", "-1", "0", "1e999", True, "6.2"])
def test_wrong_flops_are_one_clear_message(value):
    with pytest.raises(UsageError, match=r"FLOPs per step: .*6\.2e15"):
        check_given(value)


@pytest.mark.parametrize("value", ["", "x", "nan", "-1", "0", "989e12", "1e-9"])
def test_wrong_peaks_are_one_clear_message(value):
    with pytest.raises(UsageError, match=r"peak: .*such as 989"):
        check_given(None, value)
