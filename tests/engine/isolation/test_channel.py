from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from asyncllm.engine.isolation.channel import Receiver, Sender, encode


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_messages_of_any_length_cut_anywhere(ends: tuple[socket.socket, socket.socket]) -> None:
    dice = random.Random(1)
    messages = [b"x" * dice.choice([0, 1, 7, 300, 70_000, 400_000]) for _ in range(60)]
    data = b"".join(map(encode, messages))

    def write() -> None:
        start = 0
        while start < len(data):
            end = start + dice.choice([1, 3, 8, 9, 1000, 100_000])
            ends[0].sendall(data[start:end])
            start = end
        ends[0].shutdown(socket.SHUT_WR)

    writer = threading.Thread(target=write)
    writer.start()
    receiver = Receiver(ends[1])
    assert [receiver.receive() for _ in messages] == messages
    assert receiver.receive() is None
    writer.join()


def test_whether_there_is_more(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(encode(1) + encode(2) + encode(3)[:-1])
    receiver = Receiver(ends[1])
    assert [(receiver.receive(), receiver.more) for _ in range(2)] == [(1, True), (2, False)]


def test_a_reader_that_sleeps_holds_up_nobody(ends: tuple[socket.socket, socket.socket]) -> None:
    cleared = threading.Event()
    sender = Sender(ends[0], cleared.set)
    messages = [(n, bytes(50_000)) for n in range(100)]
    start = time.thread_time()
    for message in messages:
        sender.send(message)
    assert time.thread_time() - start < 1.0
    assert sender.busy
    receiver = Receiver(ends[1])
    assert [receiver.receive() for _ in messages] == messages
    assert cleared.wait(5)
    assert not sender.busy
    sender.send("more")
    assert receiver.receive() == "more"


def test_nobody_reads_any_more(ends: tuple[socket.socket, socket.socket]) -> None:
    sender = Sender(ends[0], lambda: None)
    sender.send(bytes(10_000_000))
    ends[1].close()
    for _ in range(3):
        sender.send("unheard")
    end = time.monotonic() + 5
    while sender.busy:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert Receiver(ends[0]).receive() is None
