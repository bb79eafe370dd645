"""The HTML of the dashboard's pages: nothing but a place for the bundle to draw in."""

import html

from meshscope.page.file import ROOT_ID, SCRIPT, STYLE

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="meshscope-base" content="{base}">
{run}<title>meshscope</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{base}assets/{version}/{style}">
</head>
<body>
<div id="{root_id}"></div>
<noscript>This page draws with JavaScript, all of which comes from this server.</noscript>
<script src="{base}assets/{version}/{script}"></script>
</body>
</html>
"""


def render_shell(*, base: str, version: str, run_id: str | None = None) -> str:
    """`base` leads from the page to the root: addresses are relative, so that a proxy may serve it
    all below a path of its own. `version` changes with the bundle."""
    run = ""
    if run_id is not None:
        run = f'<meta name="meshscope-run" content="{html.escape(run_id, quote=True)}">\n'
    return _TEMPLATE.format(
        base=html.escape(base, quote=True),
        run=run,
        root_id=ROOT_ID,
        version=html.escape(version, quote=True),
        style=STYLE,
        script=SCRIPT,
    )
