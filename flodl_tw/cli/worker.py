"""The worker's commands: ``join``, ``run``, and what ``flodl-tw-agent`` does."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from flodl_tw.cli.terminal import make_reactor, run_to_end, say
from flodl_tw.core.errors import SettingError

if TYPE_CHECKING:
    from flodl_tw.agent.devices import Choice
    from flodl_tw.agent.gpu_probe import Probe
    from flodl_tw.agent.settings import AgentSettings
    from flodl_tw.fdl.join_block import JoinFile
    from flodl_tw.options import OptionReader


def _probe(texts: OptionReader, environ: Mapping[str, str]) -> Probe | None:
    """The GPU tools, under way; none where ranks without GPUs are wanted, which must not wait for a driver."""
    from flodl_tw.agent.gpu_probe import Probe

    return None if texts.get("nproc") is not None and texts.get("devices") is None else Probe(environ)


def _choice(texts: OptionReader, environ: Mapping[str, str], probe: Probe | None) -> Choice:
    from flodl_tw.agent.devices import choose, without_gpus
    from flodl_tw.agent.gpu_view import divided

    nproc = texts.whole("nproc", 1, 256, None)
    # A file's devices are what is offered where nothing else says more.
    if probe is None or (nproc is not None and texts.by_file("devices")):
        return without_gpus(nproc or 1)
    choice = choose(texts.get("devices"), probe.inventory(say), environ, where=texts.source("devices"))
    return choice if nproc is None else replace(choice, devices=divided(choice.devices, nproc))


def _join_file(texts: OptionReader) -> JoinFile | None:
    """What the file of ``--fdl-yml`` says; YAML is imported for it alone."""
    path = texts.get("fdl-yml")
    if path is None:
        return None
    from flodl_tw.fdl.join_block import read_join_file

    return read_join_file(path, texts.source("fdl-yml"))


def join(options: Mapping[str, object], program: list[str], environ: Mapping[str, str]) -> int:
    """``join``, or with ``--check`` the question alone."""
    from flodl_tw.agent.gpu_probe import installed_nccl
    from flodl_tw.agent.settings import read_agent_settings
    from flodl_tw.options import OptionReader

    texts = OptionReader(options, environ)
    probe = _probe(texts, environ)
    file = _join_file(texts)
    texts = texts.with_file(file.texts) if file else texts
    checks = texts.flag("check")
    if checks and not program:
        program = ["true"]
    notes: list[str] = []
    if file is not None:
        program, notes = file.command(program)
        notes = [*file.notes, *notes]
    settings, warnings = read_agent_settings(texts, program, nccl=installed_nccl(sys.path), file=file)
    choice = _choice(texts, environ, probe)
    for note in (*notes, *warnings, *choice.notes):
        say(note)
    if checks:
        from flodl_tw.cli.operator import check

        return check(settings, choice)
    return _run_agent(settings, choice, environ)


def bootstrapped(options: Mapping[str, object], program: list[str], environ: Mapping[str, str]) -> int:
    """``flodl-tw-agent``: a join as a launcher has ordered it."""
    from flodl_tw.agent.devices import numbered
    from flodl_tw.agent.gpu_probe import Probe, installed_nccl
    from flodl_tw.agent.settings import BOOTSTRAP_VARIABLE, find_program, read_agent_settings
    from flodl_tw.fdl.launcher import PROBE_VARIABLE, read_bootstrap
    from flodl_tw.options import OptionReader, variable

    bootstrap = variable(environ, BOOTSTRAP_VARIABLE)
    if bootstrap is None:
        if variable(environ, PROBE_VARIABLE):
            _become(find_program(program), environ)
        raise SettingError(
            BOOTSTRAP_VARIABLE, "", "it is not set", "start this by fdl join --bin, or use flodl-tw join"
        )
    orders = read_bootstrap(bootstrap)
    texts = OptionReader(orders.options, environ)
    probe = _probe(texts, environ)
    settings, warnings = read_agent_settings(
        texts, program, nccl=installed_nccl(sys.path), token=orders.token, flodl=True
    )
    if orders.local_devices is None:
        choice = _choice(texts, environ, probe)
    else:
        choice = numbered(orders.local_devices, (probe or Probe(environ)).inventory(say))
    for note in (*warnings, *choice.notes):
        say(note)
    return _run_agent(settings, choice, environ)


def _become(words: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Be the program from here on, with an ordinary start: without what is ours."""
    from flodl_tw.core.tokens import TOKEN_VARIABLE
    from flodl_tw.options import ENVIRONMENT_PREFIX

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
        from flodl_tw.agent.process import SIGNALS, Agents

        reactor = make_reactor()
    agents = Agents(reactor, environ, settings.stop_grace)
    agents.add(settings, choice)

    async def main() -> int:
        return (await agents.run())[0].status

    agents.show_log("warn")
    status = run_to_end(reactor, main, signalled=agents.signalled, signals=SIGNALS, tell=agents.say)
    agents.close()
    return status


def run(options: Mapping[str, object], program: list[str], environ: Mapping[str, str]) -> int:
    """``run``: a whole world on this machine."""
    from flodl_tw.cli.local_world import own_environ, run_world
    from flodl_tw.options import OptionReader

    environ = own_environ(environ)
    texts = OptionReader(options, environ)
    probe = _probe(texts, environ)
    return run_world(make_reactor(), options, program, environ, lambda: _choice(texts, environ, probe))
