"""Real torch forms its world on our port: ``flodl-tw run``, agents, one world after another, and ranks that raise."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from tests.core.store.queries import HELLO, Opcode, q
from tests.loopback.agents import Command
from tests.loopback.process import LOOPBACK, Twistd, body_of, read_all, until
from tests.torch.cases import LONG, PROGRAMS, Newest, Oldest

PLACES = [[0, 2, 0, 2], [1, 2, 0, 2], [0, 1, 1, 2]]
"""Local rank and local world size, group rank and group world size of each rank of two hosts with 2 and 1 ranks."""


def weights() -> list[float]:
    """What three ranks of ``world.py`` learn: each step goes down the mean of their gradients."""
    weight, learned = 0.0, []
    for _ in range(3):
        weight -= 0.01 * sum(2 * sample * (weight * sample - 1) for sample in (1, 2, 3)) / 3
        learned.append(round(weight, 6))
    return learned


def wanted(rank: int, version: str) -> dict[str, Any]:
    """What a rank of three tells of its world."""
    told = {"rank": rank, "torch": version, "keys of an earlier run": False, "sum": 6.0, "places": PLACES}
    return told if rank == 1 else {**told, "sum of the ends": 4.0}


def store_of(controller: Twistd) -> Any:
    """The store, as ``/store.json`` shows it."""
    return json.loads(body_of(controller.http(b"GET /store.json HTTP/1.0\r\n\r\n")))["store"]


SILENT = (b"", b"\0", b"\0\xce\xf7", HELLO[:5], HELLO)
"""What a scanner may open with and wait: nothing, a part of a magic, a torch client's first bytes."""
NOISE = (
    *(
        b"\0" * 64,
        b"\xff" * 64,
        b"SSH-2.0-scan\r\n",
        b"GET /nothing HTTP/1.0\r\n\r\n",
        b"\xe3\x17\x0d\xf1" + b"\0" * 60,
    ),
    *(HELLO[:4] + b"noise", HELLO + b"\xff", HELLO + b"\1" + b"\xff" * 8, HELLO + q(Opcode.SET, b"k" * 9000, b"")),
)
"""What it is closed for at once."""


class Worlds:
    """Worlds of three ranks on two hosts: two ranks and one."""

    def agents(self: Any, controller: Twistd, program: tuple[str, ...]) -> list[Command]:
        """Two hosts, in this order: ``gpu-a`` with two ranks, ``gpu-b`` with one."""
        # It may still be at work on the end of an earlier run.
        controller.state_is(phase="waiting", joined_ranks=0)
        first = self.host(controller.port, "gpu-a", 2, program=program)
        controller.state_is(phase="waiting", joined_ranks=2)
        return [first, self.host(controller.port, "gpu-b", 1, program=program)]

    def all_told(self: Any, *commands: Command) -> list[Any]:
        """What the ranks of ``world.py`` have told, in their order, once all have ended well."""
        for command in commands:
            self.assertEqual(command.ended(LONG), 0, command.err)
        return sorted(self.told(*commands), key=lambda told: told["rank"])

    def test_run_forms_a_gloo_world_of_two_and_one(self: Any) -> None:
        command = self.run_world("-n", "3", "--hosts", "2", program=self.program("world.py"))
        trained = {"weights": weights(), "trained on": False}
        self.assertEqual(self.all_told(command), [{**wanted(rank, self.version), **trained} for rank in range(3)])

    def test_worlds_follow_one_another_on_one_controller_and_no_scan_disturbs_them(self: Any) -> None:
        controller = self.start("--target-ranks", "3", "--after-run", "rearm")
        over = self.folder() / "over"
        program = self.program("world.py", str(over))
        agents = self.agents(controller, program)
        agents[0].printed(b"[gpu-a:r0] training", LONG)
        for opening in SILENT * 8:
            self.connect(controller, data=opening)
        for opening in NOISE * 8:
            client = self.connect(controller, data=opening)
            with contextlib.suppress(ConnectionError):
                read_all(client)
        over.touch()
        trained = {"weights": weights(), "trained on": True}
        self.assertEqual(self.all_told(*agents), [{**wanted(rank, self.version), **trained} for rank in range(3)])
        # The next run's keys are its own.
        agents = self.agents(controller, program)
        self.assertEqual(self.all_told(*agents), [wanted(rank, self.version) for rank in range(3)])
        self.assertEqual(controller.log.count("the world forms"), 2)

    def test_a_rank_that_raises_says_so_to_everybody(self: Any) -> None:
        controller = self.start("--target-ranks", "2", "--after-run", "hold")
        program = self.program("raises.py")
        agents = [self.host(controller.port, "gpu-a", 1, program=program)]
        controller.state_is(joined_ranks=1)
        agents.append(self.host(controller.port, "gpu-b", 1, program=program))

        def waited_for() -> dict[str, int]:
            store = store_of(controller)
            return {} if store is None else {each["key"]: each["clients"] for each in store["waiting"]}

        until(lambda: waited_for() == {"/go": 1, "/never": 1}, "waits for both keys", LONG)
        self.assertEqual(store_of(controller)["workers"], 2)
        shown = self.command("status", f"{LOOPBACK}:{controller.port}")
        self.assertEqual(shown.ended(), 0, shown.err)
        self.assertRegex(shown.out.decode(), r"store: 2 of 2 ranks .*, \d+ keys, \d+ bytes")
        self.assertRegex(shown.out.decode(), r"1 client waiting for /never, \d+ s so far")
        self.connect(controller, data=HELLO + q(Opcode.SET, b"/go", b""))

        self.assertEqual([agent.ended(LONG) for agent in agents], [1, 1])
        line = (
            (PROGRAMS / "raises.py").read_text().splitlines().index('        raise LabelError("batch 7 has no labels")')
        )
        died = f"LabelError: batch 7 has no labels, at {PROGRAMS / 'raises.py'}:{line + 1} in main: raise LabelError"
        for text in (agents[0].err, agents[1].err, controller.log):
            self.assertIn(died, text)
        shown = self.command("status", f"{LOOPBACK}:{controller.port}")
        self.assertEqual(shown.ended(), 0, shown.err)
        self.assertIn(f"rank 1: {died}", shown.out.decode())
        self.assertRegex(shown.out.decode(), "failed: .*" + re.escape(died))


class WorldsOfTheOldest(Worlds, Oldest):
    pass


class WorldsOfTheNewest(Worlds, Newest):
    pass
