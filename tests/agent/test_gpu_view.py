"""Which of its host's GPUs a rank sees."""

from __future__ import annotations

import unittest

from flodl_tw.agent.devices import Device, Gpu, Inventory, choose, without_gpus
from flodl_tw.agent.gpu_view import GpuView, divided, rank_view, split
from flodl_tw.core.errors import SettingError
from tests.agent.test_devices import CUDA, EIGHT, H100, MIG_A, MIG_B, UUIDS


class ViewTests(unittest.TestCase):
    """Which GPUs a rank sees."""

    def views(self, view: GpuView, option: str | None = None, mask: str | None = None) -> list[tuple[str, int]]:
        devices = choose(option, EIGHT, {} if mask is None else {CUDA: mask}).devices
        return [rank_view(devices, index, view) for index in range(len(devices))]

    def test_a_rank_sees_all_gpus_that_its_host_offers_in_their_order_and_local_rank_counts_in_them(self) -> None:
        self.assertEqual(self.views(GpuView.ALL), [("0,1,2,3,4,5,6,7", index) for index in range(8)])
        self.assertEqual(self.views(GpuView.ALL, "1,0", "6,4,5"), [("4,6", 0), ("4,6", 1)])
        names = f"{UUIDS[5]},{UUIDS[2]}"
        self.assertEqual(self.views(GpuView.ALL, None, names), [(names, 0), (names, 1)])

    def test_with_a_virtual_local_rank_it_sees_one_as_device_0(self) -> None:
        self.assertEqual(self.views(GpuView.VIRTUAL, "1,0", "4,5"), [("5", 0), ("4", 0)])

    def test_a_rank_of_flodls_sees_its_own_and_keeps_its_number(self) -> None:
        self.assertEqual(self.views(GpuView.OWN, "1,0", "4,5"), [("5", 0), ("4", 1)])

    def test_ranks_without_gpus_see_none(self) -> None:
        devices = without_gpus(2).devices
        for view, numbers in ((GpuView.ALL, [0, 1]), (GpuView.OWN, [0, 1]), (GpuView.VIRTUAL, [0, 0])):
            with self.subTest(view):
                views = [rank_view(devices, index, view) for index in range(2)]
                self.assertEqual(views, [("-1", number) for number in numbers])

    def test_a_rank_sees_its_own_mig_part_since_cuda_shows_no_more_than_one(self) -> None:
        mask = f"{MIG_A},{MIG_B}"
        for view in (GpuView.ALL, GpuView.VIRTUAL):
            self.assertEqual(self.views(view, None, mask), [(MIG_A, 0), (MIG_B, 0)])
        (note,) = choose(None, EIGHT, {CUDA: mask}).notes
        self.assertIn("one MIG part, so each rank sees its own", note)

    def test_one_rank_may_have_every_gpu_of_its_host(self) -> None:
        (device,) = divided(choose(None, EIGHT, {}).devices, 1)
        self.assertEqual(device, Device(0, "0,1,2,3,4,5,6,7", f"8 x {H100}"))
        for view in set(GpuView) - {GpuView.INHERITED}:
            self.assertEqual(rank_view((device,), 0, view), ("0,1,2,3,4,5,6,7", 0))

    def test_where_nobody_chose_any_a_rank_has_no_mask(self) -> None:
        self.assertEqual(rank_view(choose(None, EIGHT, {}).devices, 3, GpuView.INHERITED), (None, 3))

    def test_several_ranks_may_have_the_gpus_between_them(self) -> None:
        devices = divided(choose(None, EIGHT, {CUDA: "5,6,7"}).devices, 2)
        self.assertEqual(devices, (Device(5, "5,6", f"2 x {H100}"), Device(7, "7", H100)))
        self.assertEqual([rank_view(devices, index, GpuView.ALL) for index in (0, 1)], [("5,6,7", 0), ("5,6,7", 1)])
        mixed = Inventory("NVIDIA", (*EIGHT.gpus[:2], Gpu(2, "", "NVIDIA T4 (16GB, sm_75)", "sm75")))
        self.assertEqual(divided(choose(None, mixed, {}).devices, 1)[0].label, f"{H100} and 2 more")

    def test_more_ranks_than_gpus_are_refused(self) -> None:
        with self.assertRaises(SettingError) as raised:
            divided(choose("0,1", EIGHT, {}).devices, 3)
        said = "--nproc 3: there are 2 GPUs, and each rank has one at least; give fewer ranks, or more GPUs"
        self.assertEqual(str(raised.exception), said)

    def test_pseudo_hosts_get_devices_in_order_and_the_first_ones_one_more(self) -> None:
        devices = choose(None, EIGHT, {}).devices
        numbers = [[device.number for device in part] for part in split(devices, 3)]
        self.assertEqual(numbers, [[0, 1, 2], [3, 4, 5], [6, 7]])
