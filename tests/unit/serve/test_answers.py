"""What many ask for is made once."""

import asyncio

import pytest

from meshscope.serve.answer import Answer, refuse
from meshscope.serve.answers import Answers


def run(check) -> None:
    asyncio.run(check())


def test_one_answer_for_all_who_ask_at_once_until_the_next_version() -> None:
    async def check() -> None:
        answers, made = Answers(), []

        async def make() -> Answer:
            await asyncio.sleep(0.01)
            made.append(1)
            return Answer(body=b"x" * 10)

        found = await asyncio.gather(*(answers.get("page", 1, make) for _ in range(50)))
        assert len(made) == 1
        assert len({id(one) for one in found}) == 1
        await answers.get("page", 2, make)
        assert len(made) == 2
        assert answers.num_bytes == 10

    run(check)


def test_the_least_used_go_when_there_is_no_room() -> None:
    async def check() -> None:
        answers = Answers(max_bytes=100)

        async def make() -> Answer:
            return Answer(body=b"x" * 30)

        for number in range(20):
            await answers.get(number, 1, make)
            assert answers.num_bytes <= 100

    run(check)


def test_what_failed_is_asked_again() -> None:
    async def check() -> None:
        answers, tries = Answers(), []

        async def make() -> Answer:
            tries.append(1)
            if len(tries) == 1:
                raise ConnectionError
            return refuse(422, "no") if len(tries) == 2 else Answer(body=b"good")

        with pytest.raises(ConnectionError):
            await answers.get("page", 1, make)
        assert (await answers.get("page", 1, make)).status == 422
        assert (await answers.get("page", 1, make)).body == b"good"
        assert answers.num_bytes == 4

    run(check)
