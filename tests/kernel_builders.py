"""Writes kernel samples row by row, through the real writer; times in microseconds from T0."""

import tarfile
from pathlib import Path

from builders import START_MONO_NS, make_writer, put_span, put_step
from communication_builders import operation_words
from meshscope.core.operations import EndSource
from meshscope.store.kernel_table import KernelKind
from meshscope.store.read.run import Attempt, open_run
from meshscope.store.schema import MISSING
from meshscope.store.write.groups import GROUP_KIND, pack_ranks

T0 = START_MONO_NS
US = 1_000
COMPUTE_STREAM, OTHER_STREAM = 7, 16

REAL = Path(__file__).parent / "golden" / "runs" / "kernel_samples.tar.xz"
"""One rank of each of two programs, 4 NCCL ranks on one H200: all rows of a kernel sample of steps
21 and 22, other tables around it."""


def open_real(folder: Path, name: str) -> Attempt:
    """`ddp` has rank 2, `fsdp2` rank 1."""
    with tarfile.open(REAL) as archive:
        archive.extractall(folder, filter="data")
    return open_run(folder / "kernel_samples" / name).last_attempt


class SampleBuilder:
    """One rank with one sample of steps 1 to `last_step`."""

    def __init__(self, path: Path, *, rank: int = 0, world_size: int = 1) -> None:
        self.path = path
        self.writer = make_writer(path, rank, world_size)
        self.num_rows = 0

    def step(self, number: int, start: float, end: float) -> None:
        put_step(self.writer, number, T0 + int(start * US), T0 + int(end * US))

    def phase(self, name: str, start: float, end: float, depth: int = 0) -> None:
        put_span(
            self.writer, name, T0 + int(start * US), int(end * US) - int(start * US), depth=depth
        )

    def work(
        self,
        start: float,
        end: float,
        launch: float | None = None,
        *,
        kind: KernelKind = KernelKind.COMPUTE,
        stream: int | None = None,
        launch_length: float = 0,
        thread: int = 0,
        name: str = "kernel",
        is_graph: bool = False,
    ) -> None:
        if stream is None:
            is_other = kind is KernelKind.COMMUNICATION
            stream = OTHER_STREAM if is_other else COMPUTE_STREAM
        self.writer.table("kernels").put(
            self.writer.name_id(name) | int(kind) << 16 | thread << 24 | stream << 32,
            T0 + int(start * US),
            int(end * US) - int(start * US),
            MISSING if launch is None else T0 + int(launch * US),
            MISSING if launch is None else int(launch_length * US),
            int(is_graph) << 32,
            MISSING,
        )
        self.num_rows += 1

    def group(self, number: int, ranks: range) -> None:
        self.writer.journal.write(
            GROUP_KIND, id=number, name=str(number), description="", backend="nccl",
            ranks=pack_ranks(ranks),
        )  # fmt: skip

    def operation(self, enqueue: float, end: float | None = None, **words: int) -> None:
        """Timed by an event of the device if it has an end."""
        self.writer.table("collectives").put(
            *operation_words(
                enqueue_ns=T0 + int(enqueue * US),
                end_ns=MISSING if end is None else T0 + int(end * US),
                **{"end_source": EndSource.NONE if end is None else EndSource.DEVICE, **words},
            )
        )

    def close(self, last_step: int, end: float, num_rows: int | None = None, **fields: object):
        """The recording as it is read."""
        line = {
            "number": 0,
            "reason": "a kernel sample",
            "disturbed_from_step": 0,
            "disturbed_to_step": last_step + 1,
            "first_step": 1,
            "last_step": last_step,
            "begin_host_mono_ns": T0,
            "end_host_mono_ns": T0 + int(end * US),
            "num_rows": self.num_rows if num_rows is None else num_rows,
            "is_read": True,
            **fields,
        }
        self.writer.journal.write("update", kernel_window=line)
        self.writer.close(end_host_mono_ns=T0 + int(end * US))
        return open_run(self.path).last_attempt.ranks[self.writer.rank]
