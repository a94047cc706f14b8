"""``status``, once or with ``--watch``, and ``wait``: one run of a controller, as it stands and as it ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import quote

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from flodl_tw.cli import terminal
from flodl_tw.cli.client import ANSWER_SECS, MAX_CHARS, REFUSED, AnswerError, ControllerClient, NoAnswerError
from flodl_tw.cli.operator import OK, Say, converse
from flodl_tw.cli.status_text import (
    OPEN_PHASES,
    OVER_PHASES,
    json_line,
    run_line,
    state_lines,
    still,
    store_lines,
    why_lines,
)
from flodl_tw.core.fields import Fields, decode_object
from flodl_tw.core.log_text import printable
from flodl_tw.options import OptionReader

MISSES: Final = 3
"""Questions in a row without an answer before a controller is gone."""
WATCH_SECS: Final = 2.0
"""Between two questions."""
HELD_SECS: Final = 30.0
"""What an answer may take that the controller holds until the run is over, which it does for 20 s at most."""
AFTER_RUN_HINT: Final = "it ends with its run, unless it has --after-run hold or rearm: its log has the run's end"


def status(options: Mapping[str, object], program: list[str], environ: Mapping[str, str]) -> int:
    """``status``, once or with ``--watch``."""
    given = OptionReader(options, environ)
    as_json = given.flag("json")
    show = partial(watch, as_json=as_json) if given.flag("watch") else partial(show_status, as_json=as_json)
    # A state is for everybody to read, so a token is not even looked for.
    return converse(terminal.controller_of(given), None, show)


def wait(options: Mapping[str, object], program: list[str], environ: Mapping[str, str]) -> int:
    """``wait``: nothing is said before the run is over."""
    return converse(terminal.controller_of(OptionReader(options, environ)), None, wait_for_end)


async def show_status(client: ControllerClient, say: Say, *, as_json: bool) -> int:
    """Print the state, and what else the controller tells of the run."""
    body, state = await ask_state(client)
    await _show(client, say, body, state, as_json=as_json, whole=True)
    return OK


async def watch(client: ControllerClient, say: Say, *, as_json: bool) -> int:
    """Print the state whenever it has changed, until the run is over; status 0 if it is done, 1 if it failed.

    A countdown that counts is no change; one that has run out is.  The run is
    the one that is current at first, whatever the controller does next.
    """
    run = await follow(client)
    ending = Deferred.fromCoroutine(run.end())
    last: Fields | None = None
    try:
        while not ending.called:
            try:
                body, state = await ask_state(client)
                same = (await ask_run(client)).text("run_id") == run.run_id
            except NoAnswerError:
                # If the controller has gone, the end says so.
                pass
            else:
                if not same:
                    break
                run.phase = state.text("phase")
                over = run.phase in OVER_PHASES
                if last is None or still(state) != still(last):
                    if last is not None and not as_json:
                        say("")
                    await _show(client, say, body, state, as_json=as_json, whole=over)
                last = state
                if over:
                    return _worth(state)
            await deferLater(client.clock, WATCH_SECS)
        end = await ending
    finally:
        ending.addErrback(lambda _: None)
        ending.cancel()
    if not as_json:
        say(end_line(client, end))
    return _worth(end)


async def wait_for_end(client: ControllerClient, say: Say) -> int:
    """Say how the run that is current now has ended, when it has; status 0 if it is done, 1 if it failed."""
    run = await follow(client)
    if not run.run_id:
        raise AnswerError(f"{client.shown} gives its runs no ids: use status --watch")
    end = await run.end()
    say(end_line(client, end))
    return _worth(end)


def end_line(client: ControllerClient, end: Fields) -> str:
    return run_line(client.shown, end.text("phase"), end.optional("failure", end.text))


def _worth(end: Fields) -> int:
    return OK if end.text("phase") == "done" else REFUSED


@dataclass
class Followed:
    """One run of a controller, whatever that one does next; ``phase`` is where the run stood last."""

    client: ControllerClient
    run_id: str
    phase: str

    async def end(self) -> Fields:
        """The phase and the failure with which the run ended; AnswerError where nobody can tell any more."""
        clock, misses = self.client.clock, 0
        while True:
            asked = clock.seconds()
            try:
                told = await ask_run(self.client, self.run_id)
            except NoAnswerError as error:
                misses += 1
                if misses == MISSES:
                    gone = f"the controller has gone, its run was {printable(self.phase, MAX_CHARS)}"
                    raise NoAnswerError(f"{gone}: {error}; {AFTER_RUN_HINT}") from None
            else:
                misses = 0
                end = self._end_of(told)
                if end is not None:
                    return end
            await deferLater(clock, max(0.0, asked + WATCH_SECS - clock.seconds()))

    def _end_of(self, told: Fields) -> Fields | None:
        """How the run ended, by a ``run.json``; None while it goes on."""
        if told.text("run_id") == self.run_id:
            self.phase = told.text("phase") or self.phase
            return told if self.phase in OVER_PHASES else None
        for past in told.children("previous"):
            if past.text("run_id") == self.run_id:
                return past
        other = f"another controller answers at {self.client.shown} now"
        was = f"the run was {printable(self.phase, MAX_CHARS)} before, and the log of its controller has its end"
        raise AnswerError(f"{other}: {was}")


async def follow(client: ControllerClient) -> Followed:
    """The run that is current now."""
    run = await ask_run(client)
    return Followed(client, run.text("run_id"), run.text("phase"))


async def ask_state(client: ControllerClient) -> tuple[bytes, Fields]:
    code, body = await client.ask("GET", "/state.json")
    if code != 200:
        raise client.foreign(f"GET /state.json gets status {code}")
    state = Fields(decode_object(body, "its state"), "its state's ")
    state.text("phase")
    return body, state


async def ask_run(client: ControllerClient, wait: str | None = None) -> Fields:
    """The ``run.json``, whose ``run_id`` is empty for a controller that does not give its runs ids.

    With ``wait``, the id of a run, the answer comes when that one is over, or some time before.
    """
    path = "/run.json" if wait is None else f"/run.json?wait={quote(wait, safe='')}"
    code, body = await client.ask("GET", path, secs=ANSWER_SECS if wait is None else HELD_SECS)
    values = decode_object(body, "run.json") if code == 200 else {}
    return Fields({"run_id": "", "phase": "", "previous": [], **values}, "run.json's ")


async def _show(client: ControllerClient, say: Say, body: bytes, state: Fields, *, as_json: bool, whole: bool) -> None:
    """Print a state; ``whole``: with why the run failed, of what its ranks died, and what its store waits for."""
    if as_json:
        say(json_line(body.decode("utf-8"), sys.stdout))
        return
    told = await _more(client) if whole and state.text("phase") not in OPEN_PHASES else {}
    run = Fields(told.get("/run.json", {}), "run.json's ")
    lines = state_lines(client.shown, state, run.optional("failure", run.text))
    for path, read in (("/run.json", why_lines), ("/store.json", store_lines)):
        lines += read(told[path]) if path in told else ()
    for line in lines:
        say(line)


async def _more(client: ControllerClient) -> dict[str, dict[str, object]]:
    """What a controller of ours tells beside its state, by its path."""
    told = {}
    for path in ("/run.json", "/store.json"):
        try:
            code, body = await client.ask("GET", path)
        except NoAnswerError:
            # What was asked for is known; a controller may go once its run is over.
            break
        if code == 200:
            told[path] = decode_object(body, path[1:])
    return told
