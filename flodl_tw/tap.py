"""``twistd flodl-controller``: its options, and the one place where the parts of the server are joined.

Everything that may be refused is refused here, before the process forks:
settings, the port, the state folder, the token.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from twisted.application.service import MultiService, Service
from twisted.internet.defer import Deferred
from twisted.internet.error import ReactorNotRunning
from twisted.logger import FilteringLogObserver, Logger, LogLevel, LogLevelFilterPredicate, globalLogPublisher
from twisted.python import usage

from flodl_tw import sockets
from flodl_tw.channels import dead_peer
from flodl_tw.core.addresses import classify, show_endpoint
from flodl_tw.core.errors import SettingError
from flodl_tw.core.tokens import TOKEN_VARIABLE, refuse_argument
from flodl_tw.core.views import join_commands
from flodl_tw.core.window import Phase
from flodl_tw.limits import SPARE_DESCRIPTORS
from flodl_tw.settings import ControllerSettings
from flodl_tw.state_folder import StateFolder, check_writable, write_atomically

if TYPE_CHECKING:
    from flodl_tw.channels.front_door import FrontDoor


class Options(usage.Options):
    """The options of ``twistd flodl-controller``; the README has the same table."""

    synopsis = "[options]"
    longdesc = "Forms a training world from hosts that dial in, on one port."
    optFlags = [["open-admission", None, "Admit hosts without a token on a bind that others reach."]]
    optParameters = [
        ["cluster", None, None, "A cluster.yml of flodl, or an fdl.yml with its cluster block; options win over it."],
        ["port", "p", None, "Port to listen on [default: 29500]; 0 lets the system choose (with --port-file)."],
        ["port-file", None, None, "File that gets the port once it is listened on."],
        ["interface", None, None, "Address to listen on [default: all, IPv4 and IPv6]."],
        ["min-rank-start", None, None, "Quorum: ranks without which no world forms [default: 1]."],
        ["target-ranks", None, None, "Ranks at which the window closes at once."],
        ["join-timeout", None, None, "Seconds after which a quorum is enough, except with manual [default: 300]."],
        [
            "max-join-timeout",
            None,
            None,
            "Hard cap: seconds after which a run without a world fails [default: 600 or more].",
        ],
        ["start", None, None, "Who closes the window: auto (the clock, the default), manual (the operator) or hybrid."],
        ["backend", None, "nccl", "Data plane: nccl (one GPU vendor, one NCCL minor version) or cpu."],
        ["rendezvous", None, None, "Rendezvous channel: native, off, or an endpoint [default: native, off with cpu]."],
        ["data", None, None, "Endpoint that the data channel is forwarded to, such as tcp:HOST:PORT or unix:PATH."],
        ["control", None, None, "Endpoint that the control channel is forwarded to: where a coordinator listens."],
        ["store", None, "native", "torch.distributed's store on the same port, for the world's hosts: native or off."],
        ["store-max-bytes", None, "268435456", "Bytes that a world's store may hold."],
        ["store-max-keys", None, "1000000", "Keys that a world's store may hold."],
        ["frame-ceiling", None, "1073741824", "Bytes of the largest frame that relays pass on (with --control)."],
        ["nccl-socket-ifname", None, "", "Network interface for the ranks of hosts that no cluster file names."],
        [
            "token-file",
            None,
            None,
            "File with the token, 32 hex digits, for its owner alone [default: $FLODL_JOIN_TOKEN].",
        ],
        ["dataset-sig", None, None, "Dataset signature that hosts must have, 64 hex digits."],
        ["model-sig", None, None, "Model signature that hosts must have, 64 hex digits."],
        ["on-loss", None, "abort", "What a lost host or failed rank does to the others: abort or continue."],
        ["after-run", None, "exit", "What follows a run: exit (status 0 or 1), hold (serve its state) or rearm."],
        ["max-rejects", None, "1024", "Refusals of hosts that a window bears; 0 sets no limit."],
        ["max-pending", None, "4096", "Connections that may not yet have said what they want."],
        ["max-pending-per-host", None, "1024", "The same from one address; loopback is exempt."],
        ["state-dir", None, None, "Folder for lock and token, by port [default: $STATE_DIRECTORY or $XDG_STATE_HOME]."],
    ]

    def __init__(self) -> None:
        super().__init__()
        self["allowed-host"] = []

    def opt_allowed_host(self, name: str) -> None:
        """A name by which start, abort and check may be asked for; may be given again."""
        self["allowed-host"].append(name)

    def parseOptions(self, options: Any = None) -> None:
        """Refuse an unknown option in one line, without the usage that Twisted would print before it."""
        try:
            refuse_argument(map(str, options or ()))
            super().parseOptions(options)
        except SettingError as error:
            raise SystemExit(f"flodl-controller: {error}") from None
        except usage.UsageError as error:
            raise SystemExit(f"flodl-controller: {error}; --help lists the options") from None


class Door(Service):
    """Listens on a socket that is bound already, and closes what came through it."""

    log = Logger()

    def __init__(self, reactor: Any, bound: socket.socket, front: Any, settings: ControllerSettings) -> None:
        self._reactor = reactor
        self._bound = bound
        self._front = front
        self._settings = settings
        self._port: Any = None

    def startService(self) -> None:
        super().startService()
        # A terminal that hangs up must not take a world with it unannounced.
        signal.signal(signal.SIGHUP, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
        self._port = self._reactor.adoptStreamPort(self._bound.fileno(), self._bound.family, self._front)
        self._port.transport = dead_peer.watched_transport(self._settings.limits)
        self._front.port = self._port
        self._port.numberAccepts = self._front.accepts
        # The reactor works on a duplicate.
        self._bound.close()
        if self._settings.port_file is not None:
            write_atomically(self._settings.port_file, f"{self._port.getHost().port}\n", 0o644)

    async def _stop(self) -> None:
        stopped = self._port.stopListening()
        await self._front.close_all()
        await stopped

    def stopService(self) -> Deferred[None]:
        super().stopService()
        return Deferred.fromCoroutine(self._stop())


class Announcement(Service):
    """The first lines of the log: where it listens, who may join, and how."""

    log = Logger()

    def __init__(
        self, settings: ControllerSettings, bound: socket.socket, token_source: str | None, capacity: int
    ) -> None:
        self._settings = settings
        self._where = sockets.shown_binding(bound)
        host, self._port = bound.getsockname()[:2]
        self._name = socket.gethostname() if host in ("::", "0.0.0.0") else classify(host).shown  # noqa: S104
        self._loopback = sockets.bound_to_loopback(bound)
        self._token_source = token_source
        self._capacity = capacity

    def startService(self) -> None:
        super().startService()
        for warning in self._settings.warnings:
            self.log.warn("{warning}", warning=warning)
        self.log.info(
            "listening on {where}; descriptors are enough for {capacity} hosts",
            where=self._where,
            capacity=self._capacity,
        )
        needs = "" if self._token_source is None else f"admission needs the token in {self._token_source}; "
        if self._token_source is None and not self._loopback:
            self.log.warn(
                "--open-admission: whoever reaches {where} can join this run and spoil it; "
                "use it on a network that you trust whole",
                where=self._where,
            )
        endpoint = show_endpoint(self._name, self._port)
        ours, fdls = join_commands(endpoint, self._token_source is not None)
        self.log.info("{needs}join with: {ours} (or: {fdls})", needs=needs, ours=ours, fdls=fdls)


def makeService(options: Options) -> MultiService:
    """Everything that the plugin runs, with the port bound and nothing started.

    Ends with SystemExit and one line where that cannot be.
    """
    try:
        settings = ControllerSettings.from_options(options, os.environ)
        # A child has no use for it.
        os.environ.pop(TOKEN_VARIABLE, None)
        return _assemble(settings)
    except SettingError as error:
        raise SystemExit(f"flodl-controller: {error}") from None


def _assemble(settings: ControllerSettings) -> MultiService:
    # Inside the function: importing klein or the reactor would install one too early.
    import time

    from twisted.internet import reactor

    from flodl_tw.controller import Controller
    from flodl_tw.server import channels

    # Twisted's clock is wall time, and a step of it would stall every timer or fire them all.
    clock: Any = reactor
    clock.seconds = time.monotonic
    if settings.port_file is not None:
        check_writable("--port-file", settings.port_file)
    descriptors = sockets.raise_descriptor_limit()
    bound = sockets.listen(settings.interface, settings.port, settings.limits)
    port = bound.getsockname()[1]
    assert settings.state_dir is not None
    folder = StateFolder(settings.state_dir, port)
    token = settings.token
    source = settings.token_source
    if token is None and not settings.open_admission and not sockets.bound_to_loopback(bound):
        token = folder.made_token()
        source = str(folder.token_file)
    controller = Controller(clock, settings.run, token=token, after_run=settings.after_run, finished=_stop_with_status)
    front = _front_door(clock, settings, descriptors)
    front.routes = channels(
        front,
        controller,
        port,
        allowed_hosts=settings.allowed_hosts,
        native_rendezvous=settings.native_rendezvous,
        backends=settings.backends,
        reactor=reactor,
    )
    services = MultiService()
    # Stopped in reverse: the controller says goodbye on its links before the door closes them.
    announcement = Announcement(settings, bound, source, front.capacity)
    for part in (announcement, Door(clock, bound, front, settings), controller):
        part.setServiceParent(services)
    return services


def _front_door(clock: Any, settings: ControllerSettings, descriptors: int) -> FrontDoor:
    from flodl_tw.channels.front_door import FrontDoor

    capacity = max(descriptors - SPARE_DESCRIPTORS, descriptors // 2)
    front = FrontDoor(
        clock,
        settings.limits,
        max_pending=settings.max_pending,
        max_pending_per_host=settings.max_pending_per_host,
        capacity=capacity,
        accepts=max(1, min(100, (descriptors - capacity) // 3)),
    )
    # twistd writes debug lines, too, and a balancer's probes would fill the log; the page counts them.
    front.log = Logger(
        FrontDoor.__module__,
        observer=FilteringLogObserver(globalLogPublisher, [LogLevelFilterPredicate(LogLevel.info)]),
    )
    return front


def _stop_with_status(phase: Phase) -> None:
    """End the process with the run's outcome as its exit status."""
    from twisted.internet import reactor

    if phase is not Phase.DONE:
        # twistd has no way to exit with 1: at exit its pidfile is gone and its log is written.
        atexit.register(_exit, 1)
    stopping: Any = reactor
    # A signal may have come in the same turn.
    with contextlib.suppress(ReactorNotRunning):
        stopping.stop()


def _exit(status: int) -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
