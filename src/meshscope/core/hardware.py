"""Peak arithmetic rate and memory bandwidth of accelerators, by the exact name torch gives them.

Rates are the vendors' for dense matrices (half of what is advertised with sparsity), in FLOP/s at
the boost clock of the full product, one multiply-add counted as two. `float32` is plain float32;
`tf32` is what NVIDIA's matrix units make of float32 when a program allows it. Of consumer boards
the rate is that with float32 accumulation, which is what torch's matrix products use.

A name is looked up whole, after case, repeated blanks and the maker's name are taken off it: "L40"
is not an "L4", and a slice of a partitioned GPU has a name of its own, which is not here. What is
not known is `Unavailable`: measure it (`Recorder.measure_peak`) or declare it (`set_peak`).

Wrong where a board is capped below its product's clock or power: the vendor's figure stays what
it is. MI250X rates are of one of its two dies, which torch shows as a device of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable

_TERA = 1e12
_GIGA = 1e9
TF32 = "tf32"
_MAX_NAMES_LISTED = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a product can do at best."""

    name: str
    """As torch reports it."""
    flops_per_s: Mapping[str, float]
    """Dense peak by dtype: torch's names without `torch.`, and `tf32`; `float8` stands for both
    of its kinds."""
    bandwidth_bytes_per_s: float
    """Of its own memory."""


def _device(
    name: str,
    *,
    half: float | None,
    float32: float,
    gigabytes_per_s: float,
    bfloat16: float | None = None,
    tf32: float | None = None,
    float8: float | None = None,
    float64: float | None = None,
) -> Device:
    """Rates in TFLOP/s. `half` is float16, and bfloat16 too where that is not given."""
    rates = {
        "float16": half,
        "bfloat16": half if bfloat16 is None else bfloat16,
        "float32": float32,
        TF32: tf32,
        "float8": float8,
        "float64": float64,
    }
    return Device(
        name=name,
        flops_per_s={dtype: rate * _TERA for dtype, rate in rates.items() if rate},
        bandwidth_bytes_per_s=gigabytes_per_s * _GIGA,
    )


def _volta(name: str, *, half: float, float32: float, gigabytes_per_s: float) -> Device:
    """Without bfloat16: torch emulates it there, and there is no rate to compare with."""
    made = _device(name, half=half, float32=float32, gigabytes_per_s=gigabytes_per_s)
    rates = {dtype: rate for dtype, rate in made.flops_per_s.items() if dtype != "bfloat16"}
    return Device(name=name, flops_per_s=rates, bandwidth_bytes_per_s=made.bandwidth_bytes_per_s)


def _a100(name: str, gigabytes_per_s: float) -> Device:
    return _device(
        name, half=312, tf32=156, float32=19.5, float64=19.5, gigabytes_per_s=gigabytes_per_s
    )


def _hopper(name: str, gigabytes_per_s: float) -> Device:
    return _device(
        name, half=989.4, tf32=494.7, float8=1978.9, float32=66.9, float64=66.9,
        gigabytes_per_s=gigabytes_per_s,
    )  # fmt: skip


def _hopper_pcie(name: str, gigabytes_per_s: float) -> Device:
    return _device(
        name, half=756, tf32=378, float8=1513, float32=51.2, float64=51.2,
        gigabytes_per_s=gigabytes_per_s,
    )  # fmt: skip


def _hopper_nvl(name: str, gigabytes_per_s: float) -> Device:
    return _device(
        name, half=835.5, tf32=417.5, float8=1670.5, float32=60, float64=60,
        gigabytes_per_s=gigabytes_per_s,
    )  # fmt: skip


def _mi300(name: str, gigabytes_per_s: float) -> Device:
    return _device(
        name, half=1307.4, tf32=653.7, float8=2614.9, float32=163.4, float64=163.4,
        gigabytes_per_s=gigabytes_per_s,
    )  # fmt: skip


DEVICES: tuple[Device, ...] = (
    # NVIDIA, data centre
    _volta("Tesla V100-SXM2-16GB", half=125, float32=15.7, gigabytes_per_s=900),
    _volta("Tesla V100-SXM2-32GB", half=125, float32=15.7, gigabytes_per_s=900),
    _volta("Tesla V100-PCIE-16GB", half=112, float32=14, gigabytes_per_s=900),
    _volta("Tesla V100-PCIE-32GB", half=112, float32=14, gigabytes_per_s=900),
    _volta("Tesla V100S-PCIE-32GB", half=130, float32=16.4, gigabytes_per_s=1134),
    _volta("Tesla T4", half=65, float32=8.1, gigabytes_per_s=320),
    _a100("NVIDIA A100-SXM4-40GB", 1555),
    _a100("NVIDIA A100-SXM4-80GB", 2039),
    _a100("NVIDIA A100-PCIE-40GB", 1555),
    _a100("NVIDIA A100 80GB PCIe", 1935),
    _a100("NVIDIA A800-SXM4-80GB", 2039),
    _a100("NVIDIA A800 80GB PCIe", 1935),
    _device("NVIDIA A30", half=165, tf32=82, float32=10.3, float64=10.3, gigabytes_per_s=933),
    _device("NVIDIA A10", half=125, tf32=62.5, float32=31.2, gigabytes_per_s=600),
    _device("NVIDIA A10G", half=70, tf32=35, float32=35, gigabytes_per_s=600),
    _device("NVIDIA A40", half=149.7, tf32=74.8, float32=37.4, gigabytes_per_s=696),
    _device("NVIDIA L4", half=121, tf32=60, float8=242.5, float32=30.3, gigabytes_per_s=300),
    _device("NVIDIA L40", half=181.05, tf32=90.5, float8=362, float32=90.5, gigabytes_per_s=864),
    _device("NVIDIA L40S", half=362.05, tf32=183, float8=733, float32=91.6, gigabytes_per_s=864),
    _device("NVIDIA L20", half=119.5, tf32=59.8, float8=239, float32=59.8, gigabytes_per_s=864),
    _hopper("NVIDIA H100 80GB HBM3", 3352),
    _hopper_pcie("NVIDIA H100 PCIe", 2039),
    _hopper_nvl("NVIDIA H100 NVL", 3938),
    _hopper("NVIDIA H800", 3352),
    _hopper_pcie("NVIDIA H800 PCIe", 2039),
    _device("NVIDIA H20", half=148, tf32=74, float8=296, float32=44, gigabytes_per_s=4000),
    _hopper("NVIDIA H200", 4800),
    _hopper_nvl("NVIDIA H200 NVL", 4800),
    _hopper("NVIDIA GH200 480GB", 4000),
    _hopper("NVIDIA GH200 144G HBM3e", 4900),
    _device(
        "NVIDIA B200", half=2250, tf32=1125, float8=4500, float32=75, float64=37,
        gigabytes_per_s=7700,
    ),
    _device(
        "NVIDIA GB200", half=2500, tf32=1250, float8=5000, float32=80, float64=40,
        gigabytes_per_s=8000,
    ),
    _device(
        "NVIDIA B300", half=2250, tf32=1125, float8=4500, float32=75, float64=1.2,
        gigabytes_per_s=7700,
    ),
    _device(
        "NVIDIA GB300", half=2500, tf32=1250, float8=5000, float32=80, float64=1.4,
        gigabytes_per_s=8000,
    ),
    # NVIDIA, workstation and consumer
    _device("NVIDIA RTX A6000", half=154.8, tf32=77.4, float32=38.7, gigabytes_per_s=768),
    _device(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", half=503.8, tf32=251.9,
        float8=1007.6, float32=125, gigabytes_per_s=1792,
    ),
    _device(
        "NVIDIA RTX 6000 Ada Generation", half=364.2, tf32=182.1, float8=728.5, float32=91.1,
        gigabytes_per_s=960,
    ),
    _device("NVIDIA GeForce RTX 3090", half=71, tf32=35.6, float32=35.6, gigabytes_per_s=936),
    _device("NVIDIA GeForce RTX 4080", half=97.5, tf32=48.7, float32=48.7, gigabytes_per_s=717),
    _device(
        "NVIDIA GeForce RTX 4090", half=165.2, tf32=82.6, float8=330.3, float32=82.6,
        gigabytes_per_s=1008,
    ),
    _device(
        "NVIDIA GeForce RTX 5090", half=209.5, tf32=104.8, float8=419, float32=104.8,
        gigabytes_per_s=1792,
    ),
    # AMD
    _device("AMD Instinct MI100", half=184.6, bfloat16=92.3, float32=46.1, gigabytes_per_s=1229),
    _device("AMD Instinct MI210", half=181, float32=45.3, float64=45.3, gigabytes_per_s=1638),
    _device("AMD Instinct MI250X", half=191.5, float32=47.9, float64=47.9, gigabytes_per_s=1638),
    _mi300("AMD Instinct MI300X", 5300),
    _mi300("AMD Instinct MI325X", 6000),
    _device(
        "AMD Instinct MI350X", half=2306.9, float8=4613.7, float32=144.2, float64=72.1,
        gigabytes_per_s=8000,
    ),
    _device(
        "AMD Instinct MI355X", half=2516.6, float8=5033.2, float32=157.3, float64=78.6,
        gigabytes_per_s=8000,
    ),
    _device(
        "AMD Instinct MI300A", half=980.6, tf32=490.3, float8=1961.2, float32=122.6,
        float64=122.6, gigabytes_per_s=5300,
    ),
)  # fmt: skip

AMBIGUOUS: dict[str, str] = {
    "AMD Instinct MI250X / MI250": "the driver gives this name to two products (191.5 and 181.1 "
    "TFLOP/s of float16 per die)",
    "NVIDIA H100": "several products are shortened to this name (SXM 989, NVL 835, PCIe 756 "
    "TFLOP/s of bfloat16)",
}
"""Names of which it is known that they do not say enough."""

_MAKERS = ("nvidia ", "amd ", "tesla ")


def normalise_name(name: str) -> str:
    """A device's name without what drivers write now one way, now another."""
    text = " ".join(name.split()).casefold()
    for maker in _MAKERS:
        text = text.removeprefix(maker)
    return text


_BY_NAME = {normalise_name(device.name): device for device in DEVICES}
_AMBIGUOUS = {normalise_name(name): reason for name, reason in AMBIGUOUS.items()}


def find_device(name: str) -> Device | Unavailable:
    """The product of that name, nothing like it."""
    key = normalise_name(name)
    if key in _BY_NAME:
        return _BY_NAME[key]
    if key in _AMBIGUOUS:
        return Unavailable(f"no peak for “{name}”: {_AMBIGUOUS[key]}; declare or measure it")
    known = ", ".join(device.name for device in DEVICES[:_MAX_NAMES_LISTED])
    return Unavailable(
        f"no peak for “{name}”: it is not in the table of devices; declare it with set_peak or "
        f"measure it with measure_peak (known: {known})"
    )


def find_by_word(text: str) -> Device | Unavailable:
    """As people name a device: its whole name, or a part that only one product has."""
    key = normalise_name(text)
    if key in _BY_NAME:
        return _BY_NAME[key]
    fitting = [device for name, device in _BY_NAME.items() if key and key in name]
    if len(fitting) == 1:
        return fitting[0]
    listed = fitting or list(_BY_NAME.values())
    names = ", ".join(device.name for device in listed[:_MAX_NAMES_LISTED])
    reason = "several devices are called so" if fitting else "no known device is called so"
    return Unavailable(f"{reason}; name one of {names}")


@or_unavailable
def find_peak(name: str, dtype: str) -> float:
    """Dense peak in FLOP/s of a device for a dtype."""
    device = need(find_device(name))
    rate = device.flops_per_s.get(normalise_dtype(dtype))
    if rate is None:
        known = ", ".join(device.flops_per_s)
        raise Missing(f"no peak of {device.name} for {dtype}; there is one for {known}")
    return rate


@or_unavailable
def find_bandwidth(name: str) -> float:
    """Bytes per second of a device's own memory."""
    return need(find_device(name)).bandwidth_bytes_per_s


_SHORT_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "fp64": "float64", "double": "float64", "fp8": "float8",
}  # fmt: skip


def normalise_dtype(dtype: str) -> str:
    """`torch.bfloat16`, `bf16` → `bfloat16`; any kind of float8 → `float8`."""
    text = dtype.strip().casefold().removeprefix("torch.")
    text = _SHORT_DTYPES.get(text, text)
    return "float8" if text.startswith("float8") else text
