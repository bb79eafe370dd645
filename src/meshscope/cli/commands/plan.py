"""`meshscope plan`: which layout is best, whether it fits, and how fast it will be."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from meshscope.cli.given_numbers import NumberFlag, read_numbers
from meshscope.cli.places import READ
from meshscope.cli.terminal_screen import (
    say,
    show_document,
    show_sections,
    tell_work,
    write_file,
)
from meshscope.core.unavailable import Unavailable
from meshscope.errors import MeshscopeError, UsageError

if TYPE_CHECKING:
    from meshscope.analyze.study import Study
    from meshscope.core.config.device_fit import TargetDevice
    from meshscope.plan.answer import PlanAnswer
    from meshscope.plan.cluster import Cluster
    from meshscope.plan.model.model_shape import ModelShape
    from meshscope.plan.search.request import Request
    from meshscope.plan.search.search import Found
    from meshscope.plan.timing.pricing import Job

_T = TypeVar("_T")
_LISTS = {
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "ep": "ep",
    "microbatch": "microbatch_sizes",
    "schedule": "schedules",
    "chunks": "chunks",
    "zero": "zero_stages",
    "recompute": "recomputes",
}
"""Flags that limit what may be chosen, and the field of the request."""
_WORDS = ("schedule", "recompute")
_NUMBERS = {
    "num_devices": NumberFlag("--devices", 1, 10**7),
    "per_node": NumberFlag("--per-node", 1, 10**4),
    "global_batch": NumberFlag("--batch", 1, 10**9),
    "sequence": NumberFlag("--sequence", 1, 10**8),
    "adapters": NumberFlag("--adapters", 1, 10**4),
    "memory_share": NumberFlag("--memory-share", 0, 1, is_whole=False, is_above=True),
    "price_per_hour": NumberFlag("--price-per-hour", 0, 10**6, is_whole=False),
    "top": NumberFlag("--top", 1, 1000),
}
_AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?)\s*([kmbt]?)")
_MOST_TOKENS = 1e18
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@click.command("plan", short_help="Find the best layout for a model on a cluster.")
@click.argument("model", required=False)
@click.option("--device", help="Device, such as H100-80GB, A100-SXM4-80GB, B200, MI300X.")
@click.option("--devices", "num_devices", help="How many devices.")
@click.option("--per-node", help="Devices of a node.  [default: 8; of NVL72 racks up to 72]")
@click.option("--batch", "global_batch", help="Global batch, in sequences.")
@click.option("--sequence", help="Tokens of a sequence.  [default: the model's]")
@click.option(
    "--stack",
    help="Program that trains: megatron, megatron-2021, torchtitan, torchtitan-compile or "
    "meshscope. Default: megatron, with --from meshscope.",
)
@click.option("--precision", help="bf16, bf16-grads, fp16, fp8, autocast or fp32.")
@click.option("--optimizer", default="adamw", show_default=True, help="Optimizer.")
@click.option("--inside", help="Link inside a node, such as nvlink4, pcie5 or 300GB/s.")
@click.option("--between", help="Link between nodes, such as ndr, eth100; or 100GB/s a node.")
@click.option("--adapters", help="Adapters of a node.  [default: one a device]")
@click.option("--tp", help="Tensor-parallel degrees to choose from, such as 1,2,4,8.")
@click.option("--pp", help="Pipeline degrees.")
@click.option("--cp", help="Context-parallel degrees.")
@click.option("--ep", help="Expert-parallel degrees.")
@click.option("--microbatch", help="Microbatch sizes, in sequences.")
@click.option("--schedule", help="Schedules, such as 1f1b,interleaved_1f1b.")
@click.option("--chunks", help="Stages of a rank, for schedules that loop.")
@click.option("--zero", help="ZeRO stages, 0 to 3.")
@click.option("--recompute", help="none, selective, full, every-K, offload.")
@click.option(
    "--memory-share",
    default="0.95",
    show_default=True,
    help="Share of a device's memory that may be used.",
)
@click.option("--tokens", help="Tokens to train on, such as 15T: gives days, cost and energy.")
@click.option("--price-per-hour", help="Of one device, in any currency.")
@click.option("--top", default="10", show_default=True, help="Layouts to show.")
@click.option("--why", is_flag=True, help="Show an example of every reason for a rejection.")
@click.option("--explain", is_flag=True, help="List the constants with their sources.")
@click.option(
    "--write",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the best layout that meshscope train runs to this TOML file.",
)
@click.option(
    "--from",
    "from_run",
    type=READ,
    metavar="RUN",
    help="Fit constants to a recorded run of meshscope train, and say what was fitted; MODEL may "
    "be left out then.",
)
@click.option(
    "--fits",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="CONFIG.toml",
    help="Only say whether this configuration of meshscope train fits --device.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.pass_context
def command(context: click.Context, /, **given: Any) -> None:
    """Ranks layouts of MODEL on a cluster by predicted step time, under its memory.

    MODEL is a preset (llama-3-70b, gpt-175b, deepseek-v3, …) or a Hugging Face config.json. Nothing
    is run and no GPU is needed. docs/plan.md has the formulas.

    \b
        meshscope plan llama-3-70b --device H100-80GB --devices 256 --batch 1024
        meshscope plan ./config.json --device H200 --devices 64 --batch 512 --stack torchtitan
        meshscope plan --fits train.toml --device H100-80GB
    """
    if given["fits"] is not None:
        context.exit(_answer_fits(context, given))
    given, problems = _read_given(given)
    job, fitted = _make_job(given, problems)
    request = _make_request(job, given)
    found = _search(job, request, is_quiet=given["quiet"] or given["as_json"])
    answer = _answer(job, request, found, given, fitted)
    if given["write"] is not None:
        _write_best(job, found, given["write"])
    from meshscope.report.sections.plan import DOCUMENT, make_plan_sections

    if given["as_json"]:
        show_document(DOCUMENT, answer)
    else:
        sections = make_plan_sections(answer, is_why=given["why"], is_explained=given["explain"])
        show_sections(context, sections)


def _read_given(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Flags with numbers in the place of their texts, None where one is wrong."""
    numbers, problems = read_numbers(given, _NUMBERS)
    missing = [
        f"{flag} is missing"
        for flag, name in (
            ("MODEL", "model"), ("--device", "device"), ("--devices", "num_devices"),
            ("--batch", "global_batch"),
        )
        if given[name] is None and (name != "model" or given["from_run"] is None)
    ]  # fmt: skip
    stack = given["stack"] or ("megatron" if given["from_run"] is None else "meshscope")
    return {**given, **dict.fromkeys(_NUMBERS), **numbers, "stack": stack}, missing + problems


def _open_study(path: Path) -> "Study":
    from meshscope.analyze.study import Study
    from meshscope.cli.locate import open_located, pick_attempt

    return Study(pick_attempt(open_located(path), None))


def _make_job(given: dict[str, Any], problems: list[str]) -> "tuple[Job, tuple[str, ...]]":
    """Everything that is wrong is said at once."""
    from dataclasses import replace

    from meshscope.plan.recipe import make_recipe
    from meshscope.plan.timing.calibration import find_constants
    from meshscope.plan.timing.pricing import Job

    made: dict[str, Any] = {}
    for name, make in (
        ("from_run", lambda: _open_study(given["from_run"])),
        ("model", lambda: _find_model(given["model"], given["sequence"])),
        ("recipe", lambda: make_recipe(given["stack"], given["precision"], given["optimizer"])),
        ("cluster", lambda: _make_cluster(given)),
    ):
        found = None if given.get(name, "") is None else _try(problems, make)
        if found is not None:
            made[name] = found
    problems += [*_find_list_problems(given), *_find_path_problems(given)]
    if "recipe" in made and "cluster" in made:
        peak = made["cluster"].find_peak(made["recipe"].precision.dtype)
        if isinstance(peak, Unavailable):
            problems.append(
                f"--precision {made['recipe'].precision.name}: {peak.reason}; choose with "
                "--precision"
            )
    if problems:
        raise UsageError("; ".join(problems))
    study = made.pop("from_run", None)
    constants = find_constants(given["stack"], made["cluster"].device.name)
    if study is None:
        return Job(**made, constants=constants), ()
    from meshscope.plan.timing.from_run import fit_runs, read_layout

    made.setdefault("model", read_layout(study).model)
    if given["sequence"] is not None:
        made["model"] = replace(made["model"], sequence_length=given["sequence"])
    return fit_runs(Job(**made, constants=constants), [study])


def _make_cluster(given: dict[str, Any]) -> "Cluster | None":
    """None where no device is named; of a number that is missing or wrong, one."""
    from meshscope.plan.cluster import make_cluster

    if given["device"] is None:
        return None
    return make_cluster(
        given["device"],
        given["num_devices"] or 1,
        per_node=given["per_node"],
        inside=given["inside"],
        between=given["between"],
        num_adapters=given["adapters"],
    )


def _find_list_problems(given: dict[str, Any]) -> list[str]:
    problems = []
    chosen = {}
    for name in ("tokens", *_LISTS):
        try:
            if name == "tokens":
                _read_tokens(given["tokens"])
            else:
                chosen[_LISTS[name]] = _read_list(name, given[name])
        except UsageError as error:
            problems.append(str(error))
    from meshscope.plan.search.request import Request, find_request_problems

    limits: dict[str, Any] = {"tp": (1,), "pp": (1,)}
    limits |= {field: one for field, one in chosen.items() if one}
    return problems + find_request_problems(Request(global_batch_size=1, **limits))


def _find_path_problems(given: dict[str, Any]) -> list[str]:
    """Said before the search, and not after it."""
    path = given["write"]
    if path is None or path.parent.is_dir():
        return []
    return [f"--write: there is no folder {path.parent}"]


def _find_model(text: str, sequence: int | None) -> "ModelShape":
    from dataclasses import replace

    from meshscope.plan.model.hugging_face import read_hugging_face
    from meshscope.plan.model.known_models import find_model

    path = Path(text)
    if text.endswith(".json") or (path.is_dir() and (path / "config.json").is_file()):
        return read_hugging_face(path, sequence)
    found = find_model(text)
    return found if sequence is None else replace(found, sequence_length=sequence)


def _read_tokens(text: str | None) -> float | None:
    if text is None:
        return None
    match = _AMOUNT.fullmatch(text.strip().casefold())
    found = 0.0 if match is None else float(match[1]) * _SCALE[match[2]]
    if not 0 < found <= _MOST_TOKENS:
        raise UsageError(f"--tokens is {text[:40]!r}, expected a number such as 300B or 1.5e13")
    return found


def _read_list(flag: str, text: str | None) -> tuple[Any, ...]:
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",") if word.strip()]
    if flag in _WORDS:
        if not words:
            raise UsageError(f"--{flag} is empty, expected names with commas between them")
        return tuple(dict.fromkeys(word.casefold() for word in words))
    wrong = [word for word in words if not re.fullmatch(r"[0-9]{1,6}", word)]
    if wrong or not words:
        raise UsageError(
            f"--{flag} is {text[:40]!r}, expected whole numbers such as 1,2,4, below a million"
        )
    return tuple(dict.fromkeys(map(int, words)))


def _make_request(job: "Job", given: dict[str, Any]) -> "Request":
    from dataclasses import replace

    from meshscope.plan.search.request import make_request

    chosen = {field: _read_list(flag, given[flag]) for flag, field in _LISTS.items()}
    made = make_request(job, given["global_batch"], **chosen)
    return replace(made, memory_ratio=given["memory_share"], top=given["top"])


def _search(job: "Job", request: "Request", *, is_quiet: bool) -> "Found":
    from meshscope.plan.search.search import search

    with tell_work("planning"):
        return search(job, request, say=None if is_quiet else say)


def _answer(
    job: "Job", request: "Request", found: "Found", given: dict[str, Any], fitted: tuple[str, ...]
) -> "PlanAnswer":
    from meshscope.plan.answer import make_answer

    return make_answer(
        job,
        request,
        found,
        token_budget=_read_tokens(given["tokens"]),
        price_per_hour=given["price_per_hour"],
        fitted=fitted,
    )


def _write_best(job: "Job", found: "Found", path: Path) -> None:
    from meshscope.plan.export import write_train_toml
    from meshscope.plan.memory.engine_layout import make_train_config

    reasons = []
    for choice in found.best:
        config = make_train_config(job.model, choice.candidate)
        if not isinstance(config, Unavailable):
            write_file(write_train_toml(config), path)
            say(f"{choice.candidate.describe()} is in {path}")
            return
        reasons.append(config.reason)
    why = reasons[0] if reasons else "nothing fits"
    raise UsageError(
        f"none of the best layouts is one that meshscope train runs ({why}); plan with --stack "
        "meshscope"
    )


def _answer_fits(context: click.Context, given: dict[str, Any]) -> int:
    """0 where it fits, 2 where it does not."""
    from meshscope.engine.config.problems import find_problems
    from meshscope.engine.config.toml_file import load_config
    from meshscope.plan.fits import answer_fit
    from meshscope.report.sections.plan import FITS, make_fits_section

    wrong: list[str] = []
    device = _try(wrong, lambda: _find_fitted_device(given["device"]))
    config = _try(wrong, lambda: load_config(given["fits"]))
    if config is not None:
        kind = "cuda" if device is None else device.device_type
        problems = find_problems(config, device_type=kind)
        wrong += [f"{given['fits']}: {'; '.join(problems)}"] if problems else []
    if device is None or config is None or wrong:
        raise UsageError("; ".join(wrong))
    answer = answer_fit(config, device)
    if given["as_json"]:
        show_document(FITS, answer)
    else:
        show_sections(context, [make_fits_section(answer)])
    return 0 if answer.fits else UsageError.exit_code


def _try(problems: list[str], make: Callable[[], _T]) -> _T | None:
    """None where it fails, and why among the problems."""
    try:
        return make()
    except MeshscopeError as error:
        problems.append(str(error))
        return None


def _find_fitted_device(text: str | None) -> "TargetDevice":
    from meshscope.core.config.device_fit import find_target_device

    if text is None:
        raise UsageError("--fits needs --device: what it should fit, such as H100-80GB or 80GiB")
    device = find_target_device(text)
    if isinstance(device, Unavailable):
        raise UsageError(f"--device: {device.reason}")
    return device
