"""A run written by hand from docs/store.md, with nothing in it that the page does not ask for.

No writer of this package is used: the bytes are made here, as another language would make them.
"""

import json
import struct
import zlib
from pathlib import Path

import pytest

from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from report_builders import document_of, render_report, report_of

MASK = 2**64 - 1
SALT = 0x9E3779B97F4A7C15

MINIMAL_HEADERS: dict[str, dict[str, object]] = {
    "version": {"schema_version": 1},
    "packed": {"schema_version": 2},
    "rank": {"schema_version": 1, "rank": 0, "world_size": 1},
    "layout": {"schema_version": 1, "rank": 0, "world_size": 1, "layout": {"dp": 1}},
    "nulls": dict.fromkeys(
        ("launch_id", "restart_count", "host", "pid", "start_unix_ns", "layout_source"), None
    ),
}


def pack_record(slot: int, words: tuple[int, ...]) -> bytes:
    return struct.pack("<Q7q", (sum(words) + (slot + 1) * SALT) & MASK, *words)


def pack_table(table: str, records: list[tuple[int, ...]], *, is_closed: bool) -> bytes:
    text = json.dumps({"table": table, "schema_version": 1, "rank": 0}).encode()
    body = text.ljust(3968 - 16, b"\0")
    page = b"MSHSCOPE" + struct.pack("<II", len(text), zlib.crc32(body)) + body
    close = pack_record(4032, (len(records), 0, 0, 0, 0, 0, 0)) if is_closed else bytes(64)
    page += bytes(64) + close
    return page + b"".join(pack_record(n, words) for n, words in enumerate(records))


def pack_tables(tables: dict[str, bytes]) -> bytes:
    """One extent for each."""
    text = json.dumps({"schema_version": 2, "rank": 0, "sink": "append"}).encode()
    body = text.ljust(3968 - 16, b"\0")
    page = b"MSHSPACK" + struct.pack("<II", len(text), zlib.crc32(body)) + body + bytes(128)
    entries, extents = b"", b""
    for name, data in tables.items():
        words = struct.unpack("<4q", name.encode().ljust(32, b"\0"))
        for _ in range(2):
            place = (8192 + len(extents), 0, len(data))
            entries += pack_record(4096 + len(entries), (*words, *place))
        extents += data
    return page + entries.ljust(4096, b"\0") + extents


def pack_line(fields: dict[str, object]) -> bytes:
    text = json.dumps(fields).encode()
    return f"{zlib.crc32(text):08x} ".encode() + text + b"\n"


def write_run(run_dir: Path, header: dict[str, object], closing: dict[str, object] | None) -> None:
    directory = run_dir / "rank00000" / "attempt000"
    directory.mkdir(parents=True)
    lines = [pack_line({"kind": "header", **header})]
    if closing is not None:
        lines.append(pack_line({"kind": "close", **closing}))
    (directory / "journal.jsonl").write_bytes(b"".join(lines))
    steps = [(step, 1000 + 100 * step, 1090 + 100 * step, 1, -1, -1, 0) for step in range(3)]
    spans = [(2, 1010, 50, 50, 0, 0, 0)]
    tables = {
        name: pack_table(name, records, is_closed=closing is not None)
        for name, records in (("steps", steps), ("spans", spans))
    }
    if header.get("schema_version") == 2:
        (directory / "tables.pack").write_bytes(pack_tables(tables))
    else:
        for name, data in tables.items():
            (directory / f"{name}.tbl").write_bytes(data)


@pytest.mark.parametrize("closing", [None, {}], ids=["open", "closed"])
@pytest.mark.parametrize("header", MINIMAL_HEADERS.values(), ids=MINIMAL_HEADERS)
def test_what_a_minimal_header_leaves_out_is_unknown(
    tmp_path: Path, header: dict[str, object], closing: dict[str, object] | None
) -> None:
    write_run(tmp_path, header, closing)
    report = report_of(tmp_path)
    document_of(report)
    text = render_report(report)
    assert report.study.health.problems == ()
    assert (report.facts.world_size, report.study.steps.num_steps) == (1, 3)
    assert report.study.steps.time.median_ns == 90
    assert report.study.ranks[0].time.steps.phase_ns == {"forward": 50}
    assert report.facts.started_unix_ns == Unavailable("no rank's journal has a start")
    assert isinstance(report.study.ranks[0].host, Unavailable)
    assert isinstance(report.study.ranks[0].last_record_unix_ns, Unavailable)
    assert isinstance(report.facts.git_revision, Unavailable)
    assert "n/a: no rank's journal has a start" in text
    assert "n/a: no rank names its host" in text  # the hosts
    why = "no rank wrote its closing line" if closing is None else "no rank's closing line says"
    assert report.study.health.opening_cost_ns == Unavailable(why)


def test_a_layout_without_its_source_is_shown_and_the_source_is_said_to_be_unknown(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, MINIMAL_HEADERS["layout"], {})
    report = report_of(tmp_path)
    assert report.layout.text == "dp1×tp1×pp1"
    assert report.layout.source == Unavailable("not recorded")
    text = render_report(report)
    assert "dp1 · how this is known was not recorded" in text


def test_a_layout_source_that_came_later_is_found(tmp_path: Path) -> None:
    write_run(tmp_path, MINIMAL_HEADERS["layout"], None)
    journal = tmp_path / "rank00000" / "attempt000" / "journal.jsonl"
    update = {"kind": "update", "layout": {"dp": 1}, "layout_source": "declared"}
    journal.write_bytes(journal.read_bytes() + pack_line(update))
    assert report_of(tmp_path).layout.source == "declared"


def test_a_rank_that_does_not_say_its_start_is_not_taken_to_begin_at_zero(tmp_path: Path) -> None:
    write_run(tmp_path, MINIMAL_HEADERS["rank"], {})
    run = open_run(tmp_path)
    rank = Study(run.last_attempt).ranks[0]
    assert (rank.time.start_ns, rank.time.end_ns) == (1000, 1290)
    assert rank.last_record_unix_ns == Unavailable("the rank's journal does not say when it began")
