"""The example of ``docs/embedding.md``, as a program."""

from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path

from tests.loopback.process import WAIT, environment

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "embedded.py"


class EmbeddingTests(unittest.TestCase):
    """It runs, and the page shows it as it is."""

    def test_it_forms_a_world_and_ends_by_itself(self) -> None:
        ended = subprocess.run(
            [sys.executable, str(EXAMPLE)],
            env=environment({"PYTHONPATH": str(ROOT)}),
            capture_output=True,
            text=True,
            timeout=WAIT,
        )
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))
        first, *rest = ended.stdout.splitlines()
        self.assertRegex(first, r"^controller on port [0-9]+, notice on port [0-9]+$")
        self.assertEqual(rest, ["the world has formed: 4 ranks", "notice: training: 4 ranks", "the run is done"])

    def test_the_page_has_the_whole_program(self) -> None:
        page = (ROOT / "docs" / "embedding.md").read_text()
        self.assertIn(f"```python\n{EXAMPLE.read_text()}```\n", page)
