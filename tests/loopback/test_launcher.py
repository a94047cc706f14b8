"""The first program of a rank with real processes: what it waits for, what it becomes, and in what condition."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import unittest
from collections.abc import Mapping

from flodl_tw.agent import launcher
from flodl_tw.agent.spawn import ENDING, PASSED_ON
from tests.loopback.agents import SH, AgentTestCase
from tests.loopback.process import until

# Tells its session, whether the launcher's descriptors are open, and which signals it may not get.
TELLS = """
cut -d " " -f 6 /proc/$$/stat
for number in 3 4; do [ -e /proc/$$/fd/$number ] && echo open; done
exec grep -E "SigBlk|SigIgn" /proc/self/status
"""


class Launched:
    """A launcher as the agent starts it: signals are held back, and two descriptors are ours."""

    def __init__(self, *words: str, environ: Mapping[str, str] | None = None) -> None:
        theirs, self.go = os.pipe()
        self.out, output = os.pipe()
        self.guardians, held = os.pipe()
        # Out of the way of the numbers that they get.
        ends = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 100) for each in (theirs, output, held)]
        places = zip(
            (ends[0], ends[1], ends[1], ends[0], ends[2]), (0, 1, 2, launcher.GO, launcher.GUARDIAN), strict=True
        )
        self.pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", launcher.__file__, *words],
            os.environ if environ is None else environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, *place) for place in places],
            setsigmask=(*ENDING, *PASSED_ON),
        )
        for each in (theirs, output, held, *ends):
            os.close(each)

    def ended(self, go: bytes = b"g") -> tuple[int, bytes]:
        """Give it the word; its exit code (-N: signal N) and what it wrote."""
        os.write(self.go, go)
        os.close(self.go)
        written = b""
        while data := os.read(self.out, 1 << 16):
            written += data
        os.close(self.out)
        os.close(self.guardians)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), written


class TestLauncher(unittest.TestCase):
    """The launcher alone."""

    def test_a_program_leads_a_session_and_gets_every_signal_and_no_descriptor_of_ours(self) -> None:
        launched = Launched("/bin/sh", "-c", TELLS)
        code, told = launched.ended()
        session, *masks = told.decode().splitlines()
        self.assertEqual((code, session, len(masks)), (0, str(launched.pid), 2), told)
        for mask in masks:
            # Those that the launcher has to do with; whatever runs the tests may ignore others.
            for number in (*ENDING, *PASSED_ON, signal.SIGPIPE, signal.SIGXFSZ):
                self.assertFalse(int(mask.split()[1], 16) >> (number - 1) & 1, (mask, number))

    def test_its_environment_is_what_was_given_and_no_more(self) -> None:
        # Python itself sets LC_CTYPE where there is no locale, and would not start with this home.
        for environ in ({}, {"LANG": "C", "PYTHONHOME": "/nonexistent", "A": "b=c", "EMPTY": "", "BYTE": "\udcff"}):
            with self.subTest(environ=environ):
                code, told = Launched("/usr/bin/env", "-0", environ=environ).ended()
                found = dict(entry.split("=", 1) for entry in os.fsdecode(told).split("\0") if entry)
                self.assertEqual((code, found), (0, environ))

    def test_without_the_word_nothing_is_run(self) -> None:
        self.assertEqual(Launched("/bin/echo", "begun").ended(b""), (launcher.NOT_RUN, b""))

    def test_what_cannot_be_run_is_said_with_the_code_that_shells_have(self) -> None:
        for program, code, why in (
            ("/nonexistent/program", launcher.NOT_FOUND, "No such file or directory"),
            ("/", launcher.NOT_RUN, "Permission denied"),
        ):
            with self.subTest(program):
                said = f"flodl-tw: {program} cannot be run: {why}\n".encode()
                self.assertEqual(Launched(program).ended(), (code, said))

    def test_the_guardians_pipe_ends_with_the_launcher_and_not_before_there_is_a_session(self) -> None:
        launched = Launched("/bin/sleep", "600")
        os.set_blocking(launched.guardians, False)
        until(lambda: os.getsid(launched.pid) == launched.pid, "a session")
        with self.assertRaises(BlockingIOError):
            os.read(launched.guardians, 1)
        os.set_blocking(launched.guardians, True)
        os.write(launched.go, b"g")
        self.assertEqual(os.read(launched.guardians, 1), b"")
        os.kill(launched.pid, signal.SIGKILL)
        self.assertEqual(launched.ended(b""), (-signal.SIGKILL, b""))

    def test_a_signal_that_comes_before_it_is_ready_is_neither_lost_nor_a_traceback(self) -> None:
        for number in (*ENDING, *PASSED_ON):
            with self.subTest(signal=number.name):
                launched = Launched("/bin/echo", "begun")
                os.kill(launched.pid, number)
                until(
                    lambda pid=launched.pid: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), "its end"
                )
                self.assertEqual(launched.ended(b""), (-number, b""))


class TestStop(AgentTestCase):
    """A world that is stopped while it begins."""

    def test_sigterm_reaches_ranks_whose_sessions_have_not_begun(self) -> None:
        for _ in range(3):
            command = self.command("run", "-n", "16", "--stop-grace", "600", "--", *SH, "exec sleep 600")
            command.said("the world has formed")
            command.send_signal(signal.SIGTERM)
            self.assertEqual(command.ended(), 143, command.err)
