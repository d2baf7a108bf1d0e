"""The small parts of learners on other hosts: what waits to be sent, who has which place, how long is silent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from offbeat import codecs
from offbeat.codecs.feedback import Feedback, Rounded
from offbeat.network.connections import AnyConnection
from offbeat.server import handshake
from offbeat.server.arena import stamp
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.remote import frames, road_process
from offbeat.server.remote.frames import (
    HEADER_BYTES,
    LEARNER_CHANNELS,
    PIECE_BYTES,
    SEED_BYTES,
    Channel,
    FrameError,
    Header,
    Kind,
    Reading,
    Region,
    Words,
    unpack,
)
from offbeat.server.remote.gateway import KEPT_S, Places
from offbeat.server.remote.outgoing import LEAST_BYTES, Outgoing, Pace
from offbeat.server.remote.remote_arena import LARGE_BYTES, RemoteArena
from offbeat.server.remote.remote_road import Link
from offbeat.server.remote.road_process import HeartbeatLimit, RoadOptions, RoadProcess
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import PROTOCOL, Push, decode_input, encode

SLOT = memoryview(bytes(range(256)) * 16384)  # 4 MiB
MESSAGE = Header(Kind.MESSAGE, size=4)


def write(start: int, end: int, minibatch: int = 1) -> Header:
    return Header(Kind.WRITE, Region.GRADIENT, 0, end - start, minibatch, start)


def sent(out: Outgoing, cancelled: int = 0) -> list[tuple[Kind, int, int]]:
    """Kind, offset and size of every frame that waits."""
    found = []
    while (frame := out.next(cancelled)) is not None:
        header, parts = frame
        assert sum(map(len, parts)) == header.size
        found.append((header.kind, header.offset, header.size))
    return found


# --- what waits to be sent --------------------------------------------------------------------------------------------


def test_layers_that_lie_side_by_side_are_sent_as_one_and_the_message_after_them() -> None:
    out = Outgoing()
    for start, end in ((900, 1000), (500, 900), (0, 500)):  # as backward fills them
        out.write(write(start, end), SLOT[start:end])
    out.add(MESSAGE, b"push")
    assert sent(out) == [(Kind.WRITE, 0, 1000), (Kind.MESSAGE, 0, 4)]


def test_a_layer_that_changes_while_it_waits_is_sent_once() -> None:
    out = Outgoing()
    out.write(write(0, 100), SLOT[:100])
    out.write(write(0, 100), SLOT[:100])
    assert sent(out) == [(Kind.WRITE, 0, 100)]


def test_layers_are_sent_from_where_they_are_and_one_that_is_written_again_from_its_new_place() -> None:
    def parts(*changes: tuple[int, int, bytes]) -> list[tuple[int, bytes]]:
        out = Outgoing()
        for start, end, letter in changes:
            out.write(write(start, end), memoryview(letter * (end - start)))
        found = []
        while (frame := out.next(0, 15)) is not None:
            found.append((frame[0].offset, b"".join(frame[1])))
        return found

    layers = (20, 30, b"c"), (10, 20, b"b"), (0, 10, b"a")
    assert parts(*layers) == [(0, b"a" * 10 + b"b" * 5), (15, b"b" * 5 + b"c" * 10)]
    assert parts(*layers, (10, 20, b"B")) == [(0, b"a" * 10 + b"B" * 5), (15, b"B" * 5 + b"c" * 10)]
    assert parts(*layers, (0, 20, b"D")) == [(0, b"D" * 15), (15, b"D" * 5 + b"c" * 10)]
    assert parts(*layers, (0, 15, b"E"))[-1] == (0, b"E" * 15)  # after what it does not wholly cover
    assert parts((0, 10, b"a"), (20, 30, b"c")) == [(0, b"a" * 10), (20, b"c" * 10)]


def test_a_layer_that_was_partly_sent_is_sent_again_when_it_is_written_again() -> None:
    out = Outgoing()
    out.write(write(0, 100), SLOT[:100])
    first = out.next(0, 40)
    assert first is not None and first[0].size == 40
    out.write(write(0, 100), memoryview(b"n" * 100))
    again = out.next(0)
    assert again is not None and (again[0].offset, b"".join(again[1])) == (0, b"n" * 100)
    assert out.next(0) is None


def test_gradients_of_an_earlier_minibatch_are_let_go_when_those_of_the_next_come() -> None:
    out = Outgoing()
    out.write(write(0, 100, minibatch=4), SLOT[:100])
    out.add(MESSAGE, b"push")
    out.write(write(0, 50, minibatch=5), SLOT[:50])
    out.write(write(100, 150, minibatch=5), SLOT[:50])
    assert sent(out) == [(Kind.MESSAGE, 0, 4), (Kind.WRITE, 0, 50), (Kind.WRITE, 100, 50)]


def test_ten_thousand_layers_that_are_written_again_and_again_are_sent_once() -> None:
    """With a look at all of them for each, this took minutes."""
    out, count = Outgoing(), 10_000
    for _ in range(5):
        for start in range(count):
            out.write(write(4 * start, 4 * start + 4), SLOT[:4])
    assert sum(size for _, _, size in sent(out)) == 4 * count


def test_a_frame_has_no_more_parts_than_the_kernel_takes_at_once() -> None:
    out = Outgoing()
    for start in range(3000):
        out.write(write(start, start + 1), SLOT[start : start + 1])
    sizes = [size for _, _, size in sent(out)]
    assert max(sizes) < 1024 and sum(sizes) == 3000


def test_large_layers_are_sent_in_pieces() -> None:
    out = Outgoing()
    out.write(write(0, 2 * PIECE_BYTES + 5), SLOT[: 2 * PIECE_BYTES + 5])
    assert sent(out) == [
        (Kind.WRITE, 0, PIECE_BYTES),
        (Kind.WRITE, PIECE_BYTES, PIECE_BYTES),
        (Kind.WRITE, 2 * PIECE_BYTES, 5),
    ]


def test_what_is_left_of_a_cancelled_gradient_is_not_sent_but_its_message_is() -> None:
    out = Outgoing()
    out.write(write(0, 3 * PIECE_BYTES, minibatch=4), SLOT[: 3 * PIECE_BYTES])
    out.add(MESSAGE, b"push")
    first = out.next(3)
    assert first is not None and first[0].offset == 0
    out.write(write(0, 100, minibatch=5), SLOT[:100])
    assert sent(out, cancelled=4) == [(Kind.MESSAGE, 0, 4), (Kind.WRITE, 0, 100)]


def test_a_message_that_is_said_again_while_it_waits_is_sent_once() -> None:
    out = Outgoing()
    out.add(MESSAGE, b"push")
    out.add(MESSAGE, b"push")
    out.add(MESSAGE, b"stop")
    assert len(sent(out)) == 2


class Kernel:
    """A socket that keeps what it is told."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        self.kept.append(value)


def test_pieces_are_as_large_as_a_connection_sends_in_a_hundredth_of_a_second() -> None:
    for bytes_per_s, least, most in ((1.25e6, 1, 1), (1.25e8, 8, 32), (3e9, 32, 32)):
        pace, kernel = Pace(), Kernel()
        pace.begin(kernel)  # type: ignore[arg-type]  # all of a socket that it uses
        for _ in range(20):
            pace.sent(pace.piece_bytes, pace.piece_bytes / bytes_per_s)
        assert least * LEAST_BYTES <= pace.piece_bytes <= most * LEAST_BYTES, bytes_per_s
        assert kernel.kept[-1] == pace.piece_bytes <= PIECE_BYTES
        for _ in range(20):  # others use the link, too
            pace.sent(pace.piece_bytes, 1.0)
        assert kernel.kept[-1] == pace.piece_bytes == LEAST_BYTES


def test_the_end_of_a_layer_says_nothing_of_how_fast_a_connection_is() -> None:
    pace = Pace()
    pace.begin(Kernel())  # type: ignore[arg-type]  # all of a socket that it uses
    pace.sent(LEAST_BYTES - 1, 0.0)
    assert pace.piece_bytes == LEAST_BYTES


# --- the road process -------------------------------------------------------------------------------------------------


@pytest.fixture
def road() -> Iterator[tuple[RoadProcess, socket.socket]]:
    """One that nobody has told who it is, and the learner's end of UP_CONTROL."""
    pairs = {channel: socket.socketpair() for channel in LEARNER_CHANNELS}
    options = RoadOptions(learner=1, coordinator="", token="", hand_in=lambda *_: None, tell=lambda _: None)
    yield RoadProcess(options, {channel: here for channel, (here, _) in pairs.items()}), pairs[Channel.UP_CONTROL][1]
    for one in (end for pair in pairs.values() for end in pair):
        one.close()


def test_who_connects_and_does_not_say_who_it_is_is_not_waited_for(
    road: tuple[RoadProcess, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(road_process, "HANDSHAKE_S", 1.0)
    thread = threading.Thread(target=road[0].serve, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_a_learner_of_the_run_before_is_refused_and_that_is_told_apart_from_one_that_left() -> None:
    pairs = {channel: socket.socketpair() for channel in LEARNER_CHANNELS}
    here = {channel: one for channel, (one, _) in pairs.items()}
    options = RoadOptions(learner=1, coordinator="", token="", hand_in=print, tell=print, run="b" * 32)
    own = handshake.Handshake(PROTOCOL, "a" * 32, "learner", 1, "any")
    data = handshake.encode_handshake(own)
    pairs[Channel.UP_CONTROL][1].sendall(Header(Kind.MESSAGE, size=len(data)).pack() + data)
    assert not RoadProcess(options, here).serve()
    assert b"has begun anew" in pairs[Channel.DOWN_CONTROL][1].recv(4096)
    for one in (end for pair in pairs.values() for end in pair):
        one.close()


def test_a_learner_that_asks_and_asks_and_does_not_read_is_refused(road: tuple[RoadProcess, socket.socket]) -> None:
    process, learner = road
    learner.setblocking(False)
    learner.send(Header(Kind.READ, which=Reading.LAST).pack() * 100)
    with pytest.raises(FrameError, match="64 requests at once"):
        process._receive_control()


def test_a_part_of_a_pause_that_is_to_come_is_refused(road: tuple[RoadProcess, socket.socket]) -> None:
    with pytest.raises(FrameError, match="a pause that it was not called to"):
        road[0]._take_part(Header(Kind.PART, which=1, number=2**63))


def test_a_minibatch_of_a_clock_that_is_ahead_ends_now_and_is_as_long_as_it_was(
    road: tuple[RoadProcess, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = road
    process.start_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: 110.0)

    def told(began_s: float, ended_s: float) -> tuple[float, float]:
        push = Push(0, 1, 1, 0, began_s=began_s, ended_s=ended_s)
        message = decode_input(process._timely(push, encode(push)))
        assert isinstance(message, Push)
        return message.began_s, message.ended_s

    assert told(9.0, 9.5) == (9.0, 9.5)
    assert told(10.25, 10.5) == (9.75, 10.0)
    assert told(0.0, 12.0) == (0.0, 10.0)


# --- the learner's memory ---------------------------------------------------------------------------------------------


def arena_of(line: str = "async", sizes: tuple[int, int] = (6, 10), widths: tuple[int, ...] = ()) -> RemoteArena:
    table = ParameterLayout(
        sizes=sizes,
        groups=(0, 0),
        extra=3,
        dtype="float32",
        gradients="float32",
        rule="sgd",
        states=("momentum_buffer",),
        clip_norm=0.0,
        in_place=False,
        digest="x",
        widths=widths,
    )
    return RemoteArena(table, RunSetting(line=line, learners=3), 2)


class Kept:
    """An uplink that keeps what it is given."""

    def __init__(self) -> None:
        self.writes: list[Header] = []
        self.sent: list[memoryview] = []
        self.reads: list[tuple[int, int]] = []

    def write(self, header: Header, data: memoryview) -> None:
        assert len(data) == header.size
        self.writes.append(header)
        self.sent.append(data)

    def read(self, number: int, reading: int) -> None:
        self.reads.append((number, reading))


def test_filling_a_layer_sends_it_as_a_part_of_its_minibatch() -> None:
    arena, uplink = arena_of(), Kept()
    arena.connected(uplink)
    arena.minibatch_begun(stamp(2, 9), 0)
    arena.fill(2, 1, torch.ones(2, 5))
    arena.clear(2, (0,))
    assert uplink.writes == [
        Header(Kind.WRITE, Region.GRADIENT, 0, 40, stamp(2, 9), 24),
        Header(Kind.WRITE, Region.GRADIENT, 0, 24, stamp(2, 9), 0),
    ]
    assert arena.slots[0].tolist() == [0.0] * 6 + [1.0] * 10


def test_a_large_gradient_that_stays_is_sent_from_where_it_is_if_it_is_as_it_travels() -> None:
    items = LARGE_BYTES // 4
    arena, uplink = arena_of(sizes=(6, items)), Kept()
    arena.connected(uplink)
    arena.minibatch_begun(stamp(2, 9), 0)
    gradient = torch.ones(items)
    assert arena.fill(2, 1, gradient, stays=True) == items
    copied = gradient.double(), torch.ones(2 * items)[::2], torch._neg_view(-gradient), gradient
    for one, stays in zip(copied, (True, True, True, False), strict=True):
        arena.fill(2, 1, one, stays=stays)
    gradient[0] = 7.0  # what is sent is what is there by then
    values = [torch.frombuffer(data, dtype=torch.float32)[0].item() for data in uplink.sent]
    assert uplink.writes == [Header(Kind.WRITE, Region.GRADIENT, 0, LARGE_BYTES, stamp(2, 9), 24)] * 5
    assert values == [7.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("stays", [True, False])
def test_a_gradient_of_one_number_may_have_any_stride(stays: bool) -> None:
    arena, uplink = arena_of(sizes=(1, 9)), Kept()
    arena.connected(uplink)
    for number, one in enumerate((torch.ones(1).expand(1), torch.ones(2)[::2], torch._neg_view(-torch.ones(1)))):
        assert arena.fill(0, 0, one, stays=stays) == 1.0
        assert bytes(uplink.sent[number]) == torch.ones(1).numpy().tobytes()


def test_of_a_table_only_the_rows_that_are_there_are_sent() -> None:
    arena, uplink = arena_of(widths=(0, 5)), Kept()
    arena.connected(uplink)
    arena.minibatch_begun(stamp(2, 9), 0)
    arena.fill(
        2, 1, torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 5), (2, 5), check_invariants=True), stays=True
    )
    arena.deliver(2)
    ((header, data),) = zip(uplink.writes, uplink.sent, strict=True)
    assert (header.region, header.which, header.number) == (Region.ROWS, 1, stamp(2, 9))
    assert 5 * 4 <= len(data) < 2 * 5 * 4


def test_with_a_codec_only_the_payload_is_sent_and_it_has_the_size_that_is_priced() -> None:
    arena, uplink = arena_of("async:codec=top-k:0.1"), Kept()
    arena.connected(uplink)
    arena.minibatch_begun(stamp(2, 9), 0)
    arena.fill(2, 1, torch.arange(10.0), stays=True)
    arena.clear(2, (0,))
    assert uplink.writes == []
    codec = arena.setting.codec
    assert codec is not None
    feedback = Feedback(codec, 16)
    arena.encode(2, feedback)
    assert uplink.writes == [Header(Kind.WRITE, Region.GRADIENT, 0, SEED_BYTES + 16, stamp(2, 9))]
    assert codec.size_bytes(16) == 16 == arena.setting.policy().rule.push_bytes(64)
    assert arena.slots[0].tolist() == [0.0] * 14 + [8.0, 9.0]
    assert feedback.residual is not None and feedback.residual.tolist() == [0.0] * 6 + [*range(8), 0, 0]


def test_rounded_weights_are_decoded_when_all_of_them_have_come() -> None:
    arena = arena_of("async:down=bf16")
    arena.connected(Kept())
    arena.welcome(4)
    sent = Rounded(codecs.parse("bf16"), 16)
    weights = sent.encode(torch.linspace(0, 1, 16))
    arena.place(Header(Kind.DATA, Region.ROUNDED, 1, 32, 11, 0))[:] = sent.payload.numpy().tobytes()
    arena.ended(4, 11)
    assert arena.awaited(((0, 3),), 4, 11) == ((1, 3),)
    assert torch.equal(arena.weights[1], weights)


def test_weights_are_waited_for_and_a_broken_connection_ends_the_incarnation() -> None:
    arena = arena_of()
    arena.connected(Kept())
    arena.welcome(4)
    arena.place(Header(Kind.DATA, Region.WEIGHTS, 1, 4, 11, 8))[:] = torch.tensor([2.5]).numpy().tobytes()
    arena.ended(4, 11)
    assert arena.awaited(((0, 3),), 4, 11) == ((1, 3),)
    assert arena.weights[1][2] == 2.5
    cancel, fence, _ = arena.learner_words[2]
    assert fence.get() < 4 and cancel.get() < stamp(4, 1)
    arena.lost()
    assert arena.awaited(((0, 3),), 4, 12) == ((0, 3),)  # does not wait for what cannot come
    assert fence.get() == 4 and stamp(4, 2**40 - 1) <= cancel.get() < stamp(5, 1)


def test_words_are_not_taken_back() -> None:
    arena = arena_of()
    arena.set_words(Words(stamp(2, 5), 1, 0, 9))
    arena.set_words(Words(stamp(2, 4), 0, 1, 10))
    cancel, fence, _ = arena.learner_words[2]
    assert (cancel.get(), fence.get()) == (stamp(2, 5), 1)
    assert (arena.quiet_word.get(), arena.committed[0][0].get()) == (1, 10)


# --- places -----------------------------------------------------------------------------------------------------------

A, B = b"a" * 16, b"b" * 16


def test_hosts_get_places_as_long_as_there_are_some() -> None:
    places = Places(1, 4)
    assert places.take(A, 2, 0.0) == (1, 2)
    assert places.take(B, 2, 0.0) == (3,)
    assert places.take(b"c" * 16, 1, 0.0) == ()
    assert places.take(A, 2, 0.0) == (1, 2)  # the same again


def test_a_place_is_kept_for_its_host_while_its_learner_is_there_and_some_time_longer() -> None:
    places = Places(1, 2)
    places.take(A, 1, 0.0)
    assert places.admit(1, A, 1.0) == ""
    later_s = 10 * KEPT_S
    assert places.take(B, 1, later_s) == ()
    assert "was given to another host" in places.admit(1, B, later_s)
    places.left(1, later_s)
    assert places.take(B, 1, later_s + KEPT_S - 1) == ()
    assert places.admit(1, A, later_s + 1) == ""  # it came back in time
    places.left(1, later_s + 2)
    assert places.take(B, 1, later_s + 2 + KEPT_S) == (1,)
    assert "was given to another host" in places.admit(1, A, later_s + 3 + KEPT_S)


def test_a_learner_of_this_host_is_no_place_for_another() -> None:
    assert "has no place for another host" in Places(2, 4).admit(1, A, 0.0)


def test_a_gateway_that_was_replaced_lets_learners_back_to_the_places_they_had() -> None:
    assert Places(1, 4).admit(3, A, 0.0) == ""


def test_a_learner_that_is_refused_keeps_no_place() -> None:
    """One of the run before, that a gateway of the new run does not know from one that comes back."""
    places = Places(1, 3)
    assert places.take(A, 2, 0.0) == (1, 2)
    assert places.admit(1, A, 0.0) == "" and places.admit(2, A, 0.0) == ""
    places.refused(1)
    places.left(2, 0.0)
    assert places.take(B, 2, 0.1) == (1,)


# --- heartbeats -------------------------------------------------------------------------------------------------------


def test_the_limit_of_silence_is_ten_times_the_longest_pause_within_bounds() -> None:
    limit = HeartbeatLimit(0.0)
    assert limit.limit_s == 15.0  # generous while nothing is known
    for beat in range(1, 21):
        limit.beat(0.2 * beat)
    assert limit.limit_s == 3.0
    limit.beat(4.9)
    assert round(limit.limit_s, 6) == 9.0
    assert not limit.is_over(4.9 + 8.9) and limit.is_over(4.9 + 9.1)
    limit.beat(100.0)
    assert limit.limit_s == 60.0


# --- bytes that were lost ---------------------------------------------------------------------------------------------


@pytest.fixture
def link() -> Iterator[tuple[Link, dict[Channel, socket.socket]]]:
    """A learner's connections to a run, and their other ends."""
    here: dict[Channel, AnyConnection] = {}
    there = {}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for channel in LEARNER_CHANNELS:
            here[channel] = socket.create_connection(listener.getsockname())
            there[channel], _ = listener.accept()
            there[channel].settimeout(10)
    one = Link(here, arena_of())
    one.start()
    yield one, there
    one.close()
    for end in there.values():
        end.close()


def test_a_connection_on_which_nothing_is_sent_carries_a_sign_of_life(
    link: tuple[Link, dict[Channel, socket.socket]],
) -> None:
    end = link[1][Channel.UP_DATA]
    for _ in range(3):
        assert unpack(end.recv(HEADER_BYTES, socket.MSG_WAITALL), Channel.UP_DATA).kind is Kind.BEAT


def test_a_learner_that_was_sent_something_that_did_not_come_connects_again(
    link: tuple[Link, dict[Channel, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "SILENT_S", 0.5)
    one, there = link
    piece = Header(Kind.DATA, Region.WEIGHTS, 0, 24, 1, 0).pack() + bytes(24)
    there[Channel.DOWN_DATA].sendall(piece[:-10])  # its end was lost on the way
    end_s = time.monotonic() + 10
    while not one.broken and time.monotonic() < end_s:
        with suppress(OSError):
            there[Channel.DOWN_CONTROL].sendall(Header(Kind.BEAT).pack())
        time.sleep(0.05)
    assert one.broken
