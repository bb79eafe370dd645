"""A Python stack as one line of text: the program's own frames, the innermost first.

    train.py:88 log_metrics > item < train.py:140 main

Frames of torch, of the standard library and ours are left out as long as the program has one
further out: a reader can change only the program. `> item` is what the innermost of the program's
frames was calling, read from its bytecode: a call into C has no frame. Paths are cut to their
last parts, and no source text is kept: a line of source may hold a secret.
"""

import dis
import os
import sys
import sysconfig
from types import CodeType, FrameType

MAX_FRAMES = 6
"""Of the program, in one text."""
CALLS = " > "
CALLED_BY = " < "
_MAX_DEPTH = 200
_MAX_NAME = 60
_MAX_INSTRUCTIONS = 20_000
"""A function of more than this is not searched for what it calls."""
_CALLS = ("CALL", "PRECALL")
"""Python 3.11 calls what is written in C from the second."""
_LOADS = frozenset(
    ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")
)

Spot = tuple[CodeType, int, int]
"""Where a frame is: its code, the line, and the index of the last instruction."""


class FrameTexts:
    """Writes frames as text; remembers which files are the program's."""

    def __init__(self) -> None:
        self._is_own: dict[str, bool] = {}
        paths = sysconfig.get_paths()
        self._library = tuple({paths["stdlib"] + os.sep, paths["platstdlib"] + os.sep})
        self._sites = tuple({paths["purelib"] + os.sep, paths["platlib"] + os.sep})

    def find_spots(self, frame: FrameType) -> tuple[Spot, ...]:
        """The program's innermost frames, or the innermost of all if it has none."""
        innermost = (frame.f_code, frame.f_lineno or 0, frame.f_lasti)
        spots: list[Spot] = []
        at: FrameType | None = frame
        for _ in range(_MAX_DEPTH):
            if at is None or len(spots) == MAX_FRAMES:
                break
            code = at.f_code
            if self.is_program(code.co_filename):
                spots.append((code, at.f_lineno or 0, at.f_lasti))
            at = at.f_back
        return tuple(spots) or (innermost,)

    def is_program(self, path: str) -> bool:
        """Whether a file is neither torch's, nor the standard library's, nor ours."""
        found = self._is_own.get(path)
        if found is None:
            found = self._is_own[path] = self._find_out(path)
        return found

    def _find_out(self, path: str) -> bool:
        if path.startswith("<"):  # a frozen module, code that torch.compile made
            return path in ("<stdin>", "<string>")
        if f"{os.sep}torch{os.sep}" in path or path.startswith(_own_folder()):
            return False
        return path.startswith(self._sites) or not path.startswith(self._library)

    def write(self, spots: tuple[Spot, ...]) -> str:
        """The text of a stack."""
        calling = find_call(spots[0][0], spots[0][2])
        first = self._write_spot(spots[0]) + (CALLS + calling if calling else "")
        return CALLED_BY.join([first, *(self._write_spot(spot) for spot in spots[1:])])

    def _write_spot(self, spot: Spot) -> str:
        code, line, _ = spot
        return f"{shorten_path(code.co_filename)}:{line} {code.co_name[:_MAX_NAME]}"


def shorten_path(path: str) -> str:
    """The last two parts of a path; its spaces are underscores, as texts are split at spaces."""
    parts = path.replace(os.sep, "/").split("/")
    return "/".join(part[-_MAX_NAME:] for part in parts[-2:] if part).replace(" ", "_")


def find_call(code: CodeType, last_index: int) -> str:
    """The name of what the instruction at `last_index` calls; empty if that cannot be told.

    What is called and the call begin at one place in the source, and of all that begins there the
    attribute or name that ends last, before the arguments, is what is called.
    """
    if len(code.co_code) > 2 * _MAX_INSTRUCTIONS:
        return ""
    instructions = [found for found in dis.get_instructions(code) if found.offset <= last_index]
    if not instructions or not instructions[-1].opname.startswith(_CALLS):
        return ""
    call = instructions[-1].positions
    if call is None or call.lineno is None:
        return ""
    for found in reversed(instructions[:-1]):
        at = found.positions
        begins_there = at is not None and (at.lineno, at.col_offset) == (
            call.lineno,
            call.col_offset,
        )
        if begins_there and found.opname in _LOADS:
            return str(found.argval)[:_MAX_NAME]
    return ""


def _own_folder() -> str:
    """The folder of this package."""
    return os.path.dirname(sys.modules["meshscope"].__file__ or "") + os.sep
