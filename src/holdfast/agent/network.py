# SPDX-License-Identifier: Apache-2.0
"""Addresses and ports of this node."""

import socket

from holdfast.runtime.transport import split_address


class ReservedPort:
    """A port that the kernel gave us and gives to no other process while we hold it.

    It is bound but does not listen, with SO_REUSEADDR: a server that sets the same option, as
    torch's store does, can still bind and listen on it. So the port is known before the server
    runs, and no other process can take it in between.
    """

    def __init__(self) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        if family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def own_address(master: str) -> str:
    """The address of this host that faces the master, which other nodes can reach too.

    Connecting a datagram socket sends nothing; it only asks the kernel for the route.
    """
    host, port = split_address(master)
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
            probe.connect(info[4])
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return socket.gethostname()
