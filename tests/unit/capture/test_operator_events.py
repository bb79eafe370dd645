"""FLOPs by the operators that ran, against closed forms, a published count and torch's counter."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from meshscope.capture.model.operator_events import count_events, find_graph_dtype

WIDTH, LAYERS, VOCABULARY, BATCH, LENGTH = 64, 2, 97, 2, 16
WEIGHTS = LAYERS * 12 * WIDTH**2 + WIDTH * VOCABULARY
TOKENS = BATCH * LENGTH
CLOSED_FORM = 6 * WEIGHTS * TOKENS + 12 * LAYERS * WIDTH * LENGTH * TOKENS
LAYER_FORWARD = (2 * 12 * WIDTH**2 + 4 * LENGTH * WIDTH) * TOKENS
LAST_PRODUCT = 2 * 4 * WIDTH**2 * TOKENS


def watch(step):
    kinds, functions = torch._C._profiler, torch._C._autograd
    config = kinds.ProfilerConfig(
        kinds.ProfilerState.CPU, True, False, False, False, False, kinds._ExperimentalConfig()
    )
    functions._enable_profiler_legacy(config)
    try:
        step()
    finally:
        threads = functions._disable_profiler_legacy()
    *_, found = count_events(threads)
    return found


class Block(nn.Module):
    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.norm, self.is_fused = nn.LayerNorm(WIDTH), is_fused
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        split = self.qkv(self.norm(x)).view(BATCH, LENGTH, 3, 4, WIDTH // 4)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        if self.is_fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.down(torch.relu(self.up(x)))


class Gpt(nn.Module):
    def __init__(self, *, is_fused: bool = True, recomputes: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(is_fused=is_fused) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recomputes = recomputes

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            is_reentrant = self.recomputes == "reentrant"
            x = checkpoint(block, x, use_reentrant=is_reentrant) if self.recomputes else block(x)
        return self.head(x)


def count_gpt(**kwargs):
    model, ids = Gpt(**kwargs), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return watch(lambda: model(ids).sum().backward())


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_transformer_has_the_closed_form_to_the_unit(is_fused):
    found = count_gpt(is_fused=is_fused)
    assert found.flops.model_flops == found.flops.hardware_flops == CLOSED_FORM
    assert found.flops.forward_flops * 3 == CLOSED_FORM
    assert (found.flops.uncounted, found.has_compiled) == ((), False)


def test_what_is_computed_again_is_no_part_of_the_models():
    whole = count_gpt(recomputes="reentrant").flops
    assert (whole.model_flops, whole.recomputed_flops) == (CLOSED_FORM, LAYERS * LAYER_FORWARD)
    # Without reentrance a layer is computed again up to where its last input is saved.
    stopped = count_gpt(recomputes="yes").flops
    assert stopped.model_flops == CLOSED_FORM
    assert stopped.recomputed_flops == LAYERS * (LAYER_FORWARD - LAST_PRODUCT)


class Bottleneck(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 1, bias=False),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.ReLU(),
            nn.Conv2d(width, wide, 1, bias=False),
        )
        is_same = stride == 1 and width_in == wide
        self.skip = nn.Identity() if is_same else nn.Conv2d(width_in, wide, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


def make_resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width_in = 64
    for width, number, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(number):
            layers.append(Bottleneck(width_in, width, 1 if index else stride))
            width_in = 4 * width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    return nn.Sequential(*layers, *head)


def test_resnet50_has_its_published_count_and_torchs():
    with torch.device("meta"):
        model, image = make_resnet50(), torch.empty(1, 3, 224, 224)
    found = watch(lambda: model(image).sum().backward()).flops
    assert found.forward_flops / 2e9 == pytest.approx(4.09, abs=0.005)  # multiply-adds
    with FlopCounterMode(display=False) as counter:
        model(image).sum().backward()
    assert found.model_flops == counter.get_total_flops()


def test_transposed_frozen_and_foreign_operators():
    up = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2))
    image = torch.randn(2, 3, 16, 16)
    down_flops, up_flops = 2 * 2 * 8 * 64 * 27, 2 * 2 * 8 * 64 * 16
    found = watch(lambda: up(image).sum().backward()).flops
    assert found.model_flops == 2 * down_flops + 3 * up_flops  # the image needs no gradient
    frozen = nn.Sequential(nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16))
    found = watch(lambda: frozen(torch.randn(4, 16)).sum().backward()).flops
    assert found.model_flops == 3 * 2 * 4 * 16 * 16
    recurrent = nn.LSTM(8, 16)
    found = watch(lambda: recurrent(torch.randn(5, 2, 8))[0].sum().backward()).flops
    assert found.model_flops > 0 or found.uncounted  # by the way torch takes here


def test_evaluation_is_not_the_models_training():
    model, ids = Gpt(recomputes="reentrant"), torch.zeros(BATCH, LENGTH, dtype=torch.int64)

    def step():
        model(ids).sum().backward()
        with torch.no_grad():
            Gpt(is_fused=False)(ids)

    found = watch(step)
    assert found.flops.model_flops == CLOSED_FORM
    assert found.untrained_flops * 3 == CLOSED_FORM


def test_an_optimizers_products_are_not_the_models():
    weight = nn.Parameter(torch.randn(8, 8))

    class Orthogonal(torch.optim.SGD):
        def step(self, closure=None):
            weight.data @ weight.data
            return super().step(closure)

    optimizer = Orthogonal([weight], lr=0.1)

    def step():
        (torch.ones(4, 8) @ weight).sum().backward()
        optimizer.step()

    assert watch(step).flops.model_flops == 2 * 2 * 4 * 8 * 8


def test_a_closure_inside_of_the_optimizers_step_trains_the_model():
    model, ids = Gpt(), torch.zeros(BATCH, LENGTH, dtype=torch.int64)

    class Orthogonal(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            model.head.weight.data @ model.head.weight.data.T
            return loss

    def closure():
        loss = model(ids).sum()
        loss.backward()
        return loss

    optimizer = Orthogonal(model.parameters(), lr=0.1)
    assert watch(lambda: optimizer.step(closure)).flops.model_flops == CLOSED_FORM


def test_the_graph_tells_the_dtype_of_products():
    model, ids = Gpt(recomputes="yes"), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    assert find_graph_dtype(model(ids).sum()) == "float32"
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids).float().sum()
    assert find_graph_dtype(loss) == "bfloat16"
    assert find_graph_dtype(torch.ones(1, requires_grad=True).sum()) is None
    assert find_graph_dtype(None) is None
