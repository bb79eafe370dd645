"""`meshscope snapshot`: what a memory snapshot of torch.cuda holds."""

from dataclasses import replace
from pathlib import Path

import click

from meshscope.analyze.memory.snapshot_summary import summarize_snapshot
from meshscope.cli.options import top_option
from meshscope.cli.places import READ
from meshscope.cli.terminal_screen import show_document, show_sections
from meshscope.errors import UsageError
from meshscope.ingest.snapshot.snapshot import read_snapshot
from meshscope.report.sections.snapshot import (
    DOCUMENT,
    SnapshotDocument,
    make_snapshot_section,
)


@click.command("snapshot", short_help="Explain a memory snapshot of torch.cuda.")
@click.argument("file", type=READ)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@click.option("--device", type=click.IntRange(min=0), help="Show only this device.")
@top_option("Stacks and modules to list.")
@click.pass_context
def command(
    context: click.Context, *, file: Path, as_json: bool, device: int | None, num_rows: int
) -> None:
    """Shows what filled the device in FILE, written by `torch.cuda.memory._dump_snapshot`.

    Reading the pickle runs nothing in it. Exit codes: 0 fine, 2 usage, 3 the file
    cannot be read.
    """
    summary = summarize_snapshot(read_snapshot(file))
    if device is not None:
        chosen = tuple(one for one in summary.devices if one.device == device)
        if not chosen:
            known = ", ".join(str(one.device) for one in summary.devices) or "none"
            raise UsageError(f"device {device} is not in the snapshot; devices: {known}")
        summary = replace(summary, devices=chosen)
    if as_json:
        show_document(DOCUMENT, SnapshotDocument(snapshot=summary))
    else:
        show_sections(context, [make_snapshot_section(summary, num_rows=num_rows)])
