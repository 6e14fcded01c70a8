"""A connection over which objects travel, their tensors and arrays as the bytes that they are.

Whoever offers a link unpickles what comes: only somebody with the key is listened to.
"""

from __future__ import annotations

import hmac
import socket
import struct
from typing import Any

import numpy as np

from deltafl.engine.out_of_band import Buffer, pack, unpack

KEY_BYTES = 32
CONNECT_SECONDS = 10
# A machine that vanished says nothing. So one that is silent is asked after ten seconds and then
# every five, and after half a minute it is taken for dead.
PATIENCE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class Link:
    """One end of a connection; `OSError` and `EOFError` mean that the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in PATIENCE.items():
            if hasattr(socket, name):  # not every system knows them all
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @classmethod
    def to(cls, address: tuple[str, int], key: bytes) -> Link:
        """Connect to somebody who offers a link."""
        link = cls(socket.create_connection(address, CONNECT_SECONDS))
        link._socket.sendall(key)
        return link

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._socket.fileno()

    def send(self, obj: object) -> None:
        """Send an object of our own making."""
        content, buffers = pack(obj)
        sizes = [len(content), *(buffer.nbytes for buffer in buffers)]
        head = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        self._socket.sendall(head + content)  # one packet, where there is nothing else
        for buffer in buffers:
            self._socket.sendall(buffer.data)

    def receive(self) -> Any:
        """Wait for an object."""
        (count,) = struct.unpack("<I", self._read(4).data)
        sizes = struct.unpack(f"<{count}Q", self._read(8 * count).data)
        content, *buffers = map(self._read, sizes)
        return unpack(content.tobytes(), buffers)

    def _read(self, size: int) -> Buffer:
        block = np.empty(size, dtype=np.uint8)
        rest = block.data
        while rest:
            count = self._socket.recv_into(rest)
            if not count:
                raise EOFError("the other end is gone")
            rest = rest[count:]
        return block

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class Offer:
    """A place where one link is waited for."""

    def __init__(self, host: str, key: bytes) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._key = key
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def accept(self) -> Link:
        """Wait for whoever has the key; nobody else can connect afterwards."""
        with self._socket:
            while True:
                link = Link(self._socket.accept()[0])
                try:
                    if hmac.compare_digest(link._read(KEY_BYTES).tobytes(), self._key):
                        return link
                except (OSError, EOFError):
                    pass
                link.close()
