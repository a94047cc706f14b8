"""``flodl-tw run``: a controller and its hosts in one process on loopback, for a world on one machine."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from twisted.internet import defer
from twisted.internet.defer import Deferred
from twisted.logger import LogLevel

from flodl_tw import sockets
from flodl_tw.agent.devices import Choice
from flodl_tw.agent.outcome import ALL_CLEAN, Outcome
from flodl_tw.agent.process import Agents, run_reactor
from flodl_tw.agent.settings import read_agent_settings
from flodl_tw.channels import dead_peer
from flodl_tw.channels.front_door import FrontDoor
from flodl_tw.controller import AfterRun, Controller
from flodl_tw.core.store.wire import StoreLimits
from flodl_tw.core.tokens import TOKEN_VARIABLE
from flodl_tw.core.window import WindowSettings
from flodl_tw.limits import SCALE_VARIABLE, SPARE_DESCRIPTORS, STOP_GRACE, Limits, parse_scale
from flodl_tw.options import ENVIRONMENT_PREFIX, OptionReader, environment_name
from flodl_tw.run import RunSettings
from flodl_tw.server import channels

LOOPBACK: Final = "127.0.0.1"
OPTIONS: Final = ("nproc", "hosts", "devices", "stop-grace", "log-dir")
"""The options of ``run``: those of ``join`` that the environment may hold say nothing of a world in one process."""


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what is meant for a worker that joins elsewhere."""
    ours = {environment_name(option) for option in OPTIONS}
    return {
        name: value
        for name, value in environ.items()
        if name in ours or not (name == TOKEN_VARIABLE or name.startswith(ENVIRONMENT_PREFIX))
    }


def shares(choice: Choice, hosts: int) -> list[Choice]:
    """The devices split over ``hosts``, in order, as evenly as can be: the first ones get one more."""
    least, more = divmod(len(choice.devices), hosts)
    parts = []
    first = 0
    for index in range(hosts):
        end = first + least + (index < more)
        parts.append(replace(choice, devices=choice.devices[first:end]))
        first = end
    return parts


class LocalController:
    """The controller, behind a door of its own on loopback, on a port that the system chooses."""

    def __init__(self, reactor: Any, ranks: int, scale: float) -> None:
        limits = Limits.at(scale)
        window = WindowSettings(min_rank_start=ranks, target_ranks=ranks)
        self._over: Deferred[None] = Deferred()
        self._reactor = reactor
        self.controller = Controller(
            reactor,
            RunSettings(window=window, store=StoreLimits()),
            after_run=AfterRun.EXIT,
            finished=lambda phase: None if self._over.called else self._over.callback(None),
        )
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._front = FrontDoor(reactor, limits, capacity=max(descriptors - SPARE_DESCRIPTORS, descriptors // 2))
        bound = sockets.listen(LOOPBACK, 0, limits)
        self.port = bound.getsockname()[1]
        self._front.routes = channels(self._front, self.controller, self.port, native_rendezvous=True, reactor=reactor)
        self._listening = reactor.adoptStreamPort(bound.fileno(), bound.family, self._front)
        self._listening.transport = dead_peer.watched_transport(limits)
        self._front.port = self._listening
        bound.close()
        self.controller.startService()

    async def stop(self) -> None:
        """Close it, and what came through it, once it has seen the end of the run (or has had the time to)."""
        with suppress(defer.TimeoutError):
            await self._over.addTimeout(STOP_GRACE, self._reactor)
        self.controller.stopService()
        await self._listening.stopListening()
        await self._front.close_all()


def world_outcome(outcomes: list[Outcome]) -> Outcome:
    """The outcome of all hosts together: a rank's own, rather than that of those who were aborted for it."""
    failed = [outcome for outcome in outcomes if outcome.status]
    return next((outcome for outcome in failed if outcome.of_rank), failed[0] if failed else ALL_CLEAN)


def run_world(
    reactor: Any,
    options: Mapping[str, Any],
    program: list[str],
    environ: Mapping[str, str],
    choose: Callable[[], Choice],
) -> int:
    """Form the world, run it, and give its exit status.  ``environ`` is what ``own_environ`` gave."""
    texts = OptionReader({**options, "controller": LOOPBACK}, environ)
    choice = choose()
    hosts = texts.whole("hosts", 1, 256, 1)
    ranks = len(choice.devices)
    if hosts > ranks:
        raise texts.wrong(
            "hosts", f"there are {ranks} ranks, and each host needs one", "give fewer hosts, or more ranks"
        )
    scale, _ = parse_scale(environ.get(SCALE_VARIABLE))
    settings, warnings = read_agent_settings(texts, program)
    agents = Agents(reactor, environ, settings.stop_grace)
    for note in (*warnings, *choice.notes):
        agents.say(note)

    async def main() -> int:
        local = LocalController(reactor, ranks, scale)
        agents.say(f"the world's page: http://{LOOPBACK}:{local.port}/")
        for index, share in enumerate(shares(choice, hosts)):
            host = settings.host if hosts == 1 else f"{settings.host}-{index}"
            agents.add(replace(settings, controller=(LOOPBACK, local.port), host=host), share)
        outcome = world_outcome(await agents.run())
        await local.stop()
        return outcome.status

    # The agents tell all that the controller would.
    return run_reactor(reactor, agents, main, least_level=LogLevel.critical)
