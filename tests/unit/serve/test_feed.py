"""Events for listeners that come, go, miss some and do not keep up."""

import asyncio

from meshscope.serve.feed import QUEUE_EVENTS, RING_EVENTS, Feed, FeedEvent, Listener


def drain(listener: Listener) -> list[FeedEvent]:
    async def take() -> list[FeedEvent]:
        found = []
        while len(listener):
            event = await listener.take(1)
            assert event is not None
            found.append(event)
        return found

    return asyncio.run(take())


def steps(first: int, count: int = 1) -> dict[str, object]:
    numbers = list(range(first, first + count))
    return {"from": first, "to": numbers[-1], "steps": numbers, "job_ns": numbers, "matrix": None}


def test_an_event_is_text_with_an_id_that_names_the_server() -> None:
    event = FeedEvent(seq=7, kind="end", data={"state": "a\nb"})
    assert event.encode("s1") == b'id: s1-7\nevent: end\ndata: {"state":"a\\nb"}\n\n'


def test_a_listener_that_comes_back_gets_what_it_missed() -> None:
    feed = Feed()
    for number in range(5):
        feed.publish("report", {"number": number})
    missed = drain(feed.listen(after=3))
    assert [(event.seq, event.kind) for event in missed] == [(4, "report"), (5, "report")]
    assert drain(feed.listen()) == []


def test_what_is_too_long_ago_or_of_another_server_is_a_reset() -> None:
    feed = Feed()
    for number in range(RING_EVENTS + 50):
        feed.publish("report", {"number": number})
    for after in (10, -1, 10**9):
        assert [event.kind for event in drain(feed.listen(after=after))] == ["reset"]


def test_an_id_of_another_server_is_a_reset_from_the_first_event_on() -> None:
    feed = Feed()
    feed.publish("report", {"number": 1})
    assert [event.kind for event in drain(feed.listen(after=-1))] == ["reset"]


def test_a_listener_that_does_not_keep_up_is_told_to_ask_anew() -> None:
    feed = Feed()
    listener = feed.listen()
    for number in range(QUEUE_EVENTS + 10):
        feed.publish("report", {"number": number})
        feed.publish("status", {"step": number})
        assert len(listener) <= QUEUE_EVENTS + 1
    kinds = [event.kind for event in drain(listener)]
    assert "reset" in kinds
    assert kinds.count("status") == 1


def test_steps_of_a_slow_listener_become_one_event_and_none_is_lost() -> None:
    feed = Feed()
    listener = feed.listen()
    for number in range(500):
        feed.publish("steps", steps(number * 2, 2))
    events = drain(listener)
    assert len(events) <= QUEUE_EVENTS
    told = [step for event in events for step in event.data["steps"]]
    assert told == list(range(1000))
    assert events[-1].seq == 500


def test_whoever_comes_late_gets_the_last_status_and_the_end() -> None:
    feed = Feed()
    feed.publish("status", {"state": "live"})
    feed.publish("status", {"state": "finished"})
    feed.publish("end", {"state": "finished"})
    assert [event.kind for event in drain(feed.listen())] == ["status", "end"]


def test_a_new_listener_gets_the_last_steps_and_points_at_once() -> None:
    feed = Feed()
    for number in range(10):
        feed.publish("steps", steps(number))
        points = [{"key": "loss", "step": [number], "value": [float(number)]}]
        feed.publish("series", {"points": points})
        feed.publish("report", {"number": number})
    told = drain(feed.listen())
    assert [event.kind for event in told] == ["steps", "series"]
    assert told[0].data["steps"] == list(range(10))
    assert told[1].data["points"][0]["step"] == list(range(10))
    feed.publish("reset", {})
    assert drain(feed.listen()) == []


def test_a_heartbeat_is_due_when_nothing_comes() -> None:
    assert asyncio.run(Feed().listen().take(0.01)) is None
