"""Tests with real torch: in the environments that ``make torch-env`` makes, and skipped where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peers.torch_env import NEWEST, OLDEST, python_with
from tests.loopback.agents import AgentTestCase, Command

PROGRAMS = Path(__file__).parent / "programs"
LONG = 600.0
"""Seconds for a world of torch, on the slowest machine: it imports it a few times over."""
ENVIRON = {
    "GLOO_SOCKET_IFNAME": "lo",
    # A host of one rank gets no such limit from the agent.
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "FLODL_HOST_NAME": "box",
}


class TorchTestCase(AgentTestCase):
    """A test that needs the torch of one version."""

    version = ""

    def setUp(self) -> None:
        python = python_with(self.version)
        if python is None:
            self.skipTest(f"there is no environment with torch {self.version}: `make torch-env` makes one")
        self.python = str(python)

    def program(self, name: str, *arguments: str) -> tuple[str, ...]:
        """The words that start one of the programs with this torch."""
        return (self.python, str(PROGRAMS / name), *arguments)

    def run_world(self, *words: str, program: tuple[str, ...]) -> Command:
        """Start ``flodl-tw run``."""
        return self.command("run", *words, "--", *program, environ=ENVIRON)

    def host(self, port: int, name: str, ranks: int, *words: str, program: tuple[str, ...]) -> Command:
        """Start an agent of so many ranks."""
        return self.join(port, name, "--nproc", str(ranks), *words, program=program, environ=ENVIRON)

    def _no_fault(self, command: Command) -> None:
        # A rank may show a traceback of its own; the agent may not.
        for line in command.lines("flodl-tw: "):
            for sign in ("Traceback", "Unhandled", "fault of the program"):
                self.assertNotIn(sign, line)

    def told(self, *commands: Command) -> list[Any]:
        """What ranks have printed as JSON, in the order of each command's output."""
        texts = [line.partition("] ")[2] for command in commands for line in command.out.decode().splitlines()]
        return [json.loads(text) for text in texts if text.startswith("{")]


class Newest(TorchTestCase):
    """With the newest torch."""

    version = NEWEST


class Oldest(TorchTestCase):
    """With the oldest torch that we test with."""

    version = OLDEST
