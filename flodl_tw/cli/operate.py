"""What an operator asks of a controller: its state, its start, its end, and whether it would take a host.

Each command prints through ``say``, what keeps it from its answer through
``complain`` where that is given, and gives the exit status.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

from treq.client import HTTPClient
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from flodl_tw.cli.client import MAX_CHARS, Answer, ControllerAddress, ForeignAnswerError, NoAnswerError, ask, foreign
from flodl_tw.cli.http_client import make_http
from flodl_tw.cli.status_text import (
    OPEN_PHASES,
    RunState,
    parse_state,
    spans,
    state_lines,
    store_lines,
    why_lines,
)
from flodl_tw.core.fields import Fields, ShapeError
from flodl_tw.core.log_text import counted, printable, shortened

__all__ = ["ControllerAddress", "abort", "check", "make_http", "start", "status", "watch"]

OK: Final = 0
REFUSED: Final = 1
"""Refused, or nothing answers."""
REFUSED_FOR_GOOD: Final = 2
"""Of ``check`` alone: no retry can fix it."""
MAX_STATE: Final = 64 * 1024 * 1024
"""Bytes of a state that are read."""
MISSES: Final = 3
"""Questions in a row without an answer before a watched controller is gone."""
AFTER_RUN_HINT: Final = "it ends with its run, unless it has --after-run hold or rearm: its log has the run's end"

Say = Callable[[str], object]


class RefusedError(Exception):
    """The controller says no, with an HTTP status; the text is for people."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


async def _told(command: Awaitable[int], controller: ControllerAddress, say: Say) -> int:
    """The command's status; what keeps it from its answer is said."""
    try:
        return await command
    except ShapeError as error:
        say(str(foreign(controller, str(error))))
        return REFUSED
    except (NoAnswerError, ForeignAnswerError, RefusedError) as error:
        say(str(error))
        return REFUSED


async def status(
    http: HTTPClient, controller: ControllerAddress, say: Say, *, as_json: bool, complain: Say | None = None
) -> int:
    """Print the state, for people or as it came."""
    return await _told(_status(http, controller, say, as_json), controller, complain or say)


async def _status(http: HTTPClient, controller: ControllerAddress, say: Say, as_json: bool) -> int:
    answer, state = await _ask_state(http, controller)
    _show(answer, state, say, as_json)
    if not as_json:
        for line in await _more(http, controller, state):
            say(line)
    return OK


async def _more(http: HTTPClient, controller: ControllerAddress, state: RunState) -> list[str]:
    """Why the run failed and what its store waits for, where a controller of ours tells."""
    lines: list[str] = []
    if state.phase in OPEN_PHASES:
        return lines
    for path, read in (("/run.json", why_lines), ("/store.json", store_lines)):
        try:
            answer = await ask(http, controller, "GET", path, limit=MAX_STATE)
        except NoAnswerError:
            # What was asked for has been told; a controller may go once its run is over.
            return lines
        if answer.code == 200:
            lines += read(answer.object())
    return lines


async def watch(
    http: HTTPClient,
    controller: ControllerAddress,
    say: Say,
    clock: IReactorTime,
    *,
    as_json: bool,
    every: float = 2.0,
    complain: Say | None = None,
) -> int:
    """Print the state again whenever it has changed, until the run is over or the controller has gone.

    A countdown that counts is no change; one that has run out is.
    """
    return await _told(_watch(http, controller, say, clock, as_json, every), controller, complain or say)


async def _watch(
    http: HTTPClient, controller: ControllerAddress, say: Say, clock: IReactorTime, as_json: bool, every: float
) -> int:
    last: RunState | None = None
    misses = 0
    while True:
        try:
            answer, state = await _ask_state(http, controller)
        except NoAnswerError as error:
            misses += 1
            if last is None:
                raise
            if misses == MISSES:
                gone = f"the controller has gone, its run was {_shown(last.phase)}"
                raise NoAnswerError(f"{gone}: {error}; {AFTER_RUN_HINT}") from None
        else:
            misses = 0
            if last is None or _still(state) != _still(last):
                if last is not None and not as_json:
                    say("")
                _show(answer, state, say, as_json)
            last = state
            if state.is_over:
                for line in [] if as_json else await _more(http, controller, state):
                    say(line)
                return OK
        await deferLater(clock, every)


async def start(http: HTTPClient, controller: ControllerAddress, say: Say, *, complain: Say | None = None) -> int:
    """Close the window now, with those that are in."""
    return await _told(_start(http, controller, say), controller, complain or say)


async def _start(http: HTTPClient, controller: ControllerAddress, say: Say) -> int:
    answer = _approved(await ask(http, controller, "POST", "/start"), "POST /start")
    _require(answer, "armed")
    fields = _fields(answer)
    joined, quorum = fields.whole("joined_ranks"), fields.whole("min_rank_start")
    say(f"the run at {controller.shown} is started: {counted(joined, 'rank')} joined, quorum {quorum}")
    return OK


async def abort(
    http: HTTPClient, controller: ControllerAddress, say: Say, reason: str | None, *, complain: Say | None = None
) -> int:
    """End the run as failed, on every host."""
    return await _told(_abort(http, controller, say, reason), controller, complain or say)


async def _abort(http: HTTPClient, controller: ControllerAddress, say: Say, reason: str | None) -> int:
    # Without a reason the controller has words of its own.
    body = None if reason is None else {"reason": reason}
    answer = _approved(await ask(http, controller, "POST", "/abort", body=body), "POST /abort")
    _require(answer, "aborted")
    hosts = _fields(answer).whole("joined_hosts")
    say(f"the run at {controller.shown} is aborted: {counted(hosts, 'host')} told")
    return OK


async def check(
    http: HTTPClient, controller: ControllerAddress, say: Say, hello: dict[str, Any], *, complain: Say | None = None
) -> int:
    """Ask whether the controller would admit a host that says ``hello``; nothing changes."""
    return await _told(_check(http, controller, say, hello, complain), controller, complain or say)


async def _check(
    http: HTTPClient, controller: ControllerAddress, say: Say, hello: dict[str, Any], complain: Say | None
) -> int:
    try:
        answer = _approved(await ask(http, controller, "POST", "/check", body=hello), "POST /check")
    except RefusedError as error:
        if error.code not in (400, 403):
            raise
        # A hello with this token, or of this shape, would fare no better later.
        (complain or say)(str(error))
        return REFUSED_FOR_GOOD
    verdict = answer.object()
    admitted, retry, reason = verdict.get("admitted"), verdict.get("retry"), verdict.get("reason")
    if admitted is True:
        say(f"{controller.shown} would admit this host: {_ranks(_fields(answer).wholes('ranks'))}")
        return OK
    if admitted is not False or not isinstance(retry, bool) or not isinstance(reason, str):
        raise foreign(controller, "its verdict is neither an admission nor a refusal with its reason")
    hope = "a later attempt may be admitted" if retry else "no retry can fix it"
    say(f"{controller.shown} would refuse this host: {_shown(reason)} ({hope})")
    return REFUSED if retry else REFUSED_FOR_GOOD


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"


async def _ask_state(http: HTTPClient, controller: ControllerAddress) -> tuple[Answer, RunState]:
    answer = await ask(http, controller, "GET", "/state.json", limit=MAX_STATE)
    if answer.code != 200:
        raise foreign(controller, f"GET /state.json gets status {answer.code}")
    return answer, parse_state(answer.object())


def _show(answer: Answer, state: RunState, say: Say, as_json: bool) -> None:
    for line in [answer.text()] if as_json else state_lines(answer.controller.shown, state):
        say(line)


def _still(state: RunState) -> RunState:
    """The state without what time alone changes."""
    return replace(
        state,
        window_remaining_secs=None if state.window_remaining_secs is None else 0,
        cap_remaining_secs=None if state.cap_remaining_secs is None else 0,
    )


def _approved(answer: Answer, endpoint: str) -> Answer:
    """The answer, if the controller says yes; else RefusedError or ForeignAnswerError."""
    if answer.code == 200:
        return answer
    controller = answer.controller
    if answer.code == 404:
        raise RefusedError(
            f"{controller.shown} does not know {endpoint} (status 404): it is an older controller, "
            "or flodl's own launcher",
            answer.code,
        )
    error = answer.object().get("error")
    if not isinstance(error, str):
        raise foreign(controller, f"status {answer.code} without a reason")
    hint = ""
    if answer.code == 403 and (controller.token is None or "needs the token" in error):
        given = "give the token with" if controller.token is None else "compare the token in"
        hint = f"; {given} --token-file FILE or FLODL_JOIN_TOKEN"
    raise RefusedError(f"{controller.shown} refuses: {_shown(error)}{hint}", answer.code)


def _shown(text: str) -> str:
    return shortened(printable(text), MAX_CHARS)


def _require(answer: Answer, key: str) -> None:
    """Fail unless the answer says that it is done."""
    if answer.object().get(key) is not True:
        raise foreign(answer.controller, f"status 200, and {key} is not true")


def _fields(answer: Answer) -> Fields:
    return Fields(answer.object(), "its answer's ")
