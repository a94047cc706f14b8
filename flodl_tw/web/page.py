"""The page at ``/`` for a person's browser: the run at a glance, and how to join it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from twisted.web.template import Tag, tags

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


def _facts(run: Run) -> list[tuple[str, str]]:
    head = run.state_head()
    target = head["target_ranks"]
    wanted = f"quorum {head['min_rank_start']}" + (f", target {target}" if target else "")
    facts = [
        ("Ranks", f"{head['joined_ranks']} in; {wanted}"),
        ("Hosts", str(head["joined_hosts"])),
        ("Start", head["start_mode"] + (", armed" if head["start_armed"] else "")),
    ]
    for label, key in (("Window closes in", "window_remaining_secs"), ("Hard cap in", "cap_remaining_secs")):
        if head[key] is not None:
            facts.append((label, f"{head[key]} s"))
    return facts


def printable(text: str) -> str:
    """Text from a peer as a page may hold it: what does not print is escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


def _row(cells: list[str], cell: Tag) -> Tag:
    return tags.tr([cell.clone()(text) for text in cells])


def _members(run: Run) -> Tag:
    if not run.ledger.joined_hosts:
        return tags.p("No host has joined.")
    rows = [_row(["Host", "Ranks", "Devices", "From", "GPUs", "libtorch", "Joined after", "Link"], tags.th)]
    for member, ranks in run.ledger.roster():
        hello = member.offer.hello
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
                    "open" if member in run.links else "closed",
                ],
                tags.td,
            )
        )
    return tags.table(rows)


def page(run: Run, endpoint: str, credentialed: bool, ended: Mapping[str, int]) -> Tag:
    """The whole page.  ``endpoint`` is where the browser reached us; ``ended`` counts connections that got nowhere."""
    head = [
        tags.meta(charset="utf-8"),
        tags.meta(**{"http-equiv": "refresh", "content": "3"}),
        tags.title(f"flodl: {run.phase.value}"),
        tags.style(STYLE),
    ]
    body = [tags.h1("flodl controller"), tags.p("The run is ", tags.span(run.phase.value, class_="phase"), ".")]
    if run.failure is not None:
        body.append(tags.p(run.failure, class_="failure"))
    body.append(tags.dl([[tags.dt(label), tags.dd(text)] for label, text in _facts(run)]))
    body.append(_members(run))
    if run.is_open:
        body.append(tags.p("Join a host: ", tags.code(join_command(endpoint, credentialed))))
    if ended:
        counts = ", ".join(f"{word} {count}" for word, count in sorted(ended.items()))
        body.append(tags.p(f"Connections that got nowhere since the start: {counts}."))
    body.append(tags.p("For programs: ", tags.a("state.json", href="/state.json")))
    return tags.html(tags.head(head), tags.body(body), lang="en")
