"""A page as one file: the document, the bundle of `web/` and a policy that allows nothing else.

The data stands in an element that browsers do not run, with every character escaped that could end
it. The policy names the one script and the one style sheet by their hashes, so that nothing which
comes with a run's names can be run, and nothing is ever fetched.
"""

import base64
import hashlib
import html
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

from meshscope.errors import MeshscopeError
from meshscope.page.document import DOCUMENT, SHAPES, PageDocument
from meshscope.page.redaction import redact
from meshscope.report.encode import as_plain
from meshscope.report.format import clean_text

DATA_ID = "meshscope-data"
ROOT_ID = "meshscope-page"
SCRIPT, STYLE = "page.js", "page.css"
_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="meshscope {version}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div id="{root_id}"></div>
<noscript>This page draws with JavaScript, all of which is in this file.</noscript>
<script type="application/json" id="{data_id}">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def write_page(document: PageDocument, *, is_redacted: bool = False) -> str:
    """The text of the file. MeshscopeError where the bundle is not there."""
    plain = encode_page(document, is_redacted=is_redacted)
    script, style = read_bundle(SCRIPT), read_bundle(STYLE)
    return _TEMPLATE.format(
        policy=make_policy(script, style),
        version=html.escape(document.meta.meshscope_version),
        title=html.escape(f"{clean_text(plain['meta']['title'])} · meshscope"),
        style=style,
        root_id=ROOT_ID,
        data_id=DATA_ID,
        data=_escape(msgspec.json.encode(plain).decode()),
        script=script,
    )


def encode_page(document: PageDocument, *, is_redacted: bool = False) -> dict[str, Any]:
    """The document as JSON values, with its envelope."""
    name, version = DOCUMENT
    plain = {"document": name, "document_version": version, **as_plain(document, SHAPES)}
    return redact(plain) if is_redacted else plain


def read_bundle(name: str) -> str:
    """A file of the bundle, which is built from `web/` and part of the package."""
    found = find_bundle() / name
    if not found.is_file():
        raise MeshscopeError(
            f"the page's {name} is not installed: this copy of meshscope was made without it; "
            "install a released wheel, or build it with `make web` (node 20 or later)"
        )
    text = found.read_text(encoding="utf-8")
    if "</script" in text.lower() or "</style" in text.lower():
        raise MeshscopeError(f"the page's {name} would end the element it stands in; build it anew")
    return text


def find_bundle() -> Traversable:
    return files("meshscope.page") / "bundle"


def make_policy(script: str, style: str) -> str:
    """Nothing but the two texts of the file, and what they make themselves."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data: blob:",
            "worker-src blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escape(text: str) -> str:
    """JSON in which nothing can end the element or open a comment there."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
