"""The evaluation of events: against a plain walk, on random graphs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshscope.simulate.dependency_graph import NEVER, DependencyGraph, arrange_graph


def walk(num_nodes, source, target, weight, release):
    """Longest paths, node by node; edges go from lower to higher nodes."""
    times = release.copy()
    for node in range(num_nodes):
        for edge in np.flatnonzero(target == node):
            times[node] = max(times[node], times[source[edge]] + weight[edge])
    return times


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 25), st.integers(0, 60), st.integers(0, 2**31))
def test_times_are_longest_paths(num_nodes, num_edges, seed):
    generator = np.random.default_rng(seed)
    ends = np.sort(generator.integers(0, num_nodes, (num_edges, 2)), axis=1)
    ends = ends[ends[:, 0] != ends[:, 1]]
    source, target = ends[:, 0], ends[:, 1]
    weight = generator.integers(-5, 50, (len(ends), 3))
    release = generator.integers(0, 20, num_nodes)
    shuffle = generator.permutation(num_nodes)
    graph = arrange_graph(num_nodes, shuffle[source], shuffle[target])
    assert isinstance(graph, DependencyGraph)
    given_release = np.empty(num_nodes, dtype=np.int64)
    given_release[shuffle] = release
    times = graph.evaluate(weight, given_release)
    for edit in range(3):
        expected = walk(num_nodes, source, target, weight[:, edit], release)
        assert np.array_equal(times[shuffle, edit], expected)


def test_latest_times_leave_the_end_where_it_is():
    # 0 → 1 → 3 (5 + 5), 0 → 2 → 3 (1 + 2): node 2 has 7 to spare.
    source, target = np.array([0, 1, 0, 2]), np.array([1, 3, 2, 3])
    weight = np.array([5, 5, 1, 2])
    graph = arrange_graph(4, source, target)
    times = graph.evaluate(weight[:, None], np.array([0, NEVER, NEVER, NEVER]))[:, 0]
    assert times.tolist() == [0, 5, 1, 10]
    far = 1 << 60
    latest = graph.find_latest(weight, np.array([far, far, far, 10]))
    assert (latest - times).tolist() == [0, 0, 7, 0]


def test_a_circle_is_told():
    found = arrange_graph(4, np.array([0, 1, 2, 2]), np.array([1, 2, 1, 3]))
    assert found.tolist() == [1, 2, 3]


def test_a_graph_without_edges():
    graph = arrange_graph(2, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    times = graph.evaluate(np.empty((0, 2), dtype=np.int64), np.array([3, 4]))
    assert times.tolist() == [[3, 3], [4, 4]]
