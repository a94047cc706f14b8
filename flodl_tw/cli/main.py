"""The ``flodl-tw`` command: join a world from a worker, run one on this machine, and look after one from anywhere.

Options are parsed here to texts; what they mean is for ``agent/settings.py``
and for the module that does the command.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Final, NoReturn

from flodl_tw import __version__
from flodl_tw.cli.terminal import PERMANENT, TRANSIENT, end_as_init, say
from flodl_tw.core.addresses import DEFAULT_PORT
from flodl_tw.core.descriptors import open_standard_descriptors
from flodl_tw.core.errors import NotYetError, SettingError
from flodl_tw.core.tokens import TOKEN_VARIABLE, refuse_argument, take_secret, without_tokens

Command = Callable[[Mapping[str, object], list[str], Mapping[str, str]], int]
"""Does what options, program and environment say, and gives the exit status."""
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
    ("fdl-yml", "FILE", "fdl.yml whose join: block has what neither options nor environment say"),
)
DEVICE_OPTIONS: Final = (
    ("devices", "LIST", "devices to offer: all, positions such as 0,2, or GPU-… and MIG-… names [default: all]"),
    ("nproc", "N", "N ranks without GPUs instead; with --devices, N ranks that have its GPUs between them"),
)
VIEW_OPTION: Final = ("virtual-local-rank", "each rank sees one GPU alone, as device 0, and LOCAL_RANK is 0")
RANK_OPTIONS: Final = (
    (
        "master-addr",
        "WHO",
        "what MASTER_ADDR is: controller, or rank0, with torch's own store there [default: controller]",
    ),
    ("stop-grace", "SECS", "from SIGTERM to SIGKILL, when ranks are to end [default: 30]"),
    ("log-dir", "FOLDER", "where each rank's output goes, too: rank.NNN.out and rank.NNN.err"),
)
TOKEN_OPTION: Final = HOST_OPTIONS[1]
REHEARSE_OPTIONS: Final = (
    ("hosts", "N", "simulated hosts [default: 4]"),
    ("gpus", "N", "GPUs that each of them claims [default: 8]"),
    ("bad", "KINDS", "one more host of each kind, to be refused: nccl, vendor, dataset, duplicate, or a comma list"),
    ("secs", "N", "how long the ranks train once the world has formed [default: 60]"),
)
MODULES: Final = {
    **dict.fromkeys(("join", "run"), "worker"),
    **dict.fromkeys(("start", "abort"), "operator"),
    **dict.fromkeys(("status", "wait"), "status"),
    **{name: name for name in ("rehearse", "token")},
}
"""Where each command is a function of its name; imported when it is asked for: an agent needs no HTTP client."""
WITH_PROGRAM: Final = ("join", "run")


class Parser(argparse.ArgumentParser):
    """argparse, with one line for a wrong command, and status 2."""

    def error(self, message: str) -> NoReturn:
        # What was mistyped may be the token.
        say(f"{without_tokens(message)}; {self.prog} --help lists the options")
        raise SystemExit(PERMANENT)


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
    join = _command(commands, "join", "join this host, and run a rank of PROGRAM on each device")
    join.usage = "flodl-tw join HOST[:PORT] [options] -- PROGRAM [ARGS...]"
    where = f"the controller [port: {DEFAULT_PORT}]; may be left out where --fdl-yml tells it"
    join.add_argument("controller", metavar="HOST[:PORT]", nargs="?", help=where)
    _add(join, (*DEVICE_OPTIONS, *HOST_OPTIONS, *RANK_OPTIONS))
    join.add_argument(f"--{VIEW_OPTION[0]}", action="store_true", default=None, help=VIEW_OPTION[1])
    join.add_argument("--persist", action="store_true", default=None, help="dial again after each run or failure")
    join.add_argument("--check", action="store_true", default=None, help="ask whether this host would be admitted")
    run = _command(commands, "run", "controller and agents in one: a whole world on this machine")
    run.usage = "flodl-tw run [-n N] [--hosts H] [options] -- PROGRAM [ARGS...]"
    run.add_argument(
        "-n", "--nproc", dest="nproc", metavar="N", help="N ranks in all, which see what GPUs the environment leaves"
    )
    run.add_argument("--hosts", metavar="H", help="as how many hosts [default: 1]")
    run.add_argument("--stdin", metavar="WHAT", help="rank 0's input: terminal (ours, if it is one) or none [terminal]")
    _add(run, (DEVICE_OPTIONS[0], *RANK_OPTIONS))
    run.add_argument(f"--{VIEW_OPTION[0]}", action="store_true", default=None, help=VIEW_OPTION[1])
    for name, text in (
        ("status", "what the controller says of its run"),
        ("wait", "wait for the end of the run: status 0 if it is done, 1 if it failed"),
        ("start", "close the join window: the operator's start"),
        ("abort", "end the run, on every host"),
        ("rehearse", "simulated hosts without GPUs, to try what watches a controller"),
    ):
        sub = _command(commands, name, text)
        sub.add_argument("address", metavar="HOST[:PORT]", nargs="?", help=f"[default: 127.0.0.1:{DEFAULT_PORT}]")
        if name == "status":
            sub.add_argument("--json", action="store_true", default=None, help="state.json as it is")
            sub.add_argument("--watch", action="store_true", default=None, help="again whenever it changes")
        elif name != "wait":
            _add(sub, (TOKEN_OPTION,))
        if name == "rehearse":
            _add(sub, REHEARSE_OPTIONS)
        if name == "abort":
            sub.add_argument("--reason", metavar="TEXT", help="what every host and log is told")
    made = _command(commands, "token", "make a file with a new token, for a controller and its workers")
    made.add_argument("file", metavar="FILE", nargs="?", help="[default: run.token]")
    return parser


def _command(commands: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    return commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """``flodl-tw``; gives the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return _guarded(lambda environ: _run(words, environ))


def agent_main() -> int:
    """``flodl-tw-agent PROGRAM ARGS…``: an agent that a launcher such as ``fdl join --bin`` has started."""
    from flodl_tw.cli import worker

    return _guarded(lambda environ: worker.bootstrapped({}, sys.argv[1:], environ))


def _run(words: list[str], environ: Mapping[str, str]) -> int:
    split = words.index("--") if "--" in words else len(words)
    ours, program = words[:split], words[split + 1 :]
    refuse_argument(ours)
    parser = make_parser()
    parsed, unknown = parser.parse_known_args(ours)
    # From here on it speaks for the command.
    parser.prog = f"flodl-tw {parsed.command}"
    if unknown:
        lost = parsed.command in WITH_PROGRAM and split == len(words) and not unknown[0].startswith("-")
        hint = " (PROGRAM and its arguments stand after --)" if lost else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if program and parsed.command not in WITH_PROGRAM:
        parser.error(f"{parsed.command} runs no program, so nothing may stand after --")
    options = {name.replace("_", "-"): value for name, value in vars(parsed).items()}
    module = import_module(f"flodl_tw.cli.{MODULES[parsed.command]}")
    command: Command = getattr(module, parsed.command)
    return command(options, program, environ)


def _guarded(command: Callable[[Mapping[str, str]], int]) -> int:
    open_standard_descriptors()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the reactor has handlers of its own, Ctrl-C ends this without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_as_init()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            # They are the ranks', and mean nothing before there are any.
            signal.signal(number, lambda received, frame: None)
    environ = dict(os.environ)
    for name in (TOKEN_VARIABLE, "FLODL_INTERNAL_AGENT_JSON"):
        # Nothing that we start needs it from here on.
        take_secret(name)
    try:
        return command(environ)
    except SettingError as error:
        say(str(error))
        return PERMANENT
    except NotYetError as error:
        say(str(error))
        return TRANSIENT
