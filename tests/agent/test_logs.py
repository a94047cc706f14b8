"""The files of --log-dir: one for each stream of each rank, appended to by every run."""

from __future__ import annotations

import os
import tempfile
import unittest
from pathlib import Path

from flodl_tw.agent.children import ERR, OUT
from flodl_tw.agent.logs import Logs


class TestLogs(unittest.TestCase):
    """What is opened, and what is said where nothing can be."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)
        self.said: list[str] = []

    def files(self, logs: Logs, rank: int) -> dict[int, int]:
        """A rank's descriptors, closed at the end of the test."""
        found = dict(logs.files(rank))
        for descriptor in found.values():
            self.addCleanup(self.close, descriptor)
        return found

    def close(self, descriptor: int) -> None:
        try:
            os.close(descriptor)
        except OSError:
            return

    def test_a_rank_has_a_file_for_each_stream(self) -> None:
        files = self.files(Logs(self.folder, self.said.append), 7)
        self.assertEqual(list(files), [OUT, ERR])
        os.write(files[OUT], b"out\n")
        os.write(files[ERR], b"err\xff")
        self.files(Logs(self.folder, self.said.append), 1234)
        self.assertEqual(
            sorted(path.name for path in self.folder.iterdir()),
            ["rank.007.err", "rank.007.out", "rank.1234.err", "rank.1234.out"],
        )
        self.assertEqual((self.folder / "rank.007.out").read_bytes(), b"out\n")
        self.assertEqual((self.folder / "rank.007.err").read_bytes(), b"err\xff")
        self.assertEqual(self.said, [])

    def test_a_later_run_appends_and_needs_no_more_descriptors(self) -> None:
        logs = Logs(self.folder, self.said.append)
        first = self.files(logs, 0)
        os.write(first[OUT], b"first\n")
        self.assertEqual(dict(logs.files(0)), first)
        other = self.files(Logs(self.folder, self.said.append), 0)
        os.write(other[OUT], b"second\n")
        self.assertEqual((self.folder / "rank.000.out").read_bytes(), b"first\nsecond\n")

    def test_what_is_no_regular_file_is_said_and_left_out_without_waiting_for_it(self) -> None:
        os.mkfifo(self.folder / "rank.000.out")
        os.mkfifo(self.folder / "rank.000.err")
        # One with a reader could be opened, and would block once it is full.
        reader = os.open(self.folder / "rank.000.err", os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        self.assertEqual(self.files(Logs(self.folder, self.said.append), 0), {})
        self.assertEqual(len(self.said), 2)
        self.assertIn("rank.000.err cannot be opened (something that is no regular file is there)", self.said[1])

    def test_neither_is_a_link_to_a_device_a_file(self) -> None:
        path = self.folder / "rank.000.out"
        path.symlink_to("/dev/full")
        self.assertEqual(list(self.files(Logs(self.folder, self.said.append), 0)), [ERR])
        self.assertEqual(
            self.said,
            [f"--log-dir: {path} cannot be opened (something that is no regular file is there); going on without it"],
        )

    def test_nothing_that_is_started_inherits_them(self) -> None:
        for descriptor in self.files(Logs(self.folder, self.said.append), 0).values():
            self.assertFalse(os.get_inheritable(descriptor))

    def test_what_cannot_be_opened_is_said_and_left_out(self) -> None:
        path = self.folder / "rank.000.out"
        path.mkdir()
        self.assertEqual(list(self.files(Logs(self.folder, self.said.append), 0)), [ERR])
        self.assertEqual(self.said, [f"--log-dir: {path} cannot be opened (Is a directory); going on without it"])

    def test_without_a_folder_there_are_none(self) -> None:
        self.assertEqual(Logs(None, self.said.append).files(0), {})
