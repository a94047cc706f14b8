"""Addresses: the spec's private ranges at their edges, IPv4 inside IPv6, and how each is shown."""

from __future__ import annotations

import unittest

from flodl_tw.core.addresses import Address, classify, show_endpoint

# as a socket names it, shown, loopback, private
ADDRESSES = (
    ("126.255.255.255", "126.255.255.255", False, False),
    ("127.0.0.0", "127.0.0.0", True, True),
    ("127.0.0.1", "127.0.0.1", True, True),
    ("127.255.255.255", "127.255.255.255", True, True),
    ("128.0.0.0", "128.0.0.0", False, False),
    ("9.255.255.255", "9.255.255.255", False, False),
    ("10.0.0.0", "10.0.0.0", False, True),
    ("10.255.255.255", "10.255.255.255", False, True),
    ("11.0.0.0", "11.0.0.0", False, False),
    ("172.15.255.255", "172.15.255.255", False, False),
    ("172.16.0.0", "172.16.0.0", False, True),
    ("172.31.255.255", "172.31.255.255", False, True),
    ("172.32.0.0", "172.32.0.0", False, False),
    ("192.167.255.255", "192.167.255.255", False, False),
    ("192.168.0.0", "192.168.0.0", False, True),
    ("192.168.255.255", "192.168.255.255", False, True),
    ("192.169.0.0", "192.169.0.0", False, False),
    ("169.253.255.255", "169.253.255.255", False, False),
    ("169.254.0.0", "169.254.0.0", False, True),
    ("169.254.255.255", "169.254.255.255", False, True),
    ("169.255.0.0", "169.255.0.0", False, False),
    ("100.63.255.255", "100.63.255.255", False, False),
    ("100.64.0.0", "100.64.0.0", False, True),
    ("100.127.255.255", "100.127.255.255", False, True),
    ("100.128.0.0", "100.128.0.0", False, False),
    ("0.0.0.0", "0.0.0.0", False, False),
    ("192.0.2.1", "192.0.2.1", False, False),
    ("198.18.0.1", "198.18.0.1", False, False),
    ("255.255.255.255", "255.255.255.255", False, False),
    ("8.8.8.8", "8.8.8.8", False, False),
    ("::", "::", False, False),
    ("::1", "::1", True, True),
    ("0:0:0:0:0:0:0:1", "::1", True, True),
    ("::2", "::2", False, False),
    ("fe7f:ffff::", "fe7f:ffff::", False, False),
    ("fe80::", "fe80::", False, True),
    ("fe80::1%eth0", "fe80::1%eth0", False, True),
    ("febf:ffff::1", "febf:ffff::1", False, True),
    ("fec0::", "fec0::", False, False),
    ("fbff::", "fbff::", False, False),
    ("fc00::", "fc00::", False, True),
    ("fdff:ffff::1", "fdff:ffff::1", False, True),
    ("fe00::", "fe00::", False, False),
    ("2001:db8::1", "2001:db8::1", False, False),
    ("2001:DB8:0::1", "2001:db8::1", False, False),
    ("2606:4700::1111", "2606:4700::1111", False, False),
    ("::ffff:127.0.0.1", "127.0.0.1", True, True),
    ("::ffff:7f00:1", "127.0.0.1", True, True),
    ("::ffff:10.1.2.3", "10.1.2.3", False, True),
    ("::ffff:100.64.0.1", "100.64.0.1", False, True),
    ("::ffff:8.8.8.8", "8.8.8.8", False, False),
    ("::127.0.0.1", "::7f00:1", False, False),
)
NO_ADDRESS = ("", "localhost", "gpu-a", "127.1", "10.0.0.256", "1.2.3.4:80", "[::1]", ":::", "010.0.0.1")
ENDPOINTS = (
    ("10.0.0.1", 29500, "10.0.0.1:29500"),
    ("gpu-a", 0, "gpu-a:0"),
    ("::1", 29500, "[::1]:29500"),
    ("fe80::1%eth0", 1, "[fe80::1%eth0]:1"),
)


class TestAddresses(unittest.TestCase):
    """How a peer's address is judged and shown."""

    def test_each_address_is_judged_by_the_spec_s_ranges(self) -> None:
        for host, shown, loopback, private in ADDRESSES:
            with self.subTest(host):
                self.assertEqual(classify(host), Address(shown, loopback, private))

    def test_what_is_no_numeric_address_is_refused(self) -> None:
        for host in NO_ADDRESS:
            with self.subTest(host), self.assertRaises(ValueError):
                classify(host)

    def test_an_endpoint_brackets_ipv6(self) -> None:
        for host, port, shown in ENDPOINTS:
            with self.subTest(host):
                self.assertEqual(show_endpoint(host, port), shown)
