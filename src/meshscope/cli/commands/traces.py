"""`meshscope trace`: what torch.profiler's traces say, of one rank or of many."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshscope.cli.numpy_loading import load_numpy
from meshscope.cli.options import engine_option, top_option
from meshscope.cli.places import READ, WRITE_FILE
from meshscope.cli.terminal_screen import choose_screen, show_document
from meshscope.core.layout import Layout, check_layout
from meshscope.core.unavailable import Unavailable
from meshscope.errors import TraceError, UsageError

if TYPE_CHECKING:
    # What reads and analyses is loaded where it is used: help needs none of it, and one trace not
    # what compares ranks.
    from meshscope.analyze.communication.rank_comparison import RankComparison
    from meshscope.analyze.device.trace_outline import TraceOutline
    from meshscope.analyze.device.trace_summary import TraceSummary
    from meshscope.cli.trace_summaries import KeptSummary
    from meshscope.ingest.kineto.trace_cache import Stamp
    from meshscope.ingest.traces.trace_recording import TraceRecording
    from meshscope.report.screen import Screen
    from meshscope.simulate.critical_path import CriticalPath

_OBJECTS_A_COLLECTION = 100_000


@click.command("trace", short_help="Explain traces of torch.profiler.")
@click.argument("paths", nargs=-1, required=True, type=READ)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@top_option("Rows of each table.")
@engine_option
@click.option(
    "--no-cache", is_flag=True, help="Neither read nor write the cache file beside a trace."
)
@click.option(
    "--against",
    type=READ,
    help="A trace or folder to compare with; shows what changed from it to PATHS.",
)
@click.option(
    "--layout",
    "layout_text",
    help="The mesh, such as dp=4,tp=2, which names the axes of groups.  [default: from folder "
    "names such as rank0_dp0_tp0_pp0]",
)
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    help="With more than two traces, show this rank in full; may be given several times.  "
    "[default: the rank that others waited for most, otherwise the first]",
)
@click.option(
    "--device",
    "device_name",
    help="What the devices are, such as H100, where a trace does not say: peaks are looked up by "
    "it.",
)
@click.option(
    "--flame",
    type=WRITE_FILE,
    metavar="FILE",
    help="Write a flame graph of device time (.svg), or its stacks for other tools (.folded).",
)
@click.option(
    "--by",
    "flame_by",
    type=click.Choice(("module", "python")),
    default="module",
    show_default=True,
    help="What the stacks of --flame are.",
)
@click.pass_context
def command(
    context: click.Context,
    *,
    paths: tuple[Path, ...],
    as_json: bool,
    num_rows: int,
    no_cache: bool,
    against: Path | None,
    layout_text: str | None,
    ranks: tuple[int, ...],
    device_name: str | None,
    flame: Path | None,
    flame_by: str,
) -> None:
    """Shows where the time of devices went in PATHS: traces, or folders with traces below them.

    Reads JSON of Kineto, Chrome, XLA and Ascend (trace_view.json); plain, gzip, zstd, bzip2 or xz.
    Traces of several ranks of a job are combined. Exit codes: 0 fine, 2 usage, 3 a trace cannot be
    read.
    """
    given = None if layout_text is None else Layout.parse(layout_text)
    # What is read is columns and their rows, which hold no cycles: there is little to collect.
    context.call_on_close(partial(gc.set_threshold, *gc.get_threshold()))
    gc.set_threshold(_OBJECTS_A_COLLECTION)
    load_numpy()
    if flame is not None:
        _write_flame(flame, flame_by, paths)
        return
    device = "" if device_name is None else _find_name(device_name)
    compared = [against] if against is not None else []
    read = _read(
        paths,
        compared,
        given,
        use_cache=not no_cache,
        device_name=device,
        in_full=as_json or bool(compared),
    )
    layout = read.layout
    _check_ranks(ranks, read.outlines)
    difference = None
    if compared:
        earlier = _read(
            compared,
            paths,
            given,
            use_cache=not no_cache,
            may_differ=True,
            device_name=device,
        )
        from meshscope.analyze.compare.trace_diff import compare_traces

        difference = compare_traces(earlier.summaries, read.summaries)
    if as_json:
        from meshscope.analyze.device.trace_verdict import judge, list_unknown
        from meshscope.report.trace_document import DOCUMENT, TraceDocument
        from meshscope.report.trace_ranks_text import find_others_part

        comparison, find_path = _put_together(read)
        summaries = read.summaries
        document = TraceDocument(
            layout=layout if isinstance(layout, Unavailable) else layout.to_dict(),
            verdicts=tuple(judge(one, find_others_part(one.rank, comparison)) for one in summaries),
            not_known=list_unknown(summaries, read.left_out),
            traces=tuple(summaries),
            across_ranks=comparison,
            critical_path=find_path(),
            difference=difference,
        )
        show_document(DOCUMENT, document)
        return
    screen = choose_screen(context)
    if difference is None:
        text = _render(read, screen, ranks, num_rows)
    else:
        from meshscope.report.trace_diff_text import render_difference

        text = render_difference(difference, screen, num_rows=num_rows)
    click.echo(text, nl=False, color=True)  # colours were decided when the text was made


def _render(read: "_Read", screen: "Screen", ranks: Sequence[int], num_rows: int) -> str:
    """The text of all traces. Reading the one that is shown in full, most likely, takes as long as
    comparing ranks, and is done beside that."""
    from meshscope.report.trace_choice import choose_shown, guess_shown
    from meshscope.report.trace_text import render_traces

    guess = guess_shown(read.outlines, ranks)
    finish = read.begin_summary(guess)
    comparison, find_path = _put_together(read)
    first, *others = choose_shown(read.outlines, comparison, ranks)
    if first != guess:
        finish = read.begin_summary(first)
    path = find_path()
    return render_traces(
        [finish(), *(read.summarize(place) for place in others)],
        comparison,
        screen,
        layout=read.layout,
        path=path,
        num_rows=num_rows,
        outlines=read.outlines,
        left_out=read.left_out,
    )


def _write_flame(target: Path, by: str, paths: Sequence[Path]) -> None:
    """Stacks of one trace; of several the first."""
    from meshscope.analyze.device.trace_flame import fold_modules, fold_python, list_folded
    from meshscope.ingest.kineto.kineto import read_trace
    from meshscope.ingest.kineto.trace_files import find_traces
    from meshscope.ingest.traces.trace_view import TraceView
    from meshscope.report.render.flame import render_flame

    file = find_traces(paths)[0]
    view = TraceView(read_trace(file, with_python=by == "python"))
    stacks = fold_python(view) if by == "python" else fold_modules(view)
    if isinstance(stacks, Unavailable):
        raise UsageError(f"--flame: {file}: {stacks.reason}")
    if target.suffix == ".svg":
        text = render_flame(stacks, f"{file.name}, by {by}")
    else:
        text = "".join(f"{line}\n" for line in list_folded(stacks))
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}") from error
    click.echo(f"{target}: {len(stacks):,} stacks of {file}")


def _find_name(text: str) -> str:
    """The name of a device as torch writes it."""
    from meshscope.core.hardware import find_by_word

    found = find_by_word(text)
    if isinstance(found, Unavailable):
        raise UsageError(f"--device {text}: {found.reason}")
    return found.name


def _check_ranks(wanted: Sequence[int], outlines: "Sequence[TraceOutline]") -> None:
    from meshscope.report import format as form

    known = sorted({one.rank for one in outlines if isinstance(one.rank, int)})
    missing = [rank for rank in wanted if rank not in known]
    if missing:
        there = f"traces of {form.name_ranks(known)}" if known else "no trace that names its rank"
        raise UsageError(f"--rank {missing[0]}: this rank has no trace; there are {there}")


_PathFinder = Callable[[], "CriticalPath | Unavailable | None"]


def _find_no_path() -> None:
    """One trace has none."""


def _put_together(read: "_Read") -> "tuple[RankComparison | Unavailable, _PathFinder]":
    """What ranks did together, and what finds the critical path over them."""
    if len(read.recordings) < 2:
        return Unavailable("it takes traces of two ranks or more, of the same steps"), _find_no_path
    from meshscope.analyze.communication.rank_comparison import compare_ranks
    from meshscope.analyze.study import Study
    from meshscope.ingest.traces.trace_run import make_run
    from meshscope.ingest.traces.trace_steps import go_back
    from meshscope.simulate.trace_path import find_trace_path

    jumped = [one.source for one in read.recordings if go_back(one.steps)]
    if jumped:
        distrust = Unavailable(
            f"{jumped[0]}: the numbers of its steps go back, so its clock is not to be trusted"
        )
        return distrust, lambda: distrust
    layout = read.layout if isinstance(read.layout, Layout) else None
    try:
        made = make_run(read.recordings, Path(read.recordings[0].source), layout=layout)
    except TraceError as error:
        reason = Unavailable(str(error))
        return reason, lambda: reason
    study = Study(made.run.last_attempt)
    return compare_ranks(study.communication), lambda: find_trace_path(study.timeline)


_Names = dict[int, dict[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayoutFinder:
    """As the user says; else as the folders' names tell.

    What the names of traces that are compared with say of the mesh counts where their own say
    too little: both sets then name axes alike. A set that `may_differ` in size from the layout
    given does without it.
    """

    given: Layout | None
    named: _Names
    more: _Names
    may_differ: bool

    def find(self, world_size: int | Unavailable) -> Layout | Unavailable:
        """For traces of so many ranks."""
        from meshscope.ingest.traces.trace_axes import infer_layout

        if self.given is not None and (not self.may_differ or world_size == self.given.world_size):
            return self.given
        layout = infer_layout(self.named, world_size)
        return infer_layout(self.more, world_size) if isinstance(layout, Unavailable) else layout

    def check(self, world_size: int | Unavailable) -> None:
        """The user must not contradict a trace."""
        is_sure = self.given is not None and not self.may_differ
        if is_sure and self.given is not None and not isinstance(world_size, Unavailable):
            check_layout(self.given, world_size=world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadFile:
    """One trace."""

    file: Path
    layout: Layout | Unavailable
    """That named its axes."""
    outline: "TraceOutline"
    summary: "TraceSummary | None"
    """None where only the outline was asked for."""
    recording: "TraceRecording | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A set of traces."""

    layout: Layout | Unavailable
    files: list[_ReadFile]
    left_out: list[str]
    """Files that could not be read, and why."""
    read_one: Callable[..., _ReadFile | TraceError]
    """Reads one of the files again, in full."""

    @property
    def outlines(self) -> "list[TraceOutline]":
        return [one.outline for one in self.files]

    @property
    def recordings(self) -> "list[TraceRecording]":
        """Of several traces: what the path over ranks is found in."""
        return [one.recording for one in self.files if one.recording is not None]

    @property
    def summaries(self) -> "list[TraceSummary]":
        return [self.summarize(place) for place in range(len(self.files))]

    def summarize(self, place: int) -> "TraceSummary":
        """All of one trace, which is read again where only its outline was kept."""
        return self._summary_of(place, self._read_again)

    def begin_summary(self, place: int) -> "Callable[[], TraceSummary]":
        """Begins to read the trace again, if that is needed, beside what is done here meanwhile."""
        if self.files[place].summary is not None:
            return partial(self.summarize, place)
        from meshscope.cli.trace_loading import begin_file

        finish = begin_file(self._read_again, self.files[place].file)
        return lambda: self._summary_of(place, lambda _: finish())

    @property
    def _read_again(self) -> "Callable[[Path], _ReadFile | TraceError]":
        layout = self.layout if isinstance(self.layout, Layout) else None
        return partial(self.read_one, layout=layout)

    def _summary_of(
        self, place: int, read: "Callable[[Path], _ReadFile | TraceError]"
    ) -> "TraceSummary":
        one = self.files[place]
        if one.summary is not None:
            return one.summary
        again = read(one.file)
        if isinstance(again, TraceError):
            raise again
        if again.summary is None:
            raise TypeError(f"{one.file} was asked for in full")
        return again.summary


def _read(
    paths: Sequence[Path],
    beside: Sequence[Path],
    given: Layout | None,
    *,
    use_cache: bool,
    may_differ: bool = False,
    device_name: str = "",
    in_full: bool = True,
) -> _Read:
    """Every trace that can be read; a folder may have a few that cannot. Of many, only outlines are
    made unless they are all wanted `in_full`.

    All have the layout of the first that tells one, also those that would have told another.
    """
    from meshscope.cli.trace_loading import read_files, share_spans
    from meshscope.ingest.kineto.trace_files import find_traces
    from meshscope.report.trace_choice import MAX_IN_FULL

    files = find_traces(paths)
    named = _read_names(files)
    more = {**_read_names(find_traces(beside)), **named} if beside else named
    finder = _LayoutFinder(given=given, named=named, more=more, may_differ=may_differ)
    if len(files) > 1:
        _load_readers()
    # One trace has no other to be put together with.
    max_spans = share_spans(files) if len(files) > 1 and not beside else None
    read_whole = partial(
        _read_file,
        finder=finder,
        max_spans=max_spans,
        use_cache=use_cache,
        device_name=device_name,
    )
    is_brief = not in_full and len(files) > MAX_IN_FULL
    read_one = partial(read_whole, is_brief=is_brief)
    layout: Layout | Unavailable = Unavailable("no trace says the world size")
    read: list[_ReadFile] = []
    left_out: list[str] = []
    for one in read_files(files, read_one, left_out):
        if isinstance(layout, Unavailable):
            finder.check(one.outline.world_size)
            layout = one.layout
        elif one.layout != layout and not is_brief:  # an outline names no axis
            again = read_one(one.file, layout=layout)
            one = one if isinstance(again, TraceError) else again
        read.append(one)
        if len(read) == 1 and max_spans is not None:
            _load_comparison()
    if isinstance(layout, Unavailable) and max_spans is not None:
        layout, read = _name_pipeline(layout, read, None if is_brief else read_one)
    read.sort(key=_order)
    return _Read(layout=layout, files=read, left_out=left_out, read_one=read_whole)


def _load_readers() -> None:
    """What every process needs is loaded before they are forked, and so once."""
    import meshscope.ingest.traces.trace_recording  # noqa: F401


def _load_comparison() -> None:
    """What puts ranks together is loaded while other processes still read."""
    import meshscope.analyze.communication.rank_comparison  # noqa: F401
    import meshscope.report.trace_text  # noqa: F401
    import meshscope.simulate.trace_path  # noqa: F401


def _name_pipeline(
    layout: Unavailable,
    read: list[_ReadFile],
    read_one: Callable[..., _ReadFile | TraceError] | None,
) -> tuple[Layout | Unavailable, list[_ReadFile]]:
    """A pipeline shows only in all traces together: its axis is named in a second reading."""
    from meshscope.ingest.traces.trace_run import find_pipeline

    recordings = [one.recording for one in read if one.recording is not None]
    line = find_pipeline(recordings, read[0].outline.world_size) if read else layout
    if isinstance(line, Unavailable):
        return layout, read
    if read_one is None:
        return line, read
    again = [(one, read_one(one.file, layout=line)) for one in read]
    return line, [one if isinstance(new, TraceError) else new for one, new in again]


def _order(one: _ReadFile) -> int:
    """By rank, if it is known; a stable sort keeps the others as they were named."""
    return one.outline.rank if isinstance(one.outline.rank, int) else 0


def _read_file(
    file: Path,
    *,
    finder: _LayoutFinder,
    max_spans: int | None,
    use_cache: bool,
    layout: Layout | None = None,
    device_name: str = "",
    is_brief: bool = False,
) -> _ReadFile | TraceError:
    """One trace, with the layout that it tells itself, unless one is given; `max_spans` where it is
    one of several. What it says with a device's name is not kept."""
    from meshscope.analyze.device.trace_outline import outline_summary, outline_trace
    from meshscope.cli.trace_loading import load_file
    from meshscope.ingest.traces.trace_view import TraceView

    is_kept = use_cache and max_spans is None and not device_name
    try:
        stamp, kept = _load_kept(file) if is_kept else ((), None)
        if kept is not None:
            found = layout or finder.find(kept.summary.world_size)
            if kept.layout == (None if isinstance(found, Unavailable) else found):
                return _ReadFile(
                    file=file,
                    layout=found,
                    outline=outline_summary(kept.summary),
                    summary=kept.summary,
                    recording=None,
                )
        trace = load_file(file, use_cache=use_cache, keep=not is_kept)
    except OSError as error:
        return TraceError(f"{file}: {error.strerror or error}")
    except TraceError as error:
        return error
    found = layout or finder.find(trace.world_size)
    known = None if isinstance(found, Unavailable) else found
    view = TraceView(trace, known)
    summary = None
    if not is_brief:  # only then what tabulates a trace is loaded
        from meshscope.analyze.device.trace_summary import summarize_trace

        summary = summarize_trace(trace, view=view, device_name=device_name)
    if summary is not None and is_kept:
        from meshscope.cli.trace_summaries import store_summary

        store_summary(file, stamp, known, summary)
    recording = None
    if max_spans is not None:
        from meshscope.ingest.traces.trace_recording import record_trace

        recording = record_trace(trace, max_spans=max_spans, view=view)
    return _ReadFile(
        file=file,
        layout=found,
        outline=outline_trace(view) if summary is None else outline_summary(summary),
        summary=summary,
        recording=recording,
    )


def _load_kept(file: Path) -> "tuple[Stamp, KeptSummary | None]":
    """What was kept of the trace as it is now."""
    from meshscope.cli.trace_summaries import load_summary
    from meshscope.ingest.kineto.trace_cache import read_stamp

    stamp = read_stamp(file)
    return stamp, load_summary(file, stamp)


def _read_names(files: Sequence[Path]) -> _Names:
    from meshscope.ingest.traces.trace_axes import coordinates_of

    return dict(filter(None, (coordinates_of(str(file)) for file in files)))
