"""A child's connections: what is set on them from outside, and that nothing of them is kept."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest

from stepfence.launch.process import Process

CHILD = """
import socket, sys
at = ("127.0.0.1", int(sys.argv[1]))
idle, listening = socket.socket(), socket.create_server(("127.0.0.1", 0))
sock = socket.create_connection(at)
for line in sys.stdin:
    if line == "talk\\n":  # a few requests and answers put a connection into the mode in which its kernel waits
        for _ in range(8):
            sock.sendall(b"request")
            sock.recv(64)
        print("talked", flush=True)
    else:
        options = socket.TCP_NODELAY, socket.TCP_QUICKACK
        print(*(bool(sock.getsockopt(socket.IPPROTO_TCP, option)) for option in options), flush=True)
"""


class Peer:
    """A child with one connection among other descriptors, and the connection's other end."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            words = [sys.executable, "-c", CHILD, str(server.getsockname()[1])]
            self.process = Process(words, env={"PATH": os.environ["PATH"]})
            server.settimeout(20)
            self.sock = server.accept()[0]
        self.sock.settimeout(20)

    def ask(self, line: str) -> str:
        self.process.stdin.write(line.encode() + b"\n")
        return self.process.stdout.readline().decode().strip()

    def talk(self) -> None:
        self.process.stdin.write(b"talk\n")
        for _ in range(8):
            assert self.sock.recv(64) == b"request"
            self.sock.sendall(b"answer")
        assert self.process.stdout.readline() == b"talked\n"


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.process.end(5.0)
    peer.process.close()
    peer.sock.close()


def test_a_childs_connection_sends_and_acknowledges_without_delay(peer: Peer) -> None:
    peer.talk()
    assert peer.ask("options") == "False False"
    assert peer.process.acknowledge()
    assert peer.ask("options") == "True True"
    peer.talk()
    assert peer.ask("options") == "True False"  # it holds for one exchange
    assert peer.process.acknowledge()
    assert peer.ask("options") == "True True"


def test_a_connection_ends_with_its_process(peer: Peer) -> None:
    assert peer.process.acknowledge()
    peer.process.end(5.0)
    assert peer.sock.recv(64) == b""
    assert peer.process.acknowledge()  # that it is gone is nobody's fault


def test_a_process_without_connections_or_without_a_pidfd_says_so(peer: Peer) -> None:
    lonely = Process(["sleep", "60"], env={"PATH": os.environ["PATH"]})
    try:
        assert not lonely.acknowledge()
    finally:
        lonely.end(5.0)
        lonely.close()
    assert not lonely.acknowledge()
