"""A real rehearsal against a real controller."""

from __future__ import annotations

import re
import signal
import subprocess

from tests.loopback.agents import BASE, PATIENCE, TOKEN, AgentTestCase, is_stopped, script
from tests.loopback.process import LOOPBACK, until


class RehearseTests(AgentTestCase):
    def test_a_fleet_forms_its_world_and_the_bad_hosts_are_refused(self) -> None:
        controller = self.start("--target-ranks", "256", "--after-run", "hold", environ={"FLODL_JOIN_TOKEN": TOKEN})
        command = self.command(
            *("rehearse", f"{LOOPBACK}:{controller.port}", "--bad", "nccl,vendor,dataset,duplicate", "--secs", "600"),
            environ={"FLODL_JOIN_TOKEN": TOKEN, "FLODL_TW_HOSTS": "32"},
        )
        command.printed(b"the world has formed: 256 ranks on 32 hosts; training for 600 s\n")
        controller.state_is(PATIENCE, phase="training", joined_ranks=256, joined_hosts=32)
        for member in controller.state()["members"]:
            self.assertRegex(member["host"], r"^rehearsal-[0-9]{2}$")
        self.assertEqual(command.children(), [])
        command.send_signal(signal.SIGTERM)
        self.assertEqual((command.ended(), command.err), (0, ""))
        controller.state_is(PATIENCE, phase="done")
        refused = re.findall(r"^(.*) is refused, as it should be: ([a-z-]+): ", command.out.decode(), re.MULTILINE)
        self.assertEqual(
            sorted(refused),
            [
                ("a second rehearsal-01", "duplicate-host"),
                ("rehearsal-bad-dataset", "dataset-mismatch"),
                ("rehearsal-bad-nccl", "nccl-mismatch"),
                ("rehearsal-bad-vendor", "vendor-mismatch"),
            ],
        )
        for _, word in refused:
            controller.said(word)
        self.assertEqual(
            command.out.decode().splitlines()[-2:],
            ["the training has ended: every rank has exited with 0", "all went as it should"],
        )

    def test_a_rehearsal_that_is_ended_at_once_is_a_lost_host_to_the_controller(self) -> None:
        controller = self.start("--target-ranks", "4")
        command = self.command("rehearse", f"{LOOPBACK}:{controller.port}", "--hosts", "2", "--gpus", "2")
        command.printed(b"the world has formed")
        # Both wait for it when it goes on; else it could end clean between the two.
        command.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(command.pid), "its stop", PATIENCE)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            command.send_signal(number)
        self.assertEqual((command.ended(), controller.ended(PATIENCE)), (1, 1))
        self.assertEqual(command.err, "flodl-tw: not as it should be: ended at once by SIGTERM\n")
        self.assertRegex(controller.log, "host 'rehearsal-0[12]' is gone [(]link [a-z]+[)] before ranks [02]-[13]")

    def test_an_abort_ends_it_with_the_reason(self) -> None:
        controller = self.start("--min-rank-start", "99")
        command = self.command("rehearse", f"{LOOPBACK}:{controller.port}")
        command.printed(b"waiting for the world")
        asked = self.command("abort", f"{LOOPBACK}:{controller.port}", "--reason", "fire drill")
        self.assertEqual((asked.ended(), command.ended()), (0, 1))
        self.assertEqual(
            command.err, "flodl-tw: not as it should be: the run was aborted: aborted by the operator: fire drill\n"
        )
        self.assertEqual(controller.ended(PATIENCE), 1)

    def test_it_ends_where_nobody_can_be_told_anything(self) -> None:
        words = [script("flodl-tw"), "rehearse", f"{LOOPBACK}:1", "--hosts", "1"]
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                words,
                stdout=full,
                stderr=full,
                env={**BASE, "FLODL_NET_TIMEOUT_SCALE": "0.1"},
                timeout=PATIENCE,
                check=False,
            )
        self.assertEqual(done.returncode, 1)
