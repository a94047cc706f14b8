"""The operator's commands, which ask a running controller: ``status``, ``start``, ``abort``, and ``join --check``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flodl_tw.cli.terminal import Printer, controller_of, make_reactor, run_to_end, say

if TYPE_CHECKING:
    from flodl_tw.agent.devices import Choice
    from flodl_tw.agent.settings import AgentSettings
    from flodl_tw.cli.operate import ControllerAddress


def _controller(options: Mapping[str, Any], environ: Mapping[str, str]) -> ControllerAddress:
    from flodl_tw.cli.operate import ControllerAddress
    from flodl_tw.options import OptionReader
    from flodl_tw.state_folder import given_token

    return ControllerAddress(*controller_of(options), given_token(OptionReader(options, environ))[0])


def _ask(question: Callable[[Any, Callable[[str], None]], Any]) -> int:
    """Run one conversation with a controller to its exit status."""
    from flodl_tw.cli.operate import make_http

    reactor = make_reactor()
    printer = Printer()
    # Nothing here outlives a signal, so each does what it does to any program.
    status = run_to_end(reactor, lambda: question(make_http(reactor), printer.show), handlers=False)
    return 1 if printer.failed else status


def check(settings: AgentSettings, choice: Choice) -> int:
    """``join --check``: whether the controller would admit this host."""
    from flodl_tw.cli import operate
    from flodl_tw.web.hello_json import hello_to_json

    controller = operate.ControllerAddress(*settings.controller, settings.token)
    hello = hello_to_json(settings.hello(choice.devices, choice.libtorch), 4)
    return _ask(lambda http, show: operate.check(http, controller, show, hello, complain=say))


def status(options: Mapping[str, Any], program: list[str], environ: Mapping[str, str]) -> int:
    """``status``, once or with ``--watch``."""
    from flodl_tw.cli import operate
    from flodl_tw.options import OptionReader

    texts = OptionReader(options, environ)
    # A state is for everybody to read, so a token is not even looked for.
    controller = _controller(options, {})
    as_json = texts.flag("json")
    if texts.flag("watch"):
        clock = make_reactor()
        return _ask(lambda http, show: operate.watch(http, controller, show, clock, as_json=as_json, complain=say))
    return _ask(lambda http, show: operate.status(http, controller, show, as_json=as_json, complain=say))


def start(options: Mapping[str, Any], program: list[str], environ: Mapping[str, str]) -> int:
    """``start``: the operator's."""
    from flodl_tw.cli import operate

    controller = _controller(options, environ)
    return _ask(lambda http, show: operate.start(http, controller, show, complain=say))


def abort(options: Mapping[str, Any], program: list[str], environ: Mapping[str, str]) -> int:
    """``abort``, with a reason or without."""
    from flodl_tw.cli import operate
    from flodl_tw.options import OptionReader

    controller = _controller(options, environ)
    reason = OptionReader(options, environ).get("reason")
    return _ask(lambda http, show: operate.abort(http, controller, show, reason, complain=say))
