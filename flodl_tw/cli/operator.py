"""What an operator asks of a running controller: ``start``, ``abort``, and ``join --check``.

Each conversation prints its answer through ``say`` and gives the exit status;
an AnswerError is what keeps it from one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from flodl_tw.cli import terminal
from flodl_tw.cli.client import MAX_CHARS, REFUSED, AnswerError, ControllerClient, make_client
from flodl_tw.core.fields import Fields, ShapeError, decode_object
from flodl_tw.core.log_text import printable
from flodl_tw.core.phrases import counted, rank_list
from flodl_tw.options import OptionReader
from flodl_tw.state_folder import given_token
from flodl_tw.web.hello_json import hello_to_json

if TYPE_CHECKING:
    from flodl_tw.agent.devices import Choice
    from flodl_tw.agent.settings import AgentSettings

OK: Final = 0
REFUSED_FOR_GOOD: Final = 2
"""Of ``check`` alone: no retry can fix it."""

Say = Callable[[str], object]
Conversation = Callable[[ControllerClient, Say], Awaitable[int]]


def start(options: Mapping[str, object], program: list[str], environ: Mapping[str, str]) -> int:
    """``start``: the operator's."""
    given = OptionReader(options, environ)
    return converse(terminal.controller_of(given), given_token(given, terminal.say)[0], send_start)


def abort(options: Mapping[str, object], program: list[str], environ: Mapping[str, str]) -> int:
    """``abort``, with a reason or without."""
    given = OptionReader(options, environ)
    send = partial(send_abort, reason=given.get("reason"))
    return converse(terminal.controller_of(given), given_token(given, terminal.say)[0], send)


def check(settings: AgentSettings, choice: Choice) -> int:
    """``join --check``: whether the controller would admit this host."""
    hello = hello_to_json(settings.hello(choice.devices, choice.libtorch), 4)
    return converse(settings.controller, settings.token, partial(ask_check, hello=hello))


def converse(controller: tuple[str, int], token: bytes | None, conversation: Conversation) -> int:
    """Run one conversation with a controller to its exit status."""
    reactor = terminal.make_reactor()
    client = make_client(reactor, *controller, token)
    printer = terminal.Printer()
    # Nothing here outlives a signal, so each does what it does to any program.
    ended = terminal.run_to_end(reactor, lambda: told(client, conversation, printer.show, terminal.say))
    return 1 if printer.failed else ended


async def told(client: ControllerClient, conversation: Conversation, say: Say, complain: Say) -> int:
    """The conversation's status; what keeps it from its answer is said."""
    try:
        return await conversation(client, say)
    except ShapeError as error:
        complain(str(client.foreign(str(error))))
        return REFUSED
    except AnswerError as error:
        complain(str(error))
        return error.status


async def send_start(client: ControllerClient, say: Say) -> int:
    """Close the window now, with those that are in."""
    fields = await _approved(client, "/start")
    joined, quorum = fields.whole("joined_ranks"), fields.whole("min_rank_start")
    say(f"the run at {client.shown} is started: {counted(joined, 'rank')} joined, quorum {quorum}")
    return OK


async def send_abort(client: ControllerClient, say: Say, *, reason: str | None) -> int:
    """End the run as failed, on every host; without a reason the controller has words of its own."""
    fields = await _approved(client, "/abort", None if reason is None else {"reason": reason})
    say(f"the run at {client.shown} is aborted: {counted(fields.whole('joined_hosts'), 'host')} told")
    return OK


async def ask_check(client: ControllerClient, say: Say, *, hello: dict[str, object]) -> int:
    """Ask whether the controller would admit a host that says ``hello``; nothing changes."""
    # A hello with this token, or of this shape, would fare no better later.
    verdict = await _approved(client, "/check", hello, for_good=(400, 403))
    if verdict.flag("admitted"):
        say(f"{client.shown} would admit this host: {rank_list(verdict.wholes('ranks'))}")
        return OK
    retry = verdict.flag("retry")
    hope = "a later attempt may be admitted" if retry else "no retry can fix it"
    say(f"{client.shown} would refuse this host: {printable(verdict.text('reason'), MAX_CHARS)} ({hope})")
    return REFUSED if retry else REFUSED_FOR_GOOD


async def _approved(client: ControllerClient, path: str, body: object = None, for_good: tuple[int, ...] = ()) -> Fields:
    """The answer to a POST, if the controller says yes; else AnswerError, final for an HTTP status of ``for_good``."""
    code, answer = await client.ask("POST", path, body)
    if code == 404:
        older = "it is an older controller, or flodl's own launcher"
        raise AnswerError(f"{client.shown} does not know POST {path} (status 404): {older}")
    fields = Fields(decode_object(answer, f"its answer (status {code})"), "its answer's ")
    if code == 200:
        return fields
    hint = "; the token is given with --token-file FILE or FLODL_JOIN_TOKEN" if code == 403 else ""
    text = f"{client.shown} refuses: {printable(fields.text('error'), MAX_CHARS)}{hint}"
    raise AnswerError(text, REFUSED_FOR_GOOD if code in for_good else REFUSED)
