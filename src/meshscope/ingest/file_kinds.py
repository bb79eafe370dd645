"""Says what a file is that is no trace, from how it begins and from what its JSON holds."""

from collections.abc import Iterable

from meshscope.ingest.compressed import BZIP2_MAGIC, GZIP_MAGIC, XZ_MAGIC, ZSTD_MAGIC

_TAR_PLACE, _TAR_MAGIC = 257, b"ustar"
_BEGINNINGS: tuple[tuple[tuple[bytes, ...], str], ...] = (
    ((b"PK\x03\x04",), "it is a zip archive: unpack it first"),
    (
        (GZIP_MAGIC, ZSTD_MAGIC, BZIP2_MAGIC, XZ_MAGIC),
        "it is compressed twice: unpack it once first",
    ),
    ((b"version https://git-lfs",), "it is a pointer of Git LFS: fetch the file itself"),
    ((b"<",), "it is HTML or XML, no JSON"),
    ((b"SQLite format 3",), "it is a SQLite database, no JSON"),
    (
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        "it is a pickle; see `meshscope snapshot`",
    ),
    ((b"{\0", b"[\0", b"\0{", b"\0["), "it is UTF-16 without a mark: convert it to UTF-8"),
)
_FIELDS: tuple[tuple[str, str], ...] = (
    ("rocprofiler-sdk-tool", "it is rocprofv3's own JSON: write Chrome's form instead"),
    ("nodes", "it is an execution graph, as PyTorch and Chakra write, without events"),
    ("spans", "its spans are not events of Chrome's form"),
    ("ph", "it is one event, or one on each line: put them into a list, as `jq -s .` does"),
)
_TEXT_CONTROLS = b"\t\n\r\f\x1b"


def describe_beginning(first: bytes) -> str:
    """What the first bytes of a file's content tell; nothing when they could be JSON."""
    if first[_TAR_PLACE : _TAR_PLACE + len(_TAR_MAGIC)] == _TAR_MAGIC:
        return "it is a tar archive: unpack it first"
    for beginnings, description in _BEGINNINGS:
        if first.startswith(beginnings):
            return description
    is_text = all(letter >= ord(" ") or letter in _TEXT_CONTROLS for letter in first[:64])
    return "" if is_text else "it is binary, no JSON"


def describe_fields(names: Iterable[str]) -> str:
    """What the entries of a JSON object tell that has no events."""
    known = set(names)
    return next((text for name, text in _FIELDS if name in known), "")
