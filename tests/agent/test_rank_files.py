"""The files of what ranks print, and of their exceptions, and whatever else a rank may put there."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from flodl_tw.agent.output import ERR, OUT
from flodl_tw.agent.rank_files import ErrorFiles, LogFiles, beginning
from flodl_tw.core.reports import MAX_ERROR_FILE, RankError

BOOM = RankError("ValueError", "boom", "")
DATA = b'{"message":{"message":"ValueError: boom","extraInfo":{"py_callstack":"","timestamp":"1"}}}'


class TestLogFiles(unittest.TestCase):
    """The files of --log-dir: one for each stream of each rank, appended to by every run."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)
        self.said: list[str] = []

    def files(self, logs: LogFiles, rank: int) -> dict[int, int]:
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
        files = self.files(LogFiles(self.folder, self.said.append), 7)
        self.assertEqual(list(files), [OUT, ERR])
        os.write(files[OUT], b"out\n")
        os.write(files[ERR], b"err\xff")
        self.files(LogFiles(self.folder, self.said.append), 1234)
        self.assertEqual(
            sorted(path.name for path in self.folder.iterdir()),
            ["rank.007.err", "rank.007.out", "rank.1234.err", "rank.1234.out"],
        )
        self.assertEqual((self.folder / "rank.007.out").read_bytes(), b"out\n")
        self.assertEqual((self.folder / "rank.007.err").read_bytes(), b"err\xff")
        self.assertEqual(self.said, [])

    def test_a_later_run_appends_and_needs_no_more_descriptors(self) -> None:
        logs = LogFiles(self.folder, self.said.append)
        first = self.files(logs, 0)
        os.write(first[OUT], b"first\n")
        self.assertEqual(dict(logs.files(0)), first)
        other = self.files(LogFiles(self.folder, self.said.append), 0)
        os.write(other[OUT], b"second\n")
        self.assertEqual((self.folder / "rank.000.out").read_bytes(), b"first\nsecond\n")

    def test_what_is_no_regular_file_is_said_and_left_out_without_waiting_for_it(self) -> None:
        os.mkfifo(self.folder / "rank.000.out")
        os.mkfifo(self.folder / "rank.000.err")
        # One with a reader could be opened, and would block once it is full.
        reader = os.open(self.folder / "rank.000.err", os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        self.assertEqual(self.files(LogFiles(self.folder, self.said.append), 0), {})
        self.assertEqual(len(self.said), 2)
        self.assertIn("rank.000.err cannot be opened (something that is no regular file is there)", self.said[1])

    def test_no_link_is_followed_whatever_it_leads_to(self) -> None:
        path, other = self.folder / "rank.000.out", self.folder / "other"
        other.write_bytes(b"theirs")
        for target in (other, self.folder / "nothing", Path("/dev/full")):
            with self.subTest(target=target):
                path.symlink_to(target)
                self.said.clear()
                self.assertEqual(list(self.files(LogFiles(self.folder, self.said.append), 0)), [ERR])
                self.assertEqual(self.said, [f"--log-dir: {path} cannot be opened (it is a link); going on without it"])
                path.unlink()
        self.assertEqual(other.read_bytes(), b"theirs")
        self.assertFalse((self.folder / "nothing").exists())

    def test_another_user_s_file_gets_nothing_of_what_ranks_print(self) -> None:
        path = self.folder / "rank.000.out"
        path.touch()
        theirs = os.geteuid() + 1
        found = SimpleNamespace(st_mode=path.stat().st_mode, st_uid=theirs)
        with mock.patch("os.fstat", return_value=found):
            self.assertEqual(self.files(LogFiles(self.folder, self.said.append), 0).get(OUT), None)
        self.assertEqual(
            self.said,
            [f"--log-dir: {path} cannot be opened (it is the user's with the id {theirs}); going on without it"],
        )

    def test_a_file_of_its_folder_s_owner_s_is_taken(self) -> None:
        """As root has them on a file server that makes root nobody."""
        if os.geteuid():
            self.skipTest("only root can give a file away")
        path = self.folder / "rank.000.out"
        path.touch()
        for owned in (self.folder, path):
            os.chown(owned, 12345, -1)
        self.assertEqual(list(self.files(LogFiles(self.folder, self.said.append), 0)), [OUT, ERR])

    def test_nothing_that_is_started_inherits_them(self) -> None:
        for descriptor in self.files(LogFiles(self.folder, self.said.append), 0).values():
            self.assertFalse(os.get_inheritable(descriptor))

    def test_what_cannot_be_opened_is_said_and_left_out(self) -> None:
        path = self.folder / "rank.000.out"
        path.mkdir()
        self.assertEqual(list(self.files(LogFiles(self.folder, self.said.append), 0)), [ERR])
        self.assertEqual(self.said, [f"--log-dir: {path} cannot be opened (Is a directory); going on without it"])

    def test_without_a_folder_there_are_none(self) -> None:
        self.assertEqual(LogFiles(None, self.said.append).files(0), {})


class ErrorFilesTestCase(unittest.TestCase):
    """An open folder, inside one of the test's own."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.base = Path(made.name)
        self.said: list[str] = []
        self.files = ErrorFiles()
        self.open(self.base)
        self.addCleanup(self.files.close)

    def open(self, base: Path) -> None:
        with mock.patch.object(tempfile, "tempdir", str(base)):
            self.files.open(self.said.append)

    def path(self, rank: int = 0) -> Path:
        path = self.files.path(rank)
        assert path is not None
        return Path(path)


class TestFolder(ErrorFilesTestCase):
    """Its life."""

    def test_it_is_for_this_user_alone(self) -> None:
        folder = self.path().parent
        self.assertEqual(stat.S_IMODE(folder.stat().st_mode), 0o700)
        self.assertEqual(list(folder.iterdir()), [])
        self.assertTrue(folder.name.startswith("flodl-tw-errors-"))

    def test_the_guardian_can_know_it_by_the_beginning_of_its_path(self) -> None:
        with mock.patch.object(tempfile, "tempdir", str(self.base)):
            begins = beginning()
        assert begins is not None
        self.assertRegex(begins, rf"\A{re.escape(str(self.base))}/flodl-tw-errors-[0-9a-f]{{16}}-\Z")
        self.assertTrue(str(self.path().parent).startswith(begins))

    def test_where_nothing_temporary_can_be_made_there_is_no_beginning(self) -> None:
        with mock.patch.object(tempfile, "gettempdir", side_effect=FileNotFoundError(2, "No usable directory")):
            self.assertIsNone(beginning())

    def test_each_rank_has_a_file_of_its_own(self) -> None:
        self.assertEqual(
            [self.path(rank).name for rank in (0, 7, 4096)], ["rank.000.json", "rank.007.json", "rank.4096.json"]
        )

    def test_it_is_gone_at_the_end_with_all_that_is_in_it(self) -> None:
        self.path(0).write_bytes(DATA)
        self.path(1).mkdir()
        (self.path(1) / "more").write_bytes(b"x")
        outside = self.base / "outside"
        outside.mkdir()
        (outside / "kept").write_bytes(b"x")
        self.path(2).symlink_to(outside)
        os.mkfifo(self.path(3))
        self.files.close()
        self.assertEqual([path.name for path in self.base.iterdir()], ["outside"])
        self.assertTrue((outside / "kept").exists())
        self.assertIsNone(self.files.path(0))
        self.assertIsNone(self.files.read(0))
        self.files.close()

    def test_until_it_is_open_there_is_nothing(self) -> None:
        files = ErrorFiles()
        self.assertIsNone(files.path(0))
        self.assertIsNone(files.read(0))
        files.close()

    def test_a_host_that_cannot_make_one_does_without(self) -> None:
        files = ErrorFiles()
        with mock.patch.object(tempfile, "tempdir", str(self.base / "nowhere")):
            files.open(self.said.append)
        self.assertIsNone(files.path(0))
        self.assertEqual(
            self.said,
            ["no folder for error files can be made (No such file or directory): exceptions of ranks are not reported"],
        )


class TestRead(ErrorFilesTestCase):
    """What is read of a rank's file."""

    def test_an_exception(self) -> None:
        self.path(3).write_bytes(DATA)
        self.assertEqual(self.files.read(3), BOOM)
        self.assertIsNone(self.files.read(4))

    def test_a_file_of_the_limit_is_read_and_one_byte_more_is_not(self) -> None:
        self.path().write_bytes(DATA.ljust(MAX_ERROR_FILE))
        self.assertEqual(self.files.read(0), BOOM)
        self.path().write_bytes(DATA.ljust(MAX_ERROR_FILE + 1))
        self.assertIsNone(self.files.read(0))

    def test_a_traceback_of_megabytes_is_short(self) -> None:
        deep = {"py_callstack": '  File "a.py", line 1, in f\n    f()\n' * 100_000}
        self.path().write_text(json.dumps({"message": {"message": "RecursionError: deep", "extraInfo": deep}}))
        self.assertEqual(self.files.read(0), RankError("RecursionError", "deep", "a.py:1 in f: f()"))

    def test_whatever_else_is_there_says_nothing_and_holds_nobody_up(self) -> None:
        other = self.base / "other.json"
        other.write_bytes(DATA)
        for name, make in (
            ("nothing", lambda path: None),
            ("an empty file", lambda path: path.write_bytes(b"")),
            ("no JSON", lambda path: path.write_bytes(b"boom")),
            ("not UTF-8", lambda path: path.write_bytes(b"\xff\xfe\x80")),
            ("a pipe", os.mkfifo),
            ("a directory", lambda path: path.mkdir()),
            ("a link", lambda path: path.symlink_to(other)),
            ("a link to nothing", lambda path: path.symlink_to(self.base / "nothing")),
            ("a link to itself", lambda path: path.symlink_to(path)),
            ("a device without an end", lambda path: path.symlink_to("/dev/zero")),
        ):
            with self.subTest(name):
                path = self.path(len(name))
                make(path)
                before = len(os.listdir("/proc/self/fd"))
                self.assertIsNone(self.files.read(len(name)))
                self.assertEqual(len(os.listdir("/proc/self/fd")), before)
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink(missing_ok=True)

    def test_a_file_that_may_not_be_read_says_nothing(self) -> None:
        self.path().write_bytes(DATA)
        with mock.patch.object(os, "open", side_effect=PermissionError(13, "Permission denied")):
            self.assertIsNone(self.files.read(0))

    def test_a_pipe_whose_writer_is_silent_is_not_waited_for(self) -> None:
        os.mkfifo(self.path())
        held = os.open(self.path(), os.O_RDWR)
        self.addCleanup(os.close, held)
        self.assertIsNone(self.files.read(0))

    def test_a_huge_file_costs_no_more_than_the_limit(self) -> None:
        with self.path().open("wb") as file:
            file.truncate(1 << 40)
        self.assertIsNone(self.files.read(0))
