"""The text of memory points: trees of the categories that were asked for."""

import pytest

from meshscope.capture.memory.points import CATEGORIES, PointFiles, choose_categories
from meshscope.core.memory_point import MemoryPoint
from meshscope.errors import CaptureError

MIB = 1 << 20


def write_log(folder, layouts) -> list[str]:
    files = PointFiles(folder, {"title": "rank 0"})
    modules = {
        "parameters": {"blocks.0.weight": 3 * MIB, "blocks.1.weight": MIB},
        "gradients": {"blocks.0.weight": 3 * MIB},
        "activations": {"blocks": 2 * MIB},
    }
    point = MemoryPoint(
        name="mine", step=-1, microbatch=-1, seconds=0.5, modules_bytes=modules, elsewhere_bytes={}
    )
    files.put(point, choose_categories(layouts))
    files.flush()
    lines = (folder / "memory.log").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("layout of") or line.startswith("  blocks")]


def test_trees_of_the_chosen_categories_are_shown(tmp_path):
    assert write_log(tmp_path, "parameters, activations") == [
        "layout of parameters: path, own MiB, subtree MiB",
        "  blocks: 0.00, 4.00",
        "  blocks.0: 0.00, 3.00",
        "  blocks.0.weight: 3.00, 3.00",
        "  blocks.1: 0.00, 1.00",
        "  blocks.1.weight: 1.00, 1.00",
        "layout of activations: path, own MiB, subtree MiB",
        "  blocks: 2.00, 2.00",
    ]
    assert write_log(tmp_path, ()) == []


def test_all_is_all_and_an_unknown_category_is_named():
    assert choose_categories("all") == CATEGORIES
    assert choose_categories(["gradients"]) == ("gradients",)
    with pytest.raises(CaptureError, match="no layout of grads"):
        choose_categories("grads")
