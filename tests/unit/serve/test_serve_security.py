"""Who is answered, and what a browser may do with it."""

import asyncio
from collections.abc import Mapping

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from meshscope.serve.security import Access, Guard, is_loopback, split_host

TOKEN = "a-token-of-some-length"


async def answer(_: Request) -> Response:
    return PlainTextResponse("secret")


class Client:
    """Asks the guard itself, and keeps cookies as a browser does."""

    def __init__(self, access: Access) -> None:
        app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST", "DELETE"])])
        self._transport = httpx.ASGITransport(Guard(app, access))
        self._cookies = httpx.Cookies()

    def request(self, method: str, path: str, **given: object) -> httpx.Response:
        async def ask() -> httpx.Response:
            base = "http://localhost:8265"
            async with httpx.AsyncClient(transport=self._transport, base_url=base) as client:
                client.cookies = self._cookies
                response = await client.request(method, path, **given)
                self._cookies = client.cookies
                return response

        return asyncio.run(ask())

    def get(
        self,
        path: str,
        headers: Mapping[str, str | bytes] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        return self.request("GET", path, headers=headers, params=params)


def make_client(
    *, host: str = "127.0.0.1", token: str | None = None, names: tuple[str, ...] = ()
) -> Client:
    return Client(Access(host=host, port=8265, token=token, allowed_hosts=frozenset(names)))


@pytest.mark.parametrize(
    "name", ["localhost", "127.0.0.1", "localhost:1", "[::1]:8265", "LOCALHOST."]
)
def test_loopback_answers_under_its_own_names(name: str) -> None:
    assert make_client().get("/", headers={"host": name}).status_code == 200


@pytest.mark.parametrize(
    "name",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "localhost@evil",
     "a b", "169.254.169.254", "10.0.0.1", "localhost:80:90", "[::1", "localhost/../x"],
)  # fmt: skip
def test_loopback_does_not_answer_under_other_names(name: str) -> None:
    reply = make_client().get("/", headers={"host": name})
    assert reply.status_code == 421
    assert "secret" not in reply.text


def test_elsewhere_names_must_be_known_and_addresses_are() -> None:
    client = make_client(host="0.0.0.0", token=TOKEN, names=("proxy.example",))
    bearer = {"authorization": f"Bearer {TOKEN}"}
    for name, status in (("10.1.2.3:8265", 200), ("proxy.example", 200), ("evil.example", 421)):
        assert client.get("/", headers={"host": name, **bearer}).status_code == status


def test_a_token_moves_from_the_address_to_a_cookie() -> None:
    client = make_client(host="0.0.0.0", token=TOKEN)
    assert client.get("/run/x").status_code == 401
    moved = client.get(f"/run/x?token={TOKEN}&a=1")
    assert moved.status_code == 303
    assert moved.headers["location"] == "./x?a=1"
    cookie = moved.headers["set-cookie"].lower()
    assert cookie.startswith(f"meshscope_8265={TOKEN}")
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert client.get("/run/x").text == "secret"


@pytest.mark.parametrize("given", ["", TOKEN[:-1], "x" * 10_000, f"{TOKEN}\u00e9"])
def test_a_wrong_token_is_refused_wherever_it_comes(given: str) -> None:
    client = make_client(token=TOKEN)
    bearer = {"authorization": f"Bearer {given}".encode()}
    for reply in (
        client.get("/", params={"token": given}),
        client.get("/", headers=bearer),
        client.get("/", headers={"cookie": f"meshscope_8265={given}".encode()}),
        client.get("/", headers={"cookie": f"meshscope_1={TOKEN}"}),
    ):
        assert reply.status_code == 401
        assert "set-cookie" not in reply.headers
        assert "secret" not in reply.text


def test_a_broken_cookie_beside_it_does_not_hide_the_token() -> None:
    client = make_client(token=TOKEN)
    reply = client.get("/", headers={"cookie": f'a"=@;;=; b[]=1; meshscope_8265={TOKEN}'})
    assert reply.text == "secret"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_get_is_answered(method: str) -> None:
    reply = make_client().request(method, "/api/v1/runs")
    assert reply.status_code == 405
    assert "secret" not in reply.text


def test_every_answer_forbids_what_the_page_does_not_need() -> None:
    client = make_client(token=TOKEN)
    for reply in (
        client.get("/"),
        client.request("POST", "/"),
        client.get("/", headers={"authorization": f"Bearer {TOKEN}"}),
        client.get("/", headers={"host": "evil"}),
    ):
        policy = reply.headers["content-security-policy"]
        for part in (
            "default-src 'none'",
            "script-src 'self'",
            "connect-src 'self'",
            "frame-ancestors 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ):
            assert part in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in reply.headers


def test_other_sites_get_no_data_and_may_link_to_pages() -> None:
    client = make_client()
    other = {"sec-fetch-site": "cross-site"}
    assert client.get("/run/x", headers={**other, "sec-fetch-mode": "navigate"}).status_code == 200
    assert client.get("/run/x", headers={**other, "sec-fetch-mode": "no-cors"}).status_code == 403
    api = client.get("/api/v1/runs", headers={**other, "sec-fetch-mode": "navigate"})
    assert api.status_code == 403


def test_loopback_is_known_by_address() -> None:
    assert [is_loopback(one) for one in ("localhost", "127.0.0.2", "::1")] == [True] * 3
    assert [is_loopback(one) for one in ("0.0.0.0", "::", "10.0.0.1", "host")] == [False] * 4
    assert split_host("Name.Example.:80") == "name.example"
