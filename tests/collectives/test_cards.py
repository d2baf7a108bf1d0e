"""Whoever can write to the store of a group cannot be taken for a rank, and what it writes there ends in one line."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from offbeat.collectives import cards, rendezvous
from offbeat.collectives.cards import CardError, read, sign, token_of
from offbeat.errors import OffbeatError, PeerError
from offbeat.network import keys
from offbeat.network.keys import SECRET

KEY = bytes(range(32))
CARD = {
    "protocol": 1, "token": "ab" * 16, "host": "h", "hostname": "n", "pid": 7, "numbering": "", "strategy": "ring",
    "arena": 4096, "listener": "l",
}  # fmt: skip


@pytest.mark.parametrize("secret", [None, KEY])
def test_a_card_comes_back_as_it_was_signed(secret: bytes | None) -> None:
    assert read(sign(CARD, "card/1/0", secret).encode(), "card/1/0", secret) == CARD
    why = {"protocol": 1, "error": "no memory"}
    assert read(sign(why, "card/1/0", secret).encode(), "card/1/0", secret) == why


def test_a_card_without_the_secret_of_another_place_or_changed_is_refused() -> None:
    signed = sign(CARD, "card/1/0", KEY)
    changed = json.loads(signed) | {"strategy": "tree"}
    forged: list[tuple[str, str]] = [
        (sign(CARD, "card/1/0", None), "card/1/0"),
        (sign(CARD, "card/1/0", bytes(32)), "card/1/0"),
        (signed, "card/1"),
        (signed, "card/2/0"),
        (json.dumps(changed), "card/1/0"),
        (json.dumps(json.loads(signed) | {"mac": "é"}), "card/1/0"),
        (json.dumps(json.loads(signed) | {"mac": 3}), "card/1/0"),
    ]
    for text, place in forged:
        with pytest.raises(CardError, match="is not signed with the secret of this group"):
            read(text.encode(), place, KEY)


def junk(chance: random.Random) -> bytes:
    """Cards with something wrong in them, and things that are no cards at all."""
    card: Any = dict(CARD)
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(list(CARD))
        value: Any = chance.choice([None, True, -1, 1.5, "x", [], {}, "zz" * 16, 2**70, float("nan")])
        if chance.random() < 0.5:
            card.pop(name, None)
        else:
            card[name] = value
    whole = json.dumps(card).encode()
    cut = whole[: chance.randrange(len(whole))]
    noise = chance.randbytes(chance.randrange(200))
    return chance.choice([whole, cut, noise, b"[" * 20_000, b"9" * 20_000, b"null", b'{"protocol": 1}', b""])


@pytest.mark.parametrize("wrong", [{"port": 70000}, {"port": -1}, {"address": "a name"}, {"address": ""}])
def test_a_card_says_where_to_connect_by_an_address_and_a_port(wrong: dict[str, Any]) -> None:
    right = {**CARD, "address": "10.0.0.1", "port": 7000}
    assert read(json.dumps(right).encode(), "address/1/0", None) == right
    with pytest.raises(CardError, match=f"has a wrong '{next(iter(wrong))}'"):
        read(json.dumps(right | wrong).encode(), "address/1/0", None)


def test_a_card_without_what_its_kind_needs_is_not_taken() -> None:
    store, place = HashStore(), ["address/0", "address/1"]
    own = {**CARD, "address": "10.0.0.1", "port": 7000}
    exchange = cards.CardExchange(store, place, 0, own, None, lambda _: False, needs=("address", "port"))
    store.set(place[1], json.dumps({**CARD, "port": 7000}))
    end_s = time.monotonic() + 0.3
    with cards.bounded(store), pytest.raises(CardError, match="has no 'address'"):
        exchange.wait_for(1, end_s)
    store.set(place[1], json.dumps({"protocol": 1, "error": "no memory"}))
    assert exchange.wait_for(1, time.monotonic() + 5)["error"] == "no memory"


@pytest.mark.parametrize("secret", [None, KEY])
def test_whatever_stands_there_is_a_card_or_a_card_error(secret: bytes | None) -> None:
    chance = random.Random(0)
    refused = 0
    for _ in range(3000):
        try:
            found = read(junk(chance), "card/1/0", secret)
            assert found["protocol"] == 1 or secret is None
        except CardError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 200
    assert refused > 2000


def test_the_token_of_a_group_with_a_secret_is_not_what_its_cards_say() -> None:
    found = [dict(CARD), dict(CARD)]
    assert token_of(found, None) == bytes.fromhex("ab" * 16)
    assert token_of(found, KEY) not in (bytes.fromhex("ab" * 16), token_of(found, bytes(32)))
    assert len(token_of(found, KEY)) == 16


@pytest.mark.parametrize("text", ["xyz", "ab", "0x" + "ab" * 16])
def test_a_secret_that_is_none_is_one_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, text)
    with pytest.raises(OffbeatError, match="expected at least 32 hexadecimal digits"):
        keys.secret_of()


# --- ranks that meet in a store, and somebody else in it -------------------------------------------------------------


def exchange(
    store: HashStore,
    attack: Callable[[HashStore, threading.Event], None] | None,
    *,
    ranks: int = 3,
    most_s: float = 20.0,
    name: str = "listener",
    failing: int | None = None,
) -> list[Any]:
    """Each rank's cards, or its error."""
    found: list[Any] = [None] * ranks
    over = threading.Event()

    def one(rank: int) -> None:
        time.sleep(0.2 * rank)
        card: dict[str, Any] = {"strategy": "ring", "arena": 4096, "listener": f"{name} {rank}"}
        try:
            if rank == failing:
                rendezvous.say_why_not(store, rank, "no memory")
                return
            found[rank] = rendezvous.hand_out_card(store, rank, list(range(ranks)), card, most_s)
            rendezvous.check_cards(found[rank], rank, list(range(ranks)))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    attacker = threading.Thread(target=lambda: attack and attack(store, over))
    attacker.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    over.set()
    attacker.join(60)
    return found


def listeners_of(found: list[Any]) -> list[list[str]]:
    return [[card["listener"] for card in one] for one in found]


ALL = [[f"listener {rank}" for rank in range(3)]] * 3


def overwrite(store: HashStore, over: threading.Event) -> None:
    """Junk and forged cards, for a second and a half, now and then."""
    chance = random.Random(1)
    for _ in range(15):
        for rank in range(3):
            store.set(f"card/{rank}", junk(chance).decode("latin-1"))
        if over.wait(0.1):
            return


def delete(store: HashStore, over: threading.Event) -> None:
    for _ in range(15):
        for rank in range(3):
            store.delete_key(f"card/{rank}")
        if over.wait(0.1):
            return


def forge(store: HashStore, over: threading.Event) -> None:
    forged = sign({**CARD, "error": "go home"}, "card/1", None)
    for _ in range(15):
        store.set("card/1", forged)
        if over.wait(0.1):
            return


@pytest.mark.parametrize("attack", [None, overwrite, delete, forge])
def test_ranks_with_a_secret_find_each_other_whatever_is_done_to_their_cards_for_a_while(
    attack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, KEY.hex())
    found = exchange(HashStore(), attack)
    assert listeners_of(found) == ALL, found


@pytest.mark.parametrize("attack", [None, overwrite, delete])
def test_and_without_one_as_long_as_it_is_junk(attack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    found = exchange(HashStore(), attack)
    for one in found:
        assert isinstance(one, (list, PeerError)), one


@pytest.mark.parametrize("deleted", ["nothing", "the mark of one", "all marks"])
def test_a_store_serves_one_group_after_another_and_old_cards_are_not_taken(
    deleted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, KEY.hex())
    store = HashStore()
    assert listeners_of(exchange(store, None)) == ALL
    for rank in {"nothing": (), "the mark of one": (0,), "all marks": range(3)}[deleted]:
        store.delete_key(f"card/{rank}/read")
    again = exchange(store, None, name="another")
    assert listeners_of(again) == [[f"another {rank}" for rank in range(3)]] * 3, again


def test_a_group_is_made_in_the_store_of_one_that_could_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, KEY.hex())
    store = HashStore()
    failed = exchange(store, None, failing=2)
    assert [str(failed[rank]) for rank in (0, 1)] == ["rank 2 cannot start: no memory"] * 2
    assert listeners_of(exchange(store, None)) == ALL


def test_a_card_that_stays_forged_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, KEY.hex())
    monkeypatch.setattr(cards, "REPAIR_S", 0.3)
    store = HashStore()
    store.set("card/1", "junk")
    card = {"strategy": "ring", "arena": 4096, "listener": "l"}
    with pytest.raises(PeerError) as told:
        rendezvous.hand_out_card(store, 0, [0, 1], card, 20.0)
    assert str(told.value) == (
        "the group cannot be created: the entry of rank 1 in the group's store is not JSON; another "
        "process may have written to that store"
    )
    assert told.value.ranks == (1,)


def test_a_card_that_does_not_come_is_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    card = {"strategy": "ring", "arena": 4096, "listener": "l"}
    with pytest.raises(PeerError, match=r"rank 1 did not join the group within 0\.3 s"):
        rendezvous.hand_out_card(HashStore(), 0, [0, 1], card, 0.3)
    assert SECRET not in os.environ
