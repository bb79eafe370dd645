"""What a step does once its backwards are done: sums of gradients, their norm, the optimizer.

One all-reduce over all ranks carries the loss, the squared norm and stop requests, so that all
ranks know the same and take the step, or skip it, together. On an accelerator that decision is made
there: the fused optimizers skip by themselves when something was not finite (as torch's
GradScaler tells them), and the host waits for nothing.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshscope.core.config.train_config import TrainConfig
from meshscope.engine.data_parallel.torch_ddp import DataParallel
from meshscope.engine.mesh import Mesh, Role
from meshscope.engine.model.dtensor_parallel import reduce_partial_gradients
from meshscope.engine.model.tensor_parallel import find_sequence_parallel_parameters, sum_gradients
from meshscope.engine.step_result import StepResult
from meshscope.engine.update.gradient_norm import (
    ModelGradients,
    clip_ratio_on_device,
    sync_tied_gradients,
)
from meshscope.engine.update.learning_rate import set_learning_rate
from meshscope.engine.update.loss_scale import LossScale
from meshscope.engine.update.optimizer import make_learning_rate, make_optimizer


class StepUpdate:
    """The optimizer of this rank's stages, and what comes before it. Made after sharding."""

    def __init__(
        self,
        config: TrainConfig,
        stages: Mapping[int, nn.Module],
        mesh: Mesh,
        data_parallel: DataParallel,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._modules = list(stages.values())
        self._data_parallel = data_parallel
        self.optimizer = make_optimizer(config.optimizer, self._modules, mesh.device)
        self.learning_rate = make_learning_rate(config.optimizer, config.num_steps)
        self.loss_scale = LossScale(
            config.precision.initial_loss_scale,
            config.precision.loss_scale_growth_steps,
            is_enabled=config.precision.compute == "fp16",
        )
        self._gradients = ModelGradients(
            self._modules,
            counts_whole=mesh.is_first_of(Role.MATRICES),
            counts_undivided=mesh.is_first_of(Role.REPLICAS),
        )
        self._partial = [p for m in self._modules for p in find_sequence_parallel_parameters(m)]
        self._tied = [
            weight
            for module in self._modules
            if (weight := getattr(module, "tied_weight", None)) is not None
        ]
        has_dtensors = any(hasattr(p, "to_local") for m in self._modules for p in m.parameters())
        # The fused kernels take either plain tensors or DTensors, not a plain flag for DTensors.
        self._decides_on_device = mesh.device.type == "cuda" and not has_dtensors
        self._num_skipped = torch.zeros((), device=mesh.device)

    @property
    def num_skipped(self) -> int:
        """Steps not taken because gradients were not finite; waits for the device."""
        return int(self._num_skipped.item())

    def configure(self, config: TrainConfig) -> None:
        """Takes other settings of the optimizer, those that are read in every step."""
        self._config = config
        self.learning_rate = make_learning_rate(config.optimizer, config.num_steps)
        for group in self.optimizer.param_groups:
            if group["params"][0].ndim >= 2:
                group["weight_decay"] = config.optimizer.weight_decay

    def is_same_everywhere(self, text: str) -> bool:
        """Whether all ranks gave the same text. Collective."""
        # 20 bits: sums of squares of thousands of ranks are exact.
        number = float(zlib.crc32(text.encode()) & 0xFFFFF)
        own = torch.tensor([number, number**2, 1.0], dtype=torch.float64, device=self._mesh.device)
        total, squares, num_ranks = self.sum_over_mesh(list(own)).tolist()
        return bool(squares * num_ranks == total**2)

    def synchronise(self) -> None:
        """Averages over replicas, and sums over tp and copies of a tied table what needs it."""
        self._data_parallel.finish()
        if self._config.parallel.tensor_parallel == "dtensor":
            for module in self._modules:
                reduce_partial_gradients(module)
        elif self._partial:
            sum_gradients(self._partial, self._mesh.group_of(Role.MATRICES))
        if len(self._tied) == 2:
            # First and last stage on one rank: nothing to send, but both copies need the sum.
            _add_gradients(*self._tied)
        elif self._tied:
            sync_tied_gradients(self._tied[0], self._mesh.tied_group)

    def measure(self, own_loss: Tensor, *, wants_stop: bool) -> Tensor:
        """Loss, squared norm and stop requests, over all ranks; float64 on the device."""
        stop = torch.full_like(own_loss, float(wants_stop))
        return self.sum_over_mesh([own_loss, self._gradients.square(), stop])

    def sum_over_mesh(self, values: Sequence[Tensor]) -> Tensor:
        """Sums scalars over all ranks in one all-reduce."""
        total = torch.stack([value.to(torch.float64) for value in values])
        world = self._mesh.group_of(Role.WHOLE_MESH)
        if world is not None:
            dist.all_reduce(total, group=world)
        return total

    def take(self, totals: Tensor, *, step: int) -> StepResult:
        """Clips, and takes the step if everything is finite. `totals` is what `measure` gave."""
        rate = self.learning_rate.at(step)
        set_learning_rate(self.optimizer, rate)
        result = StepResult(
            totals,
            step=step,
            num_tokens=self._config.global_batch_size * self._config.model.sequence_length,
            learning_rate=rate,
            loss_scale=self.loss_scale.value,
            max_norm=self._config.optimizer.max_gradient_norm,
        )
        if self._decides_on_device:
            self._step_on_device(totals)
        else:
            self._step(result)
        if self.loss_scale.is_enabled:
            self.loss_scale.update(is_finite=not result.is_skipped)
            if self.loss_scale.value != result.loss_scale:
                self._data_parallel.rescale(self.loss_scale.value / result.loss_scale)
        return result

    def _step(self, result: StepResult) -> None:
        if result.is_skipped:
            self._num_skipped += 1
            return
        ratio = result.clip_ratio / result.loss_scale
        if ratio != 1.0:
            self._gradients.scale(ratio)
        self.optimizer.step()

    def _step_on_device(self, totals: Tensor) -> None:
        scale, max_norm = self.loss_scale.value, self._config.optimizer.max_gradient_norm
        norm = totals[1].sqrt() / scale
        if max_norm is not None or scale != 1.0:
            self._gradients.scale((clip_ratio_on_device(norm, max_norm) / scale).float())
        is_not_finite = (~norm.isfinite()).float()
        self._num_skipped += is_not_finite
        self.optimizer.found_inf = is_not_finite  # type: ignore[attr-defined]  # fused ones read it
        self.optimizer.step()


@torch.no_grad()
def _add_gradients(first: nn.Parameter, second: nn.Parameter) -> None:
    grads = [weight.grad for weight in (first, second) if weight.grad is not None]
    if not grads:
        return
    total = torch.stack(grads).sum(0)
    first.grad, second.grad = total, total.clone()
