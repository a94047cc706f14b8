"""Settings of the machine that no test can change for real: names, homes, absurd scales."""

from __future__ import annotations

import socket
import unittest
from pathlib import Path
from unittest import mock

from flodl_tw import sockets
from flodl_tw.core.errors import SettingError
from flodl_tw.limits import Limits
from flodl_tw.state_folder import default_state_dir


class ListenTests(unittest.TestCase):
    """What the listening socket is."""

    def test_a_name_that_stands_for_several_addresses_is_refused_with_all_of_them(self) -> None:
        found = [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        ]
        with mock.patch("socket.getaddrinfo", return_value=found), self.assertRaises(SettingError) as caught:
            sockets.listen("both.example", 0, Limits())
        self.assertEqual(
            str(caught.exception),
            "--interface both.example: it stands for 2 addresses (::1, 127.0.0.1); name one of them",
        )


class StateDirTests(unittest.TestCase):
    """Where state goes by default."""

    def test_the_service_manager_comes_first_then_the_state_home_then_the_home(self) -> None:
        for environ, expected in (
            ({"STATE_DIRECTORY": "/a:/b", "XDG_STATE_HOME": "/c"}, Path("/a")),
            ({"XDG_STATE_HOME": "/c"}, Path("/c/flodl-tw")),
            ({"XDG_STATE_HOME": "relative"}, Path.home() / ".local/state/flodl-tw"),
            ({}, Path.home() / ".local/state/flodl-tw"),
        ):
            with self.subTest(environ=environ):
                self.assertEqual(default_state_dir(environ), expected)

    def test_a_user_without_a_home_is_pointed_to_the_option(self) -> None:
        with mock.patch.object(Path, "home", side_effect=RuntimeError), self.assertRaises(SettingError) as caught:
            default_state_dir({})
        self.assertEqual(
            str(caught.exception),
            "--state-dir: this user has no home folder for the default; name a folder of your own, or give the "
            "token by --token-file",
        )
