"""Clients and a turn server over a real socket: never two at once, and nobody waits for the dead."""

import select
import socket
import threading

import pytest

from ddp_bench.bench.cluster.turns import TurnClient, TurnServer

LIMIT_S = 30.0
"""Ends a test that has failed; nothing waits for it otherwise."""


def all_end(sides):
    for side in sides:
        side.start()
    for side in sides:
        side.join(LIMIT_S)
        assert not side.is_alive()


class Turn:
    """Who holds the turn: a second holder at the same time is noted, and given every chance to come."""

    def __init__(self):
        self.order = []
        self.met = []
        self._inside = set()
        self._entered = threading.Condition()

    def hold(self, name, wait_s=0.0):
        with self._entered:
            self._inside.add(name)
            self.order.append(name)
            if len(self._inside) > 1:
                self.met.append(set(self._inside))
            self._entered.notify_all()
            self._entered.wait_for(lambda: bool(self.met), wait_s)
            self._inside.discard(name)


@pytest.fixture
def server(tmp_path):
    made = TurnServer(tmp_path / "turns", seed=1)
    yield made
    made.close()


def test_turns_alternate_and_never_meet(server, tmp_path):
    turn = Turn()

    def take_turns(name):
        client = TurnClient(str(tmp_path / "turns"))
        for _ in range(50):
            client.next_turn()
            turn.hold(name, wait_s=0.01)
        client.close()

    all_end([threading.Thread(target=take_turns, args=(name,)) for name in "ab"])
    assert turn.met == [], "one leaves before the other enters"
    pairs = [tuple(turn.order[i : i + 2]) for i in range(0, 96, 2)]
    assert {frozenset(pair) for pair in pairs} == {frozenset("ab")}, "each pair of turns holds both"
    assert len(set(pairs)) == 2, "in random order"
    assert server.turns >= 48


def test_clients_that_do_not_take_turns_would_be_seen_to_meet():
    turn = Turn()
    all_end([threading.Thread(target=turn.hold, args=(name, LIMIT_S), daemon=True) for name in "ab"])
    assert turn.met == [{"a", "b"}]


def test_a_side_that_leaves_frees_the_other(server, tmp_path):
    first, second = TurnClient(str(tmp_path / "turns")), TurnClient(str(tmp_path / "turns"))
    done = []

    def go_on():
        for i in range(3):
            second.next_turn()
            done.append(i)
        second.close()

    side = threading.Thread(target=go_on)
    side.start()
    first.close()
    side.join(LIMIT_S)
    assert done == [0, 1, 2]
    assert server.turns <= 2


@pytest.mark.parametrize("seed", range(4))
def test_both_may_leave_whoever_is_asked_first(seed, tmp_path):
    made = TurnServer(tmp_path / "turns", seed=seed)
    clients = [TurnClient(str(tmp_path / "turns")) for _ in range(2)]

    def take_turns(client):
        client.next_turn()
        client.close()

    sides = [threading.Thread(target=take_turns, args=(client,), daemon=True) for client in clients]
    all_end(sides)
    made.close()


def test_any_number_takes_turns_each_once_per_round(tmp_path):
    made = TurnServer(tmp_path / "turns", seed=1, num_clients=4)
    log = []

    def take_turns(name, turns):
        client = TurnClient(str(tmp_path / "turns"))
        for _ in range(turns):
            client.next_turn()
            log.append(name)
        client.close()

    sides = [threading.Thread(target=take_turns, args=(name, 5 + 5 * (name == "d"))) for name in "abcd"]
    all_end(sides)
    made.close()
    assert [set(log[i : i + 4]) for i in range(0, 20, 4)] == [set("abcd")] * 5
    assert log[20:] == ["d"] * 5, "the last one goes on alone"
    assert made.turns == 5


def test_nobody_waits_for_a_client_that_never_connected(tmp_path):
    made = TurnServer(tmp_path / "turns", seed=1, num_clients=3)
    granted = threading.Semaphore(0)

    def take_turns():
        client = TurnClient(str(tmp_path / "turns"))
        client.next_turn()
        granted.release()
        client.close()

    sides = [threading.Thread(target=take_turns, daemon=True) for _ in range(2)]
    for side in sides:
        side.start()
    assert not granted.acquire(timeout=0.2), "the third has not come"
    made.client_left()
    assert granted.acquire(timeout=LIMIT_S)
    assert granted.acquire(timeout=LIMIT_S)
    for side in sides:
        side.join(LIMIT_S)
    made.client_left()  # of one that took its turn and ended: nothing happens
    made.close()


def test_who_connects_late_takes_part_although_another_left_after_it_had_connected(tmp_path):
    """Of three one connects and dies: two connections are its own; the last connects beside the other."""
    made = TurnServer(tmp_path / "turns", seed=1, num_clients=3)
    path = str(tmp_path / "turns")
    gone = socket.socket(socket.AF_UNIX)
    gone.connect(path)
    other = TurnClient(path)
    gone.close()
    made.client_left()
    other.next_turn()
    came, turn = threading.Event(), Turn()

    def come_late():
        late = TurnClient(path)
        came.set()
        late.next_turn()
        turn.hold("late")
        late.close()

    side = threading.Thread(target=come_late, daemon=True)
    side.start()
    assert came.wait(LIMIT_S)
    turn.hold("other", wait_s=0.2)
    assert turn.met == [], "the other holds the turn"
    # The round in which it is let in, then one that it takes part in, then the proof that this is over.
    for _ in range(3):
        other.next_turn()
    assert turn.order == ["other", "late"]
    other.close()
    side.join(LIMIT_S)
    assert not side.is_alive()
    made.close()


def test_who_comes_when_all_have_left_is_free(tmp_path):
    made = TurnServer(tmp_path / "turns", seed=1, num_clients=2)
    made.client_left()
    made.client_left()
    made.close()
    late = TurnClient(str(tmp_path / "turns"))
    late.next_turn()
    late.close()


def test_a_server_is_closed_while_it_looks_for_late_clients(tmp_path, monkeypatch):
    looks, goes_on = threading.Event(), threading.Event()
    looked = select.select

    def held_up(*waiting):
        looks.set()
        goes_on.wait(10)
        return looked(*waiting)

    monkeypatch.setattr(select, "select", held_up)
    made = TurnServer(tmp_path / "turns", seed=1, num_clients=1)
    made.client_left()
    assert looks.wait(10)
    closing = threading.Thread(target=made.close)
    closing.start()
    closing.join(0.2)  # by now it has done what it can before the server goes on
    goes_on.set()
    closing.join(10)
    assert not closing.is_alive()


def test_without_a_server_every_turn_is_free():
    client = TurnClient(None)
    client.next_turn()
    client.next_turn()
    client.close()
