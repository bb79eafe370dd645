"""Which steps are looked at closely where all of them would cost too much: one in `stride`.

A step is chosen by a hash of its number, so that ranks choose the same ones without talking, and
what comes every so many steps is seen as often as anything else. The hash spreads them evenly, and
those of a larger stride (a power of two) are among those of a smaller one: of two ranks that choose
unlike, one has all the steps of the other.
"""

_FACTOR = 0x9E3779B1
_BITS = 32


def is_chosen(step: int, stride: int) -> bool:
    """Whether the step is one of those of a stride."""
    hashed = step * _FACTOR & (1 << _BITS) - 1
    return not hashed * stride >> _BITS
