"""Events and their dependencies: times by longest path, for many sets of durations at once.

An event happens when everything it depends on has happened: t(v) = max over edges (u, v) of
t(u) + weight(u, v), and not before its release. Events are evaluated level by level (a level holds
those whose longest chain of edges is equally long), all columns of a matrix [edge, edit] together.
Weights are int64, so equal durations give equal times to the nanosecond; a weight may be negative.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.store.read.arrays import Bools, Int32s, Int64s

NEVER = -(1 << 60)
"""The release of an event that only its edges hold back."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DependencyGraph:
    """Edges in the order in which they are evaluated; made by `arrange_graph`."""

    num_nodes: int
    source: Int64s
    """Position of an edge's source in evaluation order."""
    target: Int64s
    """Position of its target; ascending."""
    edge: Int64s
    """The edge's index in the arrays given to `arrange_graph`."""
    node_bounds: Int64s
    """Where each level's nodes start in evaluation order, and the end."""
    edge_bounds: Int64s
    """Where each level's edges start, and the end."""
    position: Int64s
    """[node]: its position in evaluation order."""
    order: Int64s
    """[position]: the node."""

    @property
    def num_levels(self) -> int:
        """Number of events in the longest chain."""
        return len(self.node_bounds) - 1

    def evaluate(self, weight: Int64s, release: Int64s) -> Int64s:
        """Times [node, edit] for weights [edge, edit] and releases [node], shared by all edits."""
        num_edits = weight.shape[1]
        times = np.empty((self.num_nodes, num_edits), dtype=np.int64)
        times[:] = release[self.order][:, None]
        first = _find_firsts(self.target)
        bounds = np.searchsorted(first, self.edge_bounds)
        for level in range(1, self.num_levels):
            low, high = int(self.edge_bounds[level]), int(self.edge_bounds[level + 1])
            firsts = first[bounds[level] : bounds[level + 1]]
            arrival = times[self.source[low:high]] + weight[self.edge[low:high]]
            latest = np.maximum.reduceat(arrival, firsts - low, axis=0)
            # Every node of a level above the first has an edge, and they stand in one order.
            nodes = slice(int(self.node_bounds[level]), int(self.node_bounds[level + 1]))
            np.maximum(times[nodes], latest, out=times[nodes])
        return times[self.position]

    def find_latest(self, weight: Int64s, deadline: Int64s) -> Int64s:
        """How late each node may be, for one set of weights, so that no node misses its deadline.

        `deadline` is per node; give a very large number for none.
        """
        latest = deadline[self.order].copy()
        for level in range(self.num_levels - 1, 0, -1):
            part = slice(int(self.edge_bounds[level]), int(self.edge_bounds[level + 1]))
            bound = latest[self.target[part]] - weight[self.edge[part]]
            np.minimum.at(latest, self.source[part], bound)
        found: Int64s = latest[self.position]
        return found


def arrange_graph(num_nodes: int, source: Int64s, target: Int64s) -> DependencyGraph | Int64s:
    """Sorts events into evaluation order; the nodes on or behind a cycle if there is one."""
    level = _find_levels(num_nodes, source, target)
    if (level < 0).any():
        return np.flatnonzero(level < 0)
    order = np.argsort(level, kind="stable")
    position = np.empty(num_nodes, dtype=np.int64)
    position[order] = np.arange(num_nodes)
    edge = np.argsort(position[target], kind="stable")
    num_levels = int(level.max(initial=-1)) + 1
    targets = position[target][edge]
    marks = np.arange(num_levels + 1)
    return DependencyGraph(
        num_nodes=num_nodes,
        source=position[source][edge],
        target=targets,
        edge=edge,
        node_bounds=np.searchsorted(level[order], marks),
        edge_bounds=np.searchsorted(level[target][edge], marks),
        position=position,
        order=order,
    )


def _find_levels(num_nodes: int, source: Int64s, target: Int64s) -> Int32s:
    """The longest chain of edges that ends at each node; -1 where chains have no beginning."""
    by_source = np.argsort(source, kind="stable")
    outgoing = target[by_source]
    start = np.searchsorted(source[by_source], np.arange(num_nodes + 1))
    missing = np.bincount(target, minlength=num_nodes)
    level = np.full(num_nodes, -1, dtype=np.int32)
    ready = np.flatnonzero(missing == 0)
    depth = 0
    while len(ready):
        level[ready] = depth
        count = start[ready + 1] - start[ready]
        total = int(count.sum())
        if not total:
            break
        offset = np.repeat(start[ready] - (np.cumsum(count) - count), count)
        reached = outgoing[np.arange(total) + offset]
        np.subtract.at(missing, reached, 1)
        reached = np.unique(reached)
        ready = reached[missing[reached] == 0]
        depth += 1
    return level


def _find_firsts(sorted_values: Int64s) -> Int64s:
    is_first: Bools = np.ones(len(sorted_values), dtype=np.bool_)
    is_first[1:] = sorted_values[1:] != sorted_values[:-1]
    return np.flatnonzero(is_first)
