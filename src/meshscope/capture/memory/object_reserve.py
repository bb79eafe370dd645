"""Objects made ahead of training, let go when the recorder needs lasting ones in the midst of it.

Python's garbage collector runs when so many more objects were made than let go, 700 by default, and
a program whose steps come close to that would see further collections by whoever keeps a few dozen:
a thread, a wrapped function, a generator. Letting as many go keeps the balance what it was.
"""


class _Slotted:
    """Something that the collector counts and that no free list keeps."""

    __slots__ = ("held",)


class ObjectReserve:
    """A number of such objects, of one part of the recorder."""

    def __init__(self, num_objects: int) -> None:
        self._num_objects = num_objects
        self._objects: list[_Slotted] = []

    def fill(self) -> None:
        """Ahead of training. Safe to call again."""
        while len(self._objects) < self._num_objects:
            self._objects.append(_Slotted())

    def spend(self) -> None:
        """Lets all go: what they stand for is made now."""
        self._objects.clear()
