"""Whether a configuration fits a device that need not be here: `H100-80GB`, `A100-40GB`, `80GiB`.

    device = find_target_device("H100-80GB")
    fit = estimate_fit(config, device)
    fit.fits, fit.estimate.worst.total_bytes, fit.device.memory_bytes

Sizes are those a device is sold with, in GiB, which is how makers of accelerators count them;
programs get one to six percent less, and the estimate leaves out context and buffers of libraries
(see `memory_model`): a configuration that needs more than nine tenths hardly fits.
"""

import difflib
import re
from dataclasses import dataclass

from meshscope.core.config.memory_model import MemoryEstimate, estimate_memory
from meshscope.core.config.train_config import TrainConfig
from meshscope.core.hardware import DEVICES, normalise_name
from meshscope.core.unavailable import Missing, or_unavailable

_GIB = 1 << 30
_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": _GIB, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([a-z]{1,3})")
_NAMED_SIZE = re.compile(r"([0-9]{1,4})(?:gb|gib|g)")
_MOST_OF_DEVICE = 0.9
_MAX_TEXT = 60
_NEAR = 0.6
"""Of names that are offered in place of an unknown one, as `difflib` compares."""

_MEMORY_GIB = {
    "NVIDIA A30": 24, "NVIDIA A10": 24, "NVIDIA A10G": 24, "NVIDIA A40": 48, "NVIDIA L4": 24,
    "NVIDIA L40": 48, "NVIDIA L40S": 48, "NVIDIA L20": 48, "Tesla T4": 16,
    "NVIDIA H100 PCIe": 80, "NVIDIA H100 NVL": 94, "NVIDIA H800": 80, "NVIDIA H800 PCIe": 80,
    "NVIDIA H20": 96, "NVIDIA H200": 141, "NVIDIA H200 NVL": 141, "NVIDIA GH200 480GB": 96,
    "NVIDIA GH200 144G HBM3e": 144, "NVIDIA B200": 180, "NVIDIA GB200": 186,
    "NVIDIA B300": 270, "NVIDIA GB300": 279,
    "NVIDIA RTX A6000": 48, "NVIDIA RTX 6000 Ada Generation": 48, "NVIDIA GeForce RTX 3090": 24,
    "NVIDIA GeForce RTX 4080": 16, "NVIDIA GeForce RTX 4090": 24, "NVIDIA GeForce RTX 5090": 32,
    "AMD Instinct MI100": 32, "AMD Instinct MI210": 64, "AMD Instinct MI250X": 64,
    "AMD Instinct MI300X": 192, "AMD Instinct MI325X": 256, "AMD Instinct MI300A": 128,
    "AMD Instinct MI350X": 288, "AMD Instinct MI355X": 288,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 96,
}  # fmt: skip
"""Of devices whose name does not say it; of GH200 it names the host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDevice:
    """A device to check against."""

    label: str
    """As the user wrote it."""
    memory_bytes: int
    device_type: str = "cuda"
    """Which of the memory model's assumptions hold."""
    product: str | None = None
    """Its name in `core.hardware`; None of a plain memory size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """What a configuration needs of a device."""

    device: TargetDevice
    estimate: MemoryEstimate

    @property
    def ratio(self) -> float:
        """Of the device's memory, on the rank that needs most."""
        return self.estimate.worst.total_bytes / self.device.memory_bytes

    @property
    def fits(self) -> bool:
        return self.ratio <= 1

    @property
    def is_tight(self) -> bool:
        """What the estimate leaves out may be more than what is left."""
        return self.ratio > _MOST_OF_DEVICE


def estimate_fit(config: TrainConfig, device: TargetDevice) -> MemoryFit:
    """For a configuration without problems of another kind; nothing is asked of this machine."""
    return MemoryFit(
        device=device, estimate=estimate_memory(config, device_type=device.device_type)
    )


def parse_bytes(text: str) -> int | None:
    """`80GiB` or `64 GB` in bytes; None of anything else."""
    match = _SIZE.fullmatch(text.strip().casefold())
    if match is None or match[2] not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[match[2]]) or None


@or_unavailable
def find_target_device(text: str) -> TargetDevice:
    """By a size, or by words of a known device's name with its memory where that is needed."""
    size_bytes = parse_bytes(text)
    if size_bytes is not None:
        return TargetDevice(label=text.strip(), memory_bytes=size_bytes)
    words = set(re.split(r"[\s_-]+", normalise_name(text)))
    sizes = {int(match[1]) for word in words if (match := _NAMED_SIZE.fullmatch(word))}
    names = {word for word in words if not _NAMED_SIZE.fullmatch(word)}
    found = {
        name: size_gib
        for name, size_gib in DEVICE_MEMORY_GIB.items()
        if names and names <= _split(name) and (not sizes or sizes == {size_gib})
    }
    shown = text.strip()[:_MAX_TEXT]
    if not found:
        known = sorted({describe_device(*item) for item in DEVICE_MEMORY_GIB.items()})
        lower = {name.casefold(): name for name in known}
        near = difflib.get_close_matches(shown.casefold(), lower, 3, _NEAR)
        listed = f"did you mean {' or '.join(lower[one] for one in near)}? " if near else ""
        raise Missing(
            f"“{shown}” is no known device and no memory size; {listed}give a size such as 80GiB, "
            f"or one of {', '.join(known)}"
        )
    if len(set(found.values())) > 1:
        several = ", ".join(describe_device(*item) for item in found.items())
        raise Missing(f"“{shown}” may be any of {several}; add its memory, such as -80GB")
    product, size_gib = next(iter(found.items()))
    return TargetDevice(label=shown, memory_bytes=size_gib * _GIB, product=product)


def describe_device(name: str, size_gib: int) -> str:
    """What a user may write for a device."""
    words = [word for word in name.split() if word not in ("NVIDIA", "AMD", "Tesla")]
    words = [word for word in "-".join(words).split("-") if not _NAMED_SIZE.fullmatch(word.lower())]
    return f"{'-'.join(words)}-{size_gib}GB"


def _split(name: str) -> set[str]:
    return set(re.split(r"[\s-]+", normalise_name(name)))


def _find_size(name: str) -> int:
    if name in _MEMORY_GIB:
        return _MEMORY_GIB[name]
    match = re.search(r"([0-9]+)GB", name)
    assert match is not None, f"{name} has no memory in its name nor in the table"
    return int(match[1])


DEVICE_MEMORY_GIB = {device.name: _find_size(device.name) for device in DEVICES}
"""Memory of the devices of `core.hardware`."""
