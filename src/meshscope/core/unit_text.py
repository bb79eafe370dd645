"""The only place where numbers with units become text.

Durations have three significant digits in the unit that fits, memory is in powers of 1024, ratios
become percent.
"""

import math

_MINUTE_NS = 60_000_000_000


def duration(ns: float) -> str:
    """`850 ns`, `12.3 µs`, `412 ms`, `1.21 s`, `3 min 12 s`, `2 h 05 min`."""
    if ns < 0:
        return f"-{duration(-ns)}"
    if ns < 1:
        return "0 ns" if ns == 0 else "<1 ns"
    for unit, factor in (("ns", 1), ("µs", 1e3), ("ms", 1e6), ("s", 1e9)):
        digits = _three_digits(ns / factor)
        if float(digits) < (1000 if unit != "s" else 100):
            return f"{digits} {unit}"
    seconds = round(ns / 1e9)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    minutes = round(ns / _MINUTE_NS)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def memory(num_bytes: float) -> str:
    """`512 B`, `12.3 MiB`, `-3.00 GiB`."""
    if num_bytes < 0:
        return f"-{memory(-num_bytes)}"
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 999.5:
            return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def bandwidth(bytes_per_s: float) -> str:
    """`850 kB/s`, `12.3 MB/s`, `1.21 GB/s`: powers of 1000, as links are sold."""
    value = float(bytes_per_s)
    for unit in ("B", "kB", "MB"):
        if value < 999.5:
            return f"{value:.0f} B/s" if unit == "B" else f"{_three_digits(value)} {unit}/s"
        value /= 1000
    return f"{_three_digits(value)} GB/s"


def energy(joules: float) -> str:
    """`850 µJ`, `12.3 J`, `1.21 kJ`, `3.40 MJ`."""
    value = joules * 1e6
    for unit in ("µJ", "mJ", "J", "kJ"):
        if value < 999.5:
            return f"{_three_digits(value)} {unit}"
        value /= 1000
    return f"{_three_digits(value)} MJ"


def ratio(value: float) -> str:
    """`71 %`, `3.2 %`, `0.018 %`."""
    percent = value * 100
    size = abs(percent)
    if size == 0:
        return "0 %"
    if size >= 9.95:
        return f"{percent:.0f} %"
    if size >= 0.995:
        return f"{percent:.1f} %"
    if size < 0.00095:
        return "<0.001 %"
    return f"{percent:.{1 - math.floor(math.log10(size))}f} %"


def count(value: int) -> str:
    """`12,345`."""
    return f"{value:,}"


def plural(value: int, noun: str, nouns: str = "") -> str:
    """`1 step`, `12,345 steps`."""
    return f"{count(value)} {noun if value == 1 else nouns or noun + 's'}"


def rate(per_s: float, unit: str) -> str:
    """`2.41 steps/s`, `19,661 tokens/s`."""
    if per_s >= 99.95:
        return f"{per_s:,.0f} {unit}/s"
    return f"{_three_digits(per_s) if per_s >= 0.1 else f'{per_s:.2g}'} {unit}/s"
