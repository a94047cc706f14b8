"""What may import what: never upwards, never in a circle."""

from __future__ import annotations

import ast
import sys
import unittest
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
ORDER = (
    ("core",),
    ("deadlines", "limits", "once", "options", "reactor", "resolver", "sockets", "state_folder"),
    ("run",),
    ("controller",),
    ("channels", "web"),
    ("agent", "fdl"),
    ("settings", "log_output"),
    ("server",),
    ("flodl_tw",),
    ("tap", "testing"),
    ("cli",),
)
"""The modules and packages of ``flodl_tw`` from the ground up; a row may use its own and those before it.

``flodl_tw`` is the package itself, with the public names.
"""
PLACE = {part: place for place, row in enumerate(ORDER) for part in row}


def name_of(path: Path) -> str:
    """A module's name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """The module or package of ``ORDER`` that a module of ours is, or is in."""
    return [*module.split("."), "flodl_tw"][1]


@cache
def imports() -> dict[str, set[str]]:
    """Each module of ours, with all that it imports anywhere in its text, as the name of a module or of a thing."""
    found = {}
    for path in (ROOT / "flodl_tw").rglob("*.py"):
        names = found[name_of(path)] = set[str]()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} has a relative import, which this test cannot read"
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def graph() -> dict[str, set[str]]:
    """Each module of ours, with those of ours that it imports."""
    known = imports()

    def ours(name: str) -> str:
        return name if name in known else name.rpartition(".")[0]

    return {module: {ours(name) for name in names} & set(known) for module, names in known.items()}


class Layout(unittest.TestCase):
    """The order of the modules."""

    def test_every_module_has_its_place(self) -> None:
        self.assertEqual(set(PLACE), {part_of(module) for module in imports()})

    def test_no_module_imports_from_above(self) -> None:
        upwards = [
            f"{module} imports {other}"
            for module, others in graph().items()
            for other in others
            if PLACE[part_of(other)] > PLACE[part_of(module)]
        ]
        self.assertEqual(sorted(upwards), [])

    def test_no_modules_import_each_other(self) -> None:
        try:
            TopologicalSorter(graph()).prepare()
        except CycleError as error:
            self.fail(" imports ".join(reversed(error.args[1])))

    def test_core_imports_the_standard_library_alone(self) -> None:
        strangers = {
            f"{module} imports {name}"
            for module, names in imports().items()
            if part_of(module) == "core"
            for name in names
            if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("flodl_tw.core.")
        }
        self.assertEqual(strangers, set())
