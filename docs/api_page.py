"""The page on the Python interface: every public name with its signature and its docstring."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import meshscope

MODULES = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Z])")
MEMBER = re.compile(r"<(\w+\.\w+): [^>]*>")


def shorten(text: str) -> str:
    """A signature as its author wrote it, without where types live."""
    return MEMBER.sub(r"\1", MODULES.sub("", text)).replace("'", '"')


def describe_signature(name: str, target: Any) -> str:
    parameters = inspect.signature(target)
    parts = [shorten(str(one)) for one in parameters.parameters.values() if one.name != "self"]
    kinds = [one.kind for one in parameters.parameters.values() if one.name != "self"]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = parameters.return_annotation
    returns = (
        "" if result is parameters.empty else f" -> {shorten(inspect.formatannotation(result))}"
    )
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def describe_function(name: str, target: Any, level: int) -> list[str]:
    lines = [f"{'#' * level} {name}", "", "```text", describe_signature(name, target), "```", ""]
    return [*lines, inspect.getdoc(target) or "", ""]


def list_methods(holder: type) -> Iterator[tuple[str, Any]]:
    """What a class of ours has, in the order it is written, base classes last."""
    seen = set()
    for owner in holder.__mro__:
        if not owner.__module__.startswith("meshscope"):
            continue
        for name, value in vars(owner).items():
            if not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, value


def describe_class(name: str, holder: type) -> list[str]:
    lines = [f"## {name}", "", inspect.getdoc(holder) or "", ""]
    if dataclasses.is_dataclass(holder):
        defaults = {one.name: one for one in dataclasses.fields(holder)}
        lines += ["| field | default |", "|---|---|"]
        for field, one in defaults.items():
            has_default = one.default is not dataclasses.MISSING
            lines.append(f"| `{field}` | {f'`{one.default!r}`' if has_default else 'required'} |")
        lines.append("")
    for method, value in list_methods(holder):
        if isinstance(value, property):
            lines += [f"### {name}.{method}", "", inspect.getdoc(value) or "", ""]
        elif callable(getattr(holder, method)):
            lines += describe_function(f"{name}.{method}", getattr(holder, method), 3)
    return lines


def render_api() -> str:
    """The whole page, names in alphabetical order."""
    lines = [
        "# Python interface",
        "",
        "Generated from signatures and docstrings by `docs/generate.py`; do not edit. How to use "
        "it: [recorder.md](recorder.md) to record, [python.md](python.md) to read.",
        "",
    ]
    for name in meshscope.__all__:
        target = getattr(meshscope, name)
        if inspect.isclass(target):
            lines += describe_class(name, target)
        elif callable(target):
            lines += describe_function(name, target, 2)
    return "\n".join(lines).rstrip() + "\n"
