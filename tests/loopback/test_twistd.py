"""A world through a real ``twistd``: how it forms, how it ends, and what the process leaves behind."""

from __future__ import annotations

import json
import signal
import socket
import time

from flodl_tw.core.messages import Abort, Accept, WorldFormed
from flodl_tw.limits import STOP_GRACE
from flodl_tw.testing import make_hello
from tests.loopback.process import (
    LOOPBACK,
    PATIENT,
    SLOWNESS,
    Client,
    ProcessTestCase,
    Twistd,
    alive,
    body_of,
    ends,
    head_of,
    until,
)

STATE_KEYS = [
    "phase",
    "joined_ranks",
    "joined_hosts",
    "min_rank_start",
    "target_ranks",
    "window_remaining_secs",
    "cap_remaining_secs",
    "start_mode",
    "start_armed",
    "members",
]


class World(ProcessTestCase):
    """Runs that end by themselves."""

    def form(self, controller: Twistd) -> tuple[Client, Client]:
        """Two hosts, of 2 ranks and 1, whose world has formed; the target must be 3."""
        first = self.joined(controller, "gpu-a", 2)
        second = self.joined(controller, "gpu-b", 1)
        self.assertIsInstance(first.next(), WorldFormed)
        self.assertIsInstance(second.next(), WorldFormed)
        return first, second

    def test_the_page_says_the_join_line_of_the_log_also_to_a_browser_on_loopback(self) -> None:
        for interface in (LOOPBACK, None):
            controller = self.start("--open-admission", interface=interface)
            line = controller.said("join with: ")
            command = line.partition("join with: ")[2].partition(" (or")[0]
            page = body_of(controller.http(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n\r\n"))
            self.assertIn(f"<code>{command}</code>", page.decode())
            controller.stop()

    def test_a_world_forms_trains_and_ends_with_status_0(self) -> None:
        controller = self.start("--target-ranks", "3")
        first, second = self.form(controller)
        assert first.talk.envelope is not None
        assert second.talk.envelope is not None
        self.assertEqual(first.talk.envelope["world_size"], 3)
        self.assertEqual(first.talk.envelope["worker"]["ranks"], [0, 1])
        self.assertEqual(second.talk.envelope["worker"]["ranks"], [2])
        self.assertEqual(second.talk.envelope["controller"], {"host": LOOPBACK, "port": controller.port})
        self.assertEqual(controller.state()["phase"], "training")
        for host in (first, second):
            host.exit_all(0)
            host.close()
        self.assertEqual(controller.ended(), 0)
        self.assertIn("the run is done", controller.log)

    def test_a_rank_that_exits_3_ends_the_run_with_status_1_and_tells_every_host(self) -> None:
        controller = self.start("--target-ranks", "3")
        first, second = self.form(controller)
        first.socket.sendall(first.talk.exited(1, 3))
        for host in (first, second):
            (abort,) = host.rest()
            self.assertIsInstance(abort, Abort)
            assert isinstance(abort, Abort)
            for part in ("gpu-a", "rank 1", "code 3"):
                self.assertIn(part, abort.reason)
            host.close()
        self.assertEqual(controller.ended(), 1)
        line = controller.said("exited with")
        for part in ("gpu-a", "rank 1", "code 3"):
            self.assertIn(part, line)

    def test_a_host_whose_link_ends_early_fails_the_run(self) -> None:
        controller = self.start("--target-ranks", "3")
        first, second = self.form(controller)
        second.close()
        (abort,) = first.rest()
        assert isinstance(abort, Abort)
        for part in ("gpu-b", "closed", "rank 2"):
            self.assertIn(part, abort.reason)
        self.assertEqual(controller.ended(), 1)

    def test_a_window_without_quorum_ends_with_status_1(self) -> None:
        controller = self.start(
            "--min-rank-start", "4", "--join-timeout", "5", "--max-join-timeout", "30", scale=0.1, interface=LOOPBACK
        )
        host = self.joined(controller, "gpu-a", 2)
        (abort,) = host.rest()
        assert isinstance(abort, Abort)
        self.assertIn("2 of 4 ranks", abort.reason)
        self.assertIn("30 s, scaled to 3 s", abort.reason)
        self.assertEqual(controller.ended(), 1)

    def test_continue_leaves_a_loss_to_the_world_and_still_ends_with_status_1(self) -> None:
        controller = self.start("--target-ranks", "3", "--on-loss", "continue")
        first, second = self.form(controller)
        second.close()
        controller.said("lost host 'gpu-b'")
        first.exit_all(0)
        first.socket.shutdown(socket.SHUT_WR)
        self.assertEqual(first.rest(), [])
        self.assertEqual(controller.ended(), 1)

    def test_hold_keeps_serving_the_last_state(self) -> None:
        controller = self.start("--target-ranks", "3", "--after-run", "hold")
        for host in self.form(controller):
            host.exit_all(0)
            host.close()
        controller.state_is(phase="done", joined_ranks=3, joined_hosts=2)
        late = self.dial(controller).join("gpu-c")
        self.assertTrue(str(getattr(late, "reason", late)).startswith("window-closed: "), late)
        self.assertIsNone(controller.process.poll())
        self.assertEqual(controller.stop(), -signal.SIGTERM)

    def test_rearm_opens_the_next_window_fresh(self) -> None:
        controller = self.start("--target-ranks", "3", "--after-run", "rearm")
        salts = []
        for _ in range(2):
            controller.state_is(phase="waiting", joined_ranks=0, members=[])
            hosts = self.form(controller)
            salts.append(hosts[0].talk.salt)
            for host in hosts:
                host.exit_all(0)
                host.close()
        controller.state_is(phase="waiting", joined_ranks=0, joined_hosts=0)
        self.assertNotEqual(salts[0], salts[1])
        until(lambda: controller.log.count("the run is done") == 2, "both ends")

    def test_the_next_window_opens_after_a_failed_run_too(self) -> None:
        controller = self.start("--target-ranks", "3", "--after-run", "rearm")
        first, second = self.form(controller)
        first.socket.sendall(first.talk.exited(0, 3))
        for host in (first, second):
            host.rest()
            host.close()
        controller.state_is(phase="waiting", joined_ranks=0)
        self.form(controller)


class FrontDesk(ProcessTestCase):
    """What a controller shows while its window is open."""

    def setUp(self) -> None:
        self.controller = self.share("--min-rank-start", "8")

    def test_the_port_file_has_the_port_and_a_newline(self) -> None:
        text = self.controller.port_file.read_text()
        self.assertRegex(text, r"\A[1-9][0-9]{0,4}\n\Z")
        with socket.create_connection((LOOPBACK, int(text))):
            pass
        self.assertEqual([path.name for path in self.controller.folder.glob("*port*")], ["port"])

    def test_the_log_says_where_it_listens_and_how_to_join(self) -> None:
        self.controller.said(f"listening on 127.0.0.1:{self.controller.port}")
        self.controller.said(f"fdl join 127.0.0.1:{self.controller.port} --bin PROGRAM")
        self.assertNotIn("--token", self.controller.log)

    def test_a_plain_get_gives_the_state_with_its_length_and_then_the_end(self) -> None:
        answer = self.controller.http(b"GET /state.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = head_of(answer)
        self.assertTrue(head.startswith("HTTP/1.1 200 "), head)
        lines = [line.lower() for line in head.split("\r\n")]
        for line in (
            "content-type: application/json",
            f"content-length: {len(body_of(answer))}",
            "cache-control: no-cache",
            "access-control-allow-origin: *",
            "connection: close",
        ):
            self.assertIn(line, lines)
        state = json.loads(body_of(answer))
        self.assertEqual(list(state), STATE_KEYS)
        self.assertEqual((state["phase"], state["min_rank_start"]), ("waiting", 8))

    def test_each_start_of_a_join_dial_may_come_alone(self) -> None:
        client = self.dial(self.controller)
        hello = client.talk.hello(make_hello("slow-host"))
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index in range(len(hello)):
            client.socket.sendall(hello[index : index + 1])
        self.assertIsInstance(client.next(), Accept)


class Daemonised(ProcessTestCase):
    """Without ``-n``: the parent's status, and the pidfile."""

    def test_the_parent_returns_0_and_the_pidfile_goes_when_a_run_ends_by_itself(self) -> None:
        for code, outcome in ((0, "the run is done"), (3, "the run has failed")):
            with self.subTest(outcome=outcome):
                controller = self.start("--target-ranks", "1", daemonised=True)
                self.assertEqual(controller.ended(), 0)
                self.assertNotEqual(controller.pid, controller.process.pid)
                self.assertTrue(alive(controller.pid))
                self.assertEqual(controller.pidfile.read_text(), str(controller.pid))
                host = self.joined(controller, "gpu-a")
                self.assertIsInstance(host.next(), WorldFormed)
                host.exit_all(code)
                host.socket.shutdown(socket.SHUT_WR)
                self.assertEqual(len(host.rest()), 1 if code else 0)
                controller.gone()
                self.assertFalse(controller.pidfile.exists())
                self.assertIn(outcome, controller.log)

    def test_the_pidfile_goes_when_sigterm_ends_it(self) -> None:
        controller = self.start("--min-rank-start", "2", daemonised=True)
        host = self.joined(controller, "gpu-a")
        controller.send_signal(signal.SIGTERM)
        (abort,) = host.rest()
        self.assertIsInstance(abort, Abort)
        controller.gone()
        self.assertFalse(controller.pidfile.exists())


class Signals(ProcessTestCase):
    """SIGTERM and SIGINT: hosts are told, nobody can hold the end up, and the process dies by the signal."""

    def crowd(self, controller: Twistd) -> list[socket.socket]:
        """Three silent connections, and one that sent half a magic."""
        clients = [self.connect(controller) for _ in range(3)]
        return [*clients, self.connect(controller, data=b"\xe3\x17")]

    def test_joined_hosts_get_abort_and_the_process_dies_by_that_signal(self) -> None:
        took = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with self.subTest(signal=number.name):
                controller = self.start("--min-rank-start", "8", scale=PATIENT)
                hosts = [self.joined(controller, name) for name in ("gpu-a", "gpu-b")]
                begun = time.monotonic()
                controller.send_signal(number)
                for host in hosts:
                    self.assertEqual(host.rest(), [Abort("the controller was stopped")])
                self.assertEqual(controller.ended(), -number)
                took.append(time.monotonic() - begun)
        # Nobody was waited for, however slow the machine is.
        self.assertLess(min(took), STOP_GRACE)

    def test_a_users_signal_that_a_scheduler_sends_to_every_process_is_nothing_to_it(self) -> None:
        controller = self.start("--min-rank-start", "8")
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            controller.send_signal(number)
            controller.state_is(phase="waiting")

    def test_a_formed_world_is_told_too(self) -> None:
        controller = self.start("--target-ranks", "1")
        host = self.joined(controller, "gpu-a")
        self.assertIsInstance(host.next(), WorldFormed)
        controller.send_signal(signal.SIGTERM)
        self.assertEqual(host.rest(), [Abort("the controller was stopped")])
        self.assertEqual(controller.ended(), -signal.SIGTERM)

    def secs_to_drop_a_crowd(self) -> float:
        """How long a controller with silent peers takes to end."""
        controller = self.start("--min-rank-start", "8", scale=PATIENT)
        crowd = self.crowd(controller)
        controller.state()  # answered after all of them were accepted
        begun = time.monotonic()
        controller.send_signal(signal.SIGTERM)
        for client in crowd:
            self.assertTrue(ends(client))
        self.assertEqual(controller.ended(), -signal.SIGTERM)
        return time.monotonic() - begun

    def test_silent_peers_are_dropped_at_once(self) -> None:
        # A machine may be busy for a moment; a grace is there each time.
        self.assertTrue(any(self.secs_to_drop_a_crowd() < STOP_GRACE for _ in range(3)))

    def test_peers_that_do_not_read_cannot_hold_the_end_up(self) -> None:
        controller = self.start("--min-rank-start", "99999", scale=PATIENT)
        labels = ("x" * 255,) * 200
        hosts = [self.joined(controller, f"gpu-{number}", 1, gpus=labels) for number in range(60)]
        self.crowd(controller)
        # A joined host that never reads, and a client with an answer of megabytes that it never takes.
        for _ in range(2):
            client = socket.socket()
            self.addCleanup(client.close)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((LOOPBACK, controller.port))
            client.sendall(b"GET /state.json HTTP/1.0\r\n\r\n")
        self.assertGreater(len(controller.http(b"GET /state.json HTTP/1.0\r\n\r\n")), 3_000_000)
        begun = time.monotonic()
        controller.send_signal(signal.SIGTERM)
        self.assertEqual(controller.ended(), -signal.SIGTERM)
        # The grace does it, for every deadline is a hundred times as long as usual.
        self.assertLess(time.monotonic() - begun, STOP_GRACE + SLOWNESS)
        self.assertEqual(hosts[0].rest(), [Abort("the controller was stopped")])

    def test_a_second_signal_while_it_stops_changes_nothing(self) -> None:
        # Twisted itself logs a second signal as ReactorNotRunning, so the log is not looked at.
        controller = Twistd("--min-rank-start", "99999", scale=PATIENT).listening()
        self.addCleanup(controller.close)
        hosts = [self.joined(controller, f"gpu-{number}", 1, gpus=("x" * 255,) * 200) for number in range(60)]
        stuck = socket.socket()
        self.addCleanup(stuck.close)
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect((LOOPBACK, controller.port))
        stuck.sendall(b"GET /state.json HTTP/1.0\r\n\r\n")
        controller.state()
        begun = time.monotonic()
        controller.send_signal(signal.SIGTERM)
        self.assertEqual(hosts[0].rest(), [Abort("the controller was stopped")])
        # Abort has left, so the stop is under way, and the client that does not read holds it up.
        controller.send_signal(signal.SIGTERM)
        self.assertEqual(controller.ended(), -signal.SIGTERM)
        self.assertLess(time.monotonic() - begun, STOP_GRACE + SLOWNESS)
