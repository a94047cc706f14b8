"""``flodl-tw run``: a controller and its hosts in one process on loopback, for a world on one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from twisted.internet import defer

from flodl_tw import sockets
from flodl_tw.agent.devices import Choice
from flodl_tw.agent.gpu_view import GpuView, split
from flodl_tw.agent.outcome import ALL_CLEAN, Outcome
from flodl_tw.agent.process import SIGNALS, Agents
from flodl_tw.agent.settings import read_agent_settings
from flodl_tw.cli.terminal import run_to_end
from flodl_tw.core.phrases import counted
from flodl_tw.core.run_settings import RunSettings
from flodl_tw.core.store.wire import StoreLimits
from flodl_tw.core.tokens import TOKEN_VARIABLE
from flodl_tw.core.window import WindowSettings
from flodl_tw.limits import SCALE_VARIABLE, STOP_GRACE, Limits, parse_scale
from flodl_tw.options import ENVIRONMENT_PREFIX, OptionReader, environment_name
from flodl_tw.reactor import IReactor
from flodl_tw.server import ControllerServer
from flodl_tw.settings import ControllerSettings

STDIN: Final = {"terminal": True, "none": False}
LOOPBACK: Final = "127.0.0.1"
OPTIONS: Final = ("nproc", "hosts", "devices", "virtual-local-rank", "master-addr", "stop-grace", "log-dir", "stdin")
"""The options of ``run``: those of ``join`` that the environment may hold say nothing of a world in one process."""


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what is meant for a worker that joins elsewhere."""
    ours = {environment_name(option) for option in OPTIONS}
    return {
        name: value
        for name, value in environ.items()
        if name in ours or not (name == TOKEN_VARIABLE or name.startswith(ENVIRONMENT_PREFIX))
    }


def local_server(reactor: IReactor, ranks: int, scale: float) -> ControllerServer:
    """A controller for one world of as many ranks, on loopback, on a port that the system chooses."""
    limits = Limits.at(scale)
    window = WindowSettings(min_rank_start=ranks, target_ranks=ranks)
    settings = ControllerSettings(
        run=RunSettings(window=window, store=StoreLimits(), linger_secs=limits.linger), limits=limits
    )
    return ControllerServer(reactor, settings, sockets.listen(LOOPBACK, 0, limits))


def world_outcome(outcomes: list[Outcome]) -> Outcome:
    """The outcome of all hosts together: a rank's own, rather than that of those who were aborted for it."""
    failed = [outcome for outcome in outcomes if outcome.status]
    return next((outcome for outcome in failed if outcome.of_rank), failed[0] if failed else ALL_CLEAN)


def _gives_terminal(texts: OptionReader) -> bool:
    """Whether our standard input is a terminal that rank 0 may have: one that we are in the foreground of."""
    if not (texts.choice("stdin", STDIN, True) and os.isatty(0)):
        return False
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        # It controls no session of ours, so no shell takes it back.
        return True


def run_world(
    reactor: IReactor,
    options: Mapping[str, object],
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
            "hosts", f"{counted(ranks, 'rank')} in all, and each host needs one", "give fewer hosts, or more ranks"
        )
    scale, _ = parse_scale(environ.get(SCALE_VARIABLE))
    settings, warnings = read_agent_settings(texts, program)
    if texts.get("devices") is None and texts.get("nproc") is not None and settings.gpu_view is GpuView.ALL:
        settings = replace(settings, gpu_view=GpuView.INHERITED)
    settings = replace(settings, terminal=_gives_terminal(texts))
    agents = Agents(reactor, environ, settings.stop_grace)
    for note in (*warnings, *choice.notes):
        agents.say(note)

    async def main() -> int:
        server = local_server(reactor, ranks, scale)
        server.startService()
        agents.say(f"the world's page: http://{LOOPBACK}:{server.port}/")
        for index, share in enumerate(split(choice.devices, hosts)):
            host = settings.host if hosts == 1 else f"{settings.host}-{index}"
            agents.add(replace(settings, controller=(LOOPBACK, server.port), host=host), replace(choice, devices=share))
        outcome = world_outcome(await agents.run())
        with suppress(defer.TimeoutError):
            # Its last log lines and the page have the end of the run, where it comes in time.
            await server.when_over().addTimeout(STOP_GRACE, reactor)
        await server.stopService()
        return outcome.status

    # The agents tell all that the controller would.
    agents.show_log("critical")
    status = run_to_end(reactor, main, signalled=agents.signalled, signals=SIGNALS, tell=agents.say)
    agents.close()
    return status
