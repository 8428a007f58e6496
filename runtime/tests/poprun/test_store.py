"""The store of a run where its keeper is late, and where connections are not taken."""

import contextlib
import socket
import threading
from types import SimpleNamespace

import pytest
from poprun import agent, deadline, rendezvous, store, wire
from poprun.agent import Machines, Rendezvous
from poprun.deadline import Deadline

SECRET = b"known to members only"


def test_an_answer_that_comes_too_late_is_none_to_the_next_question(monkeypatch):
    monkeypatch.setattr(store, "ANSWER_SECONDS", 0.1)
    near, keeper = socket.socketpair()
    client = store.Client(near, 1.0)
    with keeper:
        with pytest.raises(store.StoreError, match="timed out"):
            client.has("a")
        with contextlib.suppress(BrokenPipeError):
            keeper.sendall(store.ANSWER.pack(True, 0))
        monkeypatch.setattr(store, "ANSWER_SECONDS", 30.0)
        with pytest.raises(store.StoreError, match="timed out"):
            client.has("b")
    client.close()


def test_a_key_that_is_too_long_is_refused_in_words_and_the_next_question_answered():
    listener = wire.listen(("127.0.0.1", 0))
    kept = store.Keeper(listener, SECRET)
    client = store.connect(listener.getsockname(), SECRET, Deadline(30))
    with pytest.raises(store.StoreError, match="got a key of 65536 bytes; expected at most 65535"):
        client.set("k" * 2**16, "value")
    client.set("k" * (2**16 - 1), "value")
    assert client.count() == 1
    client.close()
    kept.close()


def test_each_address_of_a_name_is_tried(monkeypatch):
    """The case of a keeper that listens at one of them only."""
    resolve, asked = socket.getaddrinfo, []

    def resolve_here(host, *rest, **more):
        asked.append(host)
        return [resolve(each, *rest, **more)[0] for each in ("::1", "127.0.0.2", "127.0.0.1")]

    listener = wire.listen(("127.0.0.1", 0))
    kept = store.Keeper(listener, SECRET)
    monkeypatch.setattr(socket, "getaddrinfo", resolve_here)
    client = store.connect(("head", listener.getsockname()[1]), SECRET, Deadline(10))
    assert client.count() == 0 and asked == ["head"]
    client.close()
    kept.close()


def refuse_first(listener, took):
    """Play a gate that refuses the first one after all that it has said, and lets in the second."""
    for turn in range(2):
        visitor, _ = listener.accept()
        with visitor:
            said = wire.receive_exactly(visitor, len(wire.MAGIC) + wire.NONCE, Deadline(30))
            theirs, own = said[len(wire.MAGIC) :], bytes(wire.NONCE)
            visitor.sendall(own + wire._proof(SECRET, b"listens", theirs, own))
            wire.receive_exactly(visitor, wire.NONCE, Deadline(30))
            if turn:
                visitor.sendall(wire.WELCOME)
                took.append(wire.receive_exactly(visitor, 5, Deadline(30)))


def test_who_is_refused_after_the_handshake_tries_again():
    """The case of too many strangers that come meanwhile, or of a machine that goes on later than
    another.
    """
    took = []
    with wire.listen(("127.0.0.1", 0)) as listener:
        gate = threading.Thread(target=refuse_first, args=(listener, took), daemon=True)
        gate.start()
        with wire.connect(listener.getsockname(), SECRET, Deadline(30)) as connection:
            wire.send_all(connection, b"hello", Deadline(30))
            gate.join(30)
    assert took == [b"hello"]


def test_a_machine_waits_only_so_long_for_the_next_start_of_machine_0(monkeypatch):
    now = [100.0]
    listener = wire.listen(("127.0.0.1", 0))
    kept = store.Keeper(listener, SECRET)
    host, port = listener.getsockname()
    client = store.connect((host, port), SECRET, Deadline(30))
    client.set("start", "0")
    client.close()
    point = rendezvous.Rendezvous((host, port), SECRET, False)
    second = Rendezvous(Machines(2, 1, 1, host, port, 2, 1), point, 1)
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "JOIN_SECONDS", 0.95)
        patch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
        patch.setattr(agent, "time", SimpleNamespace(sleep=lambda s: now.append(now.pop() + s)))
        with pytest.raises(wire.Unreachable, match="machine 0 has not begun this start"):
            second.next_rendezvous()
    kept.close()
    assert now == [pytest.approx(101.0)]
