"""The guardian with real processes: what is recorded ends with the agent, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path

from flodl_tw.agent import guardian
from flodl_tw.agent.guardian import FOLDERS, Sessions, clear, end, follow
from tests.loopback.agents import PATIENCE, PYTHON, AgentTestCase, is_stopped
from tests.loopback.process import WAIT, alive, until

SLEEP = ("sleep", "60")
STUBBORN = ("sh", "-c", "trap '' TERM; echo ready; sleep 60; sleep 60")
FAMILY = ("sh", "-c", "sleep 60 & echo $!; wait")
"""Prints its child's id."""
ORPHAN = ("sh", "-c", "sleep 60 >/dev/null & echo $!")
"""The same, and leaves it behind."""
RUNS = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
end = time.monotonic() + 60
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    time.sleep(0.005)
"""
"""Is another process every few milliseconds, and its output the same; for a minute."""
LEAVES = "trap 'echo boom >\"$1/rank.001.json\" && exit 7; exit 8' TERM\necho ready\nwhile :; do sleep 0.05; done"
"""A script that leaves an error file in a folder when it is told to end."""
NEVER = 2 * PATIENCE
"""A grace that no test waits for, unless it fails."""


class SessionTestCase(unittest.TestCase):
    """Starts processes, each in a session of its own, and kills what is left of them."""

    def start(self, *words: str) -> subprocess.Popen[str]:
        """A process that leads a session; it and what its session holds is gone at the end of the test."""
        process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE, text=True)
        self.addCleanup(self.remove, process)
        return process

    def remove(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait(WAIT)
        if process.stdout is not None:
            process.stdout.close()

    def line(self, process: subprocess.Popen[str]) -> str:
        """The next line that it prints."""
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def family(self, words: tuple[str, ...]) -> tuple[subprocess.Popen[str], int]:
        """A process, and the id of the one that it started."""
        process = self.start(*words)
        child = int(self.line(process))
        self.addCleanup(self.kill, child)
        return process, child

    def assert_untouched(self, process: subprocess.Popen[str]) -> None:
        """No SIGKILL was sent to it: another signal is what ends it."""
        process.terminate()
        self.assertEqual(process.wait(WAIT), -signal.SIGTERM)

    def kill_group(self, group: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)

    def kill(self, pid: int) -> None:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)

    def recorded(self, *processes: subprocess.Popen[str]) -> Sessions:
        sessions = Sessions()
        for process in processes:
            sessions.record(process.pid)
        return sessions


class TestSessions(SessionTestCase):
    """Which processes belong to a session."""

    def test_a_session_s_processes_are_its_leader_and_all_that_it_started(self) -> None:
        first, (second, child) = self.start(*SLEEP), self.family(FAMILY)
        self.start(*SLEEP)
        found = self.recorded(first, second).processes()
        self.assertEqual(
            {session: set(pids) for session, pids in found.items()},
            {
                first.pid: {first.pid},
                second.pid: {second.pid, child},
            },
        )

    def test_what_is_not_recorded_is_none(self) -> None:
        process = self.start(*SLEEP)
        self.assertEqual(Sessions().processes(), {})
        Sessions().signal(signal.SIGKILL)
        self.assert_untouched(process)

    def test_a_process_that_waits_to_be_reaped_is_none(self) -> None:
        process = self.start("true")
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self.assertEqual(self.recorded(process).processes(), {})

    def test_a_command_may_have_any_name(self) -> None:
        process = self.start(sys.executable, "-c", NAMED)
        self.assertEqual(self.line(process), "ready")
        self.assertEqual(self.recorded(process).processes(), {process.pid: [process.pid]})

    def test_a_session_goes_on_after_its_leader(self) -> None:
        process, child = self.family(ORPHAN)
        process.wait(WAIT)
        sessions = self.recorded(process)
        sessions.leader_gone(process.pid)
        self.assertEqual(sessions.processes(), {process.pid: [child]})
        sessions.signal(signal.SIGKILL)
        until(lambda: not sessions.processes(), "the end of what was left")

    def test_what_forks_and_exits_on_and_on_is_ended_too(self) -> None:
        for _ in range(5):
            process = self.start(*PYTHON, RUNS)
            self.assertEqual(self.line(process), "ready")
            process.wait(WAIT)
            self.addCleanup(self.kill_group, process.pid)
            sessions = self.recorded(process)
            sessions.leader_gone(process.pid)
            end(sessions, 0.1)
            assert process.stdout is not None
            # It ends with the last process that holds it, and would be held for a minute.
            self.assertTrue(select.select([process.stdout], [], [], 30)[0])
            self.assertEqual(process.stdout.read(), "")

    def test_an_id_that_a_new_process_has_is_not_the_old_session(self) -> None:
        process = self.start(*SLEEP)
        sessions = self.recorded(process)
        sessions.leader_gone(process.pid)
        sessions.signal(signal.SIGKILL)
        self.assertEqual(len(sessions), 0)
        self.assert_untouched(process)

    def test_a_signal_may_be_for_some_sessions_only(self) -> None:
        first, second = self.start(*SLEEP), self.start(*SLEEP)
        sessions = self.recorded(first, second)
        self.assertEqual([each for each, _ in sessions.known()], [first.pid, second.pid])
        sessions.signal(signal.SIGKILL, {second.pid})
        self.assertEqual(second.wait(WAIT), -signal.SIGKILL)
        self.assert_untouched(first)

    def test_what_is_forgotten_is_left_alone(self) -> None:
        process = self.start(*SLEEP)
        sessions = self.recorded(process)
        sessions.forget(process.pid)
        sessions.forget(process.pid)
        sessions.leader_gone(process.pid)
        self.assertEqual((len(sessions), sessions.processes()), (0, {}))


NAMED = """
import time
with open("/proc/self/comm", "w") as name:
    name.write("a) Z 1 (b\\n")
print("ready", flush=True)
time.sleep(60)
"""


class TestFollow(unittest.TestCase):
    """The agent's lines."""

    def followed(self, *pieces: bytes) -> Sessions:
        """What is recorded after these pieces, each read by itself, and the end of the pipe."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            for piece in pieces:
                ours.send(piece)
            ours.close()
            sessions = Sessions()
            follow(theirs.fileno(), sessions)
        return sessions

    def test_lines_come_in_any_pieces(self) -> None:
        data = b"+101\n+102\n+103\n.102\n-101\n"
        for size in (1, 2, 3, 7, len(data)):
            with self.subTest(size=size):
                pieces = [data[start : start + size] for start in range(0, len(data), size)]
                self.assertEqual([each for each, _ in self.followed(*pieces).known()], [102, 103])

    def test_an_unfinished_line_at_the_end_is_no_order(self) -> None:
        self.assertEqual([each for each, _ in self.followed(b"+101\n", b"-10").known()], [101])

    def test_no_line_is_no_session(self) -> None:
        self.assertEqual([each for each, _ in self.followed().known()], [])


class TestEnd(SessionTestCase):
    """SIGTERM, the grace, SIGKILL."""

    def test_who_obeys_goes_by_sigterm_and_nobody_waits_for_the_grace(self) -> None:
        process = self.start(*SLEEP)
        began = time.monotonic()
        end(self.recorded(process), NEVER)
        self.assertLess(time.monotonic() - began, PATIENCE)
        self.assertEqual(process.wait(WAIT), -signal.SIGTERM)

    def test_who_was_stopped_goes_by_sigterm_too(self) -> None:
        process = self.start(*SLEEP)
        process.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(process.pid), "that it has stopped")
        end(self.recorded(process), NEVER)
        self.assertEqual(process.wait(WAIT), -signal.SIGTERM)

    def test_who_ignores_sigterm_is_killed_after_the_grace_and_not_before(self) -> None:
        process = self.start(*STUBBORN)
        self.assertEqual(self.line(process), "ready")
        began = time.monotonic()
        end(self.recorded(process), 0.4)
        self.assertGreaterEqual(time.monotonic() - began, 0.4)
        self.assertEqual(process.wait(WAIT), -signal.SIGKILL)

    def test_nothing_to_end_takes_no_time(self) -> None:
        began = time.monotonic()
        end(Sessions(), NEVER)
        self.assertLess(time.monotonic() - began, PATIENCE)


class FolderTestCase(unittest.TestCase):
    """A temporary directory of the test's own, with two of an agent's folders of error files."""

    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.addCleanup(made.cleanup)
        self.base = Path(made.name)
        self.prefix = str(self.base / f"{FOLDERS}0123abcd-")
        self.first, self.second = (self.folder(f"0123abcd-{name}") for name in ("one", "two"))

    def folder(self, name: str) -> Path:
        """A folder with a rank's error file in it."""
        folder = self.base / f"{FOLDERS}{name}"
        folder.mkdir(0o700)
        (folder / "rank.000.json").write_text("{}")
        return folder

    def left(self) -> list[str]:
        """What the temporary directory holds."""
        return sorted(path.name for path in self.base.iterdir())


class TestClear(FolderTestCase):
    """The folders of error files: those of one agent go, and nothing else does."""

    def test_the_folders_of_the_agent_go_with_the_files_in_them(self) -> None:
        (self.second / "rank.000.json").unlink()
        (self.first / "rank.001.json").touch()
        clear(self.prefix)
        self.assertEqual(self.left(), [])

    def test_what_another_agent_has_stays(self) -> None:
        other = self.folder("89ef-one")
        (self.base / f"{FOLDERS}0123abcd-file").touch()
        clear(self.prefix)
        self.assertEqual(self.left(), [f"{FOLDERS}0123abcd-file", other.name])
        self.assertEqual([path.name for path in other.iterdir()], ["rank.000.json"])

    def test_no_link_is_followed_and_what_is_no_file_stays_with_its_folder(self) -> None:
        elsewhere = self.base / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "kept").touch()
        (self.base / f"{FOLDERS}0123abcd-link").symlink_to(elsewhere)
        (self.first / "rank.001.json").symlink_to(elsewhere / "kept")
        (self.first / "rank.002.json").symlink_to(elsewhere)
        os.mkfifo(self.first / "rank.003.json")
        (self.first / "rank.004.json").mkdir()
        clear(self.prefix)
        self.assertEqual(self.left(), ["elsewhere", f"{FOLDERS}0123abcd-link", self.first.name])
        self.assertEqual(
            sorted(path.name for path in self.first.iterdir()), [f"rank.{rank:03d}.json" for rank in range(1, 5)]
        )
        self.assertEqual([path.name for path in elsewhere.iterdir()], ["kept"])

    def test_another_users_folder_stays(self) -> None:
        if os.geteuid():
            self.skipTest("only root can give a folder to another user")
        os.chown(self.first, 65534, 65534)
        clear(self.prefix)
        self.assertEqual(self.left(), [self.first.name])
        self.assertTrue((self.first / "rank.000.json").exists())

    def test_a_beginning_that_is_not_one_agents_is_none(self) -> None:
        everything = self.left()
        for prefix in ("", f"{self.base}", f"{self.base}/", f"{self.base}/{FOLDERS[:-1]}", f"{self.base}/{FOLDERS}"):
            with self.subTest(prefix=prefix):
                clear(prefix)
                self.assertEqual(self.left(), everything)
                self.assertTrue((self.first / "rank.000.json").exists())
        clear(str(self.base / "nowhere" / f"{FOLDERS}0123abcd-"))


class TestProcess(SessionTestCase, FolderTestCase):
    """The whole of it, as an agent starts it."""

    def setUp(self) -> None:
        super().setUp()
        self.begin(0.4)

    def begin(self, grace: float) -> None:
        """A guardian, with the folders of an agent to remove."""
        self.guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guardian.__file__)), str(grace), self.prefix],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(self.close, self.guardian)

    def close(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()

    def tell(self, *lines: str) -> None:
        assert self.guardian.stdin is not None
        self.guardian.stdin.write("".join(f"{line}\n" for line in lines))
        self.guardian.stdin.flush()

    def ended(self) -> str:
        """The pipe ends, and it with it; gives what it said."""
        _, err = self.guardian.communicate(timeout=WAIT)
        self.assertEqual(self.guardian.returncode, 0)
        return err

    def ignores(self, number: int) -> bool:
        """Whether it has come so far as to survive the signal."""
        status = Path(f"/proc/{self.guardian.pid}/status").read_text()
        masks = (line.split()[1] for line in status.splitlines() if line.startswith(("SigIgn:", "SigCgt:")))
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)

    def gone(self, pid: int) -> Callable[[], bool]:
        return lambda: not alive(pid)

    def test_what_is_recorded_ends_with_the_pipe_and_a_bystander_does_not(self) -> None:
        obeys, (family, child), stubborn = self.start(*SLEEP), self.family(FAMILY), self.start(*STUBBORN)
        bystander, forgotten = self.start(*SLEEP), self.start(*SLEEP)
        self.assertEqual(self.line(stubborn), "ready")
        self.tell(*(f"+{process.pid}" for process in (obeys, family, stubborn, forgotten)), f"-{forgotten.pid}")
        self.assertIsNone(obeys.poll())
        said = self.ended()
        self.assertEqual(said, "flodl-tw: the agent was gone, and 3 sessions that it left have been ended\n")
        ends = [process.wait(WAIT) for process in (obeys, family, stubborn)]
        self.assertEqual(ends, [-signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL])
        until(self.gone(child), "the end of the grandchild")
        self.assertEqual((bystander.poll(), forgotten.poll()), (None, None))

    def test_what_a_leader_left_behind_ends_too(self) -> None:
        process, child = self.family(ORPHAN)
        process.wait(WAIT)
        self.tell(f"+{process.pid}", f".{process.pid}")
        self.ended()
        until(self.gone(child), "the end of what was left")

    def test_an_id_that_has_passed_to_another_process_is_left_alone(self) -> None:
        process = self.start(*SLEEP)
        self.tell(f"+{process.pid}", f".{process.pid}")
        self.assertEqual(self.ended(), "")
        self.assertIsNone(process.poll())

    def test_with_nothing_to_end_it_says_nothing(self) -> None:
        process = self.start("true")
        process.wait(WAIT)
        self.tell(f"+{process.pid}", f".{process.pid}", f"-{process.pid}")
        self.assertEqual(self.ended(), "")

    def test_the_agents_folders_go_with_the_pipe_and_not_before(self) -> None:
        process = self.start("true")
        process.wait(WAIT)
        self.tell(f"+{process.pid}", f".{process.pid}", f"-{process.pid}")
        # It has come as far as its lines.
        until(lambda: self.ignores(signal.SIGUSR2), "that SIGUSR2 is ignored")
        self.assertEqual(self.left(), [self.first.name, self.second.name])
        self.assertEqual(self.ended(), "")
        self.assertEqual(self.left(), [])

    def test_they_are_there_until_the_last_session_is_gone(self) -> None:
        self.begin(NEVER)
        process = self.start("sh", "-c", LEAVES, "sh", str(self.first))
        self.assertEqual(self.line(process), "ready")
        self.tell(f"+{process.pid}")
        self.assertEqual(self.ended(), "flodl-tw: the agent was gone, and 1 session that it left has been ended\n")
        # It could still write what it died of.
        self.assertEqual(process.wait(WAIT), 7)
        self.assertEqual(self.left(), [])

    def test_without_folders_it_does_its_work(self) -> None:
        self.prefix = ""
        self.begin(NEVER)
        process = self.start(*SLEEP)
        self.tell(f"+{process.pid}")
        self.ended()
        self.assertEqual(process.wait(WAIT), -signal.SIGTERM)
        self.assertEqual(self.left(), [self.first.name, self.second.name])

    def test_what_ends_an_agent_does_not_end_it(self) -> None:
        process = self.start(*SLEEP)
        self.tell(f"+{process.pid}")
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
        for number in numbers:
            until(lambda number=number: self.ignores(number), f"that {number.name} is ignored")  # type: ignore[misc]
            self.guardian.send_signal(number)
        self.assertIsNone(self.guardian.poll())
        self.assertEqual(self.ended(), "flodl-tw: the agent was gone, and 1 session that it left has been ended\n")
        self.assertEqual(process.wait(WAIT), -signal.SIGTERM)


# Leaves an error file, and says so; goes on then.
LEAVES_ERROR = """
import os, time
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    file.write("{}")
print("left", flush=True)
while True:
    time.sleep(1)
"""


class TestAgent(AgentTestCase):
    """A real agent that is killed."""

    def test_its_folder_of_error_files_is_gone_after_its_ranks(self) -> None:
        controller = self.start("--target-ranks", "2", "--after-run", "hold")
        base = self.folder()
        agent = self.join(
            controller.port, "gpu-a", "--nproc", "2", program=(*PYTHON, LEAVES_ERROR), environ={"TMPDIR": str(base)}
        )
        until(lambda: agent.out.count(b"left\n") == 2, "two error files", PATIENCE)
        (folder,) = base.iterdir()
        self.assertEqual(sorted(path.name for path in folder.iterdir()), ["rank.000.json", "rank.001.json"])
        children = agent.children()
        self.killed_at_the_end(*children)
        agent.process.kill()
        agent.process.wait()
        self.all_gone(children)
        self.assertEqual(list(base.iterdir()), [])
