"""Makes every answer about a run: the documents of the commands, the page's, and parts of both.

It holds the studies of a few runs, the last used ones. A run that ended is read again when its
files changed; one that is followed is as its follower's last report has it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, RLock
from typing import Any

import msgspec

from meshscope.core.unavailable import Unavailable
from meshscope.errors import MeshscopeError, RunError, UsageError
from meshscope.export.run_tables import write_table
from meshscope.ingest.kineto.trace_files import list_own_traces
from meshscope.live.follower import Analysis, Follower
from meshscope.page.document import compare_pages, describe_page, name_run
from meshscope.page.file import encode_page, write_page
from meshscope.page.heat.cells import measure_cells
from meshscope.page.heat.matrix import Picture, draw_matrix, pack_matrix
from meshscope.page.step_spans import StepSpans, cut_step
from meshscope.report.encode import as_plain
from meshscope.report.run.document import DOCUMENT as REPORT
from meshscope.report.run.document import SHAPES as REPORT_SHAPES
from meshscope.report.run.document import build_document
from meshscope.report.run.report import Report
from meshscope.report.run_compare import compare_runs
from meshscope.report.run_study import RunStudy, open_traces
from meshscope.report.sections.hang import DOCUMENT as HANG
from meshscope.report.sections.hang import SHAPES as HANG_SHAPES
from meshscope.serve.answer import BINARY, JSON, Answer, make_answer, make_json, name_file
from meshscope.serve.documents import RunSummary
from meshscope.serve.questions import MatrixQuestion, TimelineQuestion
from meshscope.serve.run_files import sign_run
from meshscope.serve.summary import summarize
from meshscope.store.read.files import fetch_below
from meshscope.store.read.run import is_run_directory, open_run
from meshscope.store.remote.mirror import name_place

MAX_STUDIES = 4
_MAX_TABLE_BYTES = 256 << 20
_TABLE_MEDIA = {
    "json": JSON,
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}
_MAX_ANSWERS_BYTES = 32 << 20
"""Of answers that are kept with a study."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    """One run's report, and answers that were made from it."""

    signature: object
    study: RunStudy | None
    report: Report
    cpu_s: float
    answers: dict[object, Answer] = field(default_factory=dict)
    num_bytes: int = 0
    lock: Any = field(default_factory=RLock)

    def answer(self, key: object, make: Callable[[], Answer]) -> Answer:
        """Made once, as long as there is room."""
        with self.lock:
            found = self.answers.get(key)
            if found is None:
                found = make()
                if self.num_bytes + len(found.body) > _MAX_ANSWERS_BYTES:
                    self.answers.clear()
                    self.num_bytes = 0
                self.answers[key] = found
                self.num_bytes += len(found.body)
            return found


class Analyst:
    """Answers questions about runs, given their folders."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, int | None], _Held] = OrderedDict()
        self._lock = Lock()
        self._making: dict[tuple[str, int | None], Any] = {}
        self._followed: dict[str, tuple[Follower, _Held | None]] = {}

    # --- what is held -----------------------------------------------------------------------------

    def follow(self, path: str) -> Follower:
        """From now on answers are those of the follower's reports, once it made one."""
        with self._lock:
            if path not in self._followed:
                self._followed[path] = (Follower(path), None)
            return self._followed[path][0]

    def unfollow(self, path: str) -> None:
        with self._lock:
            self._followed.pop(path, None)

    def analyse_followed(self, path: str, *, now: bool = False) -> Analysis | None:
        """The follower's report, where it is due; answers are then made from it."""
        with self._lock:
            follower = self._followed[path][0]
            lock = self._making.setdefault((path, None), Lock())
        with lock:
            if now:
                with self._lock:
                    held = self._followed.get(path, (follower, None))[1]
                if held is not None:
                    return None
                follower.poll()
            analysis = follower.report(now=now)
            if analysis is None:
                return None
            held = _Held(
                signature=analysis.number, study=None, report=analysis.report, cpu_s=analysis.cpu_s
            )
            with self._lock:
                if path in self._followed:
                    self._followed[path] = (follower, held)
            return analysis

    def _hold(self, path: str, attempt: int | None) -> _Held:
        key = (path, attempt)
        with self._lock:
            followed = self._followed.get(path) if attempt is None else None
            lock = self._making.setdefault(key, Lock())
        if followed is not None:
            if followed[1] is None:
                self.analyse_followed(path, now=True)
            with self._lock:
                held = self._followed.get(path, followed)[1]
            if held is not None:
                return held
        with lock:
            signature = sign_run(Path(path))
            with self._lock:
                found = self._held.get(key)
                if found is not None and found.signature == signature:
                    self._held.move_to_end(key)
                    return found
            made = self._analyse(path, attempt, signature)
            with self._lock:
                self._held[key] = made
                self._held.move_to_end(key)
                while len(self._held) > MAX_STUDIES:
                    old, _ = self._held.popitem(last=False)
                    self._making.pop(old, None)
            return made

    def _analyse(self, path: str, attempt: int | None, signature: object) -> _Held:
        begun = time.thread_time()
        fetch_below(Path(path))
        folder = Path(path)
        is_run = is_run_directory(folder)
        run = open_run(path) if is_run else open_traces(list_own_traces(folder), folder)
        if attempt is not None and attempt >= len(run.attempts):
            raise UsageError(f"there is no attempt {attempt}; there are {len(run.attempts)}")
        chosen = run.last_attempt if attempt is None else run.attempts[attempt]
        study = RunStudy(run, chosen)
        report = study.report().content
        return _Held(
            signature=signature, study=study, report=report, cpu_s=time.thread_time() - begun
        )

    # --- answers ----------------------------------------------------------------------------------

    def page(self, path: str, attempt: int | None = None) -> Answer:
        held = self._hold(path, attempt)
        return held.answer("page", lambda: make_json(encode_page(describe_page(held.report))))

    def page_file(self, path: str, attempt: int | None = None) -> Answer:
        """The page as one file, as `meshscope report --html` writes it."""
        held = self._hold(path, attempt)

        def make() -> Answer:
            text = write_page(describe_page(held.report))
            name = f"{name_file(name_run(held.report))}.html"
            return make_answer(text.encode(), media="text/html; charset=utf-8", file_name=name)

        return held.answer("page file", make)

    def table(self, path: str, attempt: int | None, name: str, form: str) -> Answer:
        """As `meshscope export --table` writes it."""
        held = self._hold(path, attempt)
        with TemporaryDirectory(prefix="meshscope-") as folder:
            file = Path(folder) / f"table.{form}"
            with held.lock:
                write_table(_study_of(held), name, file, form)
            size = file.stat().st_size
            if size > _MAX_TABLE_BYTES:
                raise RunError(
                    f"table {name} has {size >> 20} MiB; write it with `meshscope export` instead"
                )
            body = file.read_bytes()
        saved = f"{name_file(name_run(held.report))}.{name}.{form}"
        return make_answer(body, media=_TABLE_MEDIA[form], file_name=saved)

    def report(self, path: str, attempt: int | None = None) -> Answer:
        held = self._hold(path, attempt)
        return held.answer(
            "report", lambda: _encode(REPORT, build_document(held.report), REPORT_SHAPES)
        )

    def hang(self, path: str, attempt: int | None = None) -> Answer:
        """Looks now: it is about this moment."""
        from meshscope.hang.hang import diagnose_hang
        from meshscope.hang.processes import this_machine
        from meshscope.report.sections.hang import make_hang_document

        run = open_run(path)
        chosen = run.last_attempt if attempt is None else run.attempts[attempt]
        hang = diagnose_hang(chosen, this_machine(), asks_stacks=False)
        found = make_hang_document(
            hang, run=name_place(run.path), attempt=chosen.index, shows_all_ranks=True
        )
        return _encode(HANG, found, HANG_SHAPES)

    def summary(self, path: str) -> RunSummary:
        return summarize(self._hold(path, None).report)

    def matrix(self, path: str, attempt: int | None, asked: MatrixQuestion) -> Answer:
        held = self._hold(path, attempt)

        def make() -> Answer:
            study = held.report.study
            cells = measure_cells(study, asked.metric, asked.phase)
            if isinstance(cells, Unavailable):
                return make_json({"unavailable": cells.reason})
            picture = draw_matrix(cells, study.steps.step, asked.window)
            if not asked.is_binary:
                return make_json(as_plain(pack_matrix(picture)))
            return _frame_matrix(picture, asked.agg)

        return held.answer(asked, make)

    def timeline(self, path: str, attempt: int | None, asked: TimelineQuestion) -> Answer:
        held = self._hold(path, attempt)

        def make() -> Answer:
            found = cut_step(
                held.report.study, asked.step, ranks=asked.ranks, max_spans=asked.max_spans
            )
            return make_json(as_plain(_cut_times(found, asked)))

        return held.answer(asked, make)

    def series(self, path: str, attempt: int | None, name: str | None) -> Answer:
        """One curve, or all."""
        from meshscope.page.series import list_curves

        held = self._hold(path, attempt)

        def make() -> Answer:
            curves = list_curves(held.report.study)
            if name is None:
                return make_json({"series": as_plain(curves)})
            for one in curves:
                if one.key == name:
                    return make_json(as_plain(one))
            there = ", ".join(one.key for one in curves) or "none"
            raise UsageError(f"there is no series {name[:80]!r}; there are: {there}")

        return held.answer(("series", name), make)

    def memory(self, path: str, attempt: int | None) -> Answer:
        from meshscope.analyze.memory.memory_attribution import summarize_memory
        from meshscope.store.read.memory_points import read_memory

        held = self._hold(path, attempt)

        def make() -> Answer:
            try:
                return make_json(as_plain(summarize_memory(read_memory(Path(path)))))
            except MeshscopeError as error:
                return make_json({"unavailable": str(error)})

        return held.answer("memory", make)

    def compare(self, a: str, b: str, names: tuple[str, str]) -> Answer:
        held_a, held_b = self._hold(a, None), self._hold(b, None)

        def make() -> Answer:
            compared = compare_runs(_study_of(held_a), _study_of(held_b), names=names)
            page = compare_pages(compared, held_a.report, held_b.report)
            return make_json(encode_page(page))

        return held_a.answer(("compare", b, names, id(held_b)), make)

    def call(self, method: str, *arguments: Any) -> Any:
        """By name, for calls from another process."""
        if method not in METHODS:
            raise KeyError(method)
        return getattr(self, method)(*arguments)


METHODS = frozenset(
    (
        "page_file",
        "table",
        "page",
        "report",
        "hang",
        "summary",
        "matrix",
        "timeline",
        "series",
        "memory",
        "compare",
    )
)


def _study_of(held: _Held) -> RunStudy:
    if held.study is None:
        held.study = RunStudy(held.report.run, held.report.attempt)
    return held.study


def _encode(envelope: tuple[str, int], document: object, shapes: Any) -> Answer:
    name, version = envelope
    return make_json({"document": name, "document_version": version, **as_plain(document, shapes)})


def _frame_matrix(picture: Picture, agg: str) -> Answer:
    """Length of the head (uint32, little-endian), the head as JSON with spaces at its end, then the
    layers it names: uint16, little-endian, row by row."""
    packed = as_plain(pack_matrix(picture, with_layers=False))
    mean = picture.largest if picture.mean is None else picture.mean
    layers = {"max": picture.largest, "mean": mean}
    chosen = [name for name in layers if agg in (name, "both")]
    if agg == "both" and picture.mean is None:
        chosen = ["max"]
    head = msgspec.json.encode({**packed, "layers": chosen, "shape": list(picture.largest.shape)})
    head += b" " * (-(len(head) + 4) % 8)
    body = len(head).to_bytes(4, "little") + head
    body += b"".join(layers[name].astype("<u2").tobytes() for name in chosen)
    rows, columns = picture.largest.shape
    headers = (
        ("X-Matrix-Rows", str(rows)),
        ("X-Matrix-Columns", str(columns)),
        ("X-Matrix-Layers", ",".join(chosen)),
        ("X-Matrix-Lo", repr(packed["lo"])),
        ("X-Matrix-Hi", repr(packed["hi"])),
    )
    return make_answer(body, media=BINARY, headers=headers)


def _cut_times(found: StepSpans | Unavailable, asked: TimelineQuestion) -> StepSpans | Unavailable:
    """Only spans that overlap the asked interval."""
    if isinstance(found, Unavailable) or (asked.t0_ns is None and asked.t1_ns is None):
        return found
    low = 0 if asked.t0_ns is None else asked.t0_ns
    high = found.length_ns if asked.t1_ns is None else asked.t1_ns
    pieces = found.pieces
    inside = (pieces.start_ns < high) & (pieces.start_ns + pieces.duration_ns > low)
    kept = {one.name: getattr(pieces, one.name)[inside] for one in fields(pieces)}
    return replace(found, pieces=replace(pieces, **kept))
