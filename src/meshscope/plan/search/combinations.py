"""All combinations of a request as columns, and the rules that say which cannot be."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import product

import numpy as np
import numpy.typing as npt

from meshscope.plan.candidate import Candidate
from meshscope.plan.search.request import Request
from meshscope.plan.timing.layer_time import Columns, list_again
from meshscope.plan.timing.pricing import Job

Bools = npt.NDArray[np.bool_]

CHUNKED = ("interleaved_1f1b", "round_robin", "looped_bfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Combinations:
    """One row for each."""

    columns: Columns
    schedules: npt.NDArray[np.str_]
    recomputes: npt.NDArray[np.str_]
    global_batch_size: int

    def make(self, index: int) -> Candidate:
        """The candidate of a row."""
        columns = self.columns
        return Candidate(
            dp=int(columns.dp[index]),
            tp=int(columns.tp[index]),
            pp=int(columns.pp[index]),
            cp=int(columns.cp[index]),
            ep=int(columns.ep[index]),
            microbatch_size=int(columns.microbatch_size[index]),
            num_microbatches=int(columns.num_microbatches[index]),
            schedule=str(self.schedules[index]),
            chunks=int(columns.chunks[index]),
            zero_stage=int(columns.zero_stage[index]),
            recompute=str(self.recomputes[index]),
            sequence_parallel=bool(columns.sequence_parallel[index]),
        )

    def take(self, picked: npt.NDArray[np.int64]) -> "Combinations":
        """The picked rows, in their order."""
        columns = Columns(
            **{one.name: getattr(self.columns, one.name)[picked] for one in fields(Columns)}
        )
        return Combinations(
            columns=columns,
            schedules=self.schedules[picked],
            recomputes=self.recomputes[picked],
            global_batch_size=self.global_batch_size,
        )


def list_combinations(job: Job, request: Request) -> Combinations:
    """Every one, valid or not."""
    numbers = [
        request.tp, request.pp, request.cp, request.ep, request.microbatch_sizes, request.chunks,
        request.zero_stages, tuple(map(int, request.sequence_parallel)),
        tuple(range(len(request.schedules))), tuple(range(len(request.recomputes))),
    ]  # fmt: skip
    grid = np.array(list(product(*numbers)), dtype=np.float64).reshape(-1, len(numbers))
    tp, pp, cp, ep, size, chunks, zero, sp, schedule, recompute = grid.T
    dp = np.floor(job.cluster.num_devices / (tp * pp * cp))
    again = list_again(request.recomputes, job.recipe)
    which = recompute.astype(int)
    columns = Columns(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        microbatch_size=size,
        num_microbatches=np.floor(request.global_batch_size / np.maximum(1, dp * size)),
        chunks=chunks,
        zero_stage=zero,
        shards=np.maximum(1.0, dp * cp),
        **{name: shares[which] for name, shares in again.items()},
        sequence_parallel=sp,
    )
    return Combinations(
        columns=columns,
        schedules=np.array(request.schedules)[schedule.astype(int)],
        recomputes=np.array(request.recomputes)[which],
        global_batch_size=request.global_batch_size,
    )


def list_rules(job: Job, request: Request, table: Combinations) -> Iterable[tuple[str, Bools]]:
    """A reason, and the rows that it rules out."""
    columns, model, cluster, stack = table.columns, job.model, job.cluster, job.recipe.stack
    tp, pp, cp, ep, dp = columns.tp, columns.pp, columns.cp, columns.ep, columns.dp
    yield "the model has no experts to cut over ep", (model.experts is None) & (ep > 1)
    yield "degrees do not multiply to the devices", dp * tp * pp * cp != cluster.num_devices
    yield "heads cannot be cut over tp", model.num_heads % tp != 0
    kv = model.num_kv_heads
    yield "key and value heads cannot be cut over tp", (kv % tp != 0) & (model.latent is None)
    yield "the MLP's width cannot be cut over tp", model.ffn_hidden_size % tp != 0
    yield (
        "the sequence cannot be cut over cp and tp",
        (model.sequence_length % (cp * np.where(columns.sequence_parallel > 0, tp, 1)) != 0),
    )
    count = 0 if model.experts is None else model.experts.count
    yield "ep must divide the experts", (model.experts is not None) & (count % ep != 0)
    yield "ep must divide dp · cp", (dp * cp) % ep != 0
    yield (
        "the global batch is no multiple of dp and microbatch",
        columns.num_microbatches * dp * columns.microbatch_size != table.global_batch_size,
    )
    # From here on mostly what is there twice: what the user chose wrongly was said before.
    yield "sequence parallel needs tp", (columns.sequence_parallel > 0) & (tp == 1)
    yield (
        "one rank on the pipeline has one schedule",
        (pp == 1) & (table.schedules != request.schedules[0]),
    )
    is_chunked = np.isin(table.schedules, CHUNKED) & (pp > 1)
    is_v = (table.schedules == "zb_v") & (pp > 1)
    wanted = np.where(is_v, 2.0, 1.0)
    yield (
        "the schedule does not have that many chunks",
        np.where(is_chunked, columns.chunks < 2, columns.chunks != wanted),
    )
    yield "layers cannot fill the stages", model.num_layers < pp * columns.chunks
    rounds = np.maximum(1, np.floor(columns.num_microbatches / pp))
    yield (
        "interleaving needs microbatches in equal rounds over pp",
        (table.schedules == "interleaved_1f1b") & (columns.num_microbatches % rounds != 0),
    )
    yield "ZeRO has nothing to cut over", (columns.zero_stage > 0) & (dp * cp == 1)
    is_looped = np.isin(table.schedules, ("gpipe", *CHUNKED)) & (pp > 1)
    yield (
        "ZeRO 2 cannot cut gradients that microbatches add up in this program's pipeline",
        (columns.zero_stage == 2) & (pp > 1) & (stack.name != "meshscope") & ~is_looped,
    )
