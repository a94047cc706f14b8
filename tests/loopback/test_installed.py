"""The wheel, unpacked in front of everything else: a fresh interpreter finds the plugin and the commands in it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from tests.loopback.agents import BASE, PATIENCE
from tests.test_packaging import archives

LOOK = """
import flodl_tw.cli.main, flodl_tw.tap, twisted.plugins.flodl_controller as plugin
from twisted.application.service import IServiceMaker
from twisted.plugin import getPlugins
print(flodl_tw.cli.main.__file__, flodl_tw.tap.__file__, plugin.__file__)
print(*(each.tapname for each in getPlugins(IServiceMaker)))
"""


class Installed(unittest.TestCase):
    """What an install of it does."""

    def test_the_commands_and_the_plugin_are_found_in_it(self) -> None:
        with tempfile.TemporaryDirectory(prefix="flodl-tw-") as made:
            for name, data in archives()[1].items():
                path = Path(made, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            found = subprocess.run(
                [sys.executable, "-c", LOOK],
                cwd=made,
                env={**BASE, "PYTHONPATH": made},
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        paths, _, plugins = found.stdout.partition("\n")
        modules = ("flodl_tw/cli/main.py", "flodl_tw/tap.py", "twisted/plugins/flodl_controller.py")
        self.assertEqual(paths.split(), [str(Path(made, module)) for module in modules], found.stderr)
        self.assertIn("flodl-controller", plugins.split())
