"""A process of its own that ends the ranks of an agent which can't: one that was killed with them running.

The agent holds its standard input, a pipe, and writes a line for each session:
``+ID`` before the session's first program runs, ``.ID`` when that program has
exited, ``-ID`` when no process of the session is left.  When the pipe ends,
what leads a recorded session gets SIGTERM, the rest of the session once that
has gone, and after the grace all of it SIGKILL; then the agent's folders of
error files go, whose paths begin with PREFIX.

The signals of ``WITNESSED`` it names on its standard output, a byte each: who
sends them to every process of a job (Slurm does) has reached the ranks, too.

usage: guardian.py GRACE_SECONDS [PREFIX [AGENT_PID CONTROLLER]]

The last two tell an agent that comes later whose ranks it still ends.

It runs without the package around it, on the standard library alone, so that
it is small and starts at once.  The agent imports ``Sessions`` from here.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Collection

WITNESSED = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
POLL_SECS = 0.05
"""How often a session that is ending is looked at."""
FOLDERS = "flodl-tw-errors-"
"""How the name of every agent's folder begins; what tells one agent's from another's comes after it."""
UNSEEN_LOOKS = 5
"""How often a session may be looked at without a process of it being seen, though something of it is there."""
PATIENCE_SECS = 60.0
"""After SIGKILL: a process that even that does not end waits in the kernel, and nobody can help."""


class Sessions:
    """Sessions by id, with whether the process that leads each is known to have been reaped.

    Nothing but the processes of a recorded session is ever signalled.
    """

    def __init__(self) -> None:
        self._reaped: dict[int, bool] = {}
        self._unseen: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._reaped)

    def known(self) -> list[tuple[int, bool]]:
        """The sessions that are recorded, each with whether its leader was reaped."""
        return list(self._reaped.items())

    def record(self, session: int) -> None:
        """A process was started that leads this session."""
        self._reaped[session] = False

    def leader_gone(self, session: int) -> None:
        """Its leader has been reaped, so a process that has this id now is another."""
        if session in self._reaped:
            self._reaped[session] = True

    def forget(self, session: int) -> None:
        """No process of it is left."""
        self._reaped.pop(session, None)
        self._unseen.pop(session, None)

    def processes(self) -> dict[int, list[int]]:
        """The processes of each session that has any; those that wait to be reaped are none."""
        return {session: list(found) for session, found in self._look().items()}

    def left(self, only: Collection[int] | None = None) -> dict[int, list[int]]:
        """The same (of ``only``), for one who waits for their end and asks again until there is none.

        What forks and exits on and on is there, and /proc hardly ever shows it,
        so a session counts while there is anything of its group.  If that only
        waits to be reaped, it may do so for ever: after ``UNSEEN_LOOKS`` it gets
        SIGKILL, and counts no more.
        """
        seen = self.processes()
        found = {session: seen[session] for session in self._chosen(only) if session in seen}
        for session in self._chosen(only):
            if session in found:
                self._unseen.pop(session, None)
            elif self._has_group(session):
                looks = self._unseen[session] = self._unseen.get(session, 0) + 1
                if looks < UNSEEN_LOOKS:
                    found[session] = []
                else:
                    self._signal_group(session, signal.SIGKILL)
        return found

    def signal(self, number: int, only: Collection[int] | None = None) -> None:
        """Send a signal to every process of the sessions (of ``only``, where given)."""
        found = self._look()
        for session in self._chosen(only):
            groups = set(found.get(session, {}).values())
            if self._has_group(session):
                groups.add(session)
            for group in groups:
                # A whole group at once: what forks meanwhile can't slip through.
                self._signal_group(group, number)

    def signal_leaders(self, number: int) -> None:
        """Send a signal to the process that leads each session, where it is there, and to nothing that it started."""
        for session, found in self.processes().items():
            if session in found:
                try:
                    os.kill(session, number)
                except OSError:
                    continue

    def _chosen(self, only: Collection[int] | None) -> list[int]:
        return [session for session in self._reaped if only is None or session in only]

    def _signal_group(self, group: int, number: int) -> None:
        try:
            os.killpg(group, number)
        except OSError:
            return

    def _look(self) -> dict[int, dict[int, int]]:
        """What /proc shows of the sessions: the group of each process of theirs."""
        found: dict[int, dict[int, int]] = {}
        taken = set()
        # The newest first: they may be gone the soonest.
        for name in reversed(os.listdir("/proc")):
            if not name.isdecimal():
                continue
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # After the command, which may hold anything: state, parent, group, session.
                    state, _, group, session = file.read().rpartition(b")")[2].split()[:4]
            except OSError:
                continue
            number = int(session)
            if number not in self._reaped:
                continue
            if self._reaped[number] and int(name) == number:
                # The system gave the id to a new process, which it does only once the old session is gone.
                taken.add(number)
            elif state not in (b"Z", b"X"):
                found.setdefault(number, {})[int(name)] = int(group)
        for number in taken:
            found.pop(number, None)
            self.forget(number)
        return found

    def _has_group(self, session: int) -> bool:
        """Whether anything is there of the group that a session's leader began with, be it only to be reaped."""
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass
        if not self._reaped[session]:
            return True
        try:
            os.getsid(session)
        except OSError:
            return True
        # The id is another's by now.
        return False


def follow(descriptor: int, sessions: Sessions) -> None:
    """Take the agent's lines until the pipe ends."""
    orders = {b"+": sessions.record, b".": sessions.leader_gone, b"-": sessions.forget}
    rest = b""
    while data := os.read(descriptor, 65536):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            order = orders.get(line[:1])
            if order is not None and line[1:].isdigit():
                order(int(line[1:]))


def orphans(controller: str) -> list[int]:
    """The guardians of this user whose agent is gone, and had been dialing this controller: they end its ranks."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _is_orphan(name, controller)]


def _is_orphan(pid: str, controller: str) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")[:-1]
        if words[-1:] != [os.fsencode(controller)] or os.fsencode(os.path.basename(__file__)) not in words[-5]:
            return False
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid() and state not in (b"Z", b"X") and parent != words[-2]
    except (OSError, IndexError):
        return False


def end(sessions: Sessions, grace: float) -> None:
    """SIGTERM, and SIGKILL for what is there after ``grace`` seconds; returns once nothing is left."""
    deadline = time.monotonic() + grace
    sessions.signal_leaders(signal.SIGTERM)
    # One that was stopped acts on it once it goes on.
    sessions.signal(signal.SIGCONT)
    asked: set[int] = set()
    while (left := sessions.left()) and (now := time.monotonic()) < deadline + PATIENCE_SECS:
        if now >= deadline:
            sessions.signal(signal.SIGKILL)
        elif behind := {session for session, found in left.items() if session not in found} - asked:
            asked |= behind
            sessions.signal(signal.SIGTERM, behind)
            sessions.signal(signal.SIGCONT, behind)
        time.sleep(POLL_SECS)


def clear(prefix: str) -> None:
    """Remove the folders whose paths begin so, and the regular files in them.

    Anybody may make something of such a name in a temporary directory, and a
    rank may put anything into its folder: what is another user's, a link, or no
    regular file stays, and so does the folder that it is in.
    """
    base, start = os.path.split(prefix)
    if not start.startswith(FOLDERS) or start == FOLDERS:
        return
    try:
        names = os.listdir(base)
    except OSError:
        return
    for name in names:
        if name.startswith(start):
            try:
                _remove(os.path.join(base, name))
            except OSError:
                continue


def _remove(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return
        for name in os.listdir(folder):
            if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(path)


def _witness(number: int, frame: object) -> None:
    try:
        os.write(1, bytes((number,)))
    except OSError:
        return


def main() -> None:
    """Guard until the agent's end."""
    # What ends a whole group or service must not end the one that cleans up after it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    for number in WITNESSED:
        signal.signal(number, _witness)
    # The agent holds them back until here.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.setsid()
    sessions = Sessions()
    follow(0, sessions)
    left = len(sessions.processes())
    end(sessions, float(sys.argv[1]))
    if len(sys.argv) > 2 and not sessions.processes():
        # An agent that has ended in an orderly way has left none.
        clear(sys.argv[2])
    if left:
        _say_ended(left)


def _say_ended(left: int) -> None:
    """Only at the end, and without waiting: nobody may be reading it."""
    what = "1 session that it left has been ended" if left == 1 else f"{left} sessions that it left have been ended"
    try:
        os.set_blocking(2, False)
        os.write(2, f"flodl-tw: the agent was gone, and {what}\n".encode())
    except OSError:
        return


if __name__ == "__main__":
    main()
