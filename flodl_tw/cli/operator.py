"""What an operator asks of a running controller: ``status``, ``start``, ``abort``, and ``join --check``.

Each conversation prints its answer through ``say`` and gives the exit status;
an AnswerError is what keeps it from one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from twisted.internet.task import deferLater

from flodl_tw.cli import terminal
from flodl_tw.cli.client import (
    MAX_CHARS,
    MAX_STATE,
    REFUSED,
    Answer,
    AnswerError,
    ControllerAddress,
    ControllerClient,
    NoAnswerError,
    make_client,
)
from flodl_tw.cli.status_text import OPEN_PHASES, RunState, parse_state, state_lines, store_lines, why_lines
from flodl_tw.core.fields import Fields, ShapeError
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
MISSES: Final = 3
"""Questions in a row without an answer before a watched controller is gone."""
WATCH_SECS: Final = 2.0
"""Between two questions of a watch."""
AFTER_RUN_HINT: Final = "it ends with its run, unless it has --after-run hold or rearm: its log has the run's end"

Say = Callable[[str], object]


class RefusedError(AnswerError):
    """The controller says no, with an HTTP status; the text is for people."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


# The commands


def status(options: Mapping[str, object], program: list[str], environ: Mapping[str, str]) -> int:
    """``status``, once or with ``--watch``."""
    given = OptionReader(options, environ)
    # A state is for everybody to read, so a token is not even looked for.
    controller = ControllerAddress(*terminal.controller_of(given))
    as_json = given.flag("json")
    tell = watch if given.flag("watch") else show_status
    return _converse(controller, lambda client, say: tell(client, say, as_json=as_json))


def start(options: Mapping[str, object], program: list[str], environ: Mapping[str, str]) -> int:
    """``start``: the operator's."""
    return _converse(_controller(OptionReader(options, environ)), send_start)


def abort(options: Mapping[str, object], program: list[str], environ: Mapping[str, str]) -> int:
    """``abort``, with a reason or without."""
    given = OptionReader(options, environ)
    reason = given.get("reason")
    return _converse(_controller(given), lambda client, say: send_abort(client, say, reason))


def check(settings: AgentSettings, choice: Choice) -> int:
    """``join --check``: whether the controller would admit this host."""
    controller = ControllerAddress(*settings.controller, settings.token)
    hello = hello_to_json(settings.hello(choice.devices, choice.libtorch), 4)
    return _converse(controller, lambda client, say: ask_check(client, say, hello))


def _controller(given: OptionReader) -> ControllerAddress:
    return ControllerAddress(*terminal.controller_of(given), given_token(given)[0])


def _converse(controller: ControllerAddress, conversation: Callable[[ControllerClient, Say], Awaitable[int]]) -> int:
    """Run one conversation with a controller to its exit status."""
    reactor = terminal.make_reactor()
    client = make_client(reactor, controller)
    printer = terminal.Printer()
    # Nothing here outlives a signal, so each does what it does to any program.
    ended = terminal.run_to_end(reactor, lambda: told(conversation(client, printer.show), controller, terminal.say))
    return 1 if printer.failed else ended


async def told(conversation: Awaitable[int], controller: ControllerAddress, complain: Say) -> int:
    """The conversation's status; what keeps it from its answer is said."""
    try:
        return await conversation
    except ShapeError as error:
        complain(str(controller.foreign(str(error))))
        return REFUSED
    except AnswerError as error:
        complain(str(error))
        return error.status


# The conversations


async def show_status(client: ControllerClient, say: Say, *, as_json: bool) -> int:
    """Print the state, for people or as it came."""
    answer, state = await _ask_state(client)
    _show(answer, state, say, as_json)
    if not as_json:
        await _show_more(client, state, say)
    return OK


async def watch(client: ControllerClient, say: Say, *, as_json: bool) -> int:
    """Print the state again whenever it has changed, until the run is over or the controller has gone.

    A countdown that counts is no change; one that has run out is.
    """
    last: RunState | None = None
    misses = 0
    while last is None or not last.is_over:
        if last is not None:
            await deferLater(client.clock, WATCH_SECS)
        try:
            answer, state = await _ask_state(client)
        except NoAnswerError as error:
            misses += 1
            if last is None:
                raise
            if misses == MISSES:
                gone = f"the controller has gone, its run was {printable(last.phase, MAX_CHARS)}"
                raise NoAnswerError(f"{gone}: {error}; {AFTER_RUN_HINT}") from None
            continue
        misses = 0
        if last is None or _still(state) != _still(last):
            if last is not None and not as_json:
                say("")
            _show(answer, state, say, as_json)
        last = state
    if not as_json:
        await _show_more(client, last, say)
    return OK


async def send_start(client: ControllerClient, say: Say) -> int:
    """Close the window now, with those that are in."""
    fields = await _done(client, "/start", "armed")
    joined, quorum = fields.whole("joined_ranks"), fields.whole("min_rank_start")
    say(f"the run at {client.controller.shown} is started: {counted(joined, 'rank')} joined, quorum {quorum}")
    return OK


async def send_abort(client: ControllerClient, say: Say, reason: str | None) -> int:
    """End the run as failed, on every host; without a reason the controller has words of its own."""
    fields = await _done(client, "/abort", "aborted", None if reason is None else {"reason": reason})
    say(f"the run at {client.controller.shown} is aborted: {counted(fields.whole('joined_hosts'), 'host')} told")
    return OK


async def ask_check(client: ControllerClient, say: Say, hello: dict[str, object]) -> int:
    """Ask whether the controller would admit a host that says ``hello``; nothing changes."""
    try:
        verdict = await _approved(client, "/check", hello)
    except RefusedError as error:
        if error.code in (400, 403):
            # A hello with this token, or of this shape, would fare no better later.
            error.status = REFUSED_FOR_GOOD
        raise
    where = client.controller.shown
    if verdict.flag("admitted"):
        ranks = verdict.wholes("ranks")
        say(f"{where} would admit this host: {rank_list(ranks)}")
        return OK
    if "retry" not in verdict:
        raise verdict.wrong("retry", "true or false")
    retry = verdict.flag("retry")
    hope = "a later attempt may be admitted" if retry else "no retry can fix it"
    say(f"{where} would refuse this host: {printable(verdict.text('reason'), MAX_CHARS)} ({hope})")
    return REFUSED if retry else REFUSED_FOR_GOOD


async def _ask_state(client: ControllerClient) -> tuple[Answer, RunState]:
    answer = await client.ask("GET", "/state.json", limit=MAX_STATE)
    if answer.code != 200:
        raise client.controller.foreign(f"GET /state.json gets status {answer.code}")
    return answer, parse_state(answer.object())


def _show(answer: Answer, state: RunState, say: Say, as_json: bool) -> None:
    for line in [answer.body.decode("utf-8")] if as_json else state_lines(answer.controller.shown, state):
        say(line)


async def _show_more(client: ControllerClient, state: RunState, say: Say) -> None:
    """Why the run failed and what its store waits for, where a controller of ours tells."""
    if state.phase in OPEN_PHASES:
        return
    for path, read in (("/run.json", why_lines), ("/store.json", store_lines)):
        try:
            answer = await client.ask("GET", path, limit=MAX_STATE)
        except NoAnswerError:
            # What was asked for has been told; a controller may go once its run is over.
            return
        for line in read(answer.object()) if answer.code == 200 else ():
            say(line)


def _still(state: RunState) -> RunState:
    """The state without what time alone changes."""
    return replace(
        state,
        window_remaining_secs=None if state.window_remaining_secs is None else 0,
        cap_remaining_secs=None if state.cap_remaining_secs is None else 0,
    )


async def _done(client: ControllerClient, path: str, key: str, body: object = None) -> Fields:
    """What the controller says of what it has done; its answer has ``key`` for it."""
    fields = await _approved(client, path, body)
    if not fields.flag(key):
        raise client.controller.foreign(f"status 200, and {key} is not true")
    return fields


async def _approved(client: ControllerClient, path: str, body: object = None) -> Fields:
    """The answer to a POST, if the controller says yes; else RefusedError or ForeignAnswerError."""
    answer = await client.ask("POST", path, body=body)
    controller = client.controller
    if answer.code == 404:
        older = "it is an older controller, or flodl's own launcher"
        raise RefusedError(f"{controller.shown} does not know POST {path} (status 404): {older}", 404)
    fields = Fields(answer.object(), "its answer's ")
    if answer.code == 200:
        return fields
    error = fields.text("error")
    hint = ""
    if answer.code == 403 and (controller.token is None or "needs the token" in error):
        given = "give the token with" if controller.token is None else "compare the token in"
        hint = f"; {given} --token-file FILE or FLODL_JOIN_TOKEN"
    raise RefusedError(f"{controller.shown} refuses: {printable(error, MAX_CHARS)}{hint}", answer.code)
