"""What an agent costs, and how soon it is there: from the command to the hello, and from the world to its ranks.

Everything runs on the loopback, with real processes.  PROGRAM is a bare Python
that prints the time, so that a rank's first line says itself when it ran.
Beside each figure stands a floor of the same round, and torchrun where there
is one; compare the ratios and the differences, for the machine is noisy.

Bytecode is compiled first, as an installer does, into a folder that is gone
at the end.

usage: agent.py [--rounds N] [--agents N,N,...] [--torch-python PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shared import controller, cpu_secs, head, memory, row

from flodl_tw.core.fields import compact
from flodl_tw.core.messages import Accept, WorldFormed, encode_join
from flodl_tw.core.wire import JOIN_MAGIC, ZERO_KEY
from flodl_tw.testing import SimulatedClient, make_hello

PATIENCE = 60.0
SETTLE_SECS = 0.5
"""What an agent that has joined has to start its guardian, before the clock runs."""
LOCAL_RANKS = 8
SALT = bytes(range(16))
AGENT = Path(sys.executable).with_name("flodl-tw")
PYTHON = (sys.executable, "-S", "-E")
TELL_TIME = (*PYTHON, "-c", "import time; print(time.time(), flush=True)")
TELL_AND_STAY = (*PYTHON, "-c", "import time; print(time.time(), flush=True); time.sleep(300)")
BARE_SOCKET = """
import socket, sys
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sock.sendall(bytes.fromhex(sys.argv[2]))
sock.recv(1)
"""
BARE_TWISTED = """
import sys
from twisted.internet import reactor
from twisted.internet.protocol import ClientFactory, Protocol

class Floor(Protocol):
    def connectionMade(self):
        self.transport.write(bytes.fromhex(sys.argv[2]))

reactor.connectTCP("127.0.0.1", int(sys.argv[1]), ClientFactory.forProtocol(Floor))
reactor.run()
"""
TIME = re.compile(rb"\b[0-9]{10}\.[0-9]+")


@dataclass(frozen=True)
class Program:
    """A process of ours and the file that it prints to."""

    process: subprocess.Popen[bytes]
    output: Path

    def times(self) -> list[float]:
        """The times that its ranks have told."""
        return [float(text) for text in TIME.findall(self.output.read_bytes())]

    def memory(self) -> tuple[float, float]:
        """Resident and proportional memory now, in MiB."""
        return memory(self.process.pid)

    def end(self) -> None:
        """SIGTERM if it is still there, and SIGKILL if that is not enough."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


class Stage:
    """The programs of one measurement; all of them are gone when it ends."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self.programs: list[Program] = []

    def start(self, *words: str, env: dict[str, str] | None = None) -> Program:
        """Start a program whose output and errors go to a file."""
        output = self._folder / f"{len(self.programs)}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=self._folder, env=env
            )
        self.programs.append(Program(process, output))
        return self.programs[-1]

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        """Look until it has; the benchmark fails where that never comes."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            failed = any(program.process.poll() for program in self.programs)
            if failed or time.monotonic() > deadline:
                said = b"\n".join(program.output.read_bytes()[-500:] for program in self.programs)
                raise SystemExit(f"no {what} within {PATIENCE:g} s, or a failure:\n{said.decode(errors='replace')}")
            time.sleep(0.01)

    def last_time(self, count: int) -> float:
        """The latest of the times that ``count`` ranks tell."""
        self.wait_for(lambda: sum(len(program.times()) for program in self.programs) >= count, "line of every rank")
        return max(moment for program in self.programs for moment in program.times())


@contextlib.contextmanager
def stage() -> Iterator[Stage]:
    """A stage that is cleared at the end."""
    with tempfile.TemporaryDirectory() as folder:
        made = Stage(folder)
        try:
            yield made
        finally:
            for program in made.programs:
                program.end()


@contextlib.contextmanager
def door() -> Iterator[tuple[socket.socket, str]]:
    """A listening socket of the benchmark's own, and its port as text."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        yield listener, str(listener.getsockname()[1])


def join_words(port: str | int, *options: str, program: tuple[str, ...] = TELL_TIME) -> list[str]:
    """The command of an agent without GPUs."""
    return [str(AGENT), "join", f"127.0.0.1:{port}", *options, "--", *program]


# From the command to the first bytes


def first_bytes(
    words: Callable[[str], list[str]], wanted: int, env: dict[str, str] | None = None
) -> tuple[float, float, float]:
    """Seconds from the command until ``wanted`` bytes are here (0: until it connects); its memory then."""
    with door() as (listener, port), stage() as here:
        command = words(port)
        started = time.perf_counter()
        program = here.start(*command, env=env)
        with listener.accept()[0] as sock:
            sock.settimeout(PATIENCE)
            if wanted and sock.recv(wanted, socket.MSG_WAITALL) != JOIN_MAGIC[:wanted]:
                raise SystemExit(f"these are not the join channel's first bytes: {command}")
            took = time.perf_counter() - started
            resident, proportional = program.memory()
            # Nobody answers it, and it has no children: it need not end in an orderly way.
            program.process.kill()
        return took, resident, proportional


def to_hello() -> tuple[float, float, float]:
    """The agent itself."""
    return first_bytes(lambda port: join_words(port, "--nproc=1", program=("true",)), len(JOIN_MAGIC))


def to_floor(script: str) -> tuple[float, float, float]:
    """A script that sends the same four bytes, and nothing else."""
    return first_bytes(lambda port: [sys.executable, "-c", script, port, JOIN_MAGIC.hex()], len(JOIN_MAGIC))


# From the world to the ranks


def bare_ranks(count: int) -> float:
    """The floor: seconds until the last of ``count`` programs runs that are started at once, without an agent."""
    with stage() as here:
        started = time.time()
        for _ in range(count):
            here.start(*TELL_TIME)
        return here.last_time(count) - started


@contextlib.contextmanager
def joined_agents(count: int, ranks: int) -> Iterator[tuple[Stage, int]]:
    """``count`` agents of one rank each, in a window that closes at ``ranks``; and the port."""
    with controller(f"--target-ranks={ranks}", f"--min-rank-start={ranks}") as server, stage() as here:
        for index in range(count):
            here.start(*join_words(server.port, "--nproc=1", f"--host=agent-{index}"))
        joined = f"joined 127.0.0.1:{server.port}".encode()
        for program in tuple(here.programs):
            here.wait_for(lambda output=program.output: joined in output.read_bytes(), "Accept")
        time.sleep(SETTLE_SECS)
        yield here, server.port


def hello_to_ranks(count: int) -> float:
    """Seconds from the last hello, which is the benchmark's own, to the last agent's rank."""
    with joined_agents(count, count + 1) as (here, port), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        talk = SimulatedClient()
        hello = talk.hello(make_hello("last", gpus=(), libtorch="cpu"))
        started = time.time()
        sock.sendall(hello)
        while talk.envelope is None:
            data = sock.recv(1 << 16)
            if not data:
                raise SystemExit("the benchmark's own host was turned away")
            talk.feed(data)
        took = here.last_time(count) - started
        sock.sendall(talk.exited(talk.ranks[0]))
        return took


def start_to_ranks(count: int) -> float:
    """Seconds from the last of ``count`` agents' start to the last rank."""
    with joined_agents(count - 1, count) as (here, port):
        started = time.time()
        here.start(*join_words(port, "--nproc=1", "--host=last"))
        return here.last_time(count) - started


def formed_bytes(port: str) -> bytes:
    """A WorldFormed of one host, as our own controller writes it."""
    envelope = {
        "controller": {"host": "127.0.0.1", "port": int(port)},
        "world_size": LOCAL_RANKS,
        "num_workers": 1,
        "worker": {
            "host": "agent",
            "ranks": list(range(LOCAL_RANKS)),
            "local_devices": list(range(LOCAL_RANKS)),
            "nccl_socket_ifname": "",
            "path": "",
        },
        "salt": SALT.hex(),
        "flodl_tw": {"group_rank": 0, "group_world_size": 1, "run_id": "benchmark"},
    }
    return encode_join(SALT, 4, WorldFormed(compact(envelope).encode().hex()))


def guardian_of(agent: int) -> int:
    """The process of the agent's guardian."""
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if b"guardian.py" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise SystemExit("the agent has no guardian")


def formed_to_ranks() -> tuple[float, tuple[float, float], tuple[float, float]]:
    """Seconds from WorldFormed to the last of one agent's ranks; memory of agent and guardian while they run."""
    with door() as (listener, port), stage() as here:
        options = (f"--nproc={LOCAL_RANKS}", "--host=agent")
        agent = here.start(*join_words(port, *options, program=TELL_AND_STAY))
        with listener.accept()[0] as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(encode_join(ZERO_KEY, 4, Accept(tuple(range(LOCAL_RANKS)), SALT.hex(), 600)))
            here.wait_for(lambda: b"joined" in agent.output.read_bytes(), "Accept")
            time.sleep(SETTLE_SECS)
            formed = formed_bytes(port)
            started = time.time()
            sock.sendall(formed)
            took = here.last_time(LOCAL_RANKS) - started
            time.sleep(SETTLE_SECS)
            found = took, agent.memory(), memory(guardian_of(agent.process.pid))
            agent.end()
            return found


# The peer


class Torchrun:
    """torchrun's agents: each a process, with one rank each."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        # It has bytecode of its own.
        self._environ = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}

    def words(self, port: str, count: int, *, hosts_store: bool) -> list[str]:
        """One agent's command."""
        options = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=benchmark")
        conf = f"--rdzv-conf=is_host={int(hosts_store)}"
        return [*self._command, f"--nnodes={count}", "--nproc-per-node=1", *options, conf, "--no-python", *TELL_TIME]

    def to_connection(self) -> tuple[float, float, float]:
        """Seconds from the command until it connects, and its memory then."""
        return first_bytes(lambda port: self.words(port, 2, hosts_store=False), 0, self._environ)

    def start_to_ranks(self, count: int) -> float:
        """Seconds from the last agent's start to the last rank."""
        with door() as (_, port):
            pass
        with stage() as here:
            for index in range(count - 1):
                here.start(*self.words(port, count, hosts_store=not index), env=self._environ)
            self._wait_until_idle(here)
            started = time.time()
            here.start(*self.words(port, count, hosts_store=False), env=self._environ)
            return here.last_time(count) - started

    def _wait_until_idle(self, here: Stage) -> None:
        """They don't say that they wait for others: it shows when they no longer compute."""
        used = [-1.0]

        def idle() -> bool:
            time.sleep(1)
            before, used[0] = used[0], sum(cpu_secs(program.process.pid) for program in here.programs)
            return 1 < used[0] < before + 0.1 * len(here.programs)

        here.wait_for(idle, "torchrun that waits")


def find_torchrun(python: str | None) -> Torchrun | None:
    """torchrun of an interpreter that has torch: this one's, where none is named."""
    interpreter = python or sys.executable
    known = subprocess.run([interpreter, "-c", "import torch.distributed.run"], capture_output=True).returncode == 0
    return Torchrun([interpreter, "-m", "torch.distributed.run"]) if known else None


# The tables


def differences(ours: list[float], peer: list[float]) -> list[float]:
    return [a - b for a, b in zip(ours, peer, strict=True)]


def hello_table(rounds: int, peer: Torchrun | None) -> None:
    """From the command to the hello."""
    to_hello(), to_floor(BARE_TWISTED)  # bytecode
    ours, twisted, bare, torch = [], [], [], []
    for _ in range(rounds):
        ours.append(to_hello())
        twisted.append(to_floor(BARE_TWISTED))
        bare.append(to_floor(BARE_SOCKET))
        if peer is not None:
            torch.append(peer.to_connection())
    for place, (name, unit, aim) in enumerate(
        (("command to the hello", "s", "0.3"), ("resident memory then", "MiB", "40"), ("proportional", "MiB", ""))
    ):
        mine, floor = [each[place] for each in ours], [each[place] for each in twisted]
        row(f"{name}; floor: bare Twisted", mine, floor, unit, aim)
        row(f"{name}; floor: a bare socket", mine, [each[place] for each in bare], unit, "")
        if torch:
            row(f"{name}; beside: torchrun, to its connection", mine, [each[place] for each in torch], unit, "")


def world_table(rounds: int, agents: list[int]) -> None:
    """From the last hello to the ranks."""
    for count in agents:
        ours, floor = [], []
        for _ in range(rounds):
            ours.append(hello_to_ranks(count) * 1e3)
            floor.append(bare_ranks(count) * 1e3)
        row(f"last hello to the last rank, {count} agents", ours, floor, "ms", "")
        row(f"… more than the program's own start, {count} agents", differences(ours, floor), None, "ms", "50")


def local_table(rounds: int) -> None:
    """One agent with many ranks."""
    results, floor = [], []
    for _ in range(rounds):
        results.append(formed_to_ranks())
        floor.append(bare_ranks(LOCAL_RANKS) * 1e3)
    ours = [took * 1e3 for took, _, _ in results]
    row(f"WorldFormed to {LOCAL_RANKS} ranks of one agent", ours, floor, "ms", "")
    row(f"… more than {LOCAL_RANKS} bare starts", differences(ours, floor), None, "ms", "50")
    for place, kind in enumerate(("resident", "proportional")):
        row(f"agent with {LOCAL_RANKS} ranks, {kind} memory", [each[1][place] for each in results], None, "MiB", "")
        row(f"its guardian, {kind} memory", [each[2][place] for each in results], None, "MiB", "")


def torchrun_table(rounds: int, peer: Torchrun) -> None:
    """Ours and torchrun's, from the last agent's start."""
    for count in (2, 4):
        ours, torch = [], []
        for _ in range(rounds):
            ours.append(start_to_ranks(count))
            torch.append(peer.start_to_ranks(count))
        row(f"last agent's start to the last rank, {count} agents; beside: torchrun", ours, torch, "s", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--agents", default="2,4,8,16")
    parser.add_argument("--torch-python", metavar="PATH", help="an interpreter that has torch")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    peer = find_torchrun(arguments.torch_python)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        head()
        hello_table(arguments.rounds, peer)
        world_table(arguments.rounds, [int(text) for text in arguments.agents.split(",")])
        local_table(arguments.rounds)
        if peer is None:
            print("\nThere is no torchrun here to stand beside; name an interpreter that has one with --torch-python.")
        else:
            torchrun_table(arguments.rounds, peer)


if __name__ == "__main__":
    main()
