"""flodl-tw: the front door of distributed-training clusters.

core/            the wire, the membership, the window and the world; no network
run.py           one run, and everything that a late frame of it may touch
controller.py    the current run, the verdict's place, what comes after a run
mux.py           the front door: peeks at four bytes, hands the connection on
join.py          the join channel and the control link
rendezvous.py    the ranks' own channel; forward.py passes a channel on to a backend
storing.py       torch's store, for the world's hosts; its keys are in world_store.py
web/             the status channel: state.json, the page, the operator's start
limits.py        every deadline and cap
agent/           the worker's side: dial, join, the host's ranks, their end
cli.py           the ``flodl-tw`` command line; commands/ does what it says, operate.py asks a controller,
                 standalone.py is ``run``, rehearsal.py is ``rehearse``
tap.py           the options of ``twistd flodl-controller``, where the parts meet
testing.py       fakes for tests and demos: hosts, links, a controller on a clock
"""

__version__ = "0.1.0"
