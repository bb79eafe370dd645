"""Records traces with shapes of programs whose FLOPs and bytes are known by hand, on a GPU.

    python benchmarks/trace_programs.py --output FOLDER [--only NAME…] [--small]

Needs torch alone. FOLDER gets `NAME.json.gz` for each program and `programs.json` with what is
known of it without a profiler: FLOPs a step by formula, seconds a step or a call by CUDA events.
Programs of the kinds that train (residual network, GPT, Llama, DLRM with dense and with sparse
gradients, mixture of experts, diffusion's U-net, compiled GPT), single operators between events
(`op_…`), and ways of recording that readers meet: CUDA graphs, generation without steps, ranges of
the user without steps, a host that waits for its device in every layer, late input, a window that
begins in the middle of a step, stacks and memory. `--small` makes all of it small and takes the CPU
where there is no GPU: a trial of the program itself. A program that cannot run here (no compiler
for Triton, no float8) is left out, with its reason in the file.
`trace_roofline.py --recorded FOLDER` holds what is read from the traces against it.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function, schedule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARM_STEPS, TRACED_STEPS, TIMED_STEPS = 4, 3, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A step that can be taken again and again, and what it costs by hand."""

    step: Callable[[], object]
    flops: float | None = None
    """Of matrix products, convolutions and attention in one step; None where nobody counted."""
    formula: str = ""
    num_bytes: float | None = None
    """At the least, of a single operator."""
    has_steps: bool = True
    is_middle: bool = False
    """The window begins in the middle of a step."""
    options: dict[str, bool] = field(default_factory=dict)


def count_products(
    layers: list[tuple[int, int]], rows: int, *, first_needs_no_input: bool
) -> float:
    """Forward and backward of dense layers over so many rows."""
    macs = sum(a * b for a, b in layers)
    first = layers[0][0] * layers[0][1] if first_needs_no_input else 0
    return 2.0 * rows * (3 * macs - first)


class Bottleneck(nn.Module):
    """ResNet-50's block."""

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        sizes = [(width, inner, 1, 1), (inner, inner, 3, stride), (inner, out, 1, 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False) for a, b, kernel, step in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        is_changed = stride > 1 or width != out
        self.around = nn.Conv2d(width, out, 1, stride, bias=False) if is_changed else None
        self.around_norm = nn.BatchNorm2d(out) if is_changed else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for place, (convolution, norm) in enumerate(
            zip(self.convolutions, self.norms, strict=True)
        ):
            y = norm(convolution(y))
            y = functional.relu(y, inplace=True) if place < 2 else y
        if self.around is not None and self.around_norm is not None:
            x = self.around_norm(self.around(x))
        return functional.relu(x + y, inplace=True)


def make_resnet(*, small: bool) -> Program:
    """ResNet-50 in bfloat16, SGD with momentum."""
    batch, size = (2, 64) if small else (64, 224)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    side = size // 2
    first = side * side * 64 * 3 * 49
    macs, width, side = first, 64, size // 4
    for inner, count, step in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for place in range(count):
            stride = step if place == 0 else 1
            layers.append(Bottleneck(width, inner, stride))
            macs += side * side * width * inner
            after = side // stride
            macs += after * after * (9 * inner * inner + 4 * inner * inner)
            macs += after * after * width * 4 * inner if width != 4 * inner else 0
            width, side = 4 * inner, after
    macs += width * 1000
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]
    model = nn.Sequential(*layers).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    images = torch.randn(batch, 3, size, size, device=DEVICE)
    images = images.to(memory_format=torch.channels_last)
    target = torch.randint(1000, (batch,), device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = functional.cross_entropy(model(images), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step=step, flops=2.0 * batch * (3 * macs - first),
                   formula="2·B·(3·multiply-adds − first convolution's)")  # fmt: skip


class Attention(nn.Module):
    """Of GPT's and of Llama's kind."""

    def __init__(self, width: int, heads: int, key_heads: int, *, is_turned: bool) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.inward = nn.Linear(width, width + 2 * key_heads * self.size, bias=not is_turned)
        self.out = nn.Linear(width, width, bias=not is_turned)
        self.is_turned = is_turned

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions."""
        s, half = x.shape[2], self.size // 2
        angles = torch.arange(s, device=x.device)[:, None] / (
            10000 ** (torch.arange(half, device=x.device) / half)
        )
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        small = self.key_heads * self.size
        query, key, value = self.inward(x).split([w, small, small], -1)
        query = query.view(b, s, self.heads, self.size).transpose(1, 2)
        key, value = (
            one.view(b, s, self.key_heads, self.size).transpose(1, 2) for one in (key, value)
        )
        if self.is_turned:
            query, key = self.turn(query), self.turn(key)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads != self.key_heads
        )
        return self.out(mixed.transpose(1, 2).reshape(b, s, w))


class Layer(nn.Module):
    """A decoder's layer."""

    def __init__(self, width: int, heads: int, key_heads: int, ffn: int, *, is_llama: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if is_llama else nn.LayerNorm
        self.attention = Attention(width, heads, key_heads, is_turned=is_llama)
        self.norms = nn.ModuleList([norm(width), norm(width)])
        self.inner = nn.Linear(width, ffn * (2 if is_llama else 1), bias=not is_llama)
        self.outer = nn.Linear(ffn, width, bias=not is_llama)
        self.is_llama = is_llama
        self.drop = nn.Dropout(0.0 if is_llama else 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norms[0](x)))
        y = self.inner(self.norms[1](x))
        if self.is_llama:
            gate, y = y.chunk(2, -1)
            y = functional.silu(gate) * y
        else:
            y = functional.gelu(y)
        return x + self.drop(self.outer(y))


class Decoder(nn.Module):
    """Table, layers, head."""

    def __init__(
        self, layers: int, width: int, heads: int, key_heads: int, ffn: int, vocab: int, *,
        is_llama: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, key_heads, ffn, is_llama=is_llama) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width) if is_llama else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.wait = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
            if self.wait and not bool(x.isfinite().all()):
                raise RuntimeError("not finite")
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def make_decoder(
    *, is_llama: bool, small: bool, changes: Callable[[Decoder], Any] | None = None, **fields: Any
) -> Program:
    """GPT-2 small under autocast, or a narrow Llama in plain bfloat16."""
    if is_llama:
        layers, width, heads, key_heads, ffn, vocab, b, s = 8, 2048, 16, 4, 5632, 32000, 4, 2048
    else:
        layers, width, heads, key_heads, ffn, vocab, b, s = 12, 768, 12, 12, 3072, 50304, 8, 1024
    if small:
        layers, width, heads, ffn, vocab, b, s = 2, 64, 4, 128, 512, 2, 64
        key_heads = 2 if is_llama else 4
    model = Decoder(layers, width, heads, key_heads, ffn, vocab, is_llama=is_llama).to(DEVICE)
    model = model.to(torch.bfloat16) if is_llama else model
    run: Callable[[torch.Tensor], torch.Tensor] = model
    if changes is not None:
        run = changes(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, fused=is_llama and DEVICE.type == "cuda"
    )
    tokens = torch.randint(vocab, (b, s), device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=not is_llama):
            logits = run(tokens)
            loss = functional.cross_entropy(logits.view(-1, vocab), tokens.view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    size = width // heads
    weights = (
        2 * width * width + 2 * key_heads * size * width + width * ffn * (3 if is_llama else 2)
    )
    # Dense attention: forward two products, backward of a fused kernel five, each 2·s·h a token
    # and layer; a causal kernel does half, as the row says.
    flops = b * s * (6.0 * (layers * weights + width * vocab) + layers * 14.0 * s * width)
    formula = "B·s·(6·N + 14·L·h·s), attention as dense, its backward 5 products"
    return Program(step=step, flops=flops, formula=formula, **fields)


def make_dlrm(*, small: bool, is_sparse: bool) -> Program:
    """Dense layers, bags, products of all pairs, dense layers."""
    batch, width, tables, rows, per_bag = (
        (64, 16, 4, 100, 4) if small else (8192, 64, 26, 100_000, 20)
    )
    bottom_sizes = [(13, 512), (512, 256), (256, width)]
    pairs = (tables + 1) * tables // 2
    top_sizes = [(width + pairs, 1024), (1024, 1024), (1024, 512), (512, 1)]

    def stack(sizes: list[tuple[int, int]]) -> nn.Sequential:
        return nn.Sequential(*(part for a, b in sizes for part in (nn.Linear(a, b), nn.ReLU())))

    bottom, top = stack(bottom_sizes).to(DEVICE), stack(top_sizes)[:-1].to(DEVICE)
    bags = nn.ModuleList(
        nn.EmbeddingBag(rows, width, mode="sum", sparse=is_sparse) for _ in range(tables)
    ).to(DEVICE)
    weights = [*bottom.parameters(), *top.parameters(), *bags.parameters()]
    optimizer = (torch.optim.SGD if is_sparse else torch.optim.Adagrad)(weights, lr=0.01)
    dense = torch.randn(batch, 13, device=DEVICE)
    indices = [torch.randint(rows, (batch * per_bag,), device=DEVICE) for _ in range(tables)]
    offsets = torch.arange(0, batch * per_bag, per_bag, device=DEVICE)
    clicks = torch.randint(2, (batch, 1), device=DEVICE).float()
    at = torch.tril_indices(tables + 1, tables + 1, -1, device=DEVICE)

    def step() -> None:
        x = bottom(dense)
        pooled = [bag(one, offsets) for bag, one in zip(bags, indices, strict=True)]
        all_rows = torch.stack([x, *pooled], 1)
        crossed = torch.bmm(all_rows, all_rows.transpose(1, 2))[:, at[0], at[1]]
        guess = top(torch.cat([x, crossed], 1))
        functional.binary_cross_entropy_with_logits(guess, clicks).backward()
        optimizer.step()
        optimizer.zero_grad()

    flops = count_products(bottom_sizes, batch, first_needs_no_input=True)
    flops += count_products(top_sizes, batch, first_needs_no_input=False)
    flops += 3 * 2.0 * batch * (tables + 1) ** 2 * width
    return Program(step=step, flops=flops, formula="2·B·(3·multiply-adds − first layer's)")


class Experts(nn.Module):
    """Two of eight experts for each token, one after the other."""

    def __init__(self, width: int, ffn: int, num: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, ffn, bias=False), nn.SiLU(), nn.Linear(ffn, width, bias=False)
            )
            for _ in range(num)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        share, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            found = expert(rows[token]) * share[token, place, None]
            out.index_add_(0, token, found.to(out.dtype))
        return out.view_as(x)


def make_experts(*, small: bool) -> Program:
    width, ffn, num, b, s = (64, 128, 4, 2, 32) if small else (2048, 5632, 8, 4, 2048)
    model = nn.Sequential(*(Experts(width, ffn, num) for _ in range(2))).to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(b, s, width, device=DEVICE, dtype=torch.bfloat16)

    def step() -> None:
        model(data).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    # The gate's product needs no gradient of its input in the first layer, its experts' neither.
    macs = width * num + 2 * 2 * width * ffn
    spared = width * num + 2 * width * ffn
    return Program(step=step, flops=2.0 * b * s * (2 * 3 * macs - spared),
                   formula="2·tokens·(3·multiply-adds − what the input needs not)")  # fmt: skip


class Spatial(nn.Module):
    """Group norm, convolution, attention over pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.attention = Attention(width, 4, 4, is_turned=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            y = convolution(functional.silu(norm(y)))
        b, c, h, w = y.shape
        y = self.attention(y.flatten(2).transpose(1, 2)).transpose(1, 2).view(b, c, h, w)
        return x + y


def make_unet(*, small: bool) -> Program:
    width, side, b = (32, 16, 2) if small else (320, 32, 16)
    model = nn.Sequential(
        nn.Conv2d(4, width, 3, padding=1), Spatial(width), nn.Conv2d(width, width, 3, 2, 1),
        Spatial(width), nn.Upsample(scale_factor=2), Spatial(width),
        nn.Conv2d(width, 4, 3, padding=1),
    ).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    noise = torch.randn(b, 4, side, side, device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = functional.mse_loss(model(noise), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step=step)


def make_generation(*, small: bool) -> Program:
    """Tokens one after the other, with what was computed kept; nothing says where a step is."""
    width, layers, s = (64, 2, 16) if small else (2048, 8, 64)
    model = Decoder(layers, width, 16 if not small else 4, 4, 2 * width, 1000, is_llama=False)
    model = model.to(DEVICE, torch.bfloat16).eval()

    @torch.no_grad()
    def step() -> None:
        tokens = torch.randint(1000, (4, s), device=DEVICE)
        for _ in range(8):
            chosen = model(tokens)[:, -1].float().softmax(-1).multinomial(1)
            tokens = torch.cat([tokens, chosen], 1)
            chosen.tolist()

    return Program(step=step, has_steps=False)


def make_ranges(*, small: bool) -> Program:
    """Ranges of the user around the parts of a step; no step of the profiler's."""
    width, b = (64, 32) if small else (4096, 4096)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    data = torch.randn(b, width, device=DEVICE)

    def step() -> None:
        with record_function("iteration"):
            with record_function("forward"):
                loss = model(data).square().mean()
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()

    flops = 2.0 * b * width * width * (3 * 4 - 1)
    return Program(step=step, has_steps=False, flops=flops, formula="2·B·h²·(3·L − 1)")


def make_late_input(*, small: bool) -> Program:
    """Input comes from a generator that takes longer than the device."""
    width, b = (64, 32) if small else (4096, 2048)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    class Slow(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, place: int) -> torch.Tensor:
            time.sleep(0.02 / b)
            return torch.full((width,), float(place % 7))

    batches = iter(torch.utils.data.DataLoader(Slow(), batch_size=b))

    def step() -> None:
        data = next(batches).to(DEVICE)
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step=step)


def make_graph(*, small: bool) -> Program:
    """A whole step of GPT as one CUDA graph."""
    if DEVICE.type != "cuda":
        raise NotImplementedError("CUDA graphs need CUDA")
    width, b = (64, 32) if small else (2048, 4096)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)))
    model = model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    data = torch.randn(b, width, device=DEVICE)

    def inner() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            inner()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inner()
    flops = 2.0 * b * width * width * (3 * 6 - 1)
    return Program(step=graph.replay, flops=flops, formula="2·B·h²·(3·L − 1)")


def make_compiled(model: Decoder) -> Any:
    return torch.compile(model)


def make_waiting(model: Decoder) -> Any:
    model.wait = True
    return model


def make_product(dtype: torch.dtype, *, small: bool, allow_tf32: bool = False) -> Program:
    n = 64 if small else 8192
    a, b = (torch.randn(n, n, device=DEVICE, dtype=dtype) for _ in range(2))

    def step() -> None:
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
        torch.mm(a, b)
        torch.backends.cuda.matmul.allow_tf32 = False

    return Program(
        step=step, flops=2.0 * n**3, formula="2·n³", num_bytes=3.0 * n * n * a.element_size()
    )


def make_product_float8(*, small: bool) -> Program:
    n = 64 if small else 8192
    a = torch.randn(n, n, device=DEVICE).to(torch.float8_e4m3fn)
    b = torch.randn(n, n, device=DEVICE).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=DEVICE)

    def step() -> None:
        torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return Program(step=step, flops=2.0 * n**3, formula="2·n³", num_bytes=4.0 * n * n)


def make_attention(*, small: bool, is_backward: bool) -> Program:
    b, h, s, d = (1, 2, 64, 16) if small else (8, 16, 4096, 128)
    parts = [
        torch.randn(b, h, s, d, device=DEVICE, dtype=torch.bfloat16, requires_grad=is_backward)
        for _ in range(3)
    ]
    out = functional.scaled_dot_product_attention(*parts)
    gradient = torch.randn_like(out)

    def step() -> None:
        if is_backward:
            torch.autograd.grad(out, parts, gradient, retain_graph=True)
        else:
            functional.scaled_dot_product_attention(*parts)

    flops = 4.0 * b * h * s * s * d * (2.5 if is_backward else 1)
    return Program(step=step, flops=flops, formula="4·B·H·s²·d, backward 2.5 times (5 products)")


def make_convolution(*, small: bool) -> Program:
    b, c, side = (2, 8, 8) if small else (64, 256, 56)
    data = torch.randn(b, c, side, side, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(c, c, 3, 3, device=DEVICE, dtype=torch.bfloat16)
    data, weight = (one.to(memory_format=torch.channels_last) for one in (data, weight))
    return Program(
        step=lambda: functional.conv2d(data, weight, padding=1),
        flops=2.0 * b * side * side * c * c * 9, formula="2·B·H·W·C²·9",
    )  # fmt: skip


def make_moving(kind: str, *, small: bool) -> Program:
    """Operators that only move data; four bytes a number."""
    n = 1 << (16 if small else 28)
    a, b = (torch.randn(n, device=DEVICE) for _ in range(2))
    rows = a.view(-1, 128)
    table = torch.randn((1 << (10 if small else 21)), 128, device=DEVICE)
    at = torch.randint(len(table), (len(rows) // 8,), device=DEVICE)
    steps: dict[str, tuple[Callable[[], object], float]] = {
        "add": (lambda: a + b, 12.0 * n),
        "copy": (lambda: a.clone(), 8.0 * n),
        "fill": (lambda: a.zero_(), 4.0 * n),
        "sum": (lambda: b.sum(), 4.0 * n),
        "gelu": (lambda: functional.gelu(b), 8.0 * n),
        "softmax": (lambda: rows.softmax(-1), 8.0 * n),
        "layernorm": (lambda: functional.layer_norm(rows, (128,)), 8.0 * n),
        "rows": (lambda: table[at], len(at) * (8 + 2 * 128 * 4.0)),
    }
    step, num_bytes = steps[kind]
    return Program(step=step, num_bytes=num_bytes, formula="bytes read and written once")


PROGRAMS: dict[str, Callable[[bool], Program]] = {
    "resnet": lambda small: make_resnet(small=small),
    "gpt": lambda small: make_decoder(is_llama=False, small=small),
    "llama": lambda small: make_decoder(is_llama=True, small=small),
    "dlrm": lambda small: make_dlrm(small=small, is_sparse=False),
    "dlrm_sparse": lambda small: make_dlrm(small=small, is_sparse=True),
    "experts": lambda small: make_experts(small=small),
    "unet": lambda small: make_unet(small=small),
    "gpt_compiled": lambda small: make_decoder(is_llama=False, small=small, changes=make_compiled),
    "llama_compiled": lambda small: make_decoder(is_llama=True, small=small, changes=make_compiled),
    "gpt_waiting": lambda small: make_decoder(is_llama=False, small=small, changes=make_waiting),
    "gpt_no_steps": lambda small: make_decoder(is_llama=False, small=small, has_steps=False),
    "gpt_middle": lambda small: make_decoder(
        is_llama=False, small=small, has_steps=False, is_middle=True
    ),
    "gpt_stacks": lambda small: make_decoder(
        is_llama=False, small=small,
        options={"with_stack": True, "profile_memory": True, "with_modules": True},
    ),
    "generation": lambda small: make_generation(small=small),
    "ranges": lambda small: make_ranges(small=small),
    "late_input": lambda small: make_late_input(small=small),
    "graph": lambda small: make_graph(small=small),
    "op_mm_bf16": lambda small: make_product(torch.bfloat16, small=small),
    "op_mm_fp32": lambda small: make_product(torch.float32, small=small),
    "op_mm_tf32": lambda small: make_product(torch.float32, small=small, allow_tf32=True),
    "op_mm_fp8": lambda small: make_product_float8(small=small),
    "op_attention": lambda small: make_attention(small=small, is_backward=False),
    "op_attention_backward": lambda small: make_attention(small=small, is_backward=True),
    "op_convolution": lambda small: make_convolution(small=small),
    **{f"op_{kind}": lambda small, kind=kind: make_moving(kind, small=small)  # type: ignore[misc]
       for kind in ("add", "copy", "fill", "sum", "gelu", "softmax", "layernorm", "rows")},
}  # fmt: skip


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def time_steps(program: Program) -> float:
    """Seconds a step, the median of three blocks; between CUDA events where there are any."""
    found = []
    for _ in range(3):
        synchronize()
        if DEVICE.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(TIMED_STEPS):
                program.step()
            end.record()
            synchronize()
            found.append(begin.elapsed_time(end) / 1e3 / TIMED_STEPS)
        else:
            start = time.perf_counter()
            program.step()
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def record(program: Program, path: Path) -> None:
    """A trace over TRACED_STEPS steps, with shapes."""
    activities = [ProfilerActivity.CPU]
    if DEVICE.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    options = {"record_shapes": True, **program.options}
    if program.has_steps:
        plan = schedule(wait=0, warmup=1, active=TRACED_STEPS, repeat=1)
        with profile(activities=activities, schedule=plan, **options) as profiler:
            for _ in range(1 + TRACED_STEPS):
                program.step()
                profiler.step()
            synchronize()
    else:
        # What stands in the queue when the window opens has no launch in the trace.
        if program.is_middle:
            program.step()
        else:
            synchronize()
        with profile(activities=activities, **options) as profiler:
            for _ in range(TRACED_STEPS):
                program.step()
            synchronize()
    profiler.export_chrome_trace(str(path))


def main() -> int:
    """Exit code 1 where nothing could be recorded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = {}
    for name in options.only:
        torch.manual_seed(0)
        try:
            program = PROGRAMS[name](options.small)
            for _ in range(WARM_STEPS):
                program.step()
            seconds = time_steps(program)
            record(program, options.output / f"{name}.json.gz")
        except Exception as error:  # noqa: BLE001 - one that cannot run must not end the others
            rows[name] = {"left_out": f"{type(error).__name__}: {error}"[:300]}
        else:
            rows[name] = {
                "step_s": seconds, "flops": program.flops, "num_bytes": program.num_bytes,
                "formula": program.formula, "traced_steps": TRACED_STEPS,
            }  # fmt: skip
        print(name, rows[name], flush=True)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    result = {"torch": torch.__version__, "device": device, "programs": rows}
    text = json.dumps(result, indent=1) + "\n"
    (options.output / "programs.json").write_text(text, encoding="utf-8")
    is_empty = all("left_out" in row or not math.isfinite(row["step_s"]) for row in rows.values())
    return int(is_empty)


if __name__ == "__main__":
    sys.exit(main())
