"""The kernel's count of OOM kills: that of our own group, where there is one."""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

from flodl_tw.agent.memory_events import USUAL, OomKills


class TestOomKills(unittest.TestCase):
    """A group of cgroup v2 in a folder."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        self.root = Path(made.name)
        (self.root / "job").mkdir()
        self.own = self.root / "own"
        self.own.write_text("1:name=systemd:/other\n0::/job\n")
        self.events = self.root / "job" / "memory.events"

    def count(self, kills: int) -> None:
        self.events.write_text(f"low 0\noom 9\noom_kill {kills}\noom_group_kill 7\n")

    def test_the_kills_since_the_ranks_began_are_counted(self) -> None:
        self.count(5)
        kills = OomKills(self.root, self.own)
        self.count(7)
        said = f"{USUAL}, and memory.events of its cgroup counts 2 oom_kill since the ranks began"
        self.assertEqual(kills.explained(), said)

    def test_what_cannot_be_read_is_left_out(self) -> None:
        self.assertEqual(OomKills(self.root, self.own).explained(), USUAL)
        self.events.write_text("low 0\n")
        self.assertEqual(OomKills(self.root, self.own).explained(), USUAL)
        self.own.write_text("4:memory:/job\n")
        self.assertEqual(OomKills(self.root, self.own).explained(), USUAL)
        self.own.unlink()
        self.assertEqual(OomKills(self.root, self.own).explained(), USUAL)
