"""What autograd saves, put elsewhere between forward and backward: onto disk or into host memory.

    offloader = Offloader(torch.device("cpu"), folder=Path("/scratch"))
    with offloader.around_forward():
        loss = model(x)                 # saved tensors go to disk while the forward goes on
    loss.backward()                     # and are read before they are needed, last ones first
    offloader.close()

Tensors come back with the same bits, shape and strides. A tensor's space is freed when the
graph frees it: in backward, or when the graph is thrown away. Copies between device and host
go through pinned memory on a separate stream. How much may wait to be written is bounded: a
forward that is faster than the disk waits for it, instead of filling memory.

The file on disk has no name: it ends with the process, and a crash leaves nothing (`spool_file`).

Wrong where a saved tensor is changed in place after it was saved; that is found while it waits to
be written, and reported. Stay where they are: small tensors, integers, parameters and other leaves
that take gradients (such as a stage's input), which the graph holds anyway.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from meshscope.engine.memory.spool_file import SpoolFile
from meshscope.errors import MeshscopeError

_MIN_OFFLOAD_BYTES = 4096
"""Smaller tensors stay: they save nothing and cost as much to start."""


_MAX_STAGED_BYTES = 1 << 30
"""Bytes of pinned host memory between device and disk."""


class OffloadError(MeshscopeError):
    """Activations could not be written or read. What was to be written is still in memory."""


class _Record:
    """The elements of one tensor, on the device, on the host or on disk."""

    def __init__(self, flat: Tensor, spool: SpoolFile | None) -> None:
        self.source: Tensor | None = flat
        """Until it has been copied or written; then `host` or `offset` is set."""
        self.host: Tensor | None = None
        self.offset: int | None = None
        self.copied: Any = None
        """On CUDA, the event after the copy into `host`."""
        self.load: _Load | None = None
        self.num_packs = self.num_unpacks = 0
        """Several operations may have saved the same elements; the last one to use them ends it."""
        self.numel, self.dtype, self.num_bytes = flat.numel(), flat.dtype, flat.nbytes
        self.version = flat._version
        self.storage = refer_to_storage(flat)
        self.forward: _Forward | None = None
        self.index = 0
        self._spool = spool

    def __del__(self) -> None:
        if self.offset is not None and self._spool is not None:
            self._spool.give_back(self.offset, self.num_bytes)


@dataclass(frozen=True, slots=True)
class _Load:
    """A record on its way back."""

    target: Tensor
    done: "Future[None] | None"
    """The part of it that a thread does; None if there is none."""
    ready: Any = None
    """On CUDA, the event after the copy into `target`."""


@dataclass(frozen=True, slots=True)
class Packed:
    """What autograd keeps instead of a tensor."""

    record: _Record
    size: torch.Size
    stride: Sequence[int]


@dataclass(slots=True, weakref_slot=True)
class _Forward:
    """The records of one forward, in the order in which they were saved."""

    number: int
    records: list["weakref.ref[_Record]"] = field(default_factory=list)
    has_begun_backward: bool = False

    def is_waiting(self) -> bool:
        return not self.has_begun_backward and any(ref() is not None for ref in self.records)


class Offloader:
    """Hooks for saved tensors; to a file in `folder`, or without one to host memory."""

    def __init__(
        self,
        device: torch.device,
        *,
        folder: Path | None = None,
        max_waiting_bytes: int = 0,
        ahead_bytes: int = 0,
        min_bytes: int = _MIN_OFFLOAD_BYTES,
    ) -> None:
        """`max_waiting_bytes`: of what is not yet copied, beside the latest tensor; `ahead_bytes`:
        of what is brought back early, one tensor at least."""
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.written_bytes = 0
        self.read_bytes = 0
        self.wait_ns = 0
        self._spool = SpoolFile(folder) if folder is not None else None
        self._max_waiting_bytes = max_waiting_bytes
        self._ahead_bytes = ahead_bytes
        self._min_bytes = min_bytes
        self._is_cuda = device.type == "cuda"
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._stream: Any = None
        self._writing: deque[tuple[Future[None], int]] = deque()
        self._copying: deque[weakref.ref[_Record]] = deque()
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], _Record] = (
            weakref.WeakValueDictionary()
        )
        self._forwards: dict[int, _Forward] = {}
        self._num_forwards = 0
        self._backward_order: Sequence[int] = ()
        self._failure: OffloadError | None = None

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        """Offloads what is saved inside."""
        self._raise_failure()
        if not torch.is_grad_enabled():
            yield
            return
        self._forwards = {n: f for n, f in self._forwards.items() if f.is_waiting()}
        self._forwards[self._num_forwards] = _Forward(self._num_forwards)
        self._num_forwards += 1
        with saved_tensors_hooks(self.pack, self.unpack):
            yield
        self._raise_failure()

    def expect_backwards(self, order: Sequence[int]) -> None:
        """In which order the forwards of each step, counted from 0, have their backwards.

        Only to bring back early what is needed next; without it, the oldest forward comes next.
        """
        self._backward_order = tuple(order)
        self._num_forwards = 0
        self._forwards.clear()

    def finish_writes(self) -> None:
        """Waits until all pending writes are done."""
        self._wait_for_writes(0)

    def close(self) -> None:
        """Ends the threads and frees the file; graphs that still need it cannot be used."""
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()
        self._writing.clear()
        if self._spool is not None:
            self._spool.close()

    # --- out -------------------------------------------------------------------------------------

    def pack(self, x: Tensor) -> object:
        """What autograd keeps instead of `x`."""
        if not self._is_worth_it(x):
            # Detached: autograd's own output, kept by a hook, would keep itself alive.
            return x.detach()
        flat, stride = flatten_dense(x.detach())
        key = (
            refer_to_storage(flat).cdata,
            flat.storage_offset(),
            flat.numel(),
            flat.dtype,
            x._version,
        )
        # A record's weak reference keeps the storage's address from being used for another.
        record = self._known.get(key)
        if record is None:
            record = self._known[key] = self._begin_write(flat)
        record.num_packs += 1
        return Packed(record, x.size(), stride)

    def _is_worth_it(self, x: Tensor) -> bool:
        return (
            type(x) is Tensor
            and x.device.type == self.device.type
            and x.is_floating_point()
            and x.nbytes >= self._min_bytes
            and not is_of_parameter(x)
            # A leaf that takes a gradient is held by the graph itself, and by its readers.
            and not (x.is_leaf and x.requires_grad)
        )

    def _begin_write(self, flat: Tensor) -> _Record:
        self._raise_failure()
        self._release_copied()
        self._wait_for_writes(_MAX_STAGED_BYTES if self._is_cuda else self._max_waiting_bytes)
        record = _Record(flat, self._spool)
        forward = self._forwards[self._num_forwards - 1]
        record.forward, record.index = forward, len(forward.records)
        forward.records.append(weakref.ref(record))
        if self._is_cuda:
            self._copy_to_host(record)
        if self._spool is not None or not self._is_cuda:
            job = self._submit("write", self._finish_write, weakref.ref(record))
            self._writing.append((job, record.num_bytes))
        return record

    def _copy_to_host(self, record: _Record) -> None:
        """Starts the copy on the side stream; `_release_copied` frees the source after it."""
        assert record.source is not None, "nothing has been copied yet"
        stream = self._side_stream()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        host = torch.empty(record.numel, dtype=record.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(record.source, non_blocking=True)
            record.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            record.copied.record(stream)
        record.host = host
        self._copying.append(weakref.ref(record))

    def _release_copied(self) -> None:
        """Frees device memory that has been copied; waits while too much has not been."""
        alive = [record for ref in self._copying if (record := ref()) is not None]
        left_bytes = sum(record.num_bytes for record in alive)
        start_ns = time.monotonic_ns()
        for record in alive:
            if left_bytes > self._max_waiting_bytes:
                record.copied.synchronize()
            elif not record.copied.query():
                break
            self._release_source(record)
            left_bytes -= record.num_bytes
        if alive:
            self.wait_ns += time.monotonic_ns() - start_ns
        self._copying = deque(ref for ref in self._copying if (r := ref()) and r.source is not None)

    def _finish_write(self, reference: "weakref.ref[_Record]") -> None:
        """In a thread. On failure all that backward needs stays in memory."""
        record = reference()
        if record is None:
            return
        if record.copied is not None:
            record.copied.synchronize()
        if self._spool is not None:
            self._write_to_disk(record, self._spool)
        elif record.source is not None:
            record.host = record.source.clone()
            self._release_source(record)

    def _write_to_disk(self, record: _Record, spool: SpoolFile) -> None:
        data = record.source if record.host is None else record.host
        assert data is not None, "it has not been written yet"
        offset = None
        try:
            offset = spool.take(record.num_bytes)
            spool.write(offset, _as_bytes(data))
        except OSError as error:
            if offset is not None:
                spool.give_back(offset, record.num_bytes)
            self._failure = self._describe("write", record, error)
            return
        # In this order: a reader that finds neither source nor host finds the offset.
        record.offset = offset
        self.written_bytes += record.num_bytes
        if record.host is None:
            self._release_source(record)
        record.host = None

    def _release_source(self, record: _Record) -> None:
        if record.source is not None and record.source._version != record.version:
            self._failure = OffloadError(
                f"a saved {record.dtype} tensor of {record.numel} elements was changed in place "
                f"before it was offloaded; change the model not to, or use another memory strategy"
            )
        record.source = None
        if self._spool is None:
            self.written_bytes += record.num_bytes

    def _wait_for_writes(self, max_bytes: int) -> None:
        while self._writing and self._writing[0][0].done():
            self._writing.popleft()
        while sum(num_bytes for _, num_bytes in self._writing) > max_bytes:
            self._wait(self._writing.popleft()[0])

    # --- back ------------------------------------------------------------------------------------

    def unpack(self, packed: object) -> Tensor:
        if not isinstance(packed, Packed):
            assert isinstance(packed, Tensor), "pack keeps nothing else"
            return packed
        record = packed.record
        if record.forward is not None:
            record.forward.has_begun_backward = True
        # What may still wait to be written need not be read.
        flat = record.source
        load = self._begin_load(record) if flat is None else None
        for following in self._find_following(record):
            if following.source is None:
                self._begin_load(following)
        if load is not None:
            flat = self._finish_load(load)
        assert flat is not None, "there is a source, or a load"
        record.num_unpacks += 1
        if record.num_unpacks == record.num_packs:
            # Memory goes with the tensor handed out; another backward over a graph loads it again.
            record.load, record.num_unpacks = None, 0
        return flat.as_strided(packed.size, packed.stride, flat.storage_offset())

    def _begin_load(self, record: _Record) -> _Load:
        if record.load is None:
            host = record.host
            if self._is_cuda:
                record.load = self._begin_device_load(record, host)
            elif host is not None:
                record.load = _Load(host, None)
                self.read_bytes += record.num_bytes
            else:
                target = torch.empty(record.numel, dtype=record.dtype)
                job = self._submit("read", self._read_from_disk, record, target)
                record.load = _Load(target, job)
        return record.load

    def _begin_device_load(self, record: _Record, host: Tensor | None) -> _Load:
        # Memory of the stream that will use it; the copy waits for what used it before.
        target = torch.empty(record.numel, dtype=record.dtype, device=self.device)
        stream = self._side_stream()
        target.record_stream(stream)
        allocated, ready = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        allocated.record(torch.cuda.current_stream(self.device))

        def copy(pinned: Tensor) -> None:
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                stream.wait_event(allocated)
                target.copy_(pinned, non_blocking=True)
                ready.record(stream)

        def read_and_copy() -> None:
            # Threads begin on the first device; pinning there would open a context on it.
            with torch.cuda.device(self.device):
                pinned = torch.empty(record.numel, dtype=record.dtype, pin_memory=True)
                self._read_from_disk(record, pinned)
                copy(pinned)

        if host is None:
            return _Load(target, self._submit("read", read_and_copy), ready)
        copy(host)
        if self._spool is None:
            self.read_bytes += record.num_bytes
        return _Load(target, None, ready)

    def _read_from_disk(self, record: _Record, target: Tensor) -> None:
        assert self._spool is not None, "what is not in host memory is in a file"
        assert record.offset is not None, "what has no source has been written"
        try:
            self._spool.read(record.offset, _as_bytes(target))
        except OSError as error:
            raise self._describe("read", record, error) from error
        self.read_bytes += record.num_bytes

    def _finish_load(self, load: _Load) -> Tensor:
        if load.done is not None:
            self._wait(load.done)
        if load.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(load.ready)
        return load.target

    def _find_following(self, record: _Record) -> Iterator[_Record]:
        """What backward needs after `record`: saved before it, then at the end of the next one."""
        left_bytes = self._ahead_bytes
        for reference in self._follow(record):
            following = reference()
            if following is not None:
                yield following
                left_bytes -= following.num_bytes
                if left_bytes <= 0:
                    return

    def _follow(self, record: _Record) -> Iterator["weakref.ref[_Record]"]:
        if record.forward is None:
            return
        for index in range(record.index - 1, -1, -1):
            yield record.forward.records[index]
        following = self._find_next_forward(record.forward)
        if following is not None:
            yield from reversed(following.records)

    def _find_next_forward(self, forward: _Forward) -> _Forward | None:
        order = self._backward_order
        if order:
            step, index = divmod(forward.number, len(order))
            following = order.index(index) + 1
            number = step * len(order) + order[following] if following < len(order) else -1
            return self._forwards.get(number)
        return next((f for f in self._forwards.values() if f.is_waiting()), None)

    # --- both ------------------------------------------------------------------------------------

    def _submit(self, name: str, job: Callable[..., None], *arguments: object) -> "Future[None]":
        # Made when first needed: threads do not survive a fork. Two, so that reads pass writes.
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(1, f"meshscope-offload-{name}")
        return self._threads[name].submit(job, *arguments)

    def _side_stream(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._stream

    def _wait(self, job: "Future[None]") -> None:
        start_ns = time.monotonic_ns()
        job.result()
        self.wait_ns += time.monotonic_ns() - start_ns

    def _describe(self, verb: str, record: _Record, error: OSError) -> OffloadError:
        folder = self._spool.folder if self._spool is not None else ""
        return OffloadError(
            f"cannot {verb} {record.num_bytes} bytes of activations in {folder}: "
            f"{error.strerror or error}; free space there, or set offload_dir to another folder"
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def refer_to_storage(x: Tensor) -> StorageWeakRef:
    """A weak reference; while it is held, its `cdata` is that of no other storage."""
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


def is_of_parameter(x: Tensor) -> bool:
    """Whether it is a parameter or a view of one, which live on anyway."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def flatten_dense(x: Tensor) -> tuple[Tensor, Sequence[int]]:
    """One dimension with all elements, and the strides that make `x` of it.

    No copy if the elements lie together, in any order of dimensions.
    """
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.size(), strict=True)):
        if size != 1 and stride != expected:
            x = x.contiguous()
            break
        expected *= size
    return x.as_strided((x.numel(),), (1,), x.storage_offset()), x.stride()


def _as_bytes(flat: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host; bfloat16 has no NumPy type, bytes have."""
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)
