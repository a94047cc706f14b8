"""``rehearse``: hosts that are none, against a running controller."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from flodl_tw.cli.terminal import Printer, controller_of, make_reactor, run_to_end, say
from flodl_tw.core.errors import SettingError

if TYPE_CHECKING:
    from flodl_tw.cli.rehearsed import Bad, Plan
    from flodl_tw.options import OptionReader

MOST_HOSTS: Final = 4096
MOST_GPUS: Final = 256
MOST_SECS: Final = 7 * 24 * 3600
SPARE_DESCRIPTORS: Final = 64
"""What this process needs beside a connection a host."""


def rehearse(options: Mapping[str, Any], program: list[str], environ: Mapping[str, str]) -> int:
    """Join simulated hosts to a controller, train for a while, and tell whether all went as it should."""
    from flodl_tw.agent.dial import ATTEMPTS, Dialer
    from flodl_tw.cli.rehearsal import Rehearsal
    from flodl_tw.limits import Limits, scaled

    plan = read_plan(options, environ)
    reactor = make_reactor()
    dialer = Dialer(
        reactor,
        *plan.controller,
        attempts=scaled(ATTEMPTS, plan.scale),
        connect_secs=Limits.at(plan.scale).connect,
        say=once(say),
    )
    printer = Printer()
    rehearsal = Rehearsal(reactor, plan, dialer.dial, printer.show, say)
    reactor.callWhenRunning(_catch_signals, reactor, rehearsal.stop)
    status = run_to_end(reactor, rehearsal.run, handlers=True)
    return 1 if printer.failed else status


def read_plan(options: Mapping[str, Any], environ: Mapping[str, str]) -> Plan:
    """What is to be rehearsed; SettingError for the first option that cannot be used."""
    from flodl_tw.cli.rehearsed import GPUS, HOSTS, SECS, Plan
    from flodl_tw.limits import SCALE_VARIABLE, parse_scale
    from flodl_tw.options import OptionReader
    from flodl_tw.state_folder import given_token

    texts = OptionReader(options, environ)
    controller = controller_of(texts)
    scale, warning = parse_scale(texts.variable(SCALE_VARIABLE))
    if warning is not None:
        say(warning)
    plan = Plan(
        controller,
        hosts=texts.whole("hosts", 1, MOST_HOSTS, HOSTS),
        gpus=texts.whole("gpus", 1, MOST_GPUS, GPUS),
        bad=_kinds(texts),
        secs=texts.decimal("secs", MOST_SECS, SECS),
        token=given_token(texts)[0],
        scale=scale,
    )
    _check_descriptors(texts, plan)
    return plan


def _kinds(texts: OptionReader) -> tuple[Bad, ...]:
    from flodl_tw.cli.rehearsed import Bad

    known = {bad.kind: bad for bad in Bad}
    words = [word.strip() for word in (texts.get("bad") or "").split(",")]
    if words == [""]:
        return ()
    if not set(words) <= set(known):
        raise texts.wrong("bad", f"the kinds are {', '.join(known)}", "give some of them, with commas between")
    return tuple(known[word] for word in dict.fromkeys(words))


def _check_descriptors(texts: OptionReader, plan: Plan) -> None:
    from flodl_tw import sockets

    most = sockets.raise_descriptor_limit() - SPARE_DESCRIPTORS
    if plan.hosts + len(plan.bad) > most:
        raise SettingError(
            texts.source("hosts"),
            plan.hosts,
            f"this process may open enough connections for {max(most, 0)}",
            "give fewer, or raise the limit with ulimit -n",
        )


def once(tell: Callable[[str], None]) -> Callable[[str], None]:
    """The same, but no line twice: many hosts meet with the same fault."""
    told: set[str] = set()

    def tell_once(line: str) -> None:
        if line not in told:
            told.add(line)
            tell(line)

    return tell_once


def _catch_signals(reactor: Any, stop: Callable[[str], None]) -> None:
    """Have ``stop`` called with the name of each SIGTERM and SIGINT.  It follows on the reactor's own handlers."""
    from flodl_tw.agent.outcome import signal_name
    from flodl_tw.agent.process import SAME_SECS
    from flodl_tw.agent.spawn import ENDING

    last: dict[int, float] = dict.fromkeys(ENDING, -SAME_SECS)

    def came(number: int) -> None:
        before, last[number] = last[number], reactor.seconds()
        if last[number] >= before + SAME_SECS:
            stop(signal_name(number))

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, frame: reactor.callFromThread(came, received))
