"""Pipelines are found by who sends to whom."""

from meshscope.analyze.pipeline.message_chains import follow_messages

SEND, RECV = True, False


def test_a_chain_follows_first_sends():
    messages = [
        *[(3, SEND, 1), (3, SEND, 1), (3, RECV, 1)],
        *[(1, RECV, 3), (1, SEND, 0), (1, RECV, 0), (1, SEND, 3)],
        *[(0, RECV, 1), (0, SEND, 1)],
    ]
    assert follow_messages(messages) == ((3, 1, 0),)


def test_several_pipelines_are_ordered_by_their_first_rank():
    one = [(2, SEND, 3), (3, RECV, 2), (3, SEND, 2), (2, RECV, 3)]
    two = [(0, SEND, 1), (1, RECV, 0), (1, SEND, 0), (0, RECV, 1)]
    assert follow_messages(one + two) == ((0, 1), (2, 3))


def test_ranks_that_swap_are_no_pipeline():
    assert follow_messages([(0, SEND, 1), (0, RECV, 1), (1, SEND, 0), (1, RECV, 0)]) == ()


def test_a_ring_is_no_pipeline():
    messages = [(r, SEND, (r + 1) % 3) for r in range(3)] + [
        (r, RECV, (r - 1) % 3) for r in range(3)
    ]
    assert follow_messages(messages) == ()


def test_nothing_is_no_pipeline():
    assert follow_messages([]) == ()


def test_a_rank_outside_of_every_chain_makes_it_unclear():
    messages = [(0, SEND, 1), (1, RECV, 0), (5, RECV, 4)]
    assert follow_messages(messages) == ()
