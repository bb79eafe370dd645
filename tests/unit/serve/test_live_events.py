"""A run that is recorded while browsers listen: real files, real processes, real HTTP."""

import json
import time
from collections.abc import Iterator

import httpx

from serve_builders import LiveRun, Served


def read_events(response: httpx.Response) -> Iterator[tuple[str, str, dict]]:
    """Id, kind and content."""
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if not line:
            if "event" in fields:
                yield fields.get("id", ""), fields["event"], json.loads(fields["data"])
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


def test_events_of_a_run_from_hello_to_end(served: Served, live: tuple[str, LiveRun]) -> None:
    name, run = live
    address = f"/api/v1/runs/{served.find(name)}/events"
    steps: list[int] = []
    loss: dict[int, float] = {}
    seen: list[str] = []
    ids: list[str] = []
    with served.client.stream("GET", address) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for event_id, kind, data in read_events(response):
            seen.append(kind)
            ids += [event_id] if event_id else []
            if kind == "report" and run.step == 6:  # it has all that was there
                run.add(10)
            if kind == "steps":
                steps += data["steps"]
                if data["matrix"] is None and run.step == 16 and steps[-1] == 15:
                    run.add(4)
                    run.close()
            if kind == "series":
                for points in data["points"]:
                    loss.update(zip(points["step"], points["value"], strict=True))
            if kind == "status":
                state = data["state"]
    assert seen[0] == "hello"
    assert seen[-1] == "end"
    assert steps == list(range(6, 20))
    assert loss == {step: 5.0 - step / 100 for step in range(5, 20)}
    assert state == "finished"
    assert len({one.rpartition("-")[0] for one in ids}) == 1
    page = served.get(name, "page").json()
    assert page["report"]["steps"]["num_steps"] == 20
    assert page["meta"]["state"]["kind"] == "finished"

    # Who comes back with the id of an event gets the later ones; with a foreign id, a reset.
    assert listen(served, address, ids[-1])[0] == "hello"
    assert "reset" not in listen(served, address, ids[0])


def listen(served: Served, address: str, last_id: str) -> list[str]:
    with served.client.stream("GET", address, headers={"last-event-id": last_id}) as response:
        return [kind for _, kind, _ in read_events(response)]


def test_a_run_that_ended_tells_so_at_once(served: Served) -> None:
    address = f"/api/v1/runs/{served.find('slow')}/events"
    assert listen(served, address, "") == ["hello", "status", "end"]


def test_rows_of_live_runs_follow_them(served: Served, live: tuple[str, LiveRun]) -> None:
    name, run = live
    assert served.get(name, "page").json()["report"]["steps"]["num_steps"] == 6
    run.add(3)
    while served.rows()[name]["num_steps"] != 9:
        time.sleep(0.2)
    assert served.rows()[name]["state"] in ("live", "open")
    run.close()
    while served.rows()[name]["state"] != "finished":
        time.sleep(0.2)
