"""Error feedback of one sender: nothing is lost over many messages, a message can be put back, a state goes on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offbeat import codecs
from offbeat.codecs.feedback import Feedback, Rounded
from offbeat.errors import RequestError

LINES = ("bf16", "int8", "int8:stochastic", "int4", "1-bit", "top-k:0.05", "random-k:0.1", "power-sgd:2")
ITEMS = 777


def gradients(count: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(count)
    return [torch.randn(ITEMS, generator=chance) for _ in range(count)]


def send(feedback: Feedback, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """What the sender goes on with, and what a receiver decodes who knows the payload and its seed."""
    values, payload = gradient.clone(), torch.empty(feedback.size_bytes, dtype=torch.uint8)
    feedback.encode(values, payload)
    receiver, decoded = feedback.codec.coder(), torch.empty(ITEMS)
    receiver.seed(feedback.seed)
    receiver.decode(payload, decoded)
    return values, decoded


@pytest.mark.parametrize("line", LINES)
def test_all_that_was_sent_and_what_is_left_are_all_gradients(line: str) -> None:
    feedback = Feedback(codecs.parse(line), ITEMS, number=1, senders=3)
    given, sent = torch.zeros(ITEMS, dtype=torch.float64), torch.zeros(ITEMS, dtype=torch.float64)
    for gradient in gradients(50):
        values, decoded = send(feedback, gradient)
        assert torch.equal(values, decoded)
        given, sent = given + gradient, sent + decoded
    if feedback.residual is None:
        assert line == "int8:stochastic"
    else:
        left = feedback.residual[:ITEMS].double()
        assert float((sent + left - given).abs().max()) < 1e-4 < float((sent - given).abs().max())


@pytest.mark.parametrize("line", LINES)
def test_a_message_that_was_put_back_has_left_no_trace(line: str) -> None:
    codec = codecs.parse(line)
    plain, undone = Feedback(codec, ITEMS), Feedback(codec, ITEMS, undoes=True)
    for number, gradient in enumerate(gradients(6)):
        if number % 2:
            send(undone, torch.full((ITEMS,), 7.0))
            undone.put_back()
        assert torch.equal(send(undone, gradient)[0], send(plain, gradient)[0]), number


@pytest.mark.parametrize("line", LINES)
def test_a_saved_state_goes_on_with_the_same_bits(line: str) -> None:
    codec = codecs.parse(line)
    whole, resumed = Feedback(codec, ITEMS), Feedback(codec, ITEMS)
    first, second, third = gradients(3)
    send(whole, first)
    send(whole, second)
    resumed.load({name: one.clone() for name, one in whole.state().items()})
    assert torch.equal(send(whole, third)[0], send(resumed, third)[0])


def test_the_residual_of_another_model_is_refused() -> None:
    codec = codecs.parse("int8")
    with pytest.raises(RequestError, match="a residual of 5 items, and this run needs 777"):
        Feedback(codec, ITEMS).load(Feedback(codec, 5).state())


def test_rounded_weights_are_the_same_for_who_encodes_and_who_decodes() -> None:
    rounded, weights = Rounded(codecs.parse("bf16"), ITEMS), gradients(1)[0]
    here, there = rounded.encode(weights.clone()), torch.empty(ITEMS)
    rounded.decode(there)
    assert torch.equal(here, there) and torch.equal(here, weights.bfloat16().float())
