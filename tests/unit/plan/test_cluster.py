"""Devices and links by name and by bandwidth."""

import pytest

from meshscope.errors import UsageError
from meshscope.plan.cluster import INSIDE, find_link, make_cluster


@pytest.mark.parametrize(
    ("text", "gigabytes_per_s"),
    [
        ("300GB/s", 300), ("300 GB/s", 300), ("900GBps", 900), ("900GB", 900), ("400Gb/s", 50),
        ("400Gbps", 50), ("400Gbit/s", 50), ("400 gbit/s", 50), ("1.8TB/s", 1800),
        ("100MB/s", 0.1), ("NVLink4", 360),
    ],
)  # fmt: skip
def test_a_link_is_a_name_or_bytes_or_bits(text, gigabytes_per_s):
    assert find_link(text, INSIDE).bytes_per_s / 1e9 == pytest.approx(gigabytes_per_s)


@pytest.mark.parametrize(
    "text", ["", "900", "900gb/s", "-5GB/s", "0GB/s", "1e3GB/s", "GB/s", "nan"]
)
def test_what_is_no_bandwidth_is_refused(text):
    """`gb/s` may be bits or bytes, which differ by eight."""
    assert find_link(text, INSIDE) is None


def test_all_that_is_wrong_comes_at_once():
    with pytest.raises(UsageError) as raised:
        make_cluster("Z9", 8, per_node=3, inside="x", between="400gb/s")
    for word in ("Z9", "nodes of 3", "inside nodes: 'x'", "between nodes: '400gb/s'", "b is bits"):
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("device", "gigabytes_per_s"),
    [("H100-80GB", 450), ("H800-80GB", 200), ("A800-SXM4-80GB", 200), ("MI355X", 537)],
)
def test_links_of_devices_are_those_of_their_data_sheets(device, gigabytes_per_s):
    assert make_cluster(device, 8).inside.nominal_bytes_per_s / 1e9 == gigabytes_per_s
