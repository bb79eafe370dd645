"""The store's documentation says what the code does."""

import re
import struct
import subprocess
import sys
from pathlib import Path

from meshscope.store.schema import BUILTIN_NAMES, SCHEMA_VERSION, TABLES
from meshscope.store.write.journal import pack_extent
from meshscope.store.write.now_file import NOW_NAME, NowFile
from meshscope.store.write.open_step import OpenPhase, OpenStepWriter, read_open_step
from meshscope.store.write.table_file import CHECK_SALT, CLOSE_OFFSET, STATUS_OFFSET, pack_record

DOCS = Path(__file__).parents[2] / "docs"


def test_columns_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_every_column_is_listed() -> None:
    page = (DOCS / "columns.md").read_text(encoding="utf-8")
    for table in TABLES.values():
        section = page.split(f"## {table.name}\n")[1]
        for column in table.columns:
            assert f"| `{column.name}` |" in section


def test_the_worked_example_is_right() -> None:
    page = (DOCS / "store.md").read_text(encoding="utf-8")
    _, of_entry, example = page.split("**Example.**")
    entry = bytes.fromhex(re.findall(r"```\n(.*?)```", of_entry, flags=re.DOTALL)[0])
    name = int.from_bytes(b"steps", "little")
    assert entry == pack_record(4096, (name, 0, 0, 0, 8192, 0, 8192))
    assert f"{int.from_bytes(entry[:8], 'little'):#018x}" in of_entry
    shown = bytes.fromhex(re.findall(r"```\n(.*?)```", example, flags=re.DOTALL)[0])
    value_bits = 4_607_182_418_800_017_408  # 1.0
    assert shown == pack_record(2, (64, 7, 1_000_000_000, value_bits, -1, 0, 0))
    total = (64 + 7 + 1_000_000_000 + value_bits - 1 + 3 * CHECK_SALT) % 2**64
    assert f"{total:#018x}" in example
    assert shown[:8] == total.to_bytes(8, "little")


def test_the_places_it_names_are_right() -> None:
    page = (DOCS / "store.md").read_text(encoding="utf-8")
    assert f"{CHECK_SALT:#X}".replace("X", "x") in page
    assert f"| {STATUS_OFFSET}–{STATUS_OFFSET + 63} |" in page
    assert f"| {CLOSE_OFFSET}–{CLOSE_OFFSET + 63} |" in page
    assert pack_extent(123).decode()[9:-1] in page
    assert f"(now {SCHEMA_VERSION})" in page


def test_stamps_written_from_the_page_are_read(tmp_path: Path) -> None:
    page = (DOCS / "store.md").read_text(encoding="utf-8").split("## Unfinished step")[1]
    assert "the bytes `OPENSTEP`" in page
    assert "(time − epoch) · 257" in page
    epoch = 10**15
    stamps = [0] * 8
    stamps[2:5] = [(time - epoch) * 257 for time in (epoch + 5, epoch + 9, epoch + 12)]
    data = b"OPENSTEP" + struct.pack("<15q", epoch, -epoch, *stamps, *[0] * 5)
    phases = [
        OpenPhase(name_id=BUILTIN_NAMES[name], start_host_mono_ns=start, end_host_mono_ns=end)
        for name, start, end in (
            ("forward", epoch + 5, epoch + 9),
            ("backward", epoch + 12, None),
        )
    ]
    assert read_open_step(data, epoch) == (phases, 0)
    OpenStepWriter(NowFile(tmp_path / NOW_NAME, mapped=True), epoch + 1)
    assert (tmp_path / NOW_NAME).read_bytes()[:24] == data[:24]
