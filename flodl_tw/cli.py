"""The ``flodl-tw`` command: join a world from a worker, run one on this machine, and look after one from anywhere.

Options are read here as texts; what they mean is for ``agent/settings.py`` and
``operate.py``.  Twisted is imported once a command needs it, so that the GPU
tools run meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from flodl_tw import __version__
from flodl_tw.core.addresses import DEFAULT_PORT, parse_endpoint
from flodl_tw.core.window import SettingError

if TYPE_CHECKING:
    from flodl_tw.agent.devices import Choice
    from flodl_tw.agent.gpu_tools import Asking
    from flodl_tw.agent.settings import AgentSettings
    from flodl_tw.operate import Controller

PERMANENT: Final = 2
_SECRET: Final = re.compile(r"[0-9a-fA-F]{24,}")

HOST_OPTIONS: Final = (
    ("host", "NAME", "this host's name in the world [default: $FLODL_HOST_NAME, or the machine's]"),
    ("token-file", "FILE", "file with the run's token, for its owner alone [default: $FLODL_JOIN_TOKEN]"),
    ("libtorch", "LABEL", "what the ranks are built for [default: sm90, gfx942 and so on by the first device, or cpu]"),
    ("nccl-version", "X.Y.Z", "the ranks' NCCL [default: what an installed torch tells]"),
    ("dataset-sig", "HEX", "dataset signature, 64 hex digits"),
    ("run-id", "ID", "id of the published run"),
    ("model-sig", "HEX", "model signature, 64 hex digits"),
    ("data-path", "PATH", "where the data is on this host"),
    ("gpu-ram-share", "F", "share of the host's memory for an integrated GPU"),
)
DEVICE_OPTIONS: Final = (
    ("devices", "LIST", "devices to offer: all, positions such as 0,2, or GPU-… and MIG-… names [default: all]"),
    ("nproc", "N", "N ranks without GPUs instead"),
)
RANK_OPTIONS: Final = (
    ("stop-grace", "SECS", "from SIGTERM to SIGKILL, when ranks are to end [default: 30]"),
    ("log-dir", "FOLDER", "where each rank's output goes, too: rank.NNN.out and rank.NNN.err"),
)
TOKEN_OPTION: Final = HOST_OPTIONS[1]
COMMANDS: Final = ("join", "run", "status", "start", "abort")


class Parser(argparse.ArgumentParser):
    """argparse, with one line for a wrong command, and status 2."""

    page = ""
    """The command whose help is to be read, where it is another's than this parser's."""
    has_program = False
    """Whether the command takes a program."""

    def error(self, message: str) -> Any:
        # What was mistyped may be the token.
        shown = _SECRET.sub("(not shown)", message)
        head, colon, rest = message.partition("unrecognized arguments: ")
        if colon and not rest.startswith("-") and self.has_program:
            shown += " (PROGRAM and its arguments stand after --)"
        if colon and "tok" in rest.lower():
            shown = head + colon + rest.split()[0].partition("=")[0] + " (not shown)"
        _say(f"{shown}; {self.page or self.prog} --help lists the options")
        raise SystemExit(PERMANENT)


def _say(line: str) -> None:
    print(f"flodl-tw: {line}", file=sys.stderr)


def _add(parser: argparse.ArgumentParser, options: Sequence[tuple[str, str, str]]) -> None:
    for name, value, text in options:
        parser.add_argument(f"--{name}", metavar=value, help=text)


def make_parser() -> Parser:
    """The whole command line.  Every option may come from the environment, too."""
    parser = Parser(
        "flodl-tw",
        allow_abbrev=False,
        description="Join hosts to a training world, or look after one.",
        epilog="Every option may be given by environment, too: --stop-grace as FLODL_TW_STOP_GRACE; the option wins.",
    )
    parser.add_argument("--version", action="version", version=f"flodl-tw {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    join = _command(commands, "join", "join this host, and run a rank of PROGRAM on each device", _join)
    join.usage = "flodl-tw join HOST[:PORT] [options] -- PROGRAM [ARGS...]"
    join.add_argument("controller", metavar="HOST[:PORT]", help=f"the controller [port: {DEFAULT_PORT}]")
    _add(join, (*DEVICE_OPTIONS, *HOST_OPTIONS, *RANK_OPTIONS))
    join.add_argument("--persist", action="store_true", default=None, help="dial again after each run or failure")
    join.add_argument("--check", action="store_true", default=None, help="ask whether this host would be admitted")
    run = _command(commands, "run", "controller and agents in one: a whole world on this machine", _run)
    run.usage = "flodl-tw run [-n N] [--hosts H] [options] -- PROGRAM [ARGS...]"
    run.add_argument("-n", "--nproc", dest="nproc", metavar="N", help="N ranks without GPUs in all")
    run.add_argument("--hosts", metavar="H", help="as how many hosts [default: 1]")
    _add(run, (DEVICE_OPTIONS[0], *RANK_OPTIONS))
    for name, text, command in (
        ("status", "what the controller says of its run", _status),
        ("start", "close the join window: the operator's start", _start),
        ("abort", "end the run, on every host", _abort),
    ):
        sub = _command(commands, name, text, command)
        sub.add_argument("address", metavar="HOST[:PORT]", nargs="?", help=f"[default: 127.0.0.1:{DEFAULT_PORT}]")
        if name == "status":
            sub.add_argument("--json", action="store_true", default=None, help="state.json as it is")
            sub.add_argument("--watch", action="store_true", default=None, help="again whenever it changes")
        else:
            _add(sub, (TOKEN_OPTION,))
        if name == "abort":
            sub.add_argument("--reason", metavar="TEXT", help="what every host and log is told")
    return parser


def _command(commands: Any, name: str, text: str, command: Callable[..., int]) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    made.set_defaults(run=command)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """``flodl-tw``; gives the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    ours, program = words[:split], words[split + 1 :]
    if any(word.partition("=")[0] == "--token" for word in ours):
        # It must not be repeated by an error.
        _say(
            "--token (not shown): every user of this machine can see an argument; use --token-file or FLODL_JOIN_TOKEN"
        )
        return PERMANENT
    parser = make_parser()
    if ours and ours[0] in COMMANDS:
        # The outer parser speaks for the commands, too.
        parser.page = f"flodl-tw {ours[0]}"
        parser.has_program = ours[0] in ("join", "run") and split == len(words)
    parsed = parser.parse_args(ours)
    options = {name.replace("_", "-"): value for name, value in vars(parsed).items()}
    return _guarded(parsed.run, options, program)


def agent_main() -> int:
    """``flodl-tw-agent PROGRAM ARGS…``: an agent that a launcher such as ``fdl join --bin`` has started."""
    return _guarded(_bootstrapped, {}, sys.argv[1:])


def _guarded(command: Callable[..., int], options: Mapping[str, Any], program: list[str]) -> int:
    _open_standard_descriptors()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the reactor has handlers of its own, Ctrl-C ends this without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            # They are the ranks', and mean nothing before there are any.
            signal.signal(number, lambda received, frame: None)
    environ = dict(os.environ)
    for name in ("FLODL_JOIN_TOKEN", "FLODL_INTERNAL_AGENT_JSON"):
        # Nothing that we start needs it from here on.
        os.environ.pop(name, None)
    try:
        return command(options, program, environ)
    except SettingError as error:
        _say(str(error))
        return PERMANENT


def _open_standard_descriptors() -> None:
    """A closed one would be taken by the next file or socket that is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


# The worker's commands


def _asking(options: Mapping[str, Any], environ: Mapping[str, str]) -> Asking | None:
    """The GPU tools, under way; none where ranks without GPUs are wanted, which must not wait for a driver."""
    from flodl_tw.agent.gpu_tools import Asking
    from flodl_tw.agent.settings import Texts

    return None if Texts(options, environ).get("nproc") is not None else Asking(environ)


def _choice(options: Mapping[str, Any], environ: Mapping[str, str], asking: Asking | None) -> Choice:
    from flodl_tw.agent.devices import Inventory, choose
    from flodl_tw.agent.settings import Texts

    texts = Texts(options, environ)
    nproc = texts.whole("nproc", 1, 256)
    inventory = Inventory(None, ()) if asking is None else asking.inventory()
    return choose(texts.get("devices"), nproc, inventory, environ)


def _join(options: Mapping[str, Any], program: list[str], environ: Mapping[str, str]) -> int:
    from flodl_tw.agent.gpu_tools import installed_nccl
    from flodl_tw.agent.settings import Texts, read_settings

    checks = Texts(options, environ).flag("check")
    if checks and not program:
        program = ["true"]
    asking = _asking(options, environ)
    settings, warnings = read_settings(options, program, environ, nccl=installed_nccl(sys.path))
    choice = _choice(options, environ, asking)
    for note in (*warnings, *choice.notes):
        _say(note)
    if checks:
        return _check(settings, choice)
    return _run_agent(settings, choice, environ)


def _bootstrapped(options: Mapping[str, Any], program: list[str], environ: Mapping[str, str]) -> int:
    from flodl_tw.agent.bootstrap import PROBE_VARIABLE, read_bootstrap
    from flodl_tw.agent.devices import numbered
    from flodl_tw.agent.gpu_tools import Asking, installed_nccl
    from flodl_tw.agent.settings import BOOTSTRAP_VARIABLE, find_program, read_settings

    if BOOTSTRAP_VARIABLE not in environ:
        if environ.get(PROBE_VARIABLE):
            _become(find_program(program), environ)
        raise SettingError(
            BOOTSTRAP_VARIABLE, "", "it is not set", "start this by fdl join --bin, or use flodl-tw join"
        )
    orders = read_bootstrap(environ[BOOTSTRAP_VARIABLE])
    asking = _asking({}, environ)
    settings, warnings = read_settings(
        orders.options, program, environ, nccl=installed_nccl(sys.path), token=orders.token
    )
    if orders.local_devices is None:
        choice = _choice({}, environ, asking)
    else:
        choice = numbered(orders.local_devices, (asking or Asking(environ)).inventory())
    for note in (*warnings, *choice.notes):
        _say(note)
    return _run_agent(settings, choice, environ)


def _become(words: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Be the program from here on, with an ordinary start: without what is ours."""
    from flodl_tw.agent.settings import ENVIRONMENT_PREFIX
    from flodl_tw.state_folder import TOKEN_VARIABLE

    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores them, and that would pass on.
        signal.signal(number, signal.SIG_DFL)
    kept = {name: text for name, text in environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    kept.pop(TOKEN_VARIABLE, None)
    os.execve(words[0], words, kept)  # noqa: S606


@contextmanager
def _lean_imports() -> Iterator[None]:
    """Import Twisted as if there were no TLS, which it allows for: a quarter of an agent's memory and start is TLS."""
    absent = "OpenSSL" not in sys.modules
    if absent:
        sys.modules["OpenSSL"] = None  # type: ignore[assignment]
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if absent:
            del sys.modules["OpenSSL"]


def _run_agent(settings: AgentSettings, choice: Choice, environ: Mapping[str, str]) -> int:
    with _lean_imports():
        from flodl_tw.agent.main import Agents, run_reactor

        reactor = _reactor()
    agents = Agents(reactor, environ, settings.stop_grace)
    agents.add(settings, choice)

    async def main() -> int:
        return (await agents.run())[0].status

    return run_reactor(reactor, agents, main)


def _run(options: Mapping[str, Any], program: list[str], environ: Mapping[str, str]) -> int:
    from flodl_tw.standalone import own_environ, run_world

    environ = own_environ(environ)
    asking = _asking(options, environ)
    return run_world(_reactor(), options, program, environ, lambda: _choice(options, environ, asking))


def _reactor() -> Any:
    import time

    from twisted.internet import reactor

    clock: Any = reactor
    # Twisted's clock is wall time, and a step of it would stall every timer or fire them all.
    clock.seconds = time.monotonic
    return clock


# The operator's commands


def _controller(options: Mapping[str, Any], environ: Mapping[str, str]) -> Controller:
    from flodl_tw.agent.settings import Texts, given_token
    from flodl_tw.operate import Controller

    address = options.get("address") or f"127.0.0.1:{DEFAULT_PORT}"
    try:
        host, port = parse_endpoint(address)
    except ValueError as error:
        raise SettingError("HOST[:PORT]", repr(address), str(error), "name the controller") from None
    return Controller(host, port, given_token(Texts(options, environ), environ))


def _ask(question: Callable[[Any, Callable[[str], None]], Any]) -> int:
    """Run one conversation with a controller to its exit status."""
    from twisted.internet.defer import Deferred
    from twisted.python.failure import Failure

    from flodl_tw.operate import make_http

    reactor = _reactor()
    status = [1]
    unwritten: list[str] = []

    def say(line: str) -> None:
        try:
            print(line, flush=True)
        except UnicodeEncodeError:
            print(line.encode("ascii", "backslashreplace").decode(), flush=True)
        except BrokenPipeError:
            # Its reader has seen enough; what Python still holds of it goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
        except OSError as error:
            _say(f"standard output cannot be written: {error.strerror}")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            unwritten.append(line)

    def finished(result: Any) -> None:
        if isinstance(result, Failure):
            _say(f"this is a fault of the program itself, please report it: {result.getTraceback()}")
        else:
            status[0] = result
        reactor.stop()

    reactor.callWhenRunning(lambda: Deferred.fromCoroutine(question(make_http(reactor), say)).addBoth(finished))
    # Nothing here outlives a signal, so each does what it does to any program.
    reactor.run(installSignalHandlers=False)
    return 1 if unwritten else status[0]


def _check(settings: AgentSettings, choice: Choice) -> int:
    from flodl_tw.core.hello_json import hello_to_json
    from flodl_tw.operate import Controller, check

    controller = Controller(*settings.controller, settings.token)
    hello = hello_to_json(settings.hello(choice.devices, choice.libtorch), 4)
    return _ask(lambda http, say: check(http, controller, say, hello, complain=_say))


def _status(options: Mapping[str, Any], program: list[str], environ: Mapping[str, str]) -> int:
    from flodl_tw.agent.settings import Texts
    from flodl_tw.operate import status, watch

    texts = Texts(options, environ)
    # A state is for everybody to read, so a token is not even looked for.
    controller = _controller(options, {})
    as_json = texts.flag("json")
    if texts.flag("watch"):
        return _ask(lambda http, say: watch(http, controller, say, _reactor(), as_json=as_json, complain=_say))
    return _ask(lambda http, say: status(http, controller, say, as_json=as_json, complain=_say))


def _start(options: Mapping[str, Any], program: list[str], environ: Mapping[str, str]) -> int:
    from flodl_tw.operate import start

    controller = _controller(options, environ)
    return _ask(lambda http, say: start(http, controller, say, complain=_say))


def _abort(options: Mapping[str, Any], program: list[str], environ: Mapping[str, str]) -> int:
    from flodl_tw.agent.settings import Texts
    from flodl_tw.operate import abort

    controller = _controller(options, environ)
    reason = Texts(options, environ).get("reason")
    return _ask(lambda http, say: abort(http, controller, say, reason, complain=_say))
