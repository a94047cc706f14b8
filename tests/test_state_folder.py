"""Files that the controller writes and reads: what it will not touch, and what it keeps."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from flodl_tw.core.errors import SettingError
from flodl_tw.options import OptionReader
from flodl_tw.state_folder import (
    check_writable,
    given_token,
    kept_token,
    lock_folder,
    made_token,
    read_token_file,
    write_atomically,
)

TOKEN = "0f" * 16


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

    def test_no_link_in_the_way_of_a_file_is_followed(self) -> None:
        """In a folder where others may write, they may guess the name of what is written first."""
        path, theirs = self.folder / "port", self.folder / "theirs"
        for target, write in ((theirs, lambda: write_atomically(path, "1\n")), (self.folder / "made", self.check)):
            theirs.write_text("theirs")
            (self.folder / f".port.{os.getpid()}").symlink_to(target)
            write()
            self.assertEqual(theirs.read_text(), "theirs")
            self.assertFalse((self.folder / "made").exists())
        self.assertEqual(path.read_text(), "1\n")
        self.assertFalse(path.is_symlink())

    def check(self) -> None:
        check_writable("--port-file", self.folder / "port")

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

    def test_a_token_is_kept_by_machine_and_port(self) -> None:
        lines: list[str] = []
        tokens = set()
        for host, port in (("box-a", 29500), ("box-b", 29500), ("box-a", 29501)):
            with mock.patch("socket.gethostname", return_value=host):
                token, path = kept_token(self.folder, {}, port, lines.append)
            self.assertEqual(path, self.folder / f"{host}-{port}" / "token")
            tokens.add(token)
        self.assertEqual((len(tokens), lines), (3, []))

    def test_a_host_name_makes_no_path(self) -> None:
        with mock.patch("socket.gethostname", return_value="../a b"):
            self.assertEqual(lock_folder(self.folder, 1), self.folder / ".._a_b-1")

    def test_a_token_that_was_kept_by_port_alone_is_still_read(self) -> None:
        older = self.folder / "29500"
        older.mkdir()
        (older / "token").write_text(TOKEN)
        (older / "token").chmod(0o600)
        found = kept_token(self.folder, {}, 29500, self.fail)
        self.assertEqual(found, (bytes.fromhex(TOKEN), older / "token"))

    def test_a_file_system_without_locks_is_one_warning(self) -> None:
        for number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            with self.subTest(errno.errorcode[number]):
                lines: list[str] = []
                with mock.patch.object(fcntl, "flock", side_effect=OSError(number, os.strerror(number))):
                    path = lock_folder(self.folder, 29500, lines.append)
                self.assertEqual(len(lines), 1)
                self.assertIn(f"--state-dir {path}: no lock can be had there ({os.strerror(number)})", lines[0])

    def test_links_and_what_is_another_user_s_are_refused_in_a_state_folder(self) -> None:
        path = self.folder / f"{socket.gethostname()}-29500"
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir(mode=0o755)
        path.symlink_to(elsewhere)
        self.assertIn("it is a link, or no folder", self.unkept())
        self.assertEqual(stat.S_IMODE(elsewhere.stat().st_mode), 0o755)
        path.unlink()
        path.mkdir()
        (path / "lock").symlink_to(self.folder / "made")
        self.assertIn(f"--state-dir {path}: it cannot be used", self.unkept())
        self.assertFalse((self.folder / "made").exists())
        (path / "lock").unlink()
        (self.folder / "given").write_text(TOKEN)
        (self.folder / "given").chmod(0o600)
        (path / "token").symlink_to(self.folder / "given")
        self.assertIn("it is a link", self.unkept())
        with mock.patch("os.geteuid", return_value=os.geteuid() + 1):
            self.assertIn(f"it is the user's with the id {os.geteuid() - 1}", self.unkept())

    def unkept(self) -> str:
        """The one line that refuses to keep a token there."""
        with self.assertRaises(SettingError) as caught:
            kept_token(self.folder, {}, 29500, self.fail)
        return str(caught.exception)

    def test_a_state_folder_may_be_a_link_of_the_administrator_s(self) -> None:
        """As systemd makes one for a service with a user of its own."""
        (self.folder / "private").mkdir()
        (self.folder / "link").symlink_to(self.folder / "private")
        token, path = kept_token(self.folder / "link", {}, 29500, self.fail)
        self.assertEqual(read_token_file(str(path)), token)

    def test_a_full_disk_leaves_nothing(self) -> None:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch.object(Path, "replace", side_effect=full), self.assertRaises(OSError):
            write_atomically(self.folder / "port", "1\n")
        with mock.patch("secrets.token_hex", side_effect=full), self.assertRaises(SettingError):
            made_token(self.folder / "token")
        self.assertEqual(list(self.folder.iterdir()), [])

    def token_file(self, mode: int) -> str:
        """A file with a token and this mode."""
        path = self.folder / f"mounted-{mode:o}"
        path.write_text(TOKEN)
        path.chmod(mode)
        return str(path)

    def taken(self, path: str, **environ: str) -> list[str]:
        """The warnings with which the file is taken."""
        lines: list[str] = []
        given = given_token(OptionReader({"token-file": path}, environ), lines.append)
        self.assertEqual(given, (bytes.fromhex(TOKEN), path))
        return lines

    def test_a_mounted_secret_that_others_can_read_is_taken_with_one_warning(self) -> None:
        read_only = SimpleNamespace(f_flag=os.ST_RDONLY)
        for mode in (0o440, 0o444, 0o644):
            path = self.token_file(mode)
            with self.subTest(mode=oct(mode)):
                with self.assertRaises(SettingError) as caught:
                    read_token_file(path)
                self.assertIn(f"chmod 600 {path}", str(caught.exception))
                with mock.patch("os.fstatvfs", return_value=read_only):
                    (line,) = self.taken(path)
                self.assertIn(f"--token-file {path}: others can read it (mode {mode:04o})", line)
                (line,) = self.taken(path, CREDENTIALS_DIRECTORY=str(self.folder))
                self.assertIn("it is used", line)
                with self.assertRaises(SettingError):
                    self.taken(path, CREDENTIALS_DIRECTORY=str(self.folder / "other"))

    def test_another_user_s_file_is_taken_unless_others_may_write_it(self) -> None:
        if os.geteuid():
            self.skipTest("only root can give a file away")
        for mode, count in ((0o444, 1), (0o400, 0)):
            path = self.token_file(mode)
            os.chown(path, 12345, -1)
            self.assertEqual(len(self.taken(path)), count)
        path = self.token_file(0o464)
        os.chown(path, 12345, -1)
        with self.assertRaises(SettingError):
            self.taken(path)

    def test_a_folder_has_one_controller(self) -> None:
        lock_folder(self.folder, 29500)
        with self.assertRaises(SettingError) as caught:
            lock_folder(self.folder, 29500)
        self.assertIn("another controller of this port holds its lock", str(caught.exception))
        lock_folder(self.folder, 29501)
