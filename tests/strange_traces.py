"""Traces as other programs, tools and accidents make them, each with its answer by construction.

    for case in CASES:
        path = case.write(folder)   # a file or a folder to give to a command
        case.known                  # what the trace says, by rank and device

Most are the same three steps of one program (`loop`), in other words, in other forms, or damaged:
what is known of them is counted on fingers below, not computed by any reader. Written before
meshscope was run on them; what it then missed is in the commits that follow.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Events = list[Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One device of a trace; times in µs. None is not held against anything."""

    step_source: str | None = "profiler"
    step_numbers: tuple[int, ...] | None = (5, 6, 7)
    compute_us: float | None = 2100
    communication_us: float | None = 900
    exposed_us: float | None = 450
    exposed_copy_us: float | None = 120
    idle_us: float | None = 220
    num_kernels: int | None = 15
    num_collectives: int | None = 3
    categories_us: tuple[tuple[str, float], ...] = (
        ("GEMM", 1800), ("communication", 900), ("normalisation", 150), ("optimizer", 150),
        ("copy", 120),
    )  # fmt: skip
    verdicts: tuple[str, ...] | None = ("communication",)
    """Causes that a careful reader would name."""


LOOP = Known()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to read."""

    name: str
    write: Callable[[Path], Path]
    known: tuple[Known, ...] = (LOOP,)
    """Of each device of each trace, in order of rank."""
    exit_code: int = 0
    says: tuple[str, ...] = ()
    """Words on the first screen (for an error: on stderr), whatever the case."""
    never: tuple[str, ...] = ()
    missed: str = ""
    """Why meshscope does not get it right, where it is known not to."""
    is_one_run: bool = True
    """Whether `report` can make a run of it."""


CASES: list[Case] = []


def case(
    known: Known | Sequence[Known] = LOOP,
    *,
    exit_code: int = 0,
    says: Sequence[str] = (),
    never: Sequence[str] = (),
    missed: str = "",
    is_one_run: bool = True,
) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    def keep(write: Callable[[Path], Path]) -> Callable[[Path], Path]:
        CASES.append(
            Case(
                name=write.__name__.replace("_", " "),
                write=write,
                known=(known,) if isinstance(known, Known) else tuple(known),
                exit_code=exit_code,
                says=tuple(says),
                never=tuple(never),
                missed=missed,
                is_one_run=is_one_run,
            )
        )
        return write

    return keep


# The program: three steps of 1,000 µs that begin at 10,000, 11,000 and 12,000 µs.
#
#   device  100–400 product, 400–450 norm, 450–750 product, 900–940 copy, 940–990 optimizer
#           600–900 all-reduce on a stream of its own, 600–750 of it beside the product
#   compute 700, communication 300, exposed 150, copy alone 40; from 100 to 990 never idle;
#   between the steps 110 idle, twice.


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How a platform writes the program."""

    launch: str = "cudaLaunchKernel"
    runtime: str = "cuda_runtime"
    product: str = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas"
    norm: str = (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)"
    )
    optimizer: str = (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>>()"
    )
    reduce: str = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    copy: str = "Memcpy HtoD (Pinned -> Device)"
    copy_category: str = "gpu_memcpy"
    kernel: str = "kernel"
    device_properties: str = "NVIDIA H100 80GB HBM3"
    has_arguments: bool = True
    """Whether collectives say what they are beside their name."""


CUDA = Words()


def event(category: str, name: str, begin: float, length: float, **more: Any) -> Event:
    return {
        "ph": "X", "cat": category, "name": name, "pid": 100, "tid": 100, "ts": begin,
        "dur": length, "args": {}, **more,
    }  # fmt: skip


def loop(
    *,
    words: Words = CUDA,
    rank: int = 0,
    world_size: int = 2,
    device: int = 0,
    pid: int = 100,
    first: int = 5,
    num_steps: int = 3,
    origin: float = 10_000,
    correlation: int = 1,
    has_marks: bool = True,
    gap_after: dict[int, float] | None = None,
) -> Events:
    """The program's events in order of time; `gap_after` moves what follows a step away."""
    found: Events = []
    begin = origin
    for place in range(num_steps):
        found += _step(
            words, begin, first + place, correlation + 100 * place, pid, device, world_size,
            has_marks=has_marks,
        )  # fmt: skip
        begin += 1000 + (gap_after or {}).get(place, 0)
    return found


def _step(
    words: Words,
    begin: float,
    number: int,
    correlation: int,
    pid: int,
    device: int,
    world_size: int,
    *,
    has_marks: bool,
) -> Events:
    found: Events = []

    def host(category: str, name: str, since: float, length: float, tid: int = 100, **args: Any):
        found.append(event(category, name, begin + since, length, pid=pid, tid=tid, args=args))

    def work(
        place: int, category: str, name: str, called: float, since: float, length: float,
        stream: int = 7, tid: int = 100, **args: Any,
    ) -> None:  # fmt: skip
        host(words.runtime, words.launch, called, 4, tid, correlation=correlation + place)
        said = {"device": device, "stream": stream, "correlation": correlation + place, **args}
        found.append(
            event(category, name, begin + since, length, pid=device, tid=stream, args=said)
        )

    if has_marks:
        host("user_annotation", f"ProfilerStep#{number}", 0, 1000)
    host("cpu_op", "aten::mm", 10, 30)
    work(0, words.kernel, words.product, 20, 100, 300)
    host("cpu_op", "aten::layer_norm", 50, 20)
    work(1, words.kernel, words.norm, 55, 400, 50)
    host("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 100, 100, 200)
    work(2, words.kernel, words.product, 110, 450, 300, tid=200)
    arguments: dict[str, Any] = {}
    if words.has_arguments:
        arguments = {
            "Collective name": "allreduce", "In msg nelems": 1_000_000,
            "Out msg nelems": 1_000_000, "Group size": world_size, "dtype": "BFloat16",
            "Process Group Name": "0", "Process Group Description": "default_pg",
            "Process Group Ranks": json.dumps(list(range(world_size))),
        }  # fmt: skip
    work(3, words.kernel, words.reduce, 150, 600, 300, 20, 200, **arguments)
    work(4, words.copy_category, words.copy, 160, 900, 40, 8)
    host("user_annotation", "Optimizer.step#SGD.step", 200, 60)
    host("cpu_op", "aten::_foreach_add_", 205, 35)
    work(5, words.kernel, words.optimizer, 220, 940, 50)
    return found


def document(
    events: Sequence[Any], *, rank: int = 0, world_size: int = 2, words: Words = CUDA, **more: Any
) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 1_767_225_600_000_000_000,
        "deviceProperties": [{"id": 0, "name": words.device_properties}],
        "distributedInfo": {
            "backend": "nccl", "rank": rank, "world_size": world_size,
            "pg_config": [
                {
                    "pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl",
                    "pg_size": world_size, "ranks": list(range(world_size)),
                }
            ],
        },
        "traceEvents": list(events),
        **more,
    }  # fmt: skip


def put(folder: Path, data: bytes | str | dict[str, Any] | list[Any], name: str = "t.json") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(data, (dict, list)):
        data = json.dumps(data)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def changed(convert: Callable[[Event], Event | None], events: Events) -> Events:
    return [new for one in events if (new := convert(dict(one))) is not None]


# --- the text ---------------------------------------------------------------------------------


@case()
def plain(folder: Path) -> Path:
    return put(folder, document(loop()))


@case()
def events_in_any_order(folder: Path) -> Path:
    events = loop()
    random.Random(3).shuffle(events)
    return put(folder, document(events))


@case()
def times_as_text(folder: Path) -> Path:
    return put(
        folder,
        document(
            changed(lambda e: {**e, "ts": f"{e['ts']:.3f}", "dur": f"{e['dur']:.3f}"}, loop())
        ),
    )


@case()
def microseconds_since_1970_with_nanoseconds(folder: Path) -> Path:
    """16 digits before the point and three behind it do not fit a double."""
    text = json.dumps(document(changed(lambda e: {**e, "ts": f"@{e['ts']:.0f}@"}, loop())))
    for at in range(10_000, 13_001):
        text = text.replace(f'"@{at}@"', f"17632256000{at}.987")
    return put(folder, text)


@case()
def times_with_exponents(folder: Path) -> Path:
    text = json.dumps(document(changed(lambda e: {**e, "ts": f"@{e['ts']:.6E}@"}, loop())))
    return put(folder, text.replace('"@', "").replace('@"', ""))


@case()
def times_before_zero(folder: Path) -> Path:
    return put(folder, document(changed(lambda e: {**e, "ts": e["ts"] - 1e6}, loop())))


@case()
def lengths_below_zero_beside_it(folder: Path) -> Path:
    extra = [event("kernel", "gemm", 10_500, -400, pid=0, tid=7, args={"device": 0, "stream": 7})]
    return put(folder, document(loop() + extra))


@case()
def events_before_a_large_header(folder: Path) -> Path:
    found = document(loop())
    events = found.pop("traceEvents")
    return put(folder, {"traceEvents": events, **found, "more": {"x": ["y" * 100] * 20_000}})


@case()
def a_large_header_before_events(folder: Path) -> Path:
    return put(folder, {"more": {"x": ["y" * 100] * 20_000}, **document(loop())})


@case()
def a_bare_list_of_events(folder: Path) -> Path:
    return put(folder, loop())


@case(says=("not closed",))
def a_list_without_its_bracket_as_chrome_allows(folder: Path) -> Path:
    """Chrome's format says that the closing bracket may be missing."""
    return put(folder, json.dumps(loop(), indent=0)[:-1].rstrip() + ",\n")


@case()
def a_comma_behind_the_last_event_and_entry(folder: Path) -> Path:
    return put(folder, json.dumps(document(loop()))[:-2] + ",],}")


@case()
def lines_of_windows_with_a_mark(folder: Path) -> Path:
    text = json.dumps(document(loop()), indent=1).replace("\n", "\r\n")
    return put(folder, b"\xef\xbb\xbf" + text.encode())


@case()
def text_of_16_bits(folder: Path) -> Path:
    return put(folder, json.dumps(document(loop())).encode("utf-16"))


@case(exit_code=3, says=("UTF-16",))
def text_of_16_bits_without_a_mark(folder: Path) -> Path:
    return put(folder, json.dumps(document(loop())).encode("utf-16-be"))


@case()
def comments_beside_events(folder: Path) -> Path:
    """Flows, counters, marks, metadata, asynchronous and object events, as Chrome knows them."""
    more: Events = []
    for place, phase in enumerate("MCsfbenNODPSTFRcv(),"):
        fields = {"ph": phase, "name": f"x{place}", "cat": "kernel", "pid": 0, "tid": 7}
        more.append({**fields, "ts": 10_000 + place, "id": place, "args": {"value": place}})
    return put(folder, document(more + loop() + more))


@case()
def begins_and_ends_on_each_line(folder: Path) -> Path:
    """`B` and `E` instead of complete events, sorted, ends first where they meet."""
    pairs: list[tuple[float, int, float, Event]] = []
    for one in loop():
        begin = {**one, "ph": "B"}
        length = begin.pop("dur")
        end = {"ph": "E", "pid": one["pid"], "tid": one["tid"], "ts": one["ts"] + length}
        pairs += [(one["ts"], 1, -length, begin), (end["ts"], 0, length, end)]
    pairs.sort(key=lambda pair: pair[:3])
    return put(folder, document([one for *_, one in pairs]))


@case()
def numbers_of_processes_as_text(folder: Path) -> Path:
    return put(
        folder,
        document(
            changed(lambda e: {**e, "pid": f"process {e['pid']}", "tid": f"t{e['tid']}"}, loop())
        ),
    )


@case()
def arguments_that_are_none(folder: Path) -> Path:
    """Host events whose `args` are null, a list, a text; names that are numbers; unknown keys."""
    odd: list[Any] = [None, [], "x", 7, {"deep": {"a": [1]}}]
    more = [event("cpu_op", "aten::relu", 10_300 + n, 0.5) for n in range(len(odd))]
    for one, value in zip(more, odd, strict=True):
        one["args"] = value
    more += [event("cpu_op", 17, 10_320, 1), event("cpu_op", None, 10_325, 1)]  # type: ignore[arg-type]
    more += [{"ph": "X"}, {}, None, 5, "x", [], {"ph": None}, {"ph": "X", "ts": {}, "dur": []}]  # type: ignore[list-item]
    return put(folder, document(loop() + more))


@case()
def arguments_10_000_deep(folder: Path) -> Path:
    deep = '{"ph":"X","cat":"cpu_op","name":"d","pid":100,"tid":100,"ts":10300,"dur":1,"args":{"x":'
    deep += "[" * 10_000 + "]" * 10_000 + "}}"
    return put(folder, json.dumps(document(loop()))[:-2] + "," + deep + "]}")


@case()
def a_name_of_10_megabytes(folder: Path) -> Path:
    more = [event("cpu_op", "n" * 10_000_000, 10_300, 1)]
    return put(folder, document(loop() + more))


HOSTILE = "\x1b[31mred\x1b]0;title\x07<script>alert(1)</script>\u202egnp.exe\n\r\t\x00</pre>&lt;"


@case(never=("\x1b]0", "\x07", "\u202e", "\x00"))
def hostile_names(folder: Path) -> Path:
    """The product's name ends in escape codes, HTML and turned text; so do header and arguments."""
    words = replace(CUDA, product=f"{CUDA.product}{HOSTILE}", device_properties=f"H100 {HOSTILE}")
    found = document(loop(words=words), words=words)
    found["distributedInfo"]["pg_config"][0]["pg_desc"] = HOSTILE
    found[HOSTILE] = HOSTILE
    return put(folder, found)


@case()
def keys_twice(folder: Path) -> Path:
    """The later value of a key counts, as in every reader of JSON."""
    text = json.dumps(document(loop())).replace('"ph": "X"', '"ph": "M", "dur": 1, "ph": "X"')
    return put(folder, text)


@case(
    missed="the compiled scanner compares keys as they are written; it counts them as incomplete",
    is_one_run=False,
)
def keys_with_escapes(folder: Path) -> Path:
    r"""`"t\u0073"` is `"ts"`."""
    text = json.dumps(document(loop())).replace('"ts":', '"t\\u0073":')
    return put(folder, text)


@case()
def numbers_in_arguments_as_text(folder: Path) -> Path:
    def as_text(one: Event) -> Event:
        return {**one, "args": {key: str(value) for key, value in one["args"].items()}}

    return put(folder, document(changed(as_text, loop())))


@case(missed="it is refused, with the command that makes a list of the lines", is_one_run=False)
def one_event_on_each_line(folder: Path) -> Path:
    """JSON lines, as loggers write them."""
    return put(folder, "\n".join(json.dumps(one) for one in loop()) + "\n", "t.jsonl")


# --- how it is packed -------------------------------------------------------------------------


@case()
def packed_by_gzip_in_many_members(folder: Path) -> Path:
    raw = json.dumps(document(loop())).encode()
    parts = [gzip.compress(raw[at : at + 997]) for at in range(0, len(raw), 997)]
    return put(folder, b"".join(parts), "t.json.gz")


@case()
def packed_by_bzip2_under_the_name_of_gzip(folder: Path) -> Path:
    return put(folder, bz2.compress(json.dumps(document(loop())).encode()), "t.json.gz")


@case()
def packed_by_xz(folder: Path) -> Path:
    return put(folder, lzma.compress(json.dumps(document(loop())).encode()), "t.json.xz")


@case()
def packed_by_old_lzma(folder: Path) -> Path:
    raw = json.dumps(document(loop())).encode()
    return put(folder, lzma.compress(raw, format=lzma.FORMAT_ALONE), "t.json.lzma")


@case()
def a_name_that_says_nothing(folder: Path) -> Path:
    """Found when `report` refused a file that `trace` read: it went by the name."""
    return put(folder, gzip.compress(json.dumps(document(loop())).encode()), "profile of Tuesday")


@case(exit_code=3, says=("zip",))
def packed_by_zip(folder: Path) -> Path:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("t.json", json.dumps(document(loop())))
    return put(folder, target.getvalue(), "t.zip")


PARTIAL = Known(
    step_source=None, step_numbers=None, compute_us=None, communication_us=None, exposed_us=None,
    exposed_copy_us=None, idle_us=None, num_kernels=None, num_collectives=None, categories_us=(),
    verdicts=("incomplete",),
)  # fmt: skip


@case(PARTIAL, says=("cut off",))
def gzip_that_ends_in_the_middle(folder: Path) -> Path:
    raw = gzip.compress(json.dumps(document(loop(num_steps=60))).encode(), mtime=0)
    return put(folder, raw[: len(raw) // 2], "t.json.gz")


@case(exit_code=3, says=("empty",))
def an_empty_file(folder: Path) -> Path:
    return put(folder, b"")


@case(exit_code=3, says=("empty",))
def an_empty_gzip(folder: Path) -> Path:
    return put(folder, gzip.compress(b""), "t.json.gz")


@case(exit_code=3)
def only_zeros(folder: Path) -> Path:
    """A sparse file, as a full disk leaves it."""
    path = folder / "t.json"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 34)
    return path


@case(exit_code=3)
def events_that_are_null(folder: Path) -> Path:
    return put(folder, {"traceEvents": None})


@case(exit_code=3)
def a_fifo_that_nobody_writes(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    os.mkfifo(folder / "t.json")
    return folder / "t.json"


@case(exit_code=3)
def a_link_to_nothing(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "t.json").symlink_to("gone.json")
    return folder / "t.json"


@case(exit_code=3)
def an_empty_folder(folder: Path) -> Path:
    (folder / "empty").mkdir(parents=True)
    return folder / "empty"


@case((LOOP, LOOP), says=("left out",))
def a_folder_of_all_kinds(folder: Path) -> Path:
    """Two ranks among notes, a broken trace, an empty one, a loop of links, a FIFO, a far link."""
    own = folder / "mixed"
    for rank in range(2):
        put(own / f"node{rank}", document(loop(rank=rank), rank=rank), f"rank{rank}.json.gz")
        path = own / f"node{rank}" / f"rank{rank}.json.gz"
        path.write_bytes(gzip.compress(path.read_bytes()))
    put(own, "# notes", "README.md")
    put(own, {"name": "x"}, "package.json")
    put(own, b"", "empty.json")
    put(own, b'{"traceEvents": [', "cut.json")
    put(own, b"hello", "hello.json")
    put(own, {"steps": [1, 2]}, "metrics.json")
    (own / "loop").symlink_to(".")
    (own / "gone.json").symlink_to("nowhere.json")
    (own / "folder.json").mkdir()
    os.mkfifo(own / "pipe.json")
    return own


# --- other platforms --------------------------------------------------------------------------

ROCM = Words(
    launch="hipExtModuleLaunchKernel",
    runtime="cuda_runtime",  # Kineto's roctracer calls it so
    product="Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1",
    norm="void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)",
    optimizer="void at::native::(anonymous namespace)::multi_tensor_apply_kernel<x>(x) [clone .kd]",
    reduce="ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
    copy="CopyHostToDevice",
    device_properties="AMD Instinct MI300X",
)


@case()
def rocm_on_an_mi300(folder: Path) -> Path:
    return put(folder, document(loop(words=ROCM), words=ROCM))


@case()
def rccl_that_names_no_collective(folder: Path) -> Path:
    """As before torch 2.4: nothing but the kernel's name."""
    words = replace(ROCM, has_arguments=False, launch="hipLaunchKernel", runtime="hip_runtime")
    return put(folder, document(loop(words=words), words=words))


XPU = Words(
    launch="urEnqueueKernelLaunch",
    runtime="xpu_runtime",
    product="gemm_kernel",
    norm="at::native::xpu::VectorizedLayerNormKernel<float, float>",
    optimizer="at::native::xpu::MultiTensorApplyKernelFunctor<at::native::xpu::TLMeta>",
    reduce="oneccl_allreduce_large_bf16_sum",
    copy="Memcpy M2D",
    device_properties="Intel(R) Data Center GPU Max 1550",
)


@case()
def intels_xpu(folder: Path) -> Path:
    return put(folder, document(loop(words=XPU), words=XPU))


@case()
def kineto_of_2020(folder: Path) -> Path:
    """Categories with capitals, ranges as operators, ids as text."""
    names = {
        "kernel": "Kernel", "gpu_memcpy": "Memcpy", "cpu_op": "Operator",
        "cuda_runtime": "Runtime", "user_annotation": "Operator",
    }  # fmt: skip
    events = changed(lambda e: {**e, "cat": names[e["cat"]]}, loop())
    return put(folder, events)


XLA_STEP = Known(
    step_source=None,
    step_numbers=None,
    categories_us=(),
    num_collectives=3,
    verdicts=None,
    exposed_copy_us=120,
    num_kernels=15,
)


def _metadata(pid: int, name: str, threads: dict[int, str]) -> Events:
    found: Events = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}]
    for tid, text in threads.items():
        found.append(
            {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": text}}
        )
    return found


@case(XLA_STEP)
def jax_on_a_gpu(folder: Path) -> Path:
    """As `jax.profiler` writes `perfetto_trace.json.gz`: no categories, lines named for streams."""
    streams = {7: "Stream #7(Compute)", 20: "Stream #20(Compute)", 8: "Stream #8(MemcpyH2D)"}
    events = _metadata(1, "/device:GPU:0", {**streams, 90: "XLA Modules", 91: "XLA Ops"})
    events += _metadata(701, "/host:CPU", {100: "python"})
    for one in loop():
        if one["cat"] in ("kernel", "gpu_memcpy"):
            name = "MemcpyH2D" if one["cat"] == "gpu_memcpy" else one["name"]
            args = {"hlo_op": "fusion.1", "hlo_module": "jit_step"}
            kept = {"ph": "X", "pid": 1, "tid": one["tid"], "ts": one["ts"], "dur": one["dur"]}
            events.append({**kept, "name": name, "args": args})
            # The same work again on lines that summarise the streams.
            if one["tid"] == 7:
                events.append({**kept, "tid": 91, "name": "fusion.1", "args": args})
    for place in range(3):
        at = 10_100 + 1000 * place
        events.append({"ph": "X", "pid": 1, "tid": 90, "ts": at, "dur": 890, "name": "jit_step"})
        host = {"ph": "X", "pid": 701, "tid": 100, "ts": at - 100, "dur": 1000}
        events.append({**host, "name": f"train {place}", "args": {"step_num": str(place)}})
    found = {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": events}
    return put(folder, gzip.compress(json.dumps(found).encode()), "perfetto_trace.json.gz")


@case(replace(XLA_STEP, num_collectives=3))
def tensorflows_timeline(folder: Path) -> Path:
    """As `timeline.Timeline` of TensorFlow 1: `Op` events on lines of devices."""
    device = "/job:worker/replica:0/task:0/device:GPU:0"
    events = _metadata(1, f"{device}/stream:7 Compute", {0: "ops"})
    events += _metadata(2, f"{device}/stream:20 Compute", {0: "ops"})
    events += _metadata(3, f"{device}/memcpy Compute", {0: "ops"})
    lines = {7: 1, 20: 2, 8: 3}
    for one in loop():
        if one["cat"] in ("kernel", "gpu_memcpy"):
            name = "MEMCPYHtoD" if one["cat"] == "gpu_memcpy" else one["name"]
            more = {"ts": one["ts"], "dur": one["dur"], "args": {"name": "n", "op": name}}
            events.append({"ph": "X", "cat": "Op", "pid": lines[one["tid"]], "tid": 0,
                           "name": name, **more})  # fmt: skip
    return put(folder, {"traceEvents": events})


@case(replace(XLA_STEP, step_source="range"))
def nsight_turned_into_json(folder: Path) -> Path:
    """As nsys2json and its like write it: `cuda` and `nvtx` on lines named for devices."""
    events: Events = []
    for one in loop():
        if one["cat"] in ("kernel", "gpu_memcpy"):
            events.append(
                {**one, "cat": "cuda", "pid": "Device 0", "tid": f"Stream {one['tid']}", "args": {}}
            )
        elif one["name"].startswith("ProfilerStep"):
            name = f"iteration {one['name'].split('#')[1]}"
            events.append({**one, "cat": "nvtx", "name": name, "tid": "NVTX Thread 100"})
        elif one["cat"] == "cuda_runtime":
            events.append({**one, "cat": "cuda_api", "tid": "CUDA API Thread 100"})
    return put(folder, events)


# --- several of something in one file ---------------------------------------------------------


@case((LOOP, replace(LOOP, verdicts=None)))
def two_devices_of_one_process(folder: Path) -> Path:
    return put(folder, document(loop() + loop(device=1, correlation=1000, has_marks=False)))


@case((LOOP, replace(LOOP, verdicts=None)))
def two_processes_with_the_same_correlations(folder: Path) -> Path:
    """Two ranks' files pasted into one: ids mean something else in each."""
    return put(folder, document(loop() + loop(device=1, pid=200)))


@case(
    Known(
        step_numbers=(5, 6, 105, 106),
        compute_us=2800,
        communication_us=1200,
        exposed_us=600,
        exposed_copy_us=160,
        idle_us=None,
        num_kernels=20,
        num_collectives=4,
        categories_us=(("GEMM", 2400), ("communication", 1200)),
        verdicts=("communication",),
    ),
    says=("the profiler was off",),
)
def two_cycles_of_a_schedule(folder: Path) -> Path:
    """Ten seconds in which the profiler was off lie between steps 6 and 105: nobody was idle."""
    second = loop(num_steps=2, first=105, origin=10_012_000, correlation=1000)
    return put(folder, document(loop(num_steps=2) + second))


@case((LOOP, replace(LOOP, step_numbers=(6, 7, 8))))
def ranks_that_begin_at_other_steps(folder: Path) -> Path:
    put(folder / "r", document(loop()), "rank0.json")
    later = loop(first=6, origin=11_000)
    return put(folder / "r", document(later, rank=1), "rank1.json").parent


@case((LOOP, LOOP, LOOP), says=("3 of 4 ranks",), never=("it is the transfer that takes time",))
def a_rank_is_missing(folder: Path) -> Path:
    for rank in (0, 1, 3):
        found = document(loop(world_size=4), rank=rank, world_size=4)
        put(folder / "r", found, f"rank{rank}.json")
    return folder / "r"


@case((LOOP, LOOP), says=("2 traces name rank 0",), is_one_run=False)
def two_traces_of_one_rank(folder: Path) -> Path:
    """Somebody copied a file: what the second is must be said."""
    put(folder / "r", document(loop()), "a.json")
    return put(folder / "r", document(loop()), "copy of a.json").parent


@case(
    (LOOP, replace(LOOP, step_numbers=None, idle_us=None, verdicts=None)),
    says=("the numbers of its steps go back",),
)
def a_clock_that_jumps_back(folder: Path) -> Path:
    """Rank 1's clock is set back by 30 ms before its last step."""
    put(folder / "r", document(loop()), "rank0.json")
    events = loop(num_steps=2) + loop(num_steps=1, first=7, origin=-18_000, correlation=500)
    return put(folder / "r", document(events, rank=1), "rank1.json").parent


# --- steps and what runs on the device --------------------------------------------------------


@case(replace(LOOP, step_source="optimizer", step_numbers=(0, 1, 2)))
def steps_by_optimizers(folder: Path) -> Path:
    return put(folder, document(loop(has_marks=False)))


@case(replace(LOOP, step_source="range", step_numbers=(0, 1, 2)))
def steps_by_ranges_of_inference(folder: Path) -> Path:
    """Generation: no optimizer, no backward, a range for each token."""
    events: Events = []
    for one in loop(has_marks=False):
        if one["name"].startswith("autograd"):
            one["name"] = "aten::mm"
        if not one["name"].startswith("Optimizer"):
            events.append(one)
    for place in range(3):
        at = 10_000 + 1000 * place
        events.append(event("user_annotation", f"decode_step {place}", at, 990))
    return put(folder, document(events))


@case(replace(LOOP, step_source="optimizer", step_numbers=(0, 1, 2)))
def two_optimizers_in_turns(folder: Path) -> Path:
    """A GAN: the discriminator's backward and step, then the generator's, are one step."""
    events = loop(has_marks=False)
    for place in range(3):
        at = 10_300 + 1000 * place
        events += [
            event("cpu_op", "autograd::engine::evaluate_function: X", at, 50, tid=200),
            event("user_annotation", "Optimizer.step#Adam.step", at + 80, 40),
            event("cpu_op", "aten::_foreach_mul_", at + 90, 20),
        ]
    return put(folder, document(events))


@case(replace(LOOP, step_source="optimizer", step_numbers=(0, 1, 2)))
def gradients_accumulated(folder: Path) -> Path:
    """Three more backward passes before each optimizer."""
    events = loop(has_marks=False)
    for place in range(3):
        for part in range(3):
            at = 10_060 + 1000 * place + 10 * part
            events += [
                event("cpu_op", "aten::linear", at, 3),
                event("cpu_op", "autograd::engine::evaluate_function: Y", at + 4, 3, tid=200),
            ]
    return put(folder, document(events))


@case()
def steps_marked_on_the_device_too(folder: Path) -> Path:
    more = [
        event("gpu_user_annotation", f"ProfilerStep#{number}", 9100 + 1000 * place, 890,
              pid=0, tid=7, args={})
        for place, number in enumerate((5, 6, 7))
    ]  # fmt: skip
    return put(folder, document(loop() + more))


@case()
def kernels_of_no_length(folder: Path) -> Path:
    """A thousand events of 0 ns; they are kernels, and take no time."""
    more = [
        event("gpu_memset", "Memset (Device)", 10_200 + n * 0.1, 0, pid=0, tid=7,
              args={"device": 0, "stream": 7})
        for n in range(1000)
    ]  # fmt: skip
    return put(folder, document(loop() + more))


@case(
    replace(
        LOOP,
        num_kernels=15 + 24,
        categories_us=(
            ("GEMM", 1800 + 24 * 290),
            ("communication", 900),
        ),
    )
)
def eight_streams_at_once(folder: Path) -> Path:
    """Eight more products in each step, all beside the first one: the union stays what it was."""
    more = [
        event("kernel", CUDA.product, 10_105 + 1000 * place, 290, pid=0, tid=30 + stream,
              args={"device": 0, "stream": 30 + stream})
        for place in range(3)
        for stream in range(8)
    ]  # fmt: skip
    return put(folder, document(loop() + more))


@case(
    replace(
        LOOP,
        num_kernels=18,
        num_collectives=6,
        categories_us=(("GEMM", 1800), ("communication", 900 + 600)),
    )
)
def two_collectives_at_once(folder: Path) -> Path:
    """An all-gather inside of each all-reduce: communication is a union."""
    said = {"device": 0, "stream": 21, "Collective name": "_allgather_base", "dtype": "Float",
            "In msg nelems": 10, "Out msg nelems": 20, "Group size": 2}  # fmt: skip
    name = "ncclDevKernel_AllGather_RING_LL(x)"
    more = [
        event("kernel", name, 10_650 + 1000 * place, 200, pid=0, tid=21, args=said)
        for place in range(3)
    ]
    return put(folder, document(loop() + more))


@case(replace(LOOP, verdicts=None))
def a_cuda_graph(folder: Path) -> Path:
    """All work of a step comes from one cudaGraphLaunch."""
    events: Events = []
    for place in range(3):
        at = 10_000 + 1000 * place
        for one in loop()[place * 18 : (place + 1) * 18]:
            if one["cat"] in ("kernel", "gpu_memcpy"):
                args = {**one["args"], "correlation": 900 + place, "graph id": 1}
                events.append({**one, "args": args})
            elif one["name"].startswith("ProfilerStep"):
                events.append(one)
        launch = {"correlation": 900 + place}
        events.append(event("cuda_runtime", "cudaGraphLaunch", at + 20, 15, args=launch))
    return put(folder, document(events))


@case(replace(LOOP, num_kernels=15, verdicts=("communication",)))
def a_device_without_numbers(folder: Path) -> Path:
    """Neither device nor stream in the arguments: process and thread say it."""

    def without(one: Event) -> Event:
        kept = {k: v for k, v in one["args"].items() if k not in ("device", "stream")}
        return {**one, "args": kept}

    return put(folder, document(changed(without, loop())))


@case(
    Known(
        step_source="none",
        step_numbers=(),
        compute_us=500,
        communication_us=0,
        exposed_us=0,
        exposed_copy_us=0,
        idle_us=4 * 2375,
        num_kernels=5,
        num_collectives=0,
        categories_us=(("GEMM", 500),),
        verdicts=("host", "unknown"),
    )
)
def a_device_that_mostly_waits(folder: Path) -> Path:
    """100 µs of work every 2,375 µs, launched when it begins: the host is late."""
    events: Events = []
    for place in range(5):
        at = 10_000 + 2475 * place
        events.append(event("cuda_runtime", "cudaLaunchKernel", at - 8, 5,
                            args={"correlation": place + 1}))  # fmt: skip
        events.append(event("kernel", "ampere_sgemm_128x64_nn", at, 100, pid=0, tid=7,
                            args={"device": 0, "stream": 7, "correlation": place + 1}))  # fmt: skip
    return put(folder, document(events, world_size=1))


# --- a second set, written when the first was read; again before meshscope was run on it ----------


@case(replace(XLA_STEP, step_source="profiler", step_numbers=(40, 41, 42)))
def jax_on_a_tpu(folder: Path) -> Path:
    """Lines `Steps`, `XLA Modules`, `XLA Ops` (a loop around what it runs), `Async XLA Ops`."""
    lines = {1: "Steps", 2: "XLA Modules", 3: "XLA Ops", 4: "Async XLA Ops"}
    events = _metadata(3, "/device:TPU:0", lines) + _metadata(701, "/host:CPU", {100: "python"})

    def add(tid: int, name: str, begin: float, length: float) -> None:
        events.append(
            {"ph": "X", "pid": 3, "tid": tid, "name": name, "ts": begin, "dur": length, "args": {}}
        )

    for place in range(3):
        at = 10_000 + 1000 * place
        add(1, str(40 + place), at + 100, 890)
        add(2, "jit_step(123)", at + 100, 890)
        add(3, "while.7", at + 100, 350)
        add(3, "fusion.1", at + 100, 300)
        add(3, "convert.2", at + 400, 50)
        add(3, "fusion.3", at + 450, 300)
        add(3, "all-reduce.4", at + 750, 150)
        add(3, "copy.5", at + 900, 40)
        add(3, "fusion.6", at + 940, 50)
        add(4, "all-reduce-start.4", at + 600, 300)
    return put(folder, gzip.compress(json.dumps({"traceEvents": events}).encode()), "t.json.gz")


CASES[-1] = replace(
    CASES[-1],
    known=(
        replace(
            CASES[-1].known[0], num_kernels=18, num_collectives=3, communication_us=450,
            exposed_us=450, exposed_copy_us=0, compute_us=2220,
        ),
    ),
)  # fmt: skip


@case(
    Known(
        step_source="kernels",
        step_numbers=(0, 1, 2, 3, 4),
        compute_us=5 * 10 * 20,
        communication_us=0,
        exposed_us=0,
        exposed_copy_us=0,
        idle_us=None,
        num_kernels=50,
        num_collectives=0,
        categories_us=(("GEMM", 500), ("elementwise", 500)),
        verdicts=("host",),
    )
)
def a_server_without_marks(folder: Path) -> Path:
    """Ten kernels, ten different names, five times; the host launches each when it begins."""
    events: Events = []
    for place in range(50):
        number, at = place % 10, 10_000 + 100 * place
        name = f"gemm_{number}" if number % 2 else f"vectorized_elementwise_kernel_{number}"
        call = {"correlation": place + 1}
        events.append(event("cuda_runtime", "cudaLaunchKernel", at - 6, 5, args=call))
        events.append(event("kernel", name, at, 20, pid=0, tid=7,
                            args={"device": 0, "stream": 7, **call}))  # fmt: skip
    return put(folder, document(events, world_size=1))


def _wait(name: str, cause: str, gap: Callable[[float], Events], *, launch: float) -> None:
    """A kernel of 500 µs, then 500 µs without, five times; what the host did then is given."""

    def write(folder: Path) -> Path:
        events: Events = []
        for place in range(5):
            at = 10_000 + 1000 * place
            called = {"correlation": place + 1}
            events.append(event("cuda_runtime", "cudaLaunchKernel", at - launch, 5, args=called))
            events.append(event("kernel", "ampere_bf16_s1688gemm_bf16", at, 500, pid=0, tid=7,
                                args={"device": 0, "stream": 7, **called}))  # fmt: skip
            if place < 4:
                events += gap(at + 500)
        return put(folder, document(events, world_size=1))

    write.__name__ = name.replace(" ", "_")
    known = Known(
        step_source="none", step_numbers=(), compute_us=2500, communication_us=0, exposed_us=0,
        exposed_copy_us=0, idle_us=2000, num_kernels=5, num_collectives=0,
        categories_us=(("GEMM", 2500),), verdicts=(cause,),
    )  # fmt: skip
    case(known)(write)


_wait(
    "a host that loads data", "host",
    lambda at: [event("user_annotation", "enumerate(DataLoader)#X.__next__", at, 480)], launch=8,
)  # fmt: skip
_wait(
    "a host that waits for its device", "synchronising",
    lambda at: [event("cuda_runtime", "cudaStreamSynchronize", at - 490, 495)], launch=8,
)  # fmt: skip
_wait("work that was queued and waits", "dependency", lambda at: [], launch=900)


@case(
    Known(
        step_source="none",
        step_numbers=(),
        compute_us=1000,
        communication_us=0,
        exposed_us=0,
        exposed_copy_us=4000,
        idle_us=0,
        num_kernels=2,
        num_collectives=0,
        categories_us=(("GEMM", 1000), ("copy", 4000)),
        verdicts=("copies",),
    )
)
def copies_that_hold_everything_up(folder: Path) -> Path:
    events: Events = []
    for place, (category, name, begin, length) in enumerate(
        (
            ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 10_000, 2000),
            ("kernel", "nvjet_tst_128x256", 12_000, 500),
            ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 12_500, 2000),
            ("kernel", "nvjet_tst_128x256", 14_500, 500),
        )
    ):
        call = {"correlation": place + 1}
        events.append(event("cuda_runtime", "cudaMemcpyAsync", 9_000 + place, 1, args=call))
        events.append(event(category, name, begin, length, pid=0, tid=7,
                            args={"device": 0, "stream": 7, **call}))  # fmt: skip
    return put(folder, document(events, world_size=1))


LATE = replace(LOOP, compute_us=2100, verdicts=("waiting",))


@case((LATE, replace(LATE, verdicts=None)), says=("rank 1 came last 3 times", "rank 1 comes last"))
def a_rank_that_comes_late(folder: Path) -> Path:
    """Rank 1's second product takes 150 µs longer; its all-reduce begins then and lasts as much
    less. Rank 0's all-reduce begins at 600 and waits until 900: of its 150 µs that nothing hides
    all are waiting but the transfer's own."""
    put(folder / "r", document(loop()), "rank0.json")
    events = loop()
    for one in events:
        at = (one["ts"] - 10_000) % 1000
        if one["cat"] == "kernel" and one["name"] == CUDA.product and at == 450:
            one["dur"] = 440
        if one["name"] == CUDA.reduce:
            one["ts"] += 290
            one["dur"] = 10
    return put(folder / "r", document(events, rank=1), "rank1.json").parent


CASES[-1] = replace(
    CASES[-1],
    known=(
        LATE,
        replace(
            LATE, compute_us=3 * 840, communication_us=30, exposed_us=30, verdicts=None,
            categories_us=(("GEMM", 3 * 740), ("communication", 30)),
        ),
    ),
)  # fmt: skip


@case(says=("2.00 GiB", "step 6"))
def memory_by_allocator(folder: Path) -> Path:
    """`[memory]` events: at most 2 GiB allocated, in step 6, of 3 GiB reserved."""
    gib = 1 << 30
    more = [
        {
            "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 100,
            "tid": 100, "ts": at,
            "args": {"Total Reserved": 3 * gib, "Total Allocated": total, "Bytes": change,
                     "Addr": 1, "Device Id": 0, "Device Type": 1, "Ev Idx": 0},
        }
        for at, total, change in (
            (10_300, gib, gib), (11_300, 2 * gib, gib), (12_300, gib, -gib),
        )
    ]  # fmt: skip
    return put(folder, document(loop() + more))


@case(
    replace(
        LOOP,
        num_kernels=15 + 12,
        num_collectives=3 + 6,
        verdicts=None,
        compute_us=None,
        communication_us=None,
        exposed_us=None,
        exposed_copy_us=None,
        idle_us=None,
        categories_us=(("communication", 900 + 6 * 10),),
    )
)
def experts_that_exchange_tokens(folder: Path) -> Path:
    """DeepEP's kernels send; what lays out tokens does not."""
    names = (
        "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*)",
        "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)",
        "void at::native::indexing_backward_kernel<float>(long const*)",
    )
    more = [
        event("kernel", name, 10_110 + 1000 * step + 20 * place, 10, pid=0, tid=30,
              args={"device": 0, "stream": 30})
        for step in range(3)
        for place, name in enumerate(names)
    ]  # fmt: skip
    return put(folder, document(loop() + more))


@case(tuple([LOOP] + [replace(LOOP, verdicts=None)] * 7))
def eight_devices_of_one_process(folder: Path) -> Path:
    events = loop()
    for device in range(1, 8):
        events += loop(device=device, correlation=1000 * device, has_marks=False)
    return put(folder, document(events, world_size=1))


@case(exit_code=3)
def a_file_whose_name_is_hostile(folder: Path) -> Path:
    return put(folder, b"hello", "a\x1b[31m\nb\u202e.json")


@case()
def a_file_whose_good_name_is_hostile(folder: Path) -> Path:
    return put(folder, document(loop()), "a\x1b[31m b\u202e<i>.json")


@case()
def a_file_whose_name_is_no_text(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = os.fsencode(folder) + b"/\xff\xfe.json"
    with open(path, "wb") as file:
        file.write(json.dumps(document(loop())).encode())
    return Path(os.fsdecode(path))


@case(exit_code=3)
def nothing_at_all(folder: Path) -> Path:
    return folder / "there is no such file.json"
