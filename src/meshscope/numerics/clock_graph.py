"""Offsets of many clocks from differences between some pairs of them.

Clocks are nodes, measured differences are edges with an error. Values are weighted least squares,
so several paths between two clocks are averaged; errors add up along the best path, because they
are mostly systematic and do not average out.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.store.read.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What was measured between two clocks."""

    low: int
    high: int
    value: float
    """Value of `high` minus that of `low`."""
    error: float
    """Positive and finite."""


def find_islands(num_nodes: int, edges: Sequence[Edge]) -> list[int]:
    """For each node the lowest node connected to it."""
    root = list(range(num_nodes))

    def climb(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for edge in edges:
        first, second = sorted((climb(edge.low), climb(edge.high)))
        root[second] = first
    return [climb(node) for node in range(num_nodes)]


def walk_best(
    num_nodes: int, edges: Sequence[Edge], islands: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Values and errors along the path of least error from each island's lowest node."""
    near: list[list[tuple[int, float, float]]] = [[] for _ in range(num_nodes)]
    for edge in edges:
        near[edge.low].append((edge.high, edge.value, edge.error))
        near[edge.high].append((edge.low, -edge.value, edge.error))
    value = [0.0] * num_nodes
    error = [0.0 if islands[node] == node else np.inf for node in range(num_nodes)]
    heap = [(0.0, node) for node in range(num_nodes) if islands[node] == node]
    while heap:
        reached, node = heapq.heappop(heap)
        if reached > error[node]:
            continue
        for other, difference, step in near[node]:
            if reached + step < error[other]:
                error[other] = reached + step
                value[other] = value[node] + difference
                heapq.heappush(heap, (error[other], other))
    return value, error


def walk_between(num_nodes: int, edges: Sequence[Edge]) -> Floats:
    """[node, node]: the error along the best path between each two; infinite without one."""
    error = np.full((num_nodes, num_nodes), np.inf)
    np.fill_diagonal(error, 0.0)
    for edge in edges:
        least = min(error[edge.low, edge.high], edge.error)
        error[edge.low, edge.high] = error[edge.high, edge.low] = least
    for middle in range(num_nodes):
        error = np.minimum(error, error[:, [middle]] + error[[middle], :])
    return error


def solve(num_nodes: int, edges: Sequence[Edge], islands: Sequence[int]) -> Floats:
    """Values of all nodes, 0 at each island's lowest, that fit the edges best."""
    values = np.zeros(num_nodes)
    free = [node for node in range(num_nodes) if islands[node] != node]
    if not free:
        return values
    index = {node: row for row, node in enumerate(free)}
    matrix = np.zeros((len(free), len(free)))
    target = np.zeros(len(free))
    scale = min(edge.error for edge in edges)
    for edge in edges:
        weight = (scale / edge.error) ** 2
        for node, sign in ((edge.low, -1), (edge.high, 1)):
            row = index.get(node)
            if row is None:
                continue
            matrix[row, row] += weight
            target[row] += sign * weight * edge.value
            other = index.get(edge.low if node == edge.high else edge.high)
            if other is not None:
                matrix[row, other] -= weight
    values[free] = np.linalg.lstsq(matrix, target, rcond=None)[0]
    return values
