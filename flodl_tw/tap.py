"""``twistd flodl-controller``: its options, and what may be refused before the process forks:
settings, the port, the state folder, the token.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from twisted.application.service import MultiService, Service
from twisted.internet.error import ReactorNotRunning
from twisted.internet.interfaces import IReactorCore, IReactorFromThreads
from twisted.logger import Logger
from twisted.python import usage

from flodl_tw import sockets
from flodl_tw.core.descriptors import open_standard_descriptors
from flodl_tw.core.errors import SettingError
from flodl_tw.core.log_text import shown
from flodl_tw.core.phrases import join_commands
from flodl_tw.core.run_settings import AfterRun
from flodl_tw.core.tokens import TOKEN_VARIABLE, refuse_argument, take_secret, without_tokens
from flodl_tw.core.window import Phase
from flodl_tw.deadlines import use_monotonic_clock
from flodl_tw.resolver import use_thread_resolver
from flodl_tw.run import RunEnd
from flodl_tw.settings import OPTIONS, ControllerSettings
from flodl_tw.state_folder import check_writable, kept_token, read_token_file, write_atomically

if TYPE_CHECKING:
    from flodl_tw.log_output import LogOutput
    from flodl_tw.server import ControllerServer

UNUSABLE: Final = 2
"""The exit status of a start that is refused; a failed run's is 1."""
_log = Logger()


def _refused(line: object) -> SystemExit:
    """The end with one line for the operator."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"flodl-controller: {line}", file=sys.stderr, flush=True)
    return SystemExit(UNUSABLE)


class Options(usage.Options):
    """The options of ``twistd flodl-controller``; the README has the same table."""

    synopsis = "[options]"
    longdesc = "Forms a training world from hosts that dial in, on one port."
    optFlags = [["open-admission", None, "Admit hosts without a token on a bind that others reach."]]
    optParameters = OPTIONS
    log: LogOutput | None = None
    """Where twistd logs to; None in a program that is not twistd."""

    def __init__(self) -> None:
        super().__init__()
        self["allowed-host"] = []

    def opt_allowed_host(self, name: str) -> None:
        """A name by which start and abort (with the token) and check may be asked for; may be given again."""
        self["allowed-host"].append(name)

    def parseArgs(self, *words: str) -> None:  # noqa: N802  Twisted's name
        """There are no arguments, so the first is named; Twisted says that their number is wrong."""
        if words:
            raise usage.UsageError(f"{without_tokens(shown(words[0]))} stands alone: options begin with --")

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """Refuse an unknown option in one line, without the usage that Twisted would print before it.

        Under twistd the log is taken over, before it has chosen one.
        """
        try:
            refuse_argument(options or ())
            super().parseOptions(options)
        except SettingError as error:
            raise _refused(error) from None
        except usage.UsageError as error:
            raise _refused(f"{error}; --help lists the options") from None
        if self.parent is not None:
            # It needs Twisted's logger and the agent's threads, which --help does not.
            from flodl_tw.log_output import LogOutput

            open_standard_descriptors()
            if os.getpid() == 1:
                # Until the reactor has handlers of its own: without one no signal ends a container's first process.
                signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
            self.log = LogOutput(self.parent, _refused)


class Announcement(Service):
    """The first lines of the log: where it listens, who may join, and how."""

    def __init__(self, settings: ControllerSettings, bound: socket.socket, server: ControllerServer) -> None:
        self._settings = settings
        self._bound = bound
        self._server = server

    def startService(self) -> None:
        super().startService()
        for warning in self._settings.warnings:
            _log.warn("{warning}", warning=warning)
        where, most = sockets.shown_binding(self._bound), self._server.capacity.most
        _log.info("listening on {where}; descriptors are enough for {capacity} hosts", where=where, capacity=most)
        source = self._settings.token_source
        if source is None and not sockets.bound_to_loopback(self._bound):
            _log.warn(
                "--open-admission: whoever reaches {where} can join this run and spoil it; "
                "use it on a network that you trust whole",
                where=where,
            )
        host, port = self._bound.getsockname()[:2]
        needs = "" if source is None else f"admission needs the token in {source}; "
        ours, fdls = join_commands(self._settings.join_endpoint(host, port), source is not None)
        _log.info("{needs}join with: {ours} (or: {fdls})", needs=needs, ours=ours, fdls=fdls)


def makeService(options: Options) -> MultiService:
    """Everything that the plugin runs, with the port bound and nothing started.

    Ends with SystemExit and one line where that cannot be.
    """
    try:
        settings = ControllerSettings.from_options(options, os.environ)
        # A child has no use for it.
        take_secret(TOKEN_VARIABLE)
        pidfile = None if options.parent is None else options.parent["pidfile"]
        if pidfile:
            check_writable("--pidfile", Path(pidfile))
        token_file = options["token-file"]
        return _assemble(settings, options.log, None if token_file is None else os.path.abspath(token_file))
    except SettingError as error:
        raise _refused(error) from None


def _assemble(settings: ControllerSettings, log: LogOutput | None, token_file: str | None) -> MultiService:
    # Inside the function: the reactor's import installs it, and twistd may have been asked for another one.
    from twisted.internet import reactor

    from flodl_tw.server import ControllerServer

    use_monotonic_clock(reactor)
    _collect_less()
    use_thread_resolver(reactor)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            # They are for ranks; a scheduler sends them to every process of a job.
            signal.signal(number, lambda number, frame: None)
    path = settings.port_file
    if path is not None:
        check_writable("--port-file", path)
    sockets.raise_descriptor_limit()
    bound = sockets.listen(settings.interface, settings.port, settings.limits)
    given = settings.token
    settings = _with_token(settings, bound)
    server = ControllerServer(reactor, settings, bound)
    if token_file is None and settings.token is not None and given is None:
        token_file = settings.token_source
    _on_hangup(lambda: _reload(server, log, token_file))
    IReactorCore(reactor).callWhenRunning(_die_as_init)
    services = MultiService()
    for part in (Announcement(settings, bound, server), server):
        part.setServiceParent(services)
    if path is not None:
        server.when_listening().addCallback(lambda _: _write_port(path, server.port))
    if settings.after_run is AfterRun.EXIT:
        server.when_over().addCallback(_stop_with_status, server)
    return services


def _write_port(path: Path, port: int) -> None:
    try:
        write_atomically(path, f"{port}\n")
    except OSError as error:
        _log.error("--port-file {path} cannot be written ({why})", path=str(path), why=error.strerror)


def _on_hangup(reload: Callable[[], None]) -> None:
    """Have SIGHUP reload in the reactor's turn, unless nohup has it ignored."""
    from twisted.internet import reactor

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        from_signal = IReactorFromThreads(reactor).callFromThread
        signal.signal(signal.SIGHUP, lambda number, frame: from_signal(reload))


def _reload(server: ControllerServer, log: LogOutput | None, token_file: str | None) -> None:
    """SIGHUP: the log file may have been moved away, and the token file may have another token."""
    if log is not None:
        log.reopen()
    if token_file is None:
        return
    try:
        credentials = os.environ.get("CREDENTIALS_DIRECTORY")
        token = read_token_file(token_file, tell=lambda line: _log.warn("{line}", line=line), credentials=credentials)
    except SettingError as error:
        _log.warn("{error}; the token stays as it was", error=error)
        return
    if token != server.controller.token:
        server.controller.token = token
        _log.info("SIGHUP: new hellos need the token that is in {path} now", path=token_file)


def _die_as_init() -> None:
    """Have the first process of a container, which no signal of its own can kill, end with a killed one's status."""
    if os.getpid() != 1:
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _as_init(number, signal.getsignal(number)))


def _as_init(number: int, handler: object) -> Callable[[int, FrameType | None], None]:
    def came(received: int, frame: FrameType | None) -> None:
        atexit.register(_exit, 128 + number)
        if callable(handler):
            handler(received, frame)

    return came


def _collect_less() -> None:
    """Have the garbage collector leave what is loaded alone, and look less often at what a crowd of hosts brings.

    Nothing of a connection is in a circle for long, and looking for one was a tenth of what a join costs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _with_token(settings: ControllerSettings, bound: socket.socket) -> ControllerSettings:
    """The settings with a token that is made and kept, where the bind needs one and the operator gave none."""
    if settings.token is not None or settings.open_admission or sockets.bound_to_loopback(bound):
        return settings
    warnings = list(settings.warnings)
    token, path = kept_token(settings.state_dir, os.environ, bound.getsockname()[1], warnings.append)
    return replace(settings, token=token, token_source=str(path), warnings=tuple(warnings))


def _stop_with_status(end: RunEnd, server: ControllerServer) -> None:
    """End the process with the run's outcome as its exit status."""
    from twisted.internet import reactor

    if not server.running:
        # It is being stopped, and what stops it has a status of its own.
        return
    if end.phase is not Phase.DONE:
        # twistd has no way to exit with 1: at exit its pidfile is gone and its log is written.
        atexit.register(_exit, 1)
    # A signal may have come in the same turn.
    with contextlib.suppress(ReactorNotRunning):
        IReactorCore(reactor).stop()


def _exit(status: int) -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)
