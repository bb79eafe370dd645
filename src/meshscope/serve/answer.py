"""What a request is answered with, made in one process and sent by another."""

import gzip
import hashlib
import re
from dataclasses import dataclass, field

import msgspec

JSON = "application/json"
BINARY = "application/octet-stream"
_MIN_PACKED_BYTES = 1024
_PACK_LEVEL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A body and what is said about it."""

    status: int = 200
    media: str = JSON
    body: bytes = field(repr=False)
    is_packed: bool = False
    """The body is gzip."""
    etag: str = ""
    file_name: str = ""
    """To be saved under; empty: to be shown."""
    headers: tuple[tuple[str, str], ...] = ()


def make_answer(
    body: bytes,
    *,
    media: str = JSON,
    file_name: str = "",
    headers: tuple[tuple[str, str], ...] = (),
) -> Answer:
    """Packs what is long enough; the tag is that of the content."""
    is_packed = len(body) >= _MIN_PACKED_BYTES
    return Answer(
        media=media,
        body=gzip.compress(body, _PACK_LEVEL, mtime=0) if is_packed else body,
        is_packed=is_packed,
        etag=hashlib.sha256(body).hexdigest()[:24],
        file_name=file_name,
        headers=headers,
    )


def name_file(text: str) -> str:
    """A name that a header and every file system take."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:60] or "run"


def make_json(plain: object) -> Answer:
    return make_answer(msgspec.json.encode(plain))


def refuse(status: int, text: str) -> Answer:
    """An error, as JSON with one sentence."""
    return Answer(status=status, body=msgspec.json.encode({"error": text}))
