"""The whole configuration of a training run: the tables of its TOML file are the classes here.

    [parallel]
    dp = 2
    tp = 2
    pp = 2
    schedule = "1f1b"

is `TrainConfig(parallel=ParallelConfig(dp=2, tp=2, pp=2, schedule="1f1b"), …)`. Values only:
`engine.config.toml_file` reads them, `engine.config.problems` says what is wrong with them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.core.layout import DEFAULT_ORDER, Layout
from meshscope.core.schedule import Schedule
from meshscope.core.schedule_builders import build_schedule

Precision = Literal["fp32", "bf16", "fp16"]
DataParallelKind = Literal["reducer", "ddp", "fsdp"]
TensorParallelKind = Literal["plain", "dtensor"]
OptimizerKind = Literal["sgd", "adamw"]
RateSchedule = Literal["constant", "linear", "cosine", "wsd"]
MemoryKind = Literal["basic", "standard", "aggressive", "extreme", "cpu_offload"]
AllReduceKind = Literal["flat", "hierarchical", "ring", "tree", "adaptive"]
CompressionKind = Literal["none", "fp16", "bf16", "topk", "int8", "powersgd"]
DataKind = Literal["synthetic", "file"]
DeviceKind = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the model and the batch are spread over ranks."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    order: tuple[str, ...] = DEFAULT_ORDER
    """Axis names from slowest to fastest varying rank."""
    schedule: str = "1f1b"
    """Pipeline schedule; a name of `core.schedule_builders.BUILDERS`, or a whole one as text."""
    chunks_per_rank: int | None = None
    """Stages on each pipeline rank, for the schedules that loop; None is the schedule's default."""
    stage_sizes: tuple[int, ...] | None = None
    """Layers of each stage; None is as even as it goes."""
    tensor_parallel: TensorParallelKind = "plain"
    sequence_parallel: bool = False
    data_parallel: DataParallelKind = "reducer"
    zero_stage: int = 3
    """With `fsdp`: 1 shards optimizer states, 2 gradients too, 3 parameters too."""

    @property
    def layout(self) -> Layout:
        """Raises LayoutError where degrees or order are wrong."""
        return Layout(dp=self.dp, tp=self.tp, pp=self.pp, order=self.order)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How many sequences a step takes. Two of the three say it all."""

    microbatch_size: int = 1
    """Sequences that go through the model at once on one dp rank."""
    num_microbatches: int | None = None
    """Per dp rank and step."""
    global_batch_size: int | None = None
    """Sequences of a step over all dp ranks: microbatch_size · num_microbatches · dp."""

    def count_microbatches(self, dp: int) -> int:
        """Per dp rank and step; one when nothing says otherwise."""
        if self.num_microbatches is not None:
            return self.num_microbatches
        if self.global_batch_size is None:
            return 1
        return self.global_batch_size // (self.microbatch_size * dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """What the model computes in. Weights, gradients and optimizer states are float32."""

    compute: Precision = "fp32"
    initial_loss_scale: float = 65536.0
    """With fp16 only, as the two below."""
    loss_scale_growth_steps: int = 2000
    """Finite steps in a row after which the scale doubles; it halves when a step is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """What is kept between forward and backward, and where."""

    strategy: MemoryKind = "basic"
    cap_gib: float | None = None
    """Memory a rank may use, GiB; None is what its device has."""
    offload_dir: Path | None = None
    """With `extreme`: a folder on a local disk where activations are put; None is the system's
    temporary folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationConfig:
    """How gradients of data-parallel ranks are summed."""

    strategy: AllReduceKind = "flat"
    compression: CompressionKind = "none"
    compression_ratio: float = 0.01
    """With `topk`: the share of elements that is sent."""
    compression_bits: int = 8
    """With `int8`: how finely values are told apart; a byte is sent for each all the same."""
    compression_rank: int = 4
    """With `powersgd`: columns of the factors."""
    error_feedback: bool = True
    """With `topk`, `int8` and `powersgd`: what was left out is added to the next step's."""
    bucket_mib: float = 25.0
    max_buckets: int | None = None
    """Buckets are larger than `bucket_mib` where it takes that to have no more; None: no limit."""
    overlap: bool = True
    """Whether gradients are sent while backward goes on, or after it."""
    ranks_per_node: int | None = None
    """For `hierarchical`; None is what the launcher says."""
    timeout_s: float = 600.0
    """How long a rank waits in a collective for a peer that is late or dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """What a step does with gradients."""

    kind: OptimizerKind = "adamw"
    learning_rate: float = 3e-4
    momentum: float = 0.0
    """For sgd only."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """For matrices only; decoupled with adamw, added to gradients with sgd."""
    max_gradient_norm: float | None = 1.0
    """Largest norm over the whole mesh; None does not clip."""
    rate_schedule: RateSchedule = "constant"
    num_warmup_steps: int = 0
    num_decay_steps: int | None = None
    """For `wsd`; None is a fifth of all steps."""
    final_rate_ratio: float = 0.1
    """Share of the peak learning rate at the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    kind: DataKind = "synthetic"
    path: Path | None = None
    """Path of a token file."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    shuffle: bool = True
    evaluate_every: int | None = None
    """Steps between evaluations on the held-out part; None never."""
    num_evaluation_batches: int = 1
    held_out_fraction: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved, and what it begins from."""

    folder: Path | None = None
    """None saves no checkpoint."""
    every: int | None = None
    """Steps between checkpoints; None only at the end."""
    keep: int | None = 3
    """The newest so many stay; None keeps all."""
    resume: bool = True
    """Whether to go on from the folder's newest checkpoint, if it has one."""
    load: Path | None = None
    """A checkpoint to begin from where the folder has none to go on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingConfig:
    """What meshscope records of the run."""

    enabled: bool = True
    run_dir: Path | None = None
    """None is a new folder below `runs`."""
    profiling: str | None = None
    """Trace windows, such as `skip=5,active=2,ranks=stages`; None takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    model: ModelConfig | TimedModelConfig
    num_steps: int = 100
    name: str = "train"
    seed: int = 0
    device: DeviceKind = "auto"
    compile: bool = False
    """Whether torch.compile compiles the stages; with `standard`, their layers."""
    max_restarts: int = 0
    """How often all ranks are started again after one has died. Under torchrun it restarts."""
    log_every: int = 1
    """Steps between lines of progress."""
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig = BatchConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    communication: CommunicationConfig = CommunicationConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recording: RecordingConfig = RecordingConfig()
    faults: tuple[Any, ...] = field(default=())
    """`faults.Fault`s to inject: a test tool, off by default."""

    @property
    def layout(self) -> Layout:
        return self.parallel.layout

    @property
    def num_microbatches(self) -> int:
        """Per dp rank and step."""
        return self.batch.count_microbatches(self.parallel.dp)

    @property
    def global_batch_size(self) -> int:
        """Sequences per step."""
        return self.batch.microbatch_size * self.num_microbatches * self.parallel.dp

    @property
    def schedule(self) -> Schedule:
        """The pipeline's; on one pipeline rank, of one stage unless it loops."""
        parallel = self.parallel
        return build_schedule(
            parallel.schedule, parallel.pp, self.num_microbatches, parallel.chunks_per_rank
        )
