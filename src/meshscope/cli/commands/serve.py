"""`meshscope serve`: the dashboard."""

import os
import secrets
from pathlib import Path

import click

from meshscope.cli.places import READ
from meshscope.cli.terminal_screen import say
from meshscope.errors import UsageError
from meshscope.report.format import clean_path
from meshscope.store.remote.mirror import name_place

_TOKEN_VARIABLE = "MESHSCOPE_TOKEN"
_MIN_TOKEN = 8


@click.command("serve", short_help="Show the runs below folders in a browser, live.")
@click.argument("folders", type=READ, nargs=-1, metavar="DIR…")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Where to listen; elsewhere than on loopback a token is asked for.",
)
@click.option(
    "--port",
    type=click.IntRange(min=0, max=65535),
    help="Port; 0 takes any free one.  [default: the first free one from 8265 on]",
)
@click.option(
    "--token",
    help="Ask for this token, on loopback too.  [default: elsewhere than on loopback a new one; "
    f"{_TOKEN_VARIABLE} keeps it out of the list of processes]",
)
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A name that leads here, such as a proxy's; may be given several times.",
)
@click.option("--open", "opens", is_flag=True, help="Open a browser.")
def command(
    *,
    folders: tuple[Path, ...],
    host: str,
    port: int | None,
    token: str | None,
    allowed_hosts: tuple[str, ...],
    opens: bool,
) -> None:
    """Serves all runs at or below DIR… (default: here) as a dashboard, until it is interrupted.

    Runs that are being recorded update by themselves. It only reads. From another machine: `ssh -L
    8265:localhost:8265 HOST`, then open http://localhost:8265. Exit codes: 2 usage, 3 DIR is not
    there, 130 interrupted.
    """
    from meshscope.serve.run_server import listen, make_url, serve
    from meshscope.serve.runs import Runs
    from meshscope.serve.security import Access, is_loopback

    token = token or os.environ.get(_TOKEN_VARIABLE) or None
    if token is not None and (len(token) < _MIN_TOKEN or not token.isascii() or " " in token):
        raise UsageError(f"a token takes at least {_MIN_TOKEN} ASCII characters without spaces")
    given = folders or (Path(),)
    num_runs = len(Runs(given).list_runs())
    sock = listen(host, port)
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    access = Access(
        host=host,
        port=int(sock.getsockname()[1]),
        token=token,
        allowed_hosts=frozenset(name.lower() for name in allowed_hosts),
    )
    url = make_url(access)

    def tell() -> None:
        where = ", ".join(clean_path(name_place(one)) for one in given)
        say(f"{num_runs} runs below {where}" if num_runs != 1 else f"1 run below {where}")
        click.echo(url)
        say("Ctrl+C ends it")
        if opens:
            click.launch(url)

    serve(given, sock, access, ready=tell)
