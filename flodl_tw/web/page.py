"""The page at ``/`` for a person's browser: the run at a glance, and how to join it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from twisted.web.template import Tag, tags

from flodl_tw.controller import Controller
from flodl_tw.core.window import Phase, StartMode
from flodl_tw.run import Run, rank_span

STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .3rem .6rem; vertical-align: top }
th { border-bottom: 2px solid #d0d7de } td { border-bottom: 1px solid #d0d7de; overflow-wrap: anywhere }
code { background: #f0f2f4; padding: .15rem .4rem; border-radius: 4px } .phase { font-weight: 600 }
.failure { color: #b3261e } dl { display: grid; grid-template-columns: max-content auto; gap: .2rem 1rem }
dt { color: #57606a } dd { margin: 0 }
"""
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"


def join_command(endpoint: str, credentialed: bool) -> str:
    """The command that joins a worker; it never has the token itself."""
    token = " --token …" if credentialed else ""
    return f"fdl join {endpoint} --bin PROGRAM{token}"


def _window(run: Run, window_secs: int | None) -> str:
    """When the window closes, as it stands."""
    if run.settings.window.start_mode is StartMode.MANUAL:
        return "is held for the operator's start"
    quorum = run.ledger.joined_ranks >= run.settings.window.min_rank_start
    if window_secs is None:
        return "is past: the world forms as soon as there is a quorum"
    return f"closes in {window_secs} s, " + (
        "with the quorum that there is" if quorum else "if there is a quorum by then"
    )


def _facts(run: Run) -> list[tuple[str, str]]:
    head = run.state_head()
    target = head["target_ranks"]
    wanted = f"quorum {head['min_rank_start']}" + (f", target {target}" if target else "")
    facts = [
        ("Ranks", f"{head['joined_ranks']} in; {wanted}"),
        ("Hosts", str(head["joined_hosts"])),
        ("Start", head["start_mode"] + (", armed" if head["start_armed"] else "")),
    ]
    if run.is_open:
        facts.append(("Window", _window(run, head["window_remaining_secs"])))
        facts.append(("Hard cap", f"the run fails in {head['cap_remaining_secs']} s if no world has formed"))
    return facts


def printable(text: str) -> str:
    """Text from a peer as a page may hold it: what does not print is escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


def _row(cells: list[str], cell: Tag) -> Tag:
    return tags.tr([cell.clone()(text) for text in cells])


def _members(run: Run) -> Tag:
    if not run.ledger.joined_hosts:
        return tags.p("No host has joined.")
    headings = ["Host", "Ranks", "Devices", "From", "GPUs", "libtorch", "Joined after", "Link", "Exited"]
    rows = [_row(headings, tags.th)]
    for member, ranks in run.ledger.roster():
        hello = member.offer.hello
        end = run.ends.get(member)
        rows.append(
            _row(
                [
                    hello.host,
                    rank_span(ranks),
                    ", ".join(map(str, hello.local_devices)),
                    member.offer.address,
                    printable(", ".join(hello.gpus)),
                    printable(hello.libtorch),
                    f"{int(member.joined_at)} s",
                    "open" if end is None else end.value,
                    run.exits(member),
                ],
                tags.td,
            )
        )
    return tags.table(rows)


def _refused(run: Run) -> list[Tag]:
    if not run.refused_hosts:
        return []
    rows = [_row(["Host", "From", "After", "Times", "Reason"], tags.th)]
    for refused in reversed(run.refused_hosts.values()):
        cells = [printable(refused.host), refused.address, f"{int(refused.at)} s", str(refused.times)]
        rows.append(_row([*cells, refused.refusal.reason], tags.td))
    return [tags.h2("Refused"), tags.table(rows)]


def _operator(run: Run, endpoint: str, credentialed: bool) -> list[Tag]:
    """What the operator can do now."""
    if not run.is_open:
        return []
    hints = [tags.p("Join a host: ", tags.code(join_command(endpoint, credentialed)))]
    if run.phase is Phase.STAGING:
        hints.append(tags.p("Start the run: ", tags.code(f"fdl start --addr {endpoint}")))
    return hints


def page(controller: Controller, endpoint: str, ended: Mapping[str, int]) -> Tag:
    """The whole page.  ``endpoint`` is where the browser reached us; ``ended`` counts connections that got nowhere."""
    run = controller.run
    head = [
        tags.meta(charset="utf-8"),
        tags.meta(**{"http-equiv": "refresh", "content": "3"}),
        tags.title(f"flodl: {run.phase.value}"),
        tags.style(STYLE),
    ]
    body = [tags.h1("flodl controller"), tags.p("The run is ", tags.span(run.phase.value, class_="phase"), ".")]
    if run.failure is not None:
        body.append(tags.p(run.failure, class_="failure"))
    if controller.last_outcome is not None:
        body.append(tags.p(f"The run before it: {controller.last_outcome}."))
    body.append(tags.dl([[tags.dt(label), tags.dd(text)] for label, text in _facts(run)]))
    body.append(_members(run))
    body.extend(_refused(run))
    body.extend(_operator(run, endpoint, controller.credentialed))
    if ended:
        counts = ", ".join(f"{word} {count}" for word, count in sorted(ended.items()))
        body.append(tags.p(f"Connections that got nowhere since the start: {counts}."))
    body.append(tags.p("For programs: ", tags.a("state.json", href="/state.json")))
    return tags.html(tags.head(head), tags.body(body), lang="en")
