"""The tables of the docs are those of the code."""

from __future__ import annotations

import ast
import re
import unittest
from dataclasses import asdict
from pathlib import Path

from flodl_tw.agent.assignment import Assignment, Group
from flodl_tw.agent.rank_environ import rank_environ
from flodl_tw.cli.main import DEVICE_OPTIONS, HOST_OPTIONS, RANK_OPTIONS
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.refusals import RefusalCode
from flodl_tw.core.window import Phase
from flodl_tw.core.wire import CONTROL_MAGIC, DATA_MAGIC, HTTP_MAGICS, JOIN_MAGIC, RENDEZVOUS_MAGIC
from flodl_tw.fdl.join_block import KEYS, UNUSED
from flodl_tw.limits import Limits
from flodl_tw.tap import Options
from flodl_tw.testing import ClockedController, make_hello
from flodl_tw.web.resource import ENDPOINTS, StatusResource

ROOT = Path(__file__).parent.parent


def table(document: str, first_heading: str) -> list[list[str]]:
    """The rows of the table whose first column is headed so, without backquotes."""
    rows: list[list[str]] | None = None
    for line in (ROOT / document).read_text().splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is not None and cells[0] == first_heading:
            rows = []
        elif rows is not None and cells is None:
            return rows
        elif rows is not None and cells is not None and not cells[0].startswith("---"):
            rows.append(cells)
    raise AssertionError(f"{document} has no table headed {first_heading!r}")


class DocumentedTables(unittest.TestCase):
    """Each table, whole and in order."""

    maxDiff = None

    def test_the_readme_lists_every_option_as_the_command_does(self) -> None:
        documented = {}
        for option, default, text in table("README.md", "option"):
            documented[option.split(",")[0].removeprefix("--")] = (default or None, text)
        known = {name: (default or None, text) for name, _, default, text in Options.optParameters}
        known.update({name: (None, text) for name, _, text in Options.optFlags})
        for name in dir(Options):
            if name.startswith("opt_") and hasattr(Options, name) and Options.__dict__.get(name):
                text = " ".join((getattr(Options, name).__doc__ or "").split())
                known[name.removeprefix("opt_").replace("_", "-")] = (None, text)
        self.assertEqual(documented, known)

    def test_the_readme_lists_every_word_of_a_refusal(self) -> None:
        documented = [tuple(row) for row in table("README.md", "word")]
        self.assertEqual(
            documented, [(word.value, word.meaning, "yes" if word.retry else "no") for word in RefusalCode]
        )

    def test_the_agent_page_lists_every_option_of_join(self) -> None:
        documented = {name for row in table("docs/agent.md", "option") for name in re.findall(r"--[a-z-]+", row[0])}
        known = {f"--{name}" for name, _, _ in (*DEVICE_OPTIONS, *HOST_OPTIONS, *RANK_OPTIONS)}
        self.assertEqual(documented, known | {"--virtual-local-rank", "--persist", "--check"})

    def test_the_agent_page_lists_every_key_of_a_join_block(self) -> None:
        documented = [key for row in table("docs/agent.md", "key of join:") for key in row[0].split(", ")]
        self.assertEqual(documented, list(KEYS))
        text = (ROOT / "docs" / "agent.md").read_text()
        self.assertEqual([key for key in UNUSED if f"`{key}`" not in text], [])

    def test_the_agent_page_lists_every_variable_of_torchrun(self) -> None:
        documented = {name for row in table("docs/agent.md", "variable") for name in row[0].split(", ")}
        assignment = Assignment("gpu-a", (0, 1), 2, 1, ("head", 1), "", Group(0, 1, "id"))
        given = set(rank_environ({}, assignment, 0, "0"))
        self.assertEqual(documented, {name for name in given if not re.match("FLODL|CUDA|HIP", name)})

    def test_tap_lists_every_channel(self) -> None:
        rows = {row[0]: row[1] for row in table("tap.md", "first bytes")}
        for magic, channel in (
            (RENDEZVOUS_MAGIC, "rendezvous"),
            (DATA_MAGIC, "data"),
            (CONTROL_MAGIC, "control"),
            (JOIN_MAGIC, "join"),
        ):
            self.assertEqual(rows[magic.hex(" ")], channel)
        text = (ROOT / "tap.md").read_text()
        self.assertIn(", ".join(f"`{magic.decode()}`" for magic in HTTP_MAGICS) + " | status", text)

    def test_the_readme_lists_every_endpoint(self) -> None:
        routes = {
            f"{method} {rule.rule}"
            for rule in StatusResource.app.url_map.iter_rules()
            for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        }
        self.assertEqual({row[0] for row in table("README.md", "request")}, routes)
        self.assertEqual({"GET /", *ENDPOINTS}, routes)

    def test_tap_says_of_every_module_what_the_module_says_of_itself(self) -> None:
        documented = dict(table("tap.md", "module"))
        known = {}
        for path in (ROOT / "flodl_tw").rglob("*.py"):
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            if path.name != "__init__.py":
                first = " ".join(text.split("\n\n")[0].split("\n"))
                known[str(path.relative_to(ROOT / "flodl_tw"))] = first.replace("`", "")
        self.assertEqual(documented, known)

    def test_tap_lists_how_connections_end(self) -> None:
        documented = [tuple(row) for row in table("tap.md", "word")]
        self.assertEqual(documented, [(end.value, end.meaning) for end in ConnectionEnd])

    def test_tap_lists_every_phase(self) -> None:
        self.assertEqual([row[0] for row in table("tap.md", "phase")], [phase.value for phase in Phase])

    def test_tap_lists_the_state_in_its_order(self) -> None:
        controller = ClockedController()
        controller.dial().join(make_hello())
        state = controller.state()
        self.assertEqual([row[0] for row in table("tap.md", "key")], list(state))
        member = ", ".join(f"`{key}`" for key in state["members"][0])
        self.assertIn(f"A member: {member}.", (ROOT / "tap.md").read_text())

    def test_the_limits_page_has_every_deadline(self) -> None:
        documented = {name: int(seconds) for _, name, seconds in table("docs/limits.md", "deadline")}
        self.assertEqual(documented, asdict(Limits()))
