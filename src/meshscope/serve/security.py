"""Who may ask, and what a browser may do with the answer. Stands before everything else.

- GET and HEAD only: nothing here changes anything.
- The Host header must name this server: a page of another site cannot reach it under its own name.
- Where a token is asked for, it comes once in the address and moves to a cookie that scripts cannot
  read and other sites cannot send with requests of their own; programs send it as a bearer token.
- Every answer forbids the browser whatever the page does not need.
"""

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src data: blob:",
        "connect-src 'self'",
        "worker-src blob:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
TOKEN = "token"
MAX_TOKEN = 512


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may ask."""

    host: str
    """Where the server listens."""
    port: int
    token: str | None
    """None: nobody is asked for one."""
    allowed_hosts: frozenset[str] = frozenset()
    """Names by which a proxy or others reach it."""

    @property
    def cookie(self) -> str:
        """Cookies do not tell ports apart."""
        return f"meshscope_{self.port}"

    def allows_host(self, header: str) -> bool:
        name = split_host(header)
        if name is None:
            return False
        known = {*_LOOPBACK_NAMES, *self.allowed_hosts, self.host.lower()}
        if name in known:
            return True
        if is_loopback(self.host):
            return False
        # A name that an attacker owns can be pointed here; an address cannot.
        return _is_address(name) or name in _own_names()


def split_host(header: str) -> str | None:
    """`[::1]:8080` is `::1`; None for what no browser sends."""
    text = header.strip().lower().rstrip(".")
    if not text or len(text) > 255 or any(c in text for c in " /\\@,?#%"):
        return None
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        return name if bracket and (not port or port[:1] == ":") else None
    name, _, port = text.partition(":")
    return name.rstrip(".") if not port or port.isdecimal() else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _own_names() -> frozenset[str]:
    name = socket.gethostname().lower()
    return frozenset((name, name.partition(".")[0], socket.getfqdn().lower()))


class Guard:
    """The outermost part of the application."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refuse(scope)
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refuse(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            text = "only GET is answered: nothing can be changed here"
            return JSONResponse({"error": text}, 405, {"allow": "GET, HEAD"})
        if not self._access.allows_host(headers.get("host", "")):
            text = (
                "the Host header does not name this server; if a proxy or another name leads "
                "here, start it with --allow-host NAME"
            )
            return JSONResponse({"error": text}, 421)
        if headers.get("sec-fetch-site") == "cross-site" and _is_data(scope, headers):
            return JSONResponse({"error": "requests of other sites are not answered"}, 403)
        return self._check_token(scope, headers)

    def _check_token(self, scope: Scope, headers: Headers) -> Response | None:
        """None where it is right. One in the address goes to a cookie, and out of the address."""
        token = self._access.token
        given = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        shown = next((value for name, value in given if name == TOKEN), None)
        if shown is not None and (token is None or _is_same(shown, token)):
            rest = urlencode([(name, value) for name, value in given if name != TOKEN])
            # Relative, so that it holds below a proxy's path; a colon would make it an address.
            last = "./" + scope["path"].rpartition("/")[2]
            response = RedirectResponse(f"{last}?{rest}" if rest else last, 303)
            if token is not None:
                response.set_cookie(self._access.cookie, token, httponly=True, samesite="lax")
            return response
        if token is None or _is_same(_find_token(headers, self._access.cookie), token):
            return None
        text = "a token is needed: open the address that `meshscope serve` printed"
        return JSONResponse({"error": text}, 401, {"www-authenticate": "Bearer"})


def _is_data(scope: Scope, headers: Headers) -> bool:
    """Anything but following a link to a page."""
    is_navigation = headers.get("sec-fetch-mode") == "navigate"
    return not is_navigation or "/api/" in scope["path"]


def _find_token(headers: Headers, cookie: str) -> str:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return bearer.strip()
    for name, value in _read_cookies(headers.getlist("cookie")):
        if name == cookie:
            return value
    return ""


def _read_cookies(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        for part in line.split(";"):
            found: SimpleCookie = SimpleCookie()
            try:
                found.load(part)
            except CookieError:
                continue
            yield from ((name, morsel.value) for name, morsel in found.items())


def _is_same(given: str, token: str) -> bool:
    return hmac.compare_digest(given[:MAX_TOKEN].encode(), token.encode())
