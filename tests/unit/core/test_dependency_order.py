"""Orders in which everything comes after what it needs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from meshscope.core.dependency_order import sort_by_needs


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), st.randoms(use_true_random=False))
def test_each_comes_after_what_it_needs(num_nodes, random):
    names = random.sample(range(num_nodes), num_nodes)
    needs = [[] for _ in names]
    for later in range(num_nodes):
        needs[names[later]] = [names[random.randrange(later)] for _ in range(3) if later]
    order = sort_by_needs(needs)
    assert order is not None
    assert sorted(order) == list(range(num_nodes))
    index = {node: at for at, node in enumerate(order)}
    assert all(index[one] < index[node] for node in order for one in needs[node])


def test_a_circle_has_no_order():
    assert sort_by_needs([[], [0, 2], [1]]) is None
