"""What a fresh interpreter loads: core no network, and a controller no web server before it is asked for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

import flodl_tw

IMPORT_ALL = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
import flodl_tw.core
names = sorted(module.name for module in pkgutil.walk_packages(flodl_tw.core.__path__, "flodl_tw.core."))
for name in names:
    importlib.import_module(name)
print(json.dumps([names, sorted(set(sys.modules) - before)]))
"""


class TestPurity(unittest.TestCase):
    """What a fresh interpreter loads."""

    def setUp(self) -> None:
        root = str(Path(flodl_tw.__file__).parents[1])
        result = subprocess.run(
            [sys.executable, "-c", IMPORT_ALL],
            env={**os.environ, "PYTHONPATH": root},
            capture_output=True,
            timeout=30,
            check=True,
        )
        self.core, self.loaded = json.loads(result.stdout)

    def test_core_loads_no_network(self) -> None:
        self.assertEqual([name for name in self.loaded if name.startswith(("twisted", "zope", "klein"))], [])

    def test_core_loads_the_standard_library_and_itself_alone(self) -> None:
        ours = {"flodl_tw", "flodl_tw.core", *self.core}
        strangers = [name for name in self.loaded if name.partition(".")[0] not in sys.stdlib_module_names]
        self.assertEqual(set(strangers), ours)

    def test_every_module_of_core_was_imported(self) -> None:
        folder = Path(flodl_tw.__file__).parent / "core"
        paths = (path.relative_to(folder.parents[1]).with_suffix("").parts for path in folder.rglob("*.py"))
        modules = {".".join(parts).removesuffix(".__init__") for parts in paths}
        self.assertEqual(self.core, sorted(modules - {"flodl_tw.core"}))
        self.assertGreaterEqual(len(self.core), 8)


MADE = """
from flodl_tw.core.wire import HTTP_MAGICS
from flodl_tw.testing import ClockedController
factory = ClockedController().front.routes[HTTP_MAGICS[0]]
"""


class TestWebServer(unittest.TestCase):
    """A controller listens before anything of the web server is loaded."""

    def loaded(self, program: str) -> list[str]:
        """Which packages of the web server such a program has loaded."""
        names = ("klein", "werkzeug", "twisted.web")
        program += f"\nimport sys\nprint(*[name for name in {names} if name in sys.modules])"
        root = str(Path(flodl_tw.__file__).parents[1])
        environ = {**os.environ, "PYTHONPATH": root}
        return subprocess.check_output([sys.executable, "-c", program], env=environ, timeout=30, text=True).split()

    def test_a_controller_loads_none_of_it_before_it_is_asked(self) -> None:
        self.assertEqual(self.loaded(MADE), [])
        self.assertEqual(self.loaded(MADE + "factory.warm_up()"), ["klein", "werkzeug", "twisted.web"])

    def test_a_connection_loads_no_klein_by_itself(self) -> None:
        self.assertEqual(self.loaded("import flodl_tw.web.connection"), ["twisted.web"])
