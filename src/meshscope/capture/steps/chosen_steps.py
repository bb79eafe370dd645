"""Which steps are looked at closely where all of them would cost too much: one in `stride`.

Every window of `stride` steps has one, at a place that a hash chooses: ranks choose the same steps
without talking, and what comes every so many steps is seen as often as anything else. The steps of
a larger stride (a power of two) are among those of a smaller one, so that of two ranks that choose
unlike one has all the steps of the other.
"""

from functools import lru_cache

MAX_STRIDE = 64
_MASK = (1 << 32) - 1


def is_chosen(step: int, stride: int) -> bool:
    """Whether the step is one of those of a stride, a power of two up to `MAX_STRIDE`."""
    return stride == 1 or step == _choose(step // stride, stride)


@lru_cache(maxsize=64)
def _choose(window: int, stride: int) -> int:
    """The step of a window. Of its two halves one has it for their own; the other has another."""
    if stride < MAX_STRIDE:
        wider = _choose(window // 2, stride * 2)
        if wider // stride == window:
            return wider
    return window * stride + _mix(window * 2 * MAX_STRIDE + stride) % stride


def _mix(number: int) -> int:
    """Bits that depend on all of a number's, with nothing regular left (Murmur's finalizer)."""
    number &= _MASK
    number = (number ^ number >> 16) * 0x85EBCA6B & _MASK
    number = (number ^ number >> 13) * 0xC2B2AE35 & _MASK
    return number ^ number >> 16
