"""What one rank of `meshscope train` does: engine, data, checkpoints, recording and progress.

    with joined(config.device) as setup, StopRequest.on_signals() as stop:
        summary = run_worker(config, device=setup.device, stop=stop)

Ranks stop together: a rank that was asked to says so in the step's one all-reduce, and all leave
after the step that follows, having saved. Every step's loss is known to every rank; the first one
reports it. Results are read a step late, while the next step runs: a device is never idle for them.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import torch
from torch import Tensor

from meshscope.capture.default import start
from meshscope.core.config.train_config import TrainConfig
from meshscope.core.prediction import Prediction
from meshscope.core.unit_text import duration
from meshscope.engine.checkpoint.save_load import hold_checkpoints, load_newest
from meshscope.engine.data.token_data import Prefetch, TokenData, make_data
from meshscope.engine.engine import Engine
from meshscope.engine.launch.failures import note_step
from meshscope.engine.launch.stop_request import StopRequest
from meshscope.engine.memory_profiling import profile_memory
from meshscope.engine.step_result import StepResult

if TYPE_CHECKING:
    from meshscope.capture.recorder import Recorder

_RATE_WINDOW_STEPS = 10
"""Steps over which the shown speed is averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    first_step: int
    """Where it began: after a resume, not 0."""
    num_steps: int
    """Steps taken in all, those before a resume included."""
    last_loss: float | None
    """None when there was no step left to take."""
    is_stopped: bool
    """Whether it stopped before the last step, on request."""


def run_worker(
    config: TrainConfig,
    *,
    device: torch.device | str | None = None,
    stop: StopRequest | None = None,
    stream: TextIO | None = None,
    prediction: Prediction | None = None,
) -> TrainSummary:
    """Trains to the end, or until asked to stop. Every rank of the process group calls it.

    What was predicted of the run is stored with it, before anything of it is measured.
    """
    stop = stop or StopRequest()
    recorder = _start_recording(config, prediction)
    with Engine(config, device=device, recorder=recorder) as engine, _hold_checkpoints(config):
        notes = _resume(engine)
        if recorder is not None:
            recorder.watch_out_of_memory(list(engine.stages.values()), engine.optimizer)
        if recorder is not None and config.recording.profiling is not None:
            profile_memory(engine, recorder, config.recording.profiling)
        shown = sys.stderr if stream is None else stream
        progress = Progress(config, shown if engine.mesh.rank == 0 else None)
        progress.begin(engine, notes)
        summary = _train(engine, _make_training_data(config), stop, progress)
        progress.end(engine, summary)
    if recorder is not None:
        recorder.close()
    return summary


def _make_training_data(config: TrainConfig) -> TokenData:
    """As configured; raises UsageError where a file does not fit the model."""
    data = config.data
    return make_data(
        data.kind,
        vocab_size=config.model.vocab_size,
        sequence_length=config.model.sequence_length,
        global_batch_size=config.global_batch_size,
        microbatch_size=config.batch.microbatch_size,
        seed=config.seed,
        held_out_ratio=0.0 if data.evaluate_every is None else data.held_out_fraction,
        shuffles=data.shuffle,
        path=data.path,
        dtype=data.token_dtype,
    )


def _start_recording(config: TrainConfig, prediction: Prediction | None) -> "Recorder | None":
    if not config.recording.enabled:
        return None
    recorder = start(config.recording.run_dir, layout=config.layout)
    recorder.set_config(config, "train", "the configuration of meshscope train")
    if prediction is not None:
        add = recorder.session.add_prediction
        recorder.guard.run("prediction", add, prediction.as_fields())
    if config.recording.profiling is not None:
        recorder.profile(config.recording.profiling)
    return recorder


def _hold_checkpoints(config: TrainConfig) -> AbstractContextManager[None]:
    """From the start: a second job is told before it trains, not when it saves."""
    folder = config.checkpoint.folder
    return nullcontext() if folder is None else hold_checkpoints(folder)


def _resume(engine: Engine) -> list[str]:
    """From the newest good checkpoint of the run's own folder, else from the one to begin with.

    What was wrong with newer ones is handed back.
    """
    checkpoint = engine.config.checkpoint
    notes = None
    if checkpoint.folder is not None and checkpoint.resume:
        notes = load_newest(checkpoint.folder, engine.load)
    if notes is None and checkpoint.load is not None:
        engine.load(checkpoint.load)
    return notes or []


def _train(
    engine: Engine, data: TokenData, stop: StopRequest, progress: "Progress"
) -> TrainSummary:
    config = engine.config
    first_step = engine.step
    dp_rank, dp = engine.mesh.here.dp, config.parallel.dp

    def read(step: int) -> Tensor:
        return data.batch(step, dp_rank, dp)

    result: StepResult | None = None
    is_stop_wanted = False
    with Prefetch(read, first_step=first_step) as batches:
        while engine.step < config.num_steps:
            note_step(engine.step)
            before, result = result, engine.train_step(batches.take, wants_stop=stop.is_set)
            if before is not None:
                progress.show(before)
                is_stop_wanted = before.is_stop_wanted
            if is_stop_wanted:
                break
            _evaluate_if_due(engine, data, progress)
            _save_if_due(engine)
    if result is not None:
        progress.show(result)
    is_stopped = engine.step < config.num_steps
    if config.checkpoint.folder is not None and engine.step > first_step:
        engine.save(config.checkpoint.folder, keep=config.checkpoint.keep)
    return TrainSummary(
        first_step=first_step,
        num_steps=engine.step,
        last_loss=None if result is None else result.loss,
        is_stopped=is_stopped,
    )


def _evaluate_if_due(engine: Engine, data: TokenData, progress: "Progress") -> None:
    every = engine.config.data.evaluate_every
    if every is None or engine.step % every:
        return
    here, dp = engine.mesh.here, engine.config.parallel.dp
    count = min(engine.config.data.num_evaluation_batches, data.num_evaluation_batches)
    losses = [engine.evaluate(data.evaluation_batch(index, here.dp, dp)) for index in range(count)]
    if losses:
        progress.show_evaluation(engine.step, sum(losses) / len(losses))


def _save_if_due(engine: Engine) -> None:
    checkpoint = engine.config.checkpoint
    # The last step is saved when training ends, whether or not `every` asks for it.
    is_due = checkpoint.every is not None and engine.step % checkpoint.every == 0
    if checkpoint.folder is not None and is_due and engine.step < engine.config.num_steps:
        engine.save(checkpoint.folder, keep=checkpoint.keep)


class Progress:
    """One line every so many steps, on one rank; a stream of None shows nothing."""

    def __init__(self, config: TrainConfig, stream: TextIO | None) -> None:
        self._config = config
        self._stream = stream
        self._times: list[float] = []

    def begin(self, engine: Engine, notes: Sequence[str] = ()) -> None:
        """What is about to be trained, and from where."""
        for note in notes:
            self._write(note)
        self._times = [time.monotonic()]
        model, config = self._config.model, self._config
        origin = f", from step {engine.step}" if engine.step else ""
        self._write(
            f"{config.name}: {model.num_parameters:,} parameters on {config.layout.describe()}, "
            f"{engine.schedule.name}, {config.global_batch_size} sequences of "
            f"{model.sequence_length} tokens a step{origin}"
        )

    def show(self, result: StepResult) -> None:
        """A step, when it is one of those to show."""
        self._times = [*self._times[-_RATE_WINDOW_STEPS:], time.monotonic()]
        is_last = result.step + 1 == self._config.num_steps
        is_due = (result.step + 1) % self._config.log_every == 0
        if not (is_due or is_last or result.is_skipped):
            return
        seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        rate = result.num_tokens / seconds if seconds > 0 else float("nan")
        skipped = "  skipped: gradients are not finite" if result.is_skipped else ""
        width = len(str(self._config.num_steps))
        self._write(
            f"step {result.step + 1:{width}}/{self._config.num_steps}  loss {result.loss:.4f}  "
            f"norm {result.gradient_norm:.3g}  lr {result.learning_rate:.3g}  "
            f"{duration(seconds * 1e9)}  {rate:,.0f} tokens/s{skipped}"
        )

    def show_evaluation(self, step: int, loss: float) -> None:
        """The mean loss of the held-out part."""
        self._write(f"step {step}  held-out loss {loss:.4f}")

    def end(self, engine: Engine, summary: TrainSummary) -> None:
        """Where it ended, and where what it leaves is."""
        how = "stopped" if summary.is_stopped else "done"
        kept = self._config.checkpoint.folder
        saved = (
            "" if kept is None or summary.num_steps == summary.first_step else f", saved in {kept}"
        )
        recorded = "" if engine.recorder is None else f", recorded in {engine.recorder.run_dir}"
        self._write(f"{how} after step {summary.num_steps}{saved}{recorded}")

    def _write(self, line: str) -> None:
        if self._stream is not None:
            self._stream.write(line + "\n")
            self._stream.flush()
