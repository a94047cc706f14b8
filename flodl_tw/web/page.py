"""The page at ``/`` for a person's browser: the run at a glance, and how to join it.

Plain text put together, every piece of it escaped: a template engine took a
second for a few thousand hosts, in which nobody else was served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from itertools import islice
from typing import Final

from flodl_tw.controller import Controller
from flodl_tw.core.ends import ConnectionEnd
from flodl_tw.core.ledger import Member
from flodl_tw.core.log_text import printable
from flodl_tw.core.phrases import goal, hard_cap_text, join_commands, rank_list, repeats, window_text
from flodl_tw.core.window import Phase, StartMode
from flodl_tw.run import Run

STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .3rem .6rem; vertical-align: top }
th { border-bottom: 2px solid #d0d7de } td { border-bottom: 1px solid #d0d7de; overflow-wrap: anywhere }
code { background: #f0f2f4; padding: .15rem .4rem; border-radius: 4px } .phase { font-weight: 600 }
.failure { color: #b3261e } dl { display: grid; grid-template-columns: max-content auto; gap: .2rem 1rem }
dt { color: #57606a } dd { margin: 0 }
"""
MOST_ROWS: Final = 500
"""Hosts that the page lists; ``state.json`` has all of them."""
MOST_CHARS: Final = 300
"""Characters of a member's GPU labels that the page shows."""
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"


def _facts(run: Run) -> list[tuple[str, str]]:
    window, ledger = run.window, run.ledger
    settings = window.settings
    facts = [
        ("Ranks", f"{ledger.joined_ranks} in; {goal(settings.min_rank_start, settings.target_ranks)}"),
        ("Hosts", str(ledger.joined_hosts)),
        ("Start", settings.start_mode.value + (", armed" if window.armed else "")),
    ]
    if run.is_open:
        left, cap = window.countdowns()
        manual = settings.start_mode is StartMode.MANUAL
        quorum = ledger.joined_ranks >= settings.min_rank_start
        closes = window_text(None if left is None else f"{left} s", manual=manual, quorum=quorum, verb="is ")
        facts += [("Window", closes), ("Hard cap", hard_cap_text(f"{cap or 0} s"))]
    return facts


def _tag(name: str, text: str) -> str:
    return f"<{name}>{escape(printable(text))}</{name}>"


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    body = "".join(f"<tr>{''.join(_tag('td', cell) for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(_tag('th', heading) for heading in headings)}</tr>{body}</table>"


def _member_row(run: Run, member: Member, ranks: range, others_run_on: bool) -> list[str]:
    hello = member.offer.hello
    end = run.ends.get(member)
    told = "; ".join(repeats(hello.gpus))
    return [
        hello.host,
        rank_list(ranks),
        ", ".join(map(str, hello.local_devices)),
        member.offer.address,
        told if len(told) <= MOST_CHARS else told[:MOST_CHARS] + "…",
        hello.libtorch,
        f"{int(member.joined_at)} s",
        "open" if end is None else end.value,
        "" if run.exits is None else run.exits.text(member, others_run_on=others_run_on),
    ]


def _members(run: Run) -> str:
    hosts = run.ledger.joined_hosts
    if not hosts:
        return _tag("p", "No host has joined.")
    headings = ("Host", "Ranks", "Devices", "From", "GPUs", "libtorch", "Joined after", "Link", "Exited")
    shown = islice(run.ledger.roster(), MOST_ROWS)
    # The ranks of a lost host may be gone, too.
    run_on = run.phase is Phase.TRAINING and run.exits is not None and run.exits.runs_on(run.links)
    table = _table(headings, (_member_row(run, member, ranks, run_on) for member, ranks in shown))
    return table + (_tag("p", f"And {hosts - MOST_ROWS} more hosts: see state.json.") if hosts > MOST_ROWS else "")


def _refused(run: Run) -> str:
    rows = [
        [refused.host, refused.address, f"{int(refused.at)} s", str(refused.times), refused.refusal.reason]
        for refused in reversed(list(run.window.refused_hosts))
    ]
    if not rows:
        return ""
    return _tag("h2", "Refused") + _table(("Host", "From", "After", "Times", "Reason"), rows)


def _store(run: Run) -> str:
    """What torch's store is waiting for, which nobody else can tell."""
    if run.store is None:
        return ""
    return _tag("h2", "Store") + "".join(_tag("p", line) for line in run.store.told())


def _operator(run: Run, endpoint: str, credentialed: bool) -> str:
    """What the operator can do now."""
    if not run.is_open:
        return ""
    ours, fdls = join_commands(endpoint, credentialed)
    hint = f"<p>Join a host: {_tag('code', ours)} or {_tag('code', fdls)}</p>"
    if run.phase is Phase.STAGING:
        hint += f"<p>Start the run: {_tag('code', f'fdl start --addr {endpoint}')}</p>"
    return hint


def _outcome(controller: Controller) -> str:
    run = controller.run
    said = f'<p>The run is <span class="phase">{run.phase.value}</span>.</p>'
    if run.failure is not None:
        said += f'<p class="failure">{escape(printable(run.failure))}</p>'
    if controller.last_outcome is not None:
        said += _tag("p", f"The run before it: {controller.last_outcome}.")
    return said


def page(controller: Controller, endpoint: str, ended: Mapping[ConnectionEnd, int]) -> str:
    """The whole page.  ``endpoint`` is where the browser reached us; ``ended`` counts connections that got nowhere."""
    run = controller.run
    facts = "".join(_tag("dt", label) + _tag("dd", text) for label, text in _facts(run))
    counts = ", ".join(f"{end} {count}" for end, count in sorted((end.value, count) for end, count in ended.items()))
    nowhere = _tag("p", f"Connections that got nowhere since the start: {counts}.") if ended else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="3">'
        f"<title>flodl: {run.phase.value}</title><style>{STYLE}</style></head><body><h1>flodl controller</h1>"
        f"{_outcome(controller)}<dl>{facts}</dl>{_members(run)}{_refused(run)}{_store(run)}"
        f"{_operator(run, endpoint, controller.credentialed)}{nowhere}"
        '<p>For programs: <a href="/state.json">state.json</a>, <a href="/run.json">run.json</a>, '
        '<a href="/store.json">store.json</a></p></body></html>\n'
    )
