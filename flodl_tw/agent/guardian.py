"""A process of its own that ends the ranks of an agent which can't: one that was killed with them running.

The agent holds its standard input, a pipe, and writes a line for each session:
``+ID`` before the session's first program runs, ``.ID`` when that program has
exited, ``-ID`` when no process of the session is left.  When the pipe ends,
whatever is recorded gets SIGTERM, and after the grace SIGKILL.

usage: guardian.py GRACE_SECONDS

It runs without the package around it, on the standard library alone, so that
it is small and starts at once.  The agent imports ``Sessions`` from here.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection

POLL_SECS = 0.05
"""How often a session that is ending is looked at."""
PATIENCE_SECS = 60.0
"""After SIGKILL: a process that even that does not end waits in the kernel, and nobody can help."""


class Sessions:
    """Sessions by id, with whether the process that leads each is known to have been reaped.

    Nothing but the processes of a recorded session is ever signalled.
    """

    def __init__(self) -> None:
        self._reaped: dict[int, bool] = {}

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

    def processes(self) -> dict[int, list[int]]:
        """The processes of each session that has any, as /proc shows them; those that wait to be reaped are none."""
        found: dict[int, list[int]] = {}
        taken = set()
        for name in os.listdir("/proc"):
            if not name.isdecimal():
                continue
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # After the command, which may hold anything: state, parent, group, session.
                    state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
            except OSError:
                continue
            number = int(session)
            if number not in self._reaped:
                continue
            if self._reaped[number] and int(name) == number:
                # The system gave the id to a new process, which it does only once the old session is gone.
                taken.add(number)
            elif state not in (b"Z", b"X"):
                found.setdefault(number, []).append(int(name))
        for number in taken:
            found.pop(number, None)
            self.forget(number)
        return found

    def signal(self, number: int, only: Collection[int] | None = None) -> int:
        """Send a signal to every process of the sessions (of ``only``, where given); gives how many there were."""
        count = 0
        for session, pids in self.processes().items():
            if only is not None and session not in only:
                continue
            for pid in pids:
                count += 1
                try:
                    os.kill(pid, number)
                except OSError:
                    continue
        return count


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


def end(sessions: Sessions, grace: float) -> None:
    """SIGTERM, and SIGKILL for what is there after ``grace`` seconds; returns once nothing is left."""
    deadline = time.monotonic() + grace
    sessions.signal(signal.SIGTERM)
    # One that was stopped acts on it once it goes on.
    sessions.signal(signal.SIGCONT)
    while sessions.processes() and (now := time.monotonic()) < deadline + PATIENCE_SECS:
        if now >= deadline:
            sessions.signal(signal.SIGKILL)
        time.sleep(POLL_SECS)


def main() -> None:
    """Guard until the agent's end."""
    # What ends a whole group or service must not end the one that cleans up after it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    sessions = Sessions()
    follow(0, sessions)
    left = len(sessions.processes())
    if not left:
        return
    end(sessions, float(sys.argv[1]))
    # Only now, and without waiting: nobody may be reading it.
    try:
        os.set_blocking(2, False)
        what = "1 session that it left has been ended" if left == 1 else f"{left} sessions that it left have been ended"
        os.write(2, f"flodl-tw: the agent was gone, and {what}\n".encode())
    except OSError:
        pass


if __name__ == "__main__":
    main()
