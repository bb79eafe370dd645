"""Keeps torch.compile away from our own functions.

Where a compiled function breaks its graph, torch looks at every Python function that is called
from there, ours in a hook or tap included: it would compile them, break at each clock, and warn the
user of our lines. Our code is marked so that torch's evaluator runs it as it is; what it calls of
the program is looked at as before. (Where torch *traces* a hook or tap it sees `is_compiling`, and
does what it would without us: the mark has no part in that.)
"""

import sys
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FunctionType, ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_CALLS_NOTHING_OF_THE_PROGRAM = (
    f"{_PACKAGE}.store.",
    f"{_PACKAGE}.core.",
    f"{_PACKAGE}.capture.session",
    f"{_PACKAGE}.capture.sampling",
    f"{_PACKAGE}.capture.steps.hooks",
    f"{_PACKAGE}.capture.steps.scalars",
    f"{_PACKAGE}.capture.steps.step_inference",
    f"{_PACKAGE}.capture.steps.timeline",
    f"{_PACKAGE}.capture.steps.automatic",
    f"{_PACKAGE}.capture.steps.model_search",
)
"""Modules below which nothing is looked at: the standard library's functions that they call."""
_NUM_LOOKED_BACK = 100


class OwnCode:
    """Marks what has been imported of us so far; further modules at the next look."""

    def __init__(self) -> None:
        self._marked: set[str] = set()
        self._num_modules = 0

    def mark(self, torch: Any) -> None:
        """Marks all functions of modules not looked at yet. Cheap when there is none."""
        num_new = len(sys.modules) - self._num_modules
        if not num_new:
            return
        self._num_modules += num_new
        # The newest stand last. Some older ones, too: the program may have taken modules out.
        newest = islice(reversed(sys.modules), max(num_new, 0) + _NUM_LOOKED_BACK)
        found = [name for name in newest if _is_ours(name) and name not in self._marked]
        evaluator: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
        if not found or not hasattr(evaluator, "set_code_exec_strategy"):
            return
        skip, default = evaluator._FrameAction.SKIP, evaluator._FrameAction.DEFAULT
        only_itself = evaluator._FrameExecStrategy(skip, default)
        with_callees = evaluator._FrameExecStrategy(skip, skip)
        if not self._marked:
            # Around an optimizer's step torch calls its hooks: traced, they would see nothing.
            for code in _codes_of(torch.optim.Optimizer.profile_hook_step):
                evaluator.set_code_exec_strategy(code, only_itself)
        for name in found:
            self._marked.add(name)
            is_closed = name.startswith(_CALLS_NOTHING_OF_THE_PROGRAM)
            for code in _find_codes(sys.modules[name]):
                evaluator.set_code_exec_strategy(code, with_callees if is_closed else only_itself)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == _PACKAGE


def settle_known_functions() -> None:
    """Before torch's functions are replaced: torch.compile knows them by identity, from two lists.

    One may have been made already and the other not; it would then know neither the function nor
    what stands for it.
    """
    rules = getattr(sys.modules.get("torch._dynamo.trace_rules"), "get_torch_obj_rule_map", None)
    variables = sys.modules.get("torch._dynamo.variables.torch")
    in_graph = getattr(variables, "TorchInGraphFunctionVariable", None)
    if rules is not None and in_graph is not None and rules.cache_info().currsize:
        in_graph._get_handlers()


def _find_codes(module: ModuleType) -> Iterator[CodeType]:
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) == module.__name__:
            yield from _codes_of(value)
            if isinstance(value, type):
                for member in list(vars(value).values()):
                    yield from _codes_of(member)


def _codes_of(value: Any) -> Iterator[CodeType]:
    """The code of a function, method or property, and of the functions it makes."""
    for part in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset"))):
        if isinstance(part, FunctionType):
            yield from _nested_codes(part.__code__)


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_codes(constant)
