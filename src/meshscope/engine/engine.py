"""The engine: a model spread over the mesh, and what a training step does with it.

    engine = Engine(config)                     # on every rank, in an initialised process group
    for step in range(config.num_steps):
        result = engine.train_step(tokens)      # [microbatches, size, length + 1] of this dp rank
    engine.save(folder)

or microbatch by microbatch, in one order on all ranks:

    engine.begin_step()
    for index, (inputs, targets) in enumerate(microbatches):
        engine.forward(index, inputs, targets)
        engine.backward(index)
    result = engine.finish_step()

A step: forwards and backwards in the order of the schedule, gradients averaged over dp while the
last backwards run, sums over tp (sequence parallel) and between the copies of a tied table, one
all-reduce over all ranks for loss, norm and stop requests, clipping, and the optimizer. All ranks
take a step or none: one that is not finite anywhere is skipped everywhere.

`config`, `layout`, `mesh`, `stages`, `shards`, `schedule`, `optimizer` and `statistics` are there
to be read. Collective means: every rank must call it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshscope.core.config.train_config import TrainConfig
from meshscope.core.layout import Layout
from meshscope.core.placement import launch_identity
from meshscope.core.schedule import Action, ActionKind
from meshscope.engine.checkpoint.save_load import load_checkpoint, save_checkpoint
from meshscope.engine.config.problems import find_problems, require_valid_config
from meshscope.engine.config.toml_file import to_document
from meshscope.engine.data_parallel.fully_sharded import FullyShardedDataParallel
from meshscope.engine.data_parallel_choice import make_data_parallel
from meshscope.engine.faults.injector import FaultInjector
from meshscope.engine.memory.strategy import MemoryStatistics
from meshscope.engine.mesh import Mesh, Role, pick_device
from meshscope.engine.model.model_source import ConfiguredModel, ModelSource, UserModel
from meshscope.engine.model.sharding import ParameterShard, find_parameter_shards
from meshscope.engine.pipeline.pipeline import Microbatch, PipelineExecutor, PipelineStep
from meshscope.engine.stage_building import build_stages, count_parts, make_rank_strategy
from meshscope.engine.stage_flops import record_flops
from meshscope.engine.step_actions import StepActions
from meshscope.engine.step_result import StepResult
from meshscope.engine.step_update import StepUpdate
from meshscope.engine.update.loss_scale import LossScale
from meshscope.errors import UsageError

if TYPE_CHECKING:
    from meshscope.capture.recorder import Recorder

Batch = Tensor | Sequence[Microbatch]
"""Tokens [microbatches, size, length + 1], or inputs and targets of each microbatch."""

LIVE_KEYS = (
    "learning_rate",
    "rate_schedule",
    "num_warmup_steps",
    "num_decay_steps",
    "final_rate_ratio",
    "max_gradient_norm",
    "weight_decay",
)
"""Settings of `[optimizer]` that may change between steps; see `Engine.configure`."""

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """Counts of this rank so far."""

    num_steps: int
    """All steps, those before a resume included."""
    num_skipped_steps: int
    """Steps since the engine was made whose gradients were not finite."""
    num_tokens: int
    """Tokens of all dp ranks, those before a resume included."""
    peak_activations: int
    """Stage activations held at once in the latest step, stages × microbatches."""
    gradients: Any
    """Costs of gradient synchronisation; the type depends on `parallel.data_parallel`."""
    memory: MemoryStatistics


class Engine:
    """One rank's part in training. Making one is collective."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: ModelSource | None = None,
        mesh: Mesh | None = None,
        device: torch.device | str | None = None,
        recorder: "Recorder | None" = None,
    ) -> None:
        """`model` is for models of one's own; the configuration's is the default. A `mesh` made
        before saves its groups. `recorder` gets steps, phases and pipeline actions. Raises
        UsageError with every problem."""
        self.config = config
        self.device = pick_device(config.device, device)
        require_valid_config(config, device_type=self.device.type, has_own_model=model is not None)
        self.mesh = mesh or Mesh(config.layout, self.device)
        self._check_mesh()
        self.schedule = config.schedule
        self.recorder = recorder
        self._source = model or ConfiguredModel(config.model)
        self._memory = make_rank_strategy(config, self.mesh.here.pp, self.device)
        self.stages = build_stages(config, self.mesh, self._source, self._memory, self.device)
        if recorder is not None:
            recorder.set_stage_layers({i: count_parts(stage) for i, stage in self.stages.items()})
            if model is None:
                record_flops(recorder, config, self.mesh.here.pp)
        self.data_parallel = make_data_parallel(config, self.stages, self.mesh)
        self._update = StepUpdate(config, self.stages, self.mesh, self.data_parallel)
        self.faults = make_injector(config, self.mesh, recorder)
        self.faults.attach(self.stages)
        self._actions = StepActions(
            self.schedule,
            self.stages,
            self.data_parallel,
            record=self.faults.wrap_recorder(_make_action_recorder(recorder, tuple(self.stages))),
        )
        self.executor = PipelineExecutor(
            self.schedule,
            self.data_parallel.modules,
            self.mesh.group_of(Role.STAGES),
            hidden_shape=self._hidden_shape(),
            dtype=self._pipeline_dtype(),
            device=self.device,
            record=self._actions,
            forward_context=self._forward_context,
        )
        self.step = 0
        """The next step's number."""
        self.num_tokens = 0
        self._by_hand: _StepByHand | None = None
        self._failure = ""

    # --- what it is made of ------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        return self.mesh.layout

    @property
    def shards(self) -> dict[str, ParameterShard]:
        """What of each parameter this rank holds, by the model's parameter names."""
        found: dict[str, ParameterShard] = {}
        for stage in self.stages.values():
            found |= find_parameter_shards(stage)
        return found

    @property
    def statistics(self) -> EngineStatistics:
        """Reading it may wait for an accelerator."""
        return EngineStatistics(
            num_steps=self.step,
            num_skipped_steps=self._update.num_skipped,
            num_tokens=self.num_tokens,
            peak_activations=self.executor.peak_activations,
            gradients=self.data_parallel.statistics,
            memory=self._memory.statistics,
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Over this rank's parts of the parameters."""
        return self._update.optimizer

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale that keeps fp16 gradients from vanishing."""
        return self._update.loss_scale

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.schedule.num_stages - 1 in self.stages

    def close(self) -> None:
        """Removes hooks and offloaded activations; process groups stay."""
        self._failure = self._failure or "the engine was closed"
        self.faults.close()
        self.data_parallel.close()
        self._memory.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def configure(self, **changes: Any) -> None:
        """Changes settings of `[optimizer]` from the next step on: those of `LIVE_KEYS`, which no
        group, buffer or graph depends on. Collective: on all ranks, between the same steps.

        Raises UsageError on every rank, and changes nothing, for other settings, for values that
        make no sense, and where ranks gave different ones.
        """
        unknown = sorted(set(changes) - set(LIVE_KEYS))
        optimizer = self.config.optimizer if unknown else replace(self.config.optimizer, **changes)
        config = replace(self.config, optimizer=optimizer)
        problems = [
            f"{name} cannot change while the engine runs; only {', '.join(LIVE_KEYS)} of "
            "[optimizer] can: save, change the file and resume"
            for name in unknown
        ]
        has_own_model = isinstance(self._source, UserModel)
        problems += find_problems(config, device_type=self.device.type, has_own_model=has_own_model)
        if not self._update.is_same_everywhere(repr((optimizer, unknown))):
            problems.append("ranks gave different settings; give all the same, at the same step")
        if problems:
            raise UsageError("\n".join(problems))
        self.config = config
        self._update.configure(config)

    # --- a step ------------------------------------------------------------------------------

    def train_step(
        self,
        batch: Batch | Callable[[], Batch],
        *,
        loss_weights: Sequence[float] | None = None,
        wants_stop: bool = False,
    ) -> StepResult:
        """Forward, backward and optimizer for this dp rank's batch. Collective.

        A callable is asked for the batch inside of the step, as its phase `data`. `loss_weights`
        are the microbatches' parts in this dp rank's loss, by default 1/m each. Where they have
        unequal numbers of targets, n·dp/N gives the mean over all: n of the microbatch's, N of all
        dp ranks' targets.
        """
        if self._by_hand is not None:
            raise UsageError("a step begun by hand is open; call finish_step first")
        with self._recorded_step():
            self.faults.begin_step(self.step)
            with self._phase("data"), self.faults.phase("data"):
                microbatches = self._to_microbatches(batch() if callable(batch) else batch)
            weights = self._weigh(loss_weights)
            with self._guarded():
                self._open_step()
                losses = self.executor.run_step(
                    microbatches,
                    loss_weights=[weight * self.loss_scale.value for weight in weights],
                )
                return self._complete(losses, weights, wants_stop=wants_stop)

    def begin_step(self, *, loss_weights: Sequence[float] | None = None) -> None:
        """Begins a step whose microbatches the caller runs."""
        if self._by_hand is not None:
            raise UsageError("a step begun by hand is open; call finish_step first")
        weights = self._weigh(loss_weights)
        with self._guarded():
            self._open_step()
        recording = self._recorded_step()
        recording.__enter__()
        self.faults.begin_step(self.step)
        microbatches: list[Microbatch] = [(None, None)] * self.schedule.num_microbatches
        scaled = [weight * self.loss_scale.value for weight in weights]
        self._by_hand = _StepByHand(
            step=self.executor.begin_by_hand(microbatches, scaled),
            microbatches=microbatches,
            weights=weights,
            recording=recording,
        )

    def forward(
        self, index: int, inputs: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor | None:
        """Microbatch `index` through this rank's stages; its loss where the last one is.

        Waits for the stages before. Ranks that hold neither the first nor the last stage need
        neither inputs nor targets.
        """
        by_hand = self._require_by_hand()
        self._check_index(index)
        by_hand.microbatches[index] = self._to_device((inputs, targets))
        with self._guarded():
            for stage in sorted(self.stages):
                by_hand.step.run(Action(ActionKind.FORWARD, stage, index))
        return by_hand.step.result(index) if self.has_loss else None

    def backward(self, index: int) -> None:
        """Microbatch `index` back through this rank's stages; gradients add up."""
        by_hand = self._require_by_hand()
        self._check_index(index)
        for stage in sorted(self.stages, reverse=True):
            is_split = stage in self.executor.put_off
            kinds = (
                (ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
                if is_split
                else (ActionKind.BACKWARD,)
            )
            with self._guarded():
                for kind in kinds:
                    by_hand.step.run(Action(kind, stage, index))

    def finish_step(self, *, wants_stop: bool = False) -> StepResult:
        """After all microbatches: synchronises gradients and takes the step. Collective."""
        by_hand = self._require_by_hand()
        by_hand.step.finish()
        self._by_hand = None
        self.executor.peak_activations = by_hand.step.peak_activations
        with ExitStack() as stack, self._guarded():
            stack.push(by_hand.recording)  # an exception aborts the step
            return self._complete(
                by_hand.step.take_results(), by_hand.weights, wants_stop=wants_stop
            )

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """The mean loss of a batch over all dp ranks, without learning from it. Collective."""
        with self._phase("evaluation"):
            losses = self.executor.evaluate(self._to_microbatches(batch))
            weights = self._weigh(None)
            return self._update.sum_over_mesh([self._own_loss(losses, weights)]).item()

    # --- checkpoints -------------------------------------------------------------------------

    def save(self, folder: Path, *, keep: int | None = None) -> Path:
        """Saves everything needed to go on, on this or another layout. Collective."""
        state: dict[str, Any] = {
            "num_tokens": self.num_tokens,
            "loss_scale": self.loss_scale.to_document(),
            "config": to_document(self.config),
        }
        with self._phase("checkpoint"):
            return save_checkpoint(
                folder,
                step=self.step,
                stages=self.stages,
                optimizer=self.optimizer,
                state=state,
                keep=keep,
            )

    def load(self, path: Path) -> None:
        """Goes on from a checkpoint of the same model, saved on any layout. Collective."""
        with self._phase("checkpoint"):
            loaded = load_checkpoint(path, stages=self.stages, optimizer=self.optimizer)
        self.step = loaded.step
        self.num_tokens = int(loaded.state.get("num_tokens", 0))
        scale = loaded.state.get("loss_scale")
        if isinstance(scale, dict):
            self.loss_scale.restore(scale)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Ranks that wait for one whose step failed must not be met by its next step."""
        if self._failure:
            raise UsageError(
                f"no step can be taken: {self._failure}; make a new engine, after a failed step in "
                "new processes"
            )
        try:
            yield
        except UsageError:
            raise  # nothing was sent yet
        except BaseException as error:
            if self._by_hand is not None:
                self._by_hand.recording.__exit__(type(error), error, error.__traceback__)
                self._by_hand = None
            if self.layout.world_size > 1:
                self._failure = (
                    f"step {self.step} failed ({error}), and ranks are no longer in step"
                )
            raise

    # --- parts of a step ---------------------------------------------------------------------

    def _open_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._actions.begin_step()

    def _complete(
        self, losses: Sequence[Tensor], weights: Sequence[float], *, wants_stop: bool
    ) -> StepResult:
        update = self._update
        with self._phase("gradient sync"):
            update.synchronise()
        self.faults.on_gradients(self.stages.values())
        with self._phase("gradient norm"):
            own = self._own_loss(losses, weights)
            part = own.detach() if self.has_loss and self.mesh.here.tp == 0 else None
            totals = update.measure(own, wants_stop=wants_stop)
        with self._phase("optimizer"), self.faults.phase("optimizer"):
            result = update.take(totals, step=self.step)
        self._note(result, totals, part)
        return result

    def _own_loss(self, losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """This rank's part of the step's loss: the sum over all ranks is its mean over dp."""
        own = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.mesh.here.tp == 0:
            for loss, weight in zip(losses, weights if losses else (), strict=True):
                own += loss * (weight / self.layout.dp)
        return own

    def _note(self, result: StepResult, totals: Tensor, part: Tensor | None) -> None:
        """`part` is what this rank added to the loss, where it has one."""
        self.step += 1
        self.num_tokens += result.num_tokens
        if self.recorder is not None:
            # Tensors: the recorder does not wait for a device either.
            self.recorder.log(
                loss=totals[0],
                grad_norm=totals[1].sqrt() / result.loss_scale,
                lr=result.learning_rate,
                tokens=result.num_tokens // self.layout.dp,
            )
            if part is not None:  # says where a loss that is no number came from
                self.recorder.log(own_loss=part * self.layout.dp)

    # --- batches -----------------------------------------------------------------------------

    def _to_microbatches(self, batch: Batch) -> list[Microbatch]:
        if not isinstance(batch, Tensor):
            return [self._to_device(microbatch) for microbatch in batch]
        if not isinstance(self._source, UserModel):
            self._check_tokens(batch)
        tokens = batch.to(self.device, torch.int64, non_blocking=True)
        return [(part[:, :-1], part[:, 1:]) for part in tokens]

    def _check_tokens(self, tokens: Tensor) -> None:
        config = self.config
        expected = (
            config.num_microbatches,
            config.batch.microbatch_size,
            config.model.sequence_length + 1,
        )
        if tuple(tokens.shape) != expected or tokens.is_floating_point():
            raise UsageError(
                f"the batch is {tokens.dtype} of shape {tuple(tokens.shape)}, expected whole "
                f"numbers of shape {expected}: microbatches, sequences of this dp rank, tokens and "
                "one more"
            )

    def _to_device(self, microbatch: Microbatch) -> Microbatch:
        inputs, targets = (
            None if part is None else part.to(self.device, non_blocking=True) for part in microbatch
        )
        return inputs, targets

    def _weigh(self, loss_weights: Sequence[float] | None) -> Sequence[float]:
        num_microbatches = self.schedule.num_microbatches
        if loss_weights is None:
            return [1 / num_microbatches] * num_microbatches
        if len(loss_weights) != num_microbatches:
            raise UsageError(
                f"got {len(loss_weights)} loss weights, but a step has {num_microbatches} "
                "microbatches; give one for each"
            )
        return loss_weights

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.schedule.num_microbatches:
            raise UsageError(
                f"microbatch {index} is outside 0..{self.schedule.num_microbatches - 1}; "
                "batch.num_microbatches says how many a step has"
            )

    def _require_by_hand(self) -> "_StepByHand":
        if self._by_hand is None:
            raise UsageError(
                f"no step is open, since {self._failure}"
                if self._failure
                else "no step is open; call begin_step first"
            )
        return self._by_hand

    # --- how it is made ----------------------------------------------------------------------

    def _check_mesh(self) -> None:
        mesh, layout = self.mesh, self.config.layout
        if mesh.layout != layout or mesh.device.type != self.device.type:
            raise UsageError(
                f"the mesh is {mesh.layout.describe()} on {mesh.device.type}, but the "
                f"configuration has {layout.describe()} on {self.device.type}; make it with "
                "Mesh(config.layout, device), or leave it out"
            )

    def _hidden_shape(self) -> tuple[int, ...]:
        stage = next(iter(self.stages.values()))
        return self._source.hidden_shape(stage, self.config.batch.microbatch_size)

    def _pipeline_dtype(self) -> torch.dtype:
        """The dtype of what stages hand on: under autocast the residual stream stays float32."""
        if self._has_own_casts:
            return _AUTOCAST_DTYPES.get(self.config.precision.compute, torch.float32)
        return torch.float32

    @property
    def _has_own_casts(self) -> bool:
        """FSDP2 gathers parameters in the dtype to compute in: autocast has nothing to do."""
        return isinstance(self.data_parallel, FullyShardedDataParallel)

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._memory.forward_context())
            dtype = _AUTOCAST_DTYPES.get(self.config.precision.compute)
            if dtype is not None and not self._has_own_casts:
                stack.enter_context(torch.autocast(self.device.type, dtype))
            yield

    def _phase(self, name: str) -> AbstractContextManager[object]:
        return nullcontext() if self.recorder is None else self.recorder.phase(name)

    def _recorded_step(self) -> AbstractContextManager[object]:
        return nullcontext() if self.recorder is None else self.recorder.step(self.step)


@dataclass(slots=True, kw_only=True)
class _StepByHand:
    """A step between `begin_step` and `finish_step`."""

    step: PipelineStep
    microbatches: list[Microbatch]
    weights: Sequence[float]
    recording: AbstractContextManager[object]


def _make_action_recorder(recorder: "Recorder | None", stages: Sequence[int]) -> Any:
    """Writes pipeline actions into the recording; None where nothing is recorded."""
    if recorder is None:
        return None
    from meshscope.engine.pipeline.action_recording import RecordedActions

    return RecordedActions(recorder, stages)


def make_injector(config: TrainConfig, mesh: Mesh, recorder: "Recorder | None") -> FaultInjector:
    """The configured faults of this rank; without any it does nothing."""
    injector = FaultInjector(
        config.faults,
        mesh.rank,
        mesh.here,
        attempt=launch_identity(os.environ).restart_count,
        record=recorder,
        device=mesh.device,
    )
    injector.watch_groups({str(axis): mesh.group(axis) for axis in mesh.layout.named_axes})
    return injector
