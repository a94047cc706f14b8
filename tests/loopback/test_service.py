"""A controller as shells, containers, service managers and schedulers start it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from flodl_tw.core.messages import Accept, WorldFormed
from tests.loopback.agents import Command
from tests.loopback.process import LOOPBACK, TWISTD, ProcessTestCase, Twistd, until

TOKEN = "0f" * 16
NEW_TOKEN = "1e" * 16


class ServiceTestCase(ProcessTestCase):
    """With a folder of its own."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)

    def serve(self, *options: str, command: tuple[str, ...] = TWISTD, **environ: str) -> Twistd:
        """A controller whose window waits for 8 ranks, started by ``command``."""
        controller = Twistd("--min-rank-start", "8", *options, command=command, environ=environ)
        self.addCleanup(controller.close)
        return controller.listening()


def by_shell(script: str) -> tuple[str, ...]:
    """``twistd``, started by a shell that does this first."""
    return ("sh", "-c", f'{script} exec "$@"', "sh", *TWISTD)


class HangUp(ServiceTestCase):
    """SIGHUP: nobody's end."""

    def test_a_hangup_that_nohup_ignores_stays_ignored(self) -> None:
        controller = self.serve(command=by_shell("trap '' HUP;"))
        controller.send_signal(signal.SIGHUP)
        self.assertEqual(controller.state()["phase"], "waiting")
        ignored = next(
            line for line in Path(f"/proc/{controller.pid}/status").read_text().splitlines() if "Ign" in line
        )
        self.assertTrue(int(ignored.split()[1], 16) & 1 << signal.SIGHUP - 1)

    def test_a_hangup_opens_the_log_file_that_was_moved_away_again(self) -> None:
        log = self.folder / "log"
        controller = self.serve(command=(*TWISTD, "--logfile", str(log)))
        log.rename(self.folder / "log.1")
        self.assertFalse(log.exists())
        controller.send_signal(signal.SIGHUP)
        until(log.exists, "the log file")
        self.joined(controller, "gpu-a", 1)
        until(lambda: "gpu-a" in log.read_text(), "its next line")
        self.assertNotIn("gpu-a", (self.folder / "log.1").read_text())

    def test_a_log_file_that_cannot_be_opened_again_goes_on(self) -> None:
        (self.folder / "logs").mkdir()
        controller = self.serve(command=(*TWISTD, "--logfile", str(self.folder / "logs" / "log")))
        (self.folder / "logs").rename(self.folder / "moved")
        controller.send_signal(signal.SIGHUP)
        until(lambda: "cannot be opened again" in (self.folder / "moved" / "log").read_text(), "the warning")

    def test_a_hangup_reads_the_token_again_for_those_who_join_then(self) -> None:
        file = self.folder / "token"
        file.write_text(TOKEN)
        file.chmod(0o600)
        controller = self.serve("--token-file", str(file), "--target-ranks", "8")
        first = self.dial(controller, token=bytes.fromhex(TOKEN))
        self.assertIsInstance(first.join("gpu-a", 4), Accept)
        file.write_text("no token")
        controller.send_signal(signal.SIGHUP)
        self.assertIn("the token stays as it was", controller.said("#warn] --token-file"))
        file.write_text(NEW_TOKEN)
        controller.send_signal(signal.SIGHUP)
        controller.said("new hellos need the token")
        with self.assertRaises(EOFError):
            self.dial(controller, token=bytes.fromhex(TOKEN)).join("gpu-b", 4)
        second = self.dial(controller, token=bytes.fromhex(NEW_TOKEN))
        self.assertIsInstance(second.join("gpu-b", 4), Accept)
        for host in (first, second):
            self.assertIsInstance(host.next(), WorldFormed)
            host.exit_all(0)
            host.close()
        self.assertEqual(controller.ended(), 0)
        self.assertNotIn(NEW_TOKEN, controller.log)


class Places(ServiceTestCase):
    """Where it is started, and with what."""

    def test_closed_standard_descriptors_are_opened_to_nowhere(self) -> None:
        controller = self.serve(command=by_shell("exec <&- >&- 2>&-;"))
        self.assertEqual(controller.state()["phase"], "waiting")
        for number in range(3):
            self.assertEqual(os.readlink(f"/proc/{controller.pid}/fd/{number}"), "/dev/null")
        self.assertEqual(controller.stop(), -signal.SIGTERM)

    def test_what_an_encoding_does_not_have_is_escaped_in_the_log(self) -> None:
        controller = self.serve("--interface", LOOPBACK, PYTHONIOENCODING="latin-1")
        self.joined(controller, "gpu-\N{GREEK SMALL LETTER ALPHA}")
        controller.said("gpu-\\u03b1")

    def test_a_folder_that_cannot_be_written_is_one_line_or_no_matter(self) -> None:
        if os.geteuid() or shutil.which("setpriv") is None:
            self.skipTest("only root can be another user, and by setpriv")
        self.folder.chmod(0o755)
        other = ("setpriv", "--reuid", "54321", "--clear-groups", *TWISTD)
        words = ("flodl-controller", "--interface", LOOPBACK, "--port", "0", "--port-file")
        for ours, port, named in (
            (("-n",), "/proc/port", f"--pidfile {self.folder}/twistd.pid"),
            (("--pidfile=",), "/tmp/flodl-tw-port", f"--logfile {self.folder}/twistd.log"),
            (("-n", "--pidfile="), "/proc/port", "--port-file /proc/port"),
        ):
            with self.subTest(ours=ours):
                done = subprocess.run([*other, *ours, *words, port], cwd=self.folder, capture_output=True, text=True)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertRegex(done.stderr, rf"\Aflodl-controller: {named}: it cannot be written .*\n\Z")


class FirstProcess(ServiceTestCase):
    """PID 1 of a container: no signal that has no handler ends it, not even one that it sends itself."""

    CONTAINER = ("unshare", "-pf", "--mount-proc", "--kill-child")

    def setUp(self) -> None:
        super().setUp()
        if os.geteuid() or subprocess.run([*self.CONTAINER, "true"], capture_output=True, check=False).returncode:
            self.skipTest("only root can make a PID namespace, and by unshare")

    def signal_first(self, pid: int, number: int) -> None:
        """Signal the container's first process, which unshare's process ``pid`` waits for."""
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(first), number)

    def test_the_controller_ends_with_143_on_sigterm(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            controller = self.serve(command=(*self.CONTAINER, *TWISTD))
            host = self.joined(controller, "gpu-a")
            self.signal_first(controller.pid, number)
            self.assertEqual(len(host.rest()), 1)
            self.assertEqual(controller.ended(), 128 + number)

    def test_so_does_each_command_that_waits(self) -> None:
        controller = self.serve()
        address = f"{LOOPBACK}:{controller.port}"
        for words in (("status", "--watch", address), ("join", address, "--nproc", "1", "--", "true")):
            for number in (signal.SIGTERM, signal.SIGINT):
                with self.subTest(command=words[0], signal=number.name):
                    command = Command(*words, wrapped=self.CONTAINER)
                    self.addCleanup(command.close)
                    until(lambda command=command: command.out + command.err.encode(), "its first line")
                    self.signal_first(command.pid, number)
                    self.assertEqual(command.ended(), 128 + number, command.err)


class Stalled(ServiceTestCase):
    """A log that nobody reads."""

    def test_it_goes_on_and_ends_when_it_is_told_to(self) -> None:
        read, write = os.pipe()
        self.addCleanup(os.close, read)
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        os.write(write, b"x" * 4096)
        stalled = by_shell(f"exec > /proc/{os.getpid()}/fd/{write};")
        controller = self.serve("--min-rank-start", "99999", command=stalled)
        # A line a host: more in all than any pipe holds.
        for number in range(400):
            self.joined(controller, f"{number:0200}")
        self.assertEqual(controller.state()["joined_hosts"], 400)
        self.assertEqual(controller.stop(), -signal.SIGTERM)
