"""Messages between instances, here between threads of one process: what is sent arrives, or fails
in words.
"""

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from popdist import exchange, messages
from popdist.messages import CLEAR, HEADER, WHOLE, Link, Messages, TransferError

SIZES = (
    1,
    1000,
    messages.SHORT_BYTES,
    messages.SHORT_BYTES + 1,
    messages.SOCKET_BYTES,
    12 * messages.SOCKET_BYTES + 7,
)


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


def linked(count, pair=socket.socketpair):
    """The ends of links, each with a connection to each other one."""
    links = [{} for _ in range(count)]
    for first in range(count):
        for second in range(first):
            links[first][second], links[second][first] = map(Link, pair())
    return [Messages(each) for each in links]


@pytest.fixture(params=[socket.socketpair, tcp_pair], ids=["Unix", "TCP"])
def three(request):
    ends = linked(3, request.param)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def two():
    """One end, and the connection whose other end it is."""
    near, far = socket.socketpair()
    end = Messages({1: Link(near)})
    yield end, far
    end.close()
    far.close()


def content(source, target, tag, size):
    return np.random.default_rng([source, target, tag]).integers(0, 256, size, np.uint8)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_messages_arrive_whole_in_whatever_order_the_ends_begin_them(three, seed):
    plan = [
        (s, t, tag, size)
        for tag, size in enumerate(SIZES)
        for s in range(3)
        for t in range(3)
        if s != t
    ]

    def work(own):
        order = [each for each in plan if own in each[:2]]
        random.Random(seed * 3 + own).shuffle(order)
        found, begun = {}, []
        for source, target, tag, size in order:
            if source == own:
                begun.append(three[own].send(target, tag, content(source, target, tag, size)))
            else:
                found[source, tag, size] = np.empty(size, np.uint8)
                begun.append(three[own].receive(source, tag, found[source, tag, size]))
        three[own].wait(begun, 20)
        return all(
            np.array_equal(got, content(s, own, tag, size)) for (s, tag, size), got in found.items()
        )

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == [True] * 3


def test_threads_of_one_process_wait_for_messages_of_their_own(three):
    def talk(own, other, tag):
        for turn in range(30):
            got = np.empty(40_000, np.uint8)
            begun = three[own].receive(other, tag, got)
            sent = three[own].send(other, tag, np.full(40_000, turn + tag, np.uint8))
            three[own].wait([begun, sent], 20)
            assert (got == turn + tag).all()
        return True

    with ThreadPoolExecutor(8) as pool:
        talks = [pool.submit(talk, *pair, tag) for tag in range(4) for pair in ((0, 1), (1, 0))]
        assert all(each.result() for each in talks)


def test_messages_of_one_tag_arrive_in_order(three):
    sent = [three[0].send(1, 7, np.full(10, turn, np.uint8)) for turn in range(50)]
    for turn in range(50):
        got = np.empty(10, np.uint8)
        begun = three[1].receive(0, 7, got)
        mover = threading.Thread(target=three[0].wait, args=([sent[turn]], 5))
        mover.start()
        three[1].wait([begun], 5)
        mover.join()
        assert (got == turn).all()


def test_nothing_is_kept_of_messages_that_are_over(three):
    sizes, waiting = (3, messages.SHORT_BYTES + 1), []
    for size in sizes:  # before they are asked for, and after
        got = [np.empty(size, np.uint8) for _ in range(2)]
        begun = [three[0].send(1, 7, bytes(size)), three[1].receive(0, 7, got[0])]
        begun += [three[1].receive(0, 8, got[1]), three[0].send(1, 8, bytes(size))]
        for end, transfers in ((three[0], begun[::3]), (three[1], begun[1:3])):
            waiting.append(threading.Thread(target=end.wait, args=(transfers, 20)))
            waiting[-1].start()
    for thread in waiting:
        thread.join()
    for link in (three[0]._links[1], three[1]._links[0]):
        assert not (link.sends or link.receives or link.ready or link.early)


def test_an_end_that_is_gone_is_told_of_after_all_that_it_sent():
    near, far = linked(2)
    near.wait([near.send(1, 1, b"last words")], 5)
    near.close()
    said = bytearray(10)
    far.wait([far.receive(0, 1, said)], 5)
    assert said == b"last words"
    with pytest.raises(TransferError, match="Connection closed by peer"):
        far.wait([far.receive(0, 1, bytearray(5))], 5)
    far.close()


@pytest.mark.slow
def test_an_end_that_does_not_come_in_time_is_told_of(three):
    begin = time.monotonic()
    with pytest.raises(TransferError, match=r"^timed out after 0.2 s$"):
        three[0].wait([three[0].receive(1, 1, bytearray(5))], 0.2)
    assert time.monotonic() - begin < 2


@pytest.mark.slow
def test_a_slow_message_is_waited_for_as_long_as_it_moves(two):
    end, far = two
    buffer = bytearray(20)
    begun = end.receive(1, 1, buffer)
    far.sendall(HEADER.pack(WHOLE, 1, 20))

    def trickle():
        for _ in range(20):
            time.sleep(0.03)
            far.sendall(b"x")

    slow = threading.Thread(target=trickle)
    slow.start()
    end.wait([begun], 0.4)
    slow.join()
    assert buffer == b"x" * 20


def test_a_short_message_that_is_asked_for_while_it_arrives_is_not_missed(two):
    end, far = two
    far.sendall(HEADER.pack(WHOLE, 1, 3) + b"a")
    with pytest.raises(TransferError, match="timed out"):
        end.wait([end.receive(1, 99, bytearray(1))], 0.05)  # which hears the beginning
    buffer = bytearray(3)
    begun = end.receive(1, 1, buffer)
    far.sendall(b"bc")
    end.wait([begun], 5)
    assert buffer == b"abc"


UNEXPECTED = {
    "a long message that nobody waits for": HEADER.pack(WHOLE, 5, messages.SHORT_BYTES + 1),
    "another message before it": HEADER.pack(WHOLE, 1, 19),
    "a message of another size": HEADER.pack(WHOLE, 1, 2**63),
    "a kind that there is not": HEADER.pack(200, 1, 1),
    "an empty message": HEADER.pack(WHOLE, 5, 0),
    "random bytes": random.Random(1).randbytes(200),
}


@pytest.mark.parametrize("what", UNEXPECTED)
def test_an_end_that_says_what_it_may_not_say_is_not_listened_to_any_more(two, what):
    end, far = two
    buffer = bytearray(20)
    begun = end.receive(1, 1, buffer)
    far.sendall(UNEXPECTED[what])
    with pytest.raises(TransferError, match="^got a "):
        end.wait([begun], 5)
    assert buffer == bytearray(20)


def test_room_for_a_message_of_another_size_ends_the_connection(two):
    end, far = two
    begun = end.send(1, 1, bytes(messages.SHORT_BYTES + 1))
    far.sendall(HEADER.pack(CLEAR, 1, 2**40))
    with pytest.raises(TransferError, match="^got room for 1099511627776 bytes"):
        end.wait([begun], 5)


def test_what_is_kept_for_later_is_bounded(two, monkeypatch):
    monkeypatch.setattr(messages, "EARLY_BYTES", 20)
    end, far = two
    far.sendall((HEADER.pack(WHOLE, 5, 10) + bytes(10)) * 3)
    with pytest.raises(TransferError, match="^got a message of kind 2 with 10 bytes"):
        end.wait([end.receive(1, 1, bytearray(5))], 5)


@pytest.fixture
def instance(two, monkeypatch):
    """This process as instance 0 of two, and the connection of instance 1."""
    end, far = two
    monkeypatch.setattr(exchange, "getNumInstances", lambda: 2)
    monkeypatch.setattr(exchange, "getInstanceIndex", lambda: 0)
    monkeypatch.setattr(exchange, "connect", lambda: exchange.Connection(None, end, []))
    monkeypatch.setattr(exchange, "AFTERMATH_SECONDS", 0.0)
    return far


def value_message(size, content=b""):
    return HEADER.pack(WHOLE, exchange.GATHER, 8) + size.to_bytes(8, "big") + content


def test_a_value_that_is_too_large_is_refused_where_it_is(instance, monkeypatch):
    monkeypatch.setattr(exchange, "VALUE_BYTES", 10)
    with pytest.raises(ValueError, match="got a value of 12 bytes; expected at most 10"):
        exchange.gather("0123456789")
    instance.setblocking(False)
    with pytest.raises(BlockingIOError):
        instance.recv(1)


def test_no_room_is_made_for_a_value_that_is_too_large(instance):
    instance.sendall(value_message(2**62))
    with pytest.raises(exchange.InstanceError, match=f"got a value of {2**62} bytes; expected"):
        exchange.gather(1)


def test_values_of_another_instance_are_text_of_their_own_sizes(instance):
    text = "x" * 1000
    content = exchange.as_text(text).encode()
    whole = HEADER.pack(WHOLE, exchange.GATHER, len(content)) + content
    instance.sendall(value_message(len(content), whole))
    assert exchange.gather([None]) == [[None], text]
    assert instance.recv(1000) == (
        value_message(6) + HEADER.pack(WHOLE, exchange.GATHER, 6) + b"[null]"
    )


@pytest.mark.parametrize(
    "value", [object(), np.zeros(2), {1: 2}, [b"bytes"], {"a": {"b": {3, 4}}}, print]
)
def test_values_that_others_would_not_read_alike_are_refused(value):
    with pytest.raises(
        TypeError, match="gather: got .*; expected None, bool, int, float, str, and lists and dicts"
    ):
        exchange.gather(value)


def test_values_come_back_as_they_were_but_tuples_are_lists():
    value = {"a": [1, 2.5, None, True, "é\ud800", float("inf")], "b": {}, "c": 2**70}
    assert exchange.gather(value) == [value]
    assert exchange.gather((1, (2,))) == [[1, [2]]]
