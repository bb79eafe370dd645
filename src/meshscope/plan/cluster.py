"""What a job runs on: a device, how many, how many share a node, and the links between them.

    make_cluster("H100-80GB", 256, per_node=8)

Peaks and memory are of `core.hardware` and `core.config.device_fit`. Links are presets by the
device's generation, with what makers state per direction and device (`nominal`), and the share of
it that nccl-tests' bus bandwidth of large messages reaches (`ratio`). Every number has its source.
Power is the board's limit, so energy made from it is an upper bound.
"""

import re
from dataclasses import dataclass, replace

from meshscope.core.config.device_fit import TargetDevice, find_target_device
from meshscope.core.hardware import Device, find_device
from meshscope.core.unavailable import Unavailable
from meshscope.errors import UsageError

_GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between devices, in one direction."""

    name: str
    nominal_bytes_per_s: float
    """Inside a node of one device, between nodes of all a node's adapters together."""
    ratio: float
    """Of nominal, as bus bandwidth of large collectives."""
    source: str

    @property
    def bytes_per_s(self) -> float:
        return self.nominal_bytes_per_s * self.ratio


def _link(name: str, gigabytes_per_s: float, ratio: float, source: str) -> Link:
    return Link(name=name, nominal_bytes_per_s=gigabytes_per_s * _GIGA, ratio=ratio, source=source)


_NCCL = "bus bandwidth of nccl-tests as commonly reported; not measured here"

INSIDE: dict[str, Link] = {
    "nvlink2": _link("NVLink 2", 150, 0.85, f"V100: 6 links of 25 GB/s; {_NCCL}"),
    "nvlink3": _link("NVLink 3", 300, 0.77, f"A100: 12 links of 25 GB/s; {_NCCL} (230 GB/s)"),
    "nvlink-800": _link("NVLink of A800 and H800", 200, 0.80, f"8 links of 25 GB/s; {_NCCL}"),
    "nvlink4": _link("NVLink 4", 450, 0.80, f"H100: 18 links of 25 GB/s; {_NCCL} (360 GB/s)"),
    "nvlink5": _link("NVLink 5", 900, 0.78, f"B200: 18 links of 50 GB/s; {_NCCL} (700 GB/s)"),
    "xgmi3": _link("Infinity Fabric 3", 448, 0.70, f"MI300X: 7 links of 64 GB/s; {_NCCL}"),
    "xgmi4": _link("Infinity Fabric 4", 537, 0.70, f"MI350X: 7 links of 76.8 GB/s; {_NCCL}"),
    "pcie3": _link("PCIe 3 x16", 16, 0.70, f"16 lanes of 8 GT/s; {_NCCL}"),
    "pcie4": _link("PCIe 4 x16", 32, 0.70, f"16 lanes of 16 GT/s; {_NCCL}"),
    "pcie5": _link("PCIe 5 x16", 64, 0.70, f"16 lanes of 32 GT/s; {_NCCL}"),
}
BETWEEN: dict[str, Link] = {
    "hdr": _link("InfiniBand HDR", 25, 0.9, f"200 Gb/s an adapter; {_NCCL}"),
    "ndr": _link("InfiniBand NDR", 50, 0.9, f"400 Gb/s an adapter; {_NCCL}"),
    "xdr": _link("InfiniBand XDR", 100, 0.9, f"800 Gb/s an adapter; {_NCCL}"),
    "eth100": _link("Ethernet 100", 12.5, 0.8, f"100 Gb/s an adapter; {_NCCL}"),
    "eth400": _link("Ethernet 400 (RoCE)", 50, 0.85, f"400 Gb/s an adapter; {_NCCL}"),
    "eth25": _link("Ethernet 25", 3.125, 0.7, f"25 Gb/s an adapter, TCP; {_NCCL}"),
}
"""Of one adapter; `make_cluster` multiplies by how many a node has."""

_GENERATIONS: tuple[tuple[str, str, str, float, float], ...] = (
    # Words of the product's name, link inside, link between, power in W, gemm's share of the peak
    ("V100-SXM", "nvlink2", "hdr", 300, 0.75),
    ("V100", "pcie3", "eth100", 250, 0.75),
    ("A100-SXM", "nvlink3", "hdr", 400, 0.77),
    ("A800-SXM", "nvlink-800", "hdr", 400, 0.77),
    ("A100", "pcie4", "hdr", 300, 0.77),
    ("A800", "pcie4", "hdr", 300, 0.77),
    ("H100 80GB HBM3", "nvlink4", "ndr", 700, 0.70),
    ("H800 PCIe", "pcie5", "ndr", 350, 0.6),
    ("H100 PCIe", "pcie5", "ndr", 350, 0.6),
    ("H100 NVL", "pcie5", "ndr", 400, 0.6),
    ("H800", "nvlink-800", "ndr", 700, 0.70),
    ("H200 NVL", "pcie5", "ndr", 600, 0.65),
    ("H200", "nvlink4", "ndr", 700, 0.75),
    ("GH200", "nvlink4", "ndr", 700, 0.75),
    ("H20", "nvlink4", "ndr", 400, 0.85),
    ("GB300", "nvlink5", "xdr", 1400, 0.7),
    ("B300", "nvlink5", "xdr", 1100, 0.72),
    ("GB200", "nvlink5", "ndr", 1200, 0.67),
    ("B200", "nvlink5", "ndr", 1000, 0.7),
    ("MI300X", "xgmi3", "ndr", 750, 0.5),
    ("MI325X", "xgmi3", "ndr", 1000, 0.5),
    ("MI350X", "xgmi4", "ndr", 1000, 0.64),
    ("MI355X", "xgmi4", "ndr", 1400, 0.65),
    ("RTX PRO 6000", "pcie5", "ndr", 600, 0.6),
    ("MI300A", "xgmi3", "ndr", 760, 0.5),
    ("MI250X", "xgmi3", "hdr", 280, 0.6),
)
"""Power: board limits of data sheets. The last column is what large bf16 matrix products reach of
the dense peak under that limit: public measurements of about 650 to 700 TFLOP/s on H100 SXM and of
600 to 660 on MI300X; A100's is fitted (`calibration`). Blackwells are one silicon: B200's rate
times the third root of the power, over each one's own peak. MI355X by AMD's own comparison with
B200 (1.02 to 1.16 times its tokens in bf16), MI350X by the third root of the power."""


_BANDWIDTH = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?(?:([MGT])(B|b)|([MGTmgt])bit)(?:/s|ps|)")
_SCALES = {"M": 1e6, "G": _GIGA, "T": 1e12}
_USUAL_NODE, _RACK_SIZE = 8, 72
_RACK_DEVICES = ("GB200", "GB300")
"""Sold as NVL72 racks, in which NVLink joins 72 devices (NVIDIA's data sheets)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    target: TargetDevice
    device: Device
    num_devices: int
    per_node: int
    inside: Link
    between: Link
    """Of a whole node."""
    power_w: float | Unavailable
    gemm_ratio: float
    gemm_source: str
    num_processors: float | None = None
    """That `num_devices` ranks share; None: each has one of its own."""

    @property
    def ranks_per_processor(self) -> float:
        """At least 1: what all compute is longer by while all ranks compute."""
        return max(1.0, self.num_devices / (self.num_processors or self.num_devices))

    @property
    def is_host(self) -> bool:
        """Whether ranks compute on the host's cores, where issuing an operation takes its turn."""
        return self.target.device_type == "cpu"

    @property
    def memory_bytes(self) -> int:
        return self.target.memory_bytes

    def find_peak(self, dtype: str) -> float | Unavailable:
        """Dense FLOP/s."""
        rate = self.device.flops_per_s.get(dtype)
        if rate is None:
            known = ", ".join(self.device.flops_per_s)
            return Unavailable(f"{self.device.name} has no peak for {dtype}; it has {known}")
        return rate


def make_cluster(
    device: str,
    num_devices: int,
    *,
    per_node: int | None = None,
    inside: str | None = None,
    between: str | None = None,
    num_adapters: int | None = None,
) -> Cluster:
    """By names or bandwidths such as `300GB/s`; UsageError with everything that is wrong.

    A node is what the link inside joins: 8 devices, or of the 72 of an NVL72 rack as many as divide
    the job.
    """
    if per_node is None:
        per_node = _find_node_size(device, num_devices)
    counts = {"devices": num_devices, "per node": per_node, "adapters": num_adapters}
    problems = [
        f"{name} is {value}, expected at least 1"
        for name, value in counts.items()
        if value is not None and value < 1
    ]
    if per_node >= 1 and num_devices > per_node and num_devices % per_node:
        problems.append(
            f"{num_devices} devices are no whole number of nodes of {per_node}; change one of them"
        )
    target = find_target_device(device)
    if isinstance(target, Unavailable):
        problems.append(f"device: {target.reason}")
    elif target.product is None:
        problems.append(
            f"device: {device!r} is a memory size, which says nothing of speed; name a device such "
            "as H100-80GB"
        )
    links = {}
    for what, text, known in (("inside", inside, INSIDE), ("between", between, BETWEEN)):
        found = None if text is None else find_link(text, known)
        if text is not None and found is None:
            problems.append(
                f"link {what} nodes: {text[:40]!r} is unknown; use one of {', '.join(known)}, or a "
                "bandwidth such as 300GB/s or 400Gb/s (b is bits)"
            )
        links[what] = found
    if problems or isinstance(target, Unavailable) or target.product is None:
        raise UsageError("; ".join(problems))
    product = find_device(target.product)
    assert not isinstance(product, Unavailable)
    words, inside_name, between_name, power, ratio = _find_generation(target.product)
    adapters = num_adapters or per_node
    own = links["between"]
    node = own if own and own.name.startswith("given") else (own or BETWEEN[between_name])
    if not node.name.startswith("given"):
        total = node.nominal_bytes_per_s * adapters
        node = replace(node, nominal_bytes_per_s=total, name=f"{adapters} × {node.name}")
    return Cluster(
        target=target,
        device=product,
        num_devices=num_devices,
        per_node=min(per_node, num_devices),
        inside=links["inside"] or INSIDE[inside_name],
        between=node,
        power_w=power or Unavailable(f"no power limit of {target.product} is known"),
        gemm_ratio=ratio,
        gemm_source=f"preset of {words or 'devices without a preset'}",
    )


def make_host_cluster(num_ranks: int, num_cores: int, memory_bytes: int) -> Cluster:
    """Processes that share one machine's cores. Rates are placeholders that a recorded run sets
    right (`from_run.fit_host_runs`): every rank counts as a node, and memory as the link."""
    source = "placeholder, to be fitted to a recorded run"
    loopback = Link(name="memory", nominal_bytes_per_s=_GIGA, ratio=1, source=source)
    return Cluster(
        target=TargetDevice(label="this host", memory_bytes=memory_bytes, device_type="cpu"),
        device=Device(
            name="core of this host",
            flops_per_s={"float32": 50 * _GIGA, "bfloat16": 50 * _GIGA},
            bandwidth_bytes_per_s=10 * _GIGA,
        ),
        num_devices=num_ranks,
        per_node=1,
        inside=replace(loopback, nominal_bytes_per_s=1e3 * _GIGA),
        between=loopback,
        power_w=Unavailable("no power limit of this host is known"),
        gemm_ratio=1.0,
        gemm_source=source,
        num_processors=min(num_ranks, max(1, num_cores)),
    )


def _find_node_size(device: str, num_devices: int) -> int:
    if not any(name in device.upper() for name in _RACK_DEVICES):
        return _USUAL_NODE
    return max((n for n in range(1, _RACK_SIZE + 1) if num_devices % n == 0), default=1)


def find_link(text: str, known: dict[str, Link]) -> Link | None:
    """By its name or its bandwidth; None of anything else. B is bytes and b is bits, so `gb/s`,
    which may be either, is refused."""
    key = text.strip()
    if key.casefold() in known:
        return known[key.casefold()]
    match = _BANDWIDTH.fullmatch(key)
    if match is None or not float(match[1]):
        return None
    scale = _SCALES[(match[2] or match[4]).upper()]
    rate = float(match[1]) * scale / (1 if match[3] == "B" else 8)
    return Link(name=f"given {key}", nominal_bytes_per_s=rate, ratio=1.0, source="given")


def _find_generation(product: str) -> tuple[str, str, str, float, float]:
    for entry in _GENERATIONS:
        if entry[0] in product:
            return entry
    return ("", "pcie4", "eth100", 0, 0.6)
