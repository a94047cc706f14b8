"""A Twisted application with a controller inside: it serves a page of its own, too, forms a world, and ends by itself.

    python examples/embedded.py

docs/embedding.md has this program with explanations.
"""

import treq
from klein import Klein
from twisted.internet.defer import gatherResults
from twisted.internet.endpoints import clientFromString, serverFromString
from twisted.internet.task import react
from twisted.web.server import Site

from flodl_tw import ControllerServer, ControllerSettings
from flodl_tw.testing import SimulatedHost, make_hello


def notice_of(server):
    """What this application serves beside the controller: one line on the run."""
    app = Klein()

    @app.route("/")
    def notice(request):
        state = server.state()
        return f"{state['phase']}: {state['joined_ranks']} ranks\n"

    return Site(app.resource())


async def main(reactor):
    """Form a world of two hosts with two ranks each, and see it through."""
    settings = ControllerSettings.from_options({"backend": "cpu", "min-rank-start": 4, "target-ranks": 4})
    server = ControllerServer(reactor, settings, serverFromString(reactor, "tcp:0:interface=127.0.0.1"))
    server.startService()
    await server.when_listening()
    notice = await serverFromString(reactor, "tcp:0:interface=127.0.0.1").listen(notice_of(server))
    print(f"controller on port {server.port}, notice on port {notice.getHost().port}")

    # Real hosts dial by themselves; these have neither GPUs nor processes, and train for a second.
    controller = clientFromString(reactor, f"tcp:127.0.0.1:{server.port}")
    hosts = [SimulatedHost(reactor, make_hello(name, devices=2)) for name in ("gpu-a", "gpu-b")]
    await gatherResults([host.join(controller) for host in hosts])

    world = await server.when_formed()
    print(f"the world has formed: {world.world_size} ranks")
    answer = await treq.get(f"http://127.0.0.1:{notice.getHost().port}/")
    print(f"notice: {(await answer.text()).strip()}")
    end = await server.when_over()
    print(f"the run is {end.phase.value}" + (f": {end.failure}" if end.failure else ""))

    await notice.stopListening()
    await server.stopService()


if __name__ == "__main__":
    react(main)
