"""Rules that others wrote: in a file named by the user, or in an installed package.

A file is code that the user chose to run; so is a package with an entry point in the group
`meshscope.rules`. The classes of a module that derive from `Rule` are its rules. Whatever goes
wrong with one is a failure with the name of its file, which HE001 reports: the report is made all
the same. Codes of this package have two letters, those of others three or more, so that a new rule
here never takes a code of theirs.
"""

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from meshscope.analyze.study import Failure, catch_failure
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.registry import RULES, list_thresholds
from meshscope.diagnose.rule import Rule
from meshscope.errors import UsageError

GROUP = "meshscope.rules"
"""Of entry points; each names a module with rules, or a rule."""
CODE_PATTERN = re.compile(r"[A-Z]{3,8}[0-9]{3}")
_NAME_PATTERN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """The rules of a diagnosis."""

    rules: Mapping[str, type[Rule]]
    """By code."""
    sources: Mapping[str, str]
    """Code to the file or package of rules that are not ours."""
    failures: tuple[Failure, ...] = ()
    """What could not be loaded."""


OWN_RULES = RuleSet(rules=RULES, sources={})


def load_rules(files: Iterable[Path] = (), *, with_packages: bool = True) -> RuleSet:
    """Our rules, those of installed packages, and those of `files`. UsageError for no file."""
    loaders: list[tuple[str, Callable[[], object]]] = []
    if with_packages:
        points = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
        loaders += [(_name_package(point), point.load) for point in points]
    for file in files:
        if not file.is_file():
            raise UsageError(f"{file} is no file; --rules takes a Python file with rules")
        loaders.append((file.name, lambda file=file: _run_file(file)))  # type: ignore[misc]
    rules, sources = dict(RULES), dict[str, str]()
    failures: list[Failure] = []
    for source, load in loaders:
        found = catch_failure(f"rules of {source}", lambda load=load: _find_rules(load))  # type: ignore[misc]
        if isinstance(found, Failure):
            failures.append(found)
            continue
        for rule in found:
            problem = catch_failure(
                f"rule {rule.__name__} of {source}",
                lambda rule=rule: _check_rule(rule, rules),  # type: ignore[misc]
            )
            if isinstance(problem, Failure):
                failures.append(problem)
            else:
                rules[rule.code], sources[rule.code] = rule, source
    return RuleSet(rules=rules, sources=sources, failures=tuple(failures))


def _name_package(point: EntryPoint) -> str:
    return point.value if point.dist is None else f"{point.dist.name} ({point.value})"


def _run_file(file: Path) -> ModuleType:
    name = f"meshscope_rules_of_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file.name} is not named like a Python file: *.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _find_rules(load: Callable[[], object]) -> list[type[Rule]]:
    """The rules that a module defines, or the one rule that an entry point names."""
    try:
        loaded = load()
    except SystemExit as error:
        raise ImportError(f"it ends the program with exit({error.code!r})") from error
    if isinstance(loaded, type) and issubclass(loaded, Rule):
        return [loaded]
    found = [
        value
        for value in vars(loaded).values()
        if isinstance(value, type)
        and issubclass(value, Rule)
        and value.__module__ == getattr(loaded, "__name__", None)
        and not inspect.isabstract(value)
    ]
    if not found:
        raise TypeError("it defines no class that derives from meshscope.diagnose.rule.Rule")
    return list(dict.fromkeys(found))


def _check_rule(rule: type[Rule], taken: Mapping[str, type[Rule]]) -> None:
    """Raises what is wrong with how it describes itself."""
    code, name = getattr(rule, "code", None), getattr(rule, "name", None)
    if not isinstance(code, str) or not CODE_PATTERN.fullmatch(code):
        raise ValueError(
            f"its code is {code!r}; rules of others have three to eight capital letters and three "
            "digits: ACME001"
        )
    if code in taken:
        raise ValueError(f"its code {code} is that of another rule, {taken[code].name}")
    if not isinstance(name, str) or not _NAME_PATTERN.fullmatch(name):
        raise ValueError(f"its name is {name!r}; a name is words in small letters: slow-disk")
    if not inspect.cleandoc(rule.__doc__ or ""):
        raise ValueError("it has no docstring; the first sentence says what it finds")
    if not all(isinstance(one, Severity) for one in rule.severities) or len(rule.severities) != 2:
        raise ValueError(f"its severities are {rule.severities!r}, not the lowest and the highest")
    limits = {limit.name: limit for limit in list_thresholds(taken)}
    for limit in rule.thresholds:
        if limits.get(limit.name, limit) != limit:
            raise ValueError(
                f"its threshold {limit.name} is that of another rule, with other words"
            )
