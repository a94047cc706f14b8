"""Files that the controller writes and reads: what it will not touch, and what it keeps."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import unittest
from pathlib import Path

from flodl_tw.core.errors import SettingError
from flodl_tw.options import OptionReader
from flodl_tw.state_folder import (
    check_writable,
    given_token,
    lock_folder,
    made_token,
    read_token_file,
    write_atomically,
)


class StateTestCase(unittest.TestCase):
    """With a folder of its own."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)

    def refused(self, path: Path) -> str:
        """The one line that refuses to write there."""
        with self.assertRaises(SettingError) as caught:
            check_writable("--port-file", path)
        return str(caught.exception)


class WritableTests(StateTestCase):
    """A file is put in the place of a file, or of nothing."""

    def test_what_is_no_regular_file_is_left_alone(self) -> None:
        pipe, link, target = self.folder / "pipe", self.folder / "link", self.folder / "target"
        os.mkfifo(pipe)
        target.touch()
        link.symlink_to(target)
        for path in (pipe, link, self.folder, Path("/dev/null")):
            with self.subTest(path=path):
                line = self.refused(path)
                self.assertIn(f"--port-file {path}: it cannot be written (something that is no regular file", line)
        self.assertTrue(stat.S_ISFIFO(pipe.stat().st_mode))
        self.assertTrue(link.is_symlink())

    def test_a_folder_that_is_missing_is_named(self) -> None:
        self.assertIn("No such file or directory", self.refused(self.folder / "missing" / "port"))

    def test_a_check_leaves_nothing_behind(self) -> None:
        check_writable("--port-file", self.folder / "port")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_a_file_is_replaced_whole_with_its_mode(self) -> None:
        path = self.folder / "port"
        path.write_text("an older and longer text")
        check_writable("--port-file", path)
        write_atomically(path, "1\n")
        self.assertEqual((path.read_text(), stat.S_IMODE(path.stat().st_mode) & 0o600), ("1\n", 0o600))
        self.assertEqual([entry.name for entry in self.folder.iterdir()], ["port"])


class TokenTests(StateTestCase):
    """Tokens in files."""

    def test_a_made_token_is_kept_for_its_owner_alone(self) -> None:
        folder = lock_folder(self.folder, 29500)
        token = made_token(folder / "token")
        self.assertEqual(made_token(folder / "token"), token)
        self.assertEqual(stat.S_IMODE((folder / "token").stat().st_mode), 0o600)
        self.assertEqual(stat.S_IMODE(folder.stat().st_mode), 0o700)
        self.assertEqual(read_token_file(str(folder / "token")), token)

    def test_a_made_token_that_went_bad_is_named_by_its_folder_s_option(self) -> None:
        path = self.folder / "token"
        path.write_text("bad")
        path.chmod(0o600)
        with self.assertRaises(SettingError) as caught:
            made_token(path)
        self.assertTrue(str(caught.exception).startswith(f"--state-dir {path}: a token is 32 hex digits"))

    def test_a_token_given_for_its_file_is_not_shown(self) -> None:
        with self.assertRaises(SettingError) as caught:
            read_token_file("00112233445566778899aabbccddeeff")
        self.assertIn("--token-file (not shown): it cannot be read", str(caught.exception))
        self.assertNotIn("00112233", str(caught.exception))

    def test_a_file_that_is_named_like_a_token_is_not_shown_either(self) -> None:
        name = "00112233445566778899aabbccddeeff"
        path = self.folder / name
        path.write_text(name)
        with contextlib.chdir(self.folder):
            path.chmod(0o644)
            with self.assertRaises(SettingError) as caught:
                read_token_file(name)
            self.assertNotIn(name, str(caught.exception))
            path.chmod(0o600)
            given = given_token(OptionReader({"token-file": name}, {}))
        self.assertEqual(given, (bytes.fromhex(name), "(not shown)"))

    def test_a_folder_has_one_controller(self) -> None:
        lock_folder(self.folder, 29500)
        with self.assertRaises(SettingError) as caught:
            lock_folder(self.folder, 29500)
        self.assertIn("another controller of this port holds its lock", str(caught.exception))
        lock_folder(self.folder, 29501)
