"""A Python stack as one line of text: the program's own frames, the innermost first.

    train.py:88 log_metrics > item < train.py:140 main

Frames of torch, of the standard library and ours are left out as long as there is another one
further out. Of installed packages (a trainer, a logger) the two innermost frames stay, with a `~`:

    ~tracker/client.py:210 send > recv < train.py:88 log_metrics < train.py:140 main

`> item` is what the innermost frame was calling, read from its bytecode: a call into C has no
frame. Paths are cut to their last parts, and no source text is kept: a line of source may hold a
secret.
"""

import dis
import os
import sys
import sysconfig
from enum import Enum
from itertools import islice
from types import CodeType, FrameType

MAX_FRAMES = 6
"""In one text."""
_MAX_PACKAGE_FRAMES = 2
PACKAGE = "~"
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


class Owner(Enum):
    """Whose a file is."""

    NOBODY = 0
    """torch's, the standard library's or ours."""
    PACKAGE = 1
    """That of another installed package."""
    PROGRAM = 2


class FrameTexts:
    """Writes frames as text; remembers whose files are."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}
        paths = sysconfig.get_paths()
        self._library = tuple({paths["stdlib"] + os.sep, paths["platstdlib"] + os.sep})
        self._sites = tuple({paths["purelib"] + os.sep, paths["platlib"] + os.sep})

    def find_spots(self, frame: FrameType) -> tuple[Spot, ...]:
        """The innermost frames of program and packages, or the innermost of all without any."""
        innermost = (frame.f_code, frame.f_lineno or 0, frame.f_lasti)
        spots: list[Spot] = []
        num_allowed = _MAX_PACKAGE_FRAMES
        at: FrameType | None = frame
        for _ in range(_MAX_DEPTH):
            if at is None or len(spots) == MAX_FRAMES:
                break
            code = at.f_code
            owner = self.find_owner(code.co_filename)
            if owner is Owner.PROGRAM or (owner is Owner.PACKAGE and len(spots) < num_allowed):
                num_allowed = 0 if owner is Owner.PROGRAM else num_allowed
                spots.append((code, at.f_lineno or 0, at.f_lasti))
            at = at.f_back
        return tuple(spots) or (innermost,)

    def find_owner(self, path: str) -> Owner:
        found = self._owners.get(path)
        if found is None:
            found = self._owners[path] = self._find_out(path)
        return found

    def _find_out(self, path: str) -> Owner:
        if path.startswith("<"):  # a frozen module, code that torch.compile made
            is_typed = path in ("<stdin>", "<string>") or path.startswith("<ipython")
            return Owner.PROGRAM if is_typed else Owner.NOBODY
        if path.startswith(_hidden_folders()):
            return Owner.NOBODY
        if path.startswith(self._sites):
            return Owner.PACKAGE
        return Owner.NOBODY if path.startswith(self._library) else Owner.PROGRAM

    def write(self, spots: tuple[Spot, ...]) -> str:
        """The text of a stack."""
        calling = find_call(spots[0][0], spots[0][2])
        first = self._write_spot(spots[0]) + (CALLS + calling if calling else "")
        return CALLED_BY.join([first, *(self._write_spot(spot) for spot in spots[1:])])

    def _write_spot(self, spot: Spot) -> str:
        code, line, _ = spot
        mark = PACKAGE if self.find_owner(code.co_filename) is Owner.PACKAGE else ""
        return f"{mark}{shorten_path(code.co_filename)}:{line} {code.co_name[:_MAX_NAME]}"


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
    call = next(islice(code.co_positions(), last_index // 2, None), None)
    if call is None or call[0] is None:
        return ""
    begin = call[0], call[2]
    name = operation = ""
    # One at a time and none kept: a list of them all would make Python collect garbage.
    for found in dis.get_instructions(code):
        if found.offset > last_index:
            break
        operation, at = found.opname, found.positions
        if at is not None and (at.lineno, at.col_offset) == begin and operation in _LOADS:
            name = str(found.argval)[:_MAX_NAME]
    return name if operation.startswith(_CALLS) else ""


def _hidden_folders() -> tuple[str, ...]:
    """The folders of torch and of this package."""
    modules = (sys.modules.get(name) for name in ("torch", "meshscope"))
    files = (getattr(module, "__file__", None) for module in modules)
    return tuple(os.path.dirname(file) + os.sep for file in files if file)
