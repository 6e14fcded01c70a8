"""Links bring objects as they were, to whoever has the key."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
import torch

from deltafl.engine.link import KEY_BYTES, Link, Offer

KEY = bytes(range(KEY_BYTES))


@pytest.fixture
def ends():
    offer = Offer("127.0.0.1", KEY)
    ours = Link.to(offer.address, KEY)
    theirs = offer.accept()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_objects_arrive_as_they_were(ends):
    ours, theirs = ends
    large = torch.arange(3_000_000, dtype=torch.float32).reshape(1000, -1)
    sent = ("train", large, np.arange(5), [], None, {"a": 1.5})
    sender = threading.Thread(target=ours.send, args=[sent])  # more than the system keeps for us
    sender.start()
    method, tensor, array, *rest = theirs.receive()
    sender.join()
    assert method == "train"
    assert torch.equal(tensor, large)
    assert array.tolist() == [0, 1, 2, 3, 4]
    assert rest == [[], None, {"a": 1.5}]
    theirs.send(None)
    assert ours.receive() is None


def test_an_end_that_is_gone_is_noticed(ends):
    ours, theirs = ends
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()


def test_an_end_that_leaves_amid_an_object_is_noticed(ends):
    ours, theirs = ends
    theirs._socket.sendall(b"\1\0\0")
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()


def test_only_who_has_the_key_is_listened_to():
    offer = Offer("127.0.0.1", KEY)
    strangers = [Link.to(offer.address, bytes(KEY_BYTES)), Link.to(offer.address, b"short")]
    strangers[1].close()
    ours = Link.to(offer.address, KEY)
    theirs = offer.accept()
    with pytest.raises((EOFError, ConnectionResetError)):
        strangers[0].receive()
    ours.send("hello")
    assert theirs.receive() == "hello"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(offer.address)
    for link in (strangers[0], ours, theirs):
        link.close()
