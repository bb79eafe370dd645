"""Puts things in an order in which each comes after all that it needs."""

from collections.abc import Collection, Sequence


def sort_by_needs(needs: Sequence[Collection[int]]) -> list[int] | None:
    """Indices of `needs`, each after those it names; None where some need each other."""
    users: list[list[int]] = [[] for _ in needs]
    for index, needed in enumerate(needs):
        for one in needed:
            users[one].append(index)
    num_missing = [len(needed) for needed in needs]
    order = [index for index, count in enumerate(num_missing) if not count]
    for index in order:
        for user in users[index]:
            num_missing[user] -= 1
            if not num_missing[user]:
                order.append(user)
    return order if len(order) == len(needs) else None
