"""What a real agent does with its ranks: signals, the end of everything that was started, and their output."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any

from flodl_tw.agent.process import WITNESS_SECS
from flodl_tw.cli.terminal import SAME_SECS
from flodl_tw.core.messages import RankExited
from tests.loopback.agents import (
    PATIENCE,
    PYTHON,
    SALT,
    SH,
    AgentTestCase,
    Command,
    Launched,
    Launcher,
    children_of,
    in_sessions,
    is_stopped,
)
from tests.loopback.process import alive, shared, until

# Notes every signal in a file of its own, and goes on: with SIGTERM until the file "release" is there, or for good with
# "deaf".  Has a child in its session that does the same; so does a relay.  usage: FOLDER [deaf]
NOTER = """
import os, signal, sys, time
folder, deaf = sys.argv[1], "deaf" in sys.argv
me = os.environ.get("FLODL_INTERNAL_LOCAL_RANK", "relay")
ending = False
def note(number, frame):
    global ending
    open(f"{folder}/{signal.Signals(number).name}.{me}", "w").close()
    ending |= number == signal.SIGTERM and not deaf
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
    signal.signal(number, note)
child = os.fork()
if not child:
    me += ".child"
with open(f"{folder}/part.{me}", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{folder}/part.{me}", f"{folder}/pid.{me}")
while not (ending and os.path.exists(folder + "/release")):
    time.sleep(0.02)
"""
# Counts SIGUSR1 in a file.  usage: FOLDER
COUNTS = """
import os, signal, sys, time
me = sys.argv[1] + "/" + os.environ["FLODL_INTERNAL_LOCAL_RANK"]
def note(number, frame):
    with open(me, "a") as file:
        file.write("1")
signal.signal(signal.SIGUSR1, note)
print("ready", flush=True)
while not os.path.exists(sys.argv[1] + "/release"):
    time.sleep(0.02)
"""
# Stops itself, and ends with 7 at SIGTERM.  usage: FOLDER
STOPS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
with open(sys.argv[1] + "/part", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + "/part", sys.argv[1] + "/pid")
os.kill(os.getpid(), signal.SIGSTOP)
while True:
    time.sleep(0.05)
"""
RELAY = {"host": "x", "controller_host": "192.0.2.1", "controller_port": 1, "ranks": [0], "salt_hex": SALT.hex()}


class RunningCase(AgentTestCase):
    """An agent whose ranks note signals."""

    its_launcher: Launcher
    """That of the agent that was begun last."""

    def begin(
        self, *words: str, ranks: int = 2, deaf: bool = False, relay: Any = None, **how: Any
    ) -> tuple[Path, Command, Launched]:
        """An agent with ranks that run, each with a child; their pids are in ``pid.N`` and ``pid.N.child``."""
        folder = self.folder()
        launcher = self.its_launcher = self.launcher()
        program = (*PYTHON, NOTER, str(folder), *(["deaf"] if deaf else []))
        agent = self.join(launcher.port, "gpu-a", "--nproc", str(ranks), *words, program=program, **how)
        link = launcher.host()
        link.run(ranks, relay)
        self.killed_at_the_end(*self.pids(folder, ranks))
        if relay is not None:
            self.killed_at_the_end(*self.pids_of(folder, "relay"))
        return folder, agent, link

    def pids(self, folder: Path, ranks: int = 2) -> list[int]:
        """The pids of all ranks and their children."""
        return [pid for rank in range(ranks) for pid in self.pids_of(folder, str(rank))]

    def pids_of(self, folder: Path, name: str) -> list[int]:
        """The pids of a rank, or of the relay, and of its child."""
        return [int(self.file(folder / f"pid.{name}{child}")) for child in ("", ".child")]

    def another_guardian(self, agent: Command, guardian: int) -> int:
        """Kill this guardian; gives the next."""
        os.kill(guardian, signal.SIGKILL)
        found = until(lambda: {agent.guardian()} - {guardian}, "another guardian", PATIENCE).pop()
        self.killed_at_the_end(found)
        return found

    def noted(self, folder: Path, name: str) -> list[str]:
        """Who has noted a signal, once all that shall have."""
        return sorted(path.name.partition(".")[2] for path in folder.glob(f"{name}.*"))


class Signals(RunningCase):
    """What the agent does with a signal."""

    def test_every_signal_reaches_a_rank_itself_and_sigterm_its_helpers_once_it_has_gone(self) -> None:
        folder, agent, link = self.begin("--stop-grace", "60")
        pids = self.pids(folder)
        for name in ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
            agent.send_signal(signal.Signals[name])
            until(lambda name=name: self.noted(folder, name) == ["0", "1"], name)
        agent.send_signal(signal.SIGTERM)
        until(lambda: self.noted(folder, "SIGTERM") == ["0", "1"], "SIGTERM")
        time.sleep(0.3)
        self.assertEqual(self.noted(folder, "SIGTERM"), ["0", "1"])
        # What they note of the others is from before, so nothing was late.
        self.assertEqual(self.noted(folder, "SIGHUP"), ["0", "1"])
        self.assertEqual(self.noted(folder, "SIGINT"), [])
        # They have the grace, and take what they need of it.
        self.assertTrue(all(map(alive, pids)))
        (folder / "release").touch()
        # Told to end, they have not done their part of the world: their exits with 0 are no clean ones.
        self.assertEqual(link.rest(), [])
        self.assertEqual(agent.ended(), 143, agent.err)
        self.assertEqual(self.noted(folder, "SIGTERM"), ["0", "0.child", "1", "1.child"])
        self.all_gone(pids, 0)

    def test_signals_that_are_passed_on_spare_the_relay(self) -> None:
        folder, agent, link = self.begin("--stop-grace", "600", ranks=1, relay=RELAY)
        for name in ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
            agent.send_signal(signal.Signals[name])
            until(lambda name=name: self.noted(folder, name) == ["0"], name)
        agent.send_signal(signal.SIGTERM)
        until(lambda: self.noted(folder, "SIGTERM") == ["0", "relay"], "SIGTERM")
        # All of those have lower numbers, and would have been noted before it.
        for name in ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
            self.assertEqual(self.noted(folder, name), ["0"])
        (folder / "release").touch()
        self.assertEqual(agent.ended(), 143, agent.err)
        self.assertEqual(link.rest(), [])

    def test_a_rank_that_has_stopped_goes_by_its_own_handler_of_sigterm(self) -> None:
        launcher = self.launcher()
        folder = self.folder()
        agent = self.join(launcher.port, "gpu-a", "--stop-grace", "600", program=(*PYTHON, STOPS, str(folder)))
        link = launcher.host()
        link.run()
        pid = int(self.file(folder / "pid"))
        self.killed_at_the_end(pid)
        until(lambda: is_stopped(pid), "that it has stopped")
        agent.send_signal(signal.SIGTERM)
        # By SIGKILL it would be -9, and ten minutes later.
        self.assertEqual(link.rest(), [RankExited(0, 7)])
        self.assertEqual(agent.ended(), 143, agent.err)

    def test_what_ignores_sigterm_is_killed_after_the_grace_and_by_a_second_signal_at_once(self) -> None:
        folder, agent, link = self.begin("--stop-grace", "1.5", deaf=True)
        other, hurried, its_link = self.begin("--stop-grace", "600", deaf=True)
        begin = time.monotonic()
        for each in (agent, hurried):
            each.send_signal(signal.SIGTERM)
            each.said("SIGKILL in ")
        until(lambda: len(self.noted(other, "SIGTERM")) == 2, "SIGTERM")
        hurried.send_signal(signal.SIGINT)
        for its in (its_link, link):
            self.assertEqual(
                sorted(its.rest(), key=str), [RankExited(0, -signal.SIGKILL), RankExited(1, -signal.SIGKILL)]
            )
        self.assertEqual([agent.ended(), hurried.ended()], [143, 143])
        self.assertGreaterEqual(time.monotonic() - begin, 1.5)
        self.all_gone([*self.pids(folder), *self.pids(other)], 0)

    def test_loses_no_checkpoint_when_an_abort_is_followed_by_the_first_sigterm(self) -> None:
        # As Slurm's KillWait does it.
        folder, agent, link = self.begin("--stop-grace", "600")
        link.abort("over")
        until(lambda: self.noted(folder, "SIGTERM") == ["0", "1"], "SIGTERM")
        agent.send_signal(signal.SIGTERM)
        agent.said("SIGTERM came, too: the grace goes on")
        time.sleep(0.3)
        self.assertTrue(all(map(alive, self.pids(folder))))
        (folder / "release").touch()
        self.assertEqual(agent.ended(), 1, agent.err)
        self.assertEqual(link.rest(), [])

    def test_sigint_is_sigint_to_the_ranks_a_second_one_sigterm_and_a_third_the_end(self) -> None:
        folder, agent, link = self.begin("--stop-grace", "600", ranks=1, deaf=True)
        for name in ("SIGINT", "SIGTERM"):
            agent.send_signal(signal.SIGINT)
            until(lambda name=name: self.noted(folder, name) == ["0"], name)
            self.assertTrue(all(map(alive, self.pids(folder, 1))))
            # Two that come together are one.
            time.sleep(2 * SAME_SECS)
        agent.send_signal(signal.SIGINT)
        self.assertEqual(agent.ended(), 130, agent.err)
        self.assertEqual(link.rest(), [RankExited(0, -signal.SIGKILL)])

    def test_usr1_reaches_each_rank_once_though_it_is_sent_to_every_process_of_the_job(self) -> None:
        # As Slurm's --signal=USR1 is.
        folder = self.folder()
        launcher = self.launcher()
        agent = self.join(launcher.port, "gpu-a", "--nproc", "2", program=(*PYTHON, COUNTS, str(folder)))
        launcher.host().run(2)
        until(lambda: agent.out.count(b"ready") == 2, "two ranks", PATIENCE)
        job = [agent.pid, *agent.children()]
        self.assertEqual(len(job), 4)
        for rounds, order in enumerate((job, job[::-1]), 1):
            for pid in order:
                os.kill(pid, signal.SIGUSR1)
            time.sleep(3 * WITNESS_SECS)
            self.assertEqual([self.file(folder / name) for name in "01"], ["1" * rounds] * 2)
        # Sent to the agent alone it is passed on.
        agent.send_signal(signal.SIGUSR1)
        until(lambda: [self.file(folder / name) for name in "01"] == ["111"] * 2, "the third")
        (folder / "release").touch()
        self.assertEqual(agent.ended(), 0, agent.err)

    def test_a_signal_that_is_ignored_from_the_start_stays_ignored(self) -> None:
        # As under nohup, and for what a script starts in the background.
        ignoring = ("sh", "-c", 'trap "" INT HUP; exec "$@"', "sh")
        folder, agent, link = self.begin("--stop-grace", "60", ranks=1, wrapped=ignoring)
        for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
            agent.send_signal(signal.Signals[name])
        until(lambda: self.noted(folder, "SIGUSR1") == ["0"], "SIGUSR1")
        self.assertEqual(agent.lines("stopped by"), [])
        self.assertEqual((self.noted(folder, "SIGHUP"), self.noted(folder, "SIGINT")), ([], []))
        (folder / "release").touch()
        agent.send_signal(signal.SIGTERM)
        self.assertEqual(agent.ended(), 143, agent.err)
        # Told to end, it has not done its part of the world: that is no clean exit.
        self.assertEqual(link.rest(), [])

    def test_a_grandchild_that_a_clean_rank_leaves_behind_is_ended_and_said(self) -> None:
        launcher = self.launcher()
        folder = self.folder()
        text = 'sleep 600 & echo $! >"$1/part"; mv "$1/part" "$1/left"; exit 0'
        agent = self.join(launcher.port, "gpu-a", program=(*SH, text, "sh", str(folder)))
        link = launcher.host()
        link.run()
        self.assertEqual(link.rest(), [RankExited(0, 0)])
        self.assertEqual(agent.ended(), 0, agent.err)
        self.assertEqual(len(agent.lines("left 1 process")), 1, agent.err)
        self.assertFalse(alive(int(self.file(folder / "left"))))


class Killed(RunningCase):
    """``kill -9`` of the agent: nothing that it started outlives it, and nothing else is touched."""

    def bystander(self) -> subprocess.Popen[bytes]:
        """A process that the agent did not start."""
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def test_ranks_get_sigterm_from_the_guardian_and_those_that_ignore_it_are_gone_after_the_grace(self) -> None:
        folder, agent, link = self.begin("--stop-grace", "1", deaf=True)
        second, its_agent, _ = self.begin("--stop-grace", "600")
        bystander = self.bystander()
        pids, its_pids = self.pids(folder), self.pids(second)

        # The second one's guardian is killed before: another takes over.
        guardians = [agent.guardian(), its_agent.guardian()]
        self.killed_at_the_end(*guardians)
        guardians.append(self.another_guardian(its_agent, guardians[1]))
        # It has been told all once the agent does something else.
        its_agent.send_signal(signal.SIGUSR1)
        until(lambda: self.noted(second, "SIGUSR1") == ["0", "1"], "SIGUSR1")

        begin = time.monotonic()
        for each in (agent, its_agent):
            each.process.kill()
            each.process.wait()
        until(lambda: len(self.noted(second, "SIGTERM")) == 2, "SIGTERM")
        self.all_gone(pids)
        self.assertGreaterEqual(time.monotonic() - begin, 1.0)
        self.assertTrue(all(map(alive, its_pids)))
        (second / "release").touch()
        self.all_gone([*its_pids, *guardians])
        self.assertIsNone(bystander.poll())
        for each in (agent, its_agent):
            self.assertEqual(
                len(each.lines("the agent was gone, and 2 sessions that it left have been ended")), 1, each.err
            )
        with self.assertRaises((EOFError, ConnectionResetError)):
            link.next()

    def test_an_agent_that_is_killed_while_it_stops_leaves_nothing_either(self) -> None:
        folder, agent, _ = self.begin("--stop-grace", "1", deaf=True)
        self.killed_at_the_end(agent.guardian())
        agent.send_signal(signal.SIGTERM)
        agent.said("SIGKILL in 1 s")
        agent.process.kill()
        self.all_gone(self.pids(folder))


class Next(RunningCase):
    """The agent after one that was killed."""

    def test_it_joins_once_the_old_ranks_are_gone_and_another_controllers_does_not_wait(self) -> None:
        folder, agent, _ = self.begin("--stop-grace", "600")
        pids = self.pids(folder)
        self.killed_at_the_end(agent.guardian())
        agent.process.kill()
        agent.process.wait()
        port = self.its_launcher.port
        following = self.join(port, "gpu-a")
        elsewhere = self.launcher()
        other = self.join(elsewhere.port, "gpu-a")
        elsewhere.host().reject("window-closed: late")
        self.assertEqual(other.ended(), 1, other.err)
        self.assertEqual(other.lines("have their grace"), [])
        following.said("still have their grace; joining once they are gone")
        self.assertFalse(self.its_launcher.dialed())
        (folder / "release").touch()
        link = self.its_launcher.host()
        self.assertFalse(any(map(alive, pids)))
        link.reject("window-closed: late")
        self.assertEqual(following.ended(), 1, following.err)


# Starts the command that follows, with another idea of a guardian's short life.  usage: SECONDS COMMAND...
SHORT_LIVES = """
import runpy, sys
from flodl_tw.agent import spawn as processes
processes.SHORT_LIFE_SECS = float(sys.argv[1])
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Unguarded(RunningCase):
    """A guardian that is killed again and again."""

    @staticmethod
    def short_life(seconds: float) -> tuple[str, ...]:
        """The start of a command for which the life of a guardian is short up to so long, on the slowest machine."""
        return (sys.executable, "-c", SHORT_LIVES, str(seconds))

    def test_after_five_short_lives_it_is_given_up_with_one_line_and_the_ranks_go_on(self) -> None:
        folder, agent, link = self.begin("--persist", wrapped=self.short_life(3600))
        pids = self.pids(folder)
        guardian = agent.guardian()
        for _ in range(4):
            guardian = self.another_guardian(agent, guardian)
        self.assertEqual(agent.lines("guardian"), [])
        os.kill(guardian, signal.SIGKILL)
        given_up = "flodl-tw: the guardian does not stay: nothing will end the ranks, should this agent be killed"
        self.assertEqual(agent.said("guardian"), given_up)
        # All else goes on as before.
        agent.send_signal(signal.SIGUSR1)
        until(lambda: self.noted(folder, "SIGUSR1") == ["0", "1"], "SIGUSR1")
        self.assertTrue(all(map(alive, pids)))
        self.assertEqual(set(agent.children()), {pids[0], pids[2]})
        (folder / "release").touch()
        link.abort("enough")
        self.assertEqual(link.rest(), [])
        self.all_gone(pids)

        # The next world has none either.
        for path in folder.glob("pid.*"):
            path.unlink()
        link = self.its_launcher.host()
        link.run(2)
        pids = self.pids(folder)
        self.killed_at_the_end(*pids)
        self.assertEqual(set(agent.children()), {pids[0], pids[2]})
        agent.send_signal(signal.SIGTERM)
        self.assertEqual(agent.ended(), 143, agent.err)
        self.assertEqual(link.rest(), [])
        self.assertEqual(agent.lines("guardian"), [given_up])
        self.all_gone(pids, 0)

    def test_one_that_has_lived_longer_is_always_followed_by_another(self) -> None:
        folder, agent, _ = self.begin("--stop-grace", "600", wrapped=self.short_life(0))
        guardian = agent.guardian()
        for _ in range(7):
            guardian = self.another_guardian(agent, guardian)
        self.assertEqual(agent.lines("guardian"), [])
        (folder / "release").touch()
        agent.send_signal(signal.SIGTERM)
        self.assertEqual(agent.ended(), 143, agent.err)


class Many(AgentTestCase):
    """Many ranks."""

    def test_files_of_many_ranks_fit_though_the_soft_limit_is_small_and_ranks_keep_that_limit(self) -> None:
        # 256 ranks with --log-dir need more than the usual 1024; 24 stand for them.
        launcher = self.launcher()
        limited = ("sh", "-c", 'ulimit -Sn 80; exec "$@"', "sh")
        words = ("--nproc", "24", "--log-dir", "logs", "--stop-grace", "5")
        agent = self.join(launcher.port, "gpu-a", *words, program=(*SH, "ulimit -Sn"), wrapped=limited)
        link = launcher.host()
        link.run(24)
        self.assertEqual(set(link.rest()), {RankExited(rank, 0) for rank in range(24)})
        self.assertEqual(agent.ended(), 0)
        self.assertEqual({line.partition(b"] ")[2] for line in agent.out.splitlines()}, {b"80"})

    def test_500_spawns_leave_no_zombie_and_no_process(self) -> None:
        folder = self.folder()
        text = '[ "$RANK" = 250 ] || exit 0; while ! [ -e "$1/release" ]; do sleep 0.02; done'
        worlds = [self.command("run", "-n", "251", "--", *SH, text, "sh", str(folder)) for _ in range(2)]
        for world in worlds:
            until(lambda world=world: len(world.lines("exited with code 0")) == 250, "250 exits", PATIENCE)
            self.assertEqual(children_of(world.pid, zombies=True), [])
            self.assertEqual(len(world.children()), 2)
        sessions = [child for world in worlds for child in world.children()]
        (folder / "release").touch()
        for world in worlds:
            self.assertEqual(world.ended(), 0)
            self.assertEqual(len(world.lines("exited with code 0")), 251)
        until(lambda: not in_sessions(sessions), "the end of the guardians")


# Writes for ever, and tells how much it got rid of.  usage: FOLDER
WRITER = """
import os, sys
chunk = (b"x" * 1023 + b"\\n") * 64
count = 0
while True:
    os.write(1, chunk)
    count += len(chunk)
    with open(sys.argv[1] + "/part", "w") as file:
        file.write(str(count))
    os.rename(sys.argv[1] + "/part", sys.argv[1] + "/count")
"""
MAX_FILE = 1 << 20
# Becomes a command that can write no file beyond a size.  usage: BYTES COMMAND...
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execv(sys.argv[2], sys.argv[2:])
"""
LINES = "import os\nfor n in range(1088): os.write(1, b'%07d' % n + b'x' * 1016 + b'\\n')"


class Readers:
    """A command whose output nobody reads, and one whose reader takes its time; begun at once, since both do."""

    def __init__(self) -> None:
        self._made = tempfile.TemporaryDirectory(prefix="flodl-tw-")
        self.count = Path(self._made.name) / "count"
        self.unread, write = os.pipe()
        words = ("run", "-n", "1", "--stop-grace", "2", "--")
        self.blocked = Command(*words, *PYTHON, WRITER, self._made.name, stdout=write)
        os.close(write)
        self._slow, write = os.pipe()
        self.unhurried = Command(*words, *PYTHON, LINES, stdout=write)
        os.close(write)
        self.taken = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        # Something is taken every second, so nobody can say that this reader has stopped.
        for _ in range(10):
            self.taken += os.read(self._slow, 65536)
            time.sleep(1)
        while data := os.read(self._slow, 65536):
            self.taken += data

    def all_taken(self) -> list[bytes]:
        """The lines that the slow reader got."""
        self._thread.join(PATIENCE)
        return self.taken.splitlines()

    def close(self) -> None:
        """Leave nothing of it behind."""
        for command in (self.blocked, self.unhurried):
            command.close()
        self._thread.join()
        for descriptor in (self.unread, self._slow):
            os.close(descriptor)
        self._made.cleanup()


class Output(AgentTestCase):
    """What the ranks print, as the agent shows it."""

    HOST = {"FLODL_HOST_NAME": "box"}

    def setUp(self) -> None:
        self.readers = shared(self, Readers)

    def test_every_line_names_its_rank_and_its_bytes_are_unharmed(self) -> None:
        folder = self.folder()
        text = (
            "import os, sys; rank = os.environ['RANK'].encode()\n"
            "sys.stdout.buffer.write(b'out %b \\xff\\xc3\\x28\\0\\x1b[1m\\n\\n' % rank)\n"
            "sys.stderr.buffer.write(b'err %b \\xfe\\r\\n  10%%\\r  20%%\\r\\rlast' % rank)\n"
        )
        words = ("run", "-n", "3", "--hosts", "2", "--log-dir", str(folder / "logs"))
        command = self.command(*words, "--", *PYTHON, text, environ=self.HOST)
        self.assertEqual(command.ended(), 0)
        err = (command.folder / "err").read_bytes().split(b"\n")
        for rank, host in ((0, "box-0"), (1, "box-0"), (2, "box-1")):
            prefix = f"[{host}:r{rank}] ".encode()
            number = b"%d" % rank
            with self.subTest(rank=rank):
                self.assertEqual(
                    [line for line in command.out.split(b"\n") if line.startswith(prefix)],
                    [prefix + b"out " + number + b" \xff\xc3\x28\0\x1b[1m", prefix],
                )
                self.assertEqual(
                    [line for line in err if line.startswith(prefix)],
                    [prefix + b"err " + number + b" \xfe\r", prefix + b"  10%", prefix + b"  20%", prefix + b"last"],
                )
                logs = [(folder / "logs" / f"rank.{rank:03d}.{ending}").read_bytes() for ending in ("out", "err")]
                self.assertEqual(logs[0], b"out " + number + b" \xff\xc3\x28\0\x1b[1m\n\n")
                self.assertEqual(logs[1], b"err " + number + b" \xfe\r\n  10%\r  20%\r\rlast")
        self.assertEqual(len(command.out.split(b"\n")), 3 * 2 + 1)

    def test_an_unfinished_line_is_shown_while_the_rank_goes_on(self) -> None:
        folder = self.folder()
        text = 'printf loading; while ! [ -e "$1/release" ]; do sleep 0.02; done; printf " done\\nnext\\n"'
        command = self.command("run", "-n", "1", "--", *SH, text, "sh", str(folder), environ=self.HOST)
        command.said("the world has formed")
        command.printed(b"[box:r0] loading\n")
        self.assertIsNone(command.process.poll())
        (folder / "release").touch()
        self.assertEqual(command.ended(), 0)
        self.assertEqual(command.out, b"[box:r0] loading\n[box:r0]  done\n[box:r0] next\n")

    def test_8_mib_from_one_rank_arrive_whole_beside_what_another_says(self) -> None:
        folder = self.folder()
        text = (
            "import os, sys\n"
            "if os.environ['RANK'] == '1': sys.exit(print('short'))\n"
            "sys.stdout.buffer.write(b''.join(b'%08d' % n + b'x' * 1015 + b'\\n' for n in range(8192)))"
        )
        words = ("run", "-n", "2", "--log-dir", str(folder))
        command = self.command(*words, "--", *PYTHON, text, environ=self.HOST)
        self.assertEqual(command.ended(), 0)
        whole = [b"%08d" % number + b"x" * 1015 for number in range(8192)]
        lines = command.out.splitlines()
        self.assertEqual(lines.count(b"[box:r1] short"), 1)
        self.assertTrue(
            [line for line in lines if line != b"[box:r1] short"] == [b"[box:r0] " + line for line in whole]
        )
        self.assertTrue((folder / "rank.000.out").read_bytes() == b"".join(line + b"\n" for line in whole))

    def test_a_log_file_that_cannot_be_written_is_said_once_and_the_ranks_go_on(self) -> None:
        folder = self.folder().resolve()
        full = folder / "rank.000.out"
        with full.open("wb") as file:
            file.truncate(MAX_FILE)
        text = 'echo one; while ! [ -e "$1/release" ]; do sleep 0.02; done; echo two; echo three; echo four >&2'
        limited = (*PYTHON, LIMITED, str(MAX_FILE))
        words = ("run", "-n", "2", "--log-dir", str(folder), "--", *SH, text, "sh", str(folder))
        command = self.command(*words, environ=self.HOST, wrapped=limited)
        reason = os.strerror(errno.EFBIG)
        line = f"flodl-tw: --log-dir: {full} cannot be written ({reason}); going on without it"
        self.assertEqual(command.said("--log-dir"), line)
        command.printed(b"[box:r1] one\n")
        (folder / "release").touch()
        self.assertEqual(command.ended(), 0, command.err)
        self.assertEqual(command.lines("--log-dir"), [line])
        self.assertEqual(
            sorted(command.out.splitlines()),
            [b"[box:r%d] %s" % (rank, word) for rank in (0, 1) for word in (b"one", b"three", b"two")],
        )
        self.assertEqual(full.stat().st_size, MAX_FILE)
        self.assertEqual((folder / "rank.001.out").read_bytes(), b"one\ntwo\nthree\n")
        self.assertEqual([(folder / f"rank.00{rank}.err").read_bytes() for rank in (0, 1)], [b"four\n"] * 2)

    def test_an_output_that_is_closed_does_not_stop_the_ranks(self) -> None:
        read, write = os.pipe()
        os.close(read)
        text = "for n in 1 2 3 4 5 6 7 8; do echo line $n; sleep 0.02; done; exit 4"
        command = self.command("run", "-n", "1", "--", *SH, text, stdout=write, environ=self.HOST)
        os.close(write)
        self.assertEqual(command.ended(), 4, command.err)

    def test_an_output_that_nobody_reads_bounds_memory_and_holds_no_signal_up(self) -> None:
        command, count = self.readers.blocked, self.readers.count
        self.file(count)
        until(lambda: self.unread_bytes() > 32768, "a pipe that is full")
        until(lambda: time.time() - count.stat().st_mtime > 0.5, "the rank to be held up")
        self.assertLess(int(count.read_text()), 4 << 20)
        self.assertLess(command.resident_mib(), 100)
        command.send_signal(signal.SIGTERM)
        command.said("ending 1 process with SIGTERM")
        self.assertEqual(command.ended(), 143, command.err)

    def unread_bytes(self) -> int:
        """How much is in the pipe that nobody reads."""
        count: int = struct.unpack("i", fcntl.ioctl(self.readers.unread, termios.FIONREAD, bytes(4)))[0]
        return count

    def test_an_output_that_is_read_slowly_arrives_whole_after_the_last_rank(self) -> None:
        lines = self.readers.all_taken()
        self.assertEqual(self.readers.unhurried.ended(), 0)
        self.assertEqual([line[-1023:] for line in lines[-1:]], [b"0001087" + b"x" * 1016])
        self.assertEqual(len(lines), 1088)
