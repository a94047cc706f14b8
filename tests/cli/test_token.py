"""``flodl-tw token``: a file with a new token, its owner's alone, or one line and nothing."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shlex
import socket
import stat
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from flodl_tw import state_folder
from flodl_tw.cli import main as cli
from flodl_tw.cli.token import lines
from flodl_tw.state_folder import make_token_file, read_token_file

TOKEN = "00112233445566778899aabbccddeeff"


class TokenTestCase(unittest.TestCase):
    """In a folder of its own."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)

    def run_main(self, *words: str) -> tuple[int, str, str]:
        """Status, output and errors of ``flodl-tw token words``."""
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            status = cli.main(("token", *words))
        return status, out.getvalue(), err.getvalue()

    def refused(self, path: str, status: int = 2) -> str:
        """The one line for a file that cannot be made; nothing is left that was not there."""
        before = sorted(os.listdir(self.folder))
        found, out, err = self.run_main(path)
        self.assertEqual((found, out, err.count("\n")), (status, "", 1), err)
        self.assertEqual(sorted(os.listdir(self.folder)), before)
        return err.removesuffix("\n")


class MadeTests(TokenTestCase):
    """What is made, and what is said of it."""

    def test_a_file_with_32_hex_digits_is_its_owner_s_alone_whatever_the_umask(self) -> None:
        for umask in (0o000, 0o022, 0o077, 0o777):
            with self.subTest(umask=oct(umask)):
                path = self.folder / f"{umask:o}.token"
                kept = os.umask(umask)
                try:
                    status, _, err = self.run_main(str(path))
                finally:
                    os.umask(kept)
                self.assertEqual((status, err), (0, ""))
                self.assertEqual(stat.S_IMODE(path.lstat().st_mode), 0o600)
                self.assertRegex(path.read_text(), r"\A[0-9a-f]{32}\n\Z")

    def test_it_is_no_one_else_s_from_the_first_moment(self) -> None:
        modes: list[int] = []
        token_hex = state_folder.secrets.token_hex

        def looked_at(count: int) -> str:
            modes.append(stat.S_IMODE(os.stat("run.token").st_mode))
            return token_hex(count)

        kept = os.umask(0)
        opened = os.open
        try:
            with (
                mock.patch.object(os, "open", side_effect=opened) as opens,
                mock.patch.object(state_folder.secrets, "token_hex", looked_at),
            ):
                make_token_file("run.token")
        finally:
            os.umask(kept)
        flags, mode = opens.call_args.args[1:]
        self.assertEqual((flags & (os.O_CREAT | os.O_EXCL), mode), (os.O_CREAT | os.O_EXCL, 0o600))
        self.assertEqual(modes, [0o600])

    def test_no_two_are_the_same_and_options_read_them(self) -> None:
        for name in ("a", "b"):
            self.assertEqual(self.run_main(name)[0], 0)
        self.assertNotEqual(read_token_file("a"), read_token_file("b"))
        self.assertEqual(read_token_file("a").hex() + "\n", Path("a").read_text())

    def test_it_says_where_the_file_is_and_what_controller_and_workers_are_told(self) -> None:
        status, out, err = self.run_main()
        name = socket.gethostname()
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(
            out,
            f"a new token is in {self.folder}/run.token, for its owner alone; each worker needs a copy\n"
            "the controller: twistd -n --pidfile= flodl-controller --token-file run.token\n"
            f"each worker: flodl-tw join {name}:29500 --token-file run.token -- PROGRAM\n",
        )
        self.assertNotIn(Path("run.token").read_text().strip(), out)

    def test_a_shell_reads_the_name_whole(self) -> None:
        for path in ("a b", "it's", "$HOME;", "*"):
            with self.subTest(path):
                _, controller, worker = lines(path, "fd00::1")
                self.assertEqual(shlex.split(controller)[-2:], ["--token-file", path])
                self.assertEqual(
                    shlex.split(worker)[2:],
                    ["flodl-tw", "join", "[fd00::1]:29500", "--token-file", path, "--", "PROGRAM"],
                )


class RefusedTests(TokenTestCase):
    """One line; what is there is left as it is."""

    def test_what_is_there_is_left_alone(self) -> None:
        Path("file").write_text("mine\n")
        Path("file").chmod(0o644)
        Path("folder").mkdir()
        Path("to-nothing").symlink_to("nothing")
        Path("to-file").symlink_to("file")
        os.mkfifo("pipe")
        expected = "it is there already, and is left as it is; name another file, or use that one"
        for path in ("file", "folder", "pipe", "to-nothing", "to-file"):
            with self.subTest(path):
                self.assertEqual(self.refused(path), f"flodl-tw: FILE {path}: {expected}")
        self.assertEqual((Path("file").read_text(), stat.S_IMODE(os.stat("file").st_mode)), ("mine\n", 0o644))
        self.assertEqual(os.readlink("to-nothing"), "nothing")

    def test_a_place_where_no_file_can_be_is_named(self) -> None:
        Path("file").touch()
        for path, reason in (
            ("", "No such file or directory"),
            ("none/run.token", "No such file or directory"),
            ("file/run.token", "Not a directory"),
            ("x" * 300, "File name too long"),
        ):
            with self.subTest(path[:20]):
                line = self.refused(path)
                name = f"FILE {path}" if path else "FILE"
                expected = f"flodl-tw: {name}: it cannot be made ({reason}); name a file in a folder of yours"
                self.assertEqual(line, expected)

    def test_a_folder_that_cannot_be_written_to_gives_2(self) -> None:
        for number in (errno.EROFS, errno.EACCES):
            with self.subTest(number), mock.patch.object(os, "open", side_effect=OSError(number, os.strerror(number))):
                self.assertIn(f"it cannot be made ({os.strerror(number)})", self.refused("run.token"))

    def test_a_full_disk_gives_1_and_leaves_no_half_file(self) -> None:
        for number in (errno.ENOSPC, errno.EDQUOT):
            full = OSError(number, os.strerror(number))
            for module, call in ((os, "open"), (os, "fchmod"), (state_folder.secrets, "token_hex")):
                with self.subTest(number, call=call), mock.patch.object(module, call, side_effect=full):
                    self.assertEqual(
                        self.refused("run.token", 1),
                        f"flodl-tw: FILE run.token: it cannot be made ({os.strerror(number)}); "
                        "make room there, or name a file elsewhere",
                    )

    def test_a_file_system_without_owners_gets_no_token(self) -> None:
        with mock.patch.object(os, "fchmod"), mock.patch.object(os, "open", _open_to_all):
            self.assertIn("it cannot be made (others can read whatever is there)", self.refused("run.token"))

    def test_a_name_that_cannot_be_shown_or_is_a_token_is_not_taken(self) -> None:
        limit = (
            "a file of this name could not be shown, and a token is made here, not given; name a file such as run.token"
        )
        for path, shown in (("a\nb", "'a\\nb'"), ("\udcff", "'\\udcff'"), (TOKEN, "(not shown)")):
            with self.subTest(shown):
                self.assertEqual(self.refused(path), f"flodl-tw: FILE {shown}: {limit}")


_open = os.open


def _open_to_all(path: str, flags: int, mode: int = 0o777) -> int:
    """As a file system opens that gives every file the same mode."""
    descriptor = _open(path, flags, mode)
    os.chmod(path, 0o755)
    return descriptor
