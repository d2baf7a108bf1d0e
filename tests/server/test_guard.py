"""A policy whose answers cannot be carried out, or that fails, is told from everything else that may go wrong."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from offbeat.errors import PolicyError, RequestError
from offbeat.policies import Apply, Drop, Joined, Pushed, Send
from offbeat.policies.base import EachGradient
from offbeat.server.coordinator.coordinator import GuardedPolicy
from offbeat.server.run_setting import RunSetting


class Odd(EachGradient):
    """Answers every push with what it was made to answer."""

    answer: Any = ()

    def on_push(self, event: Pushed) -> Any:
        answer = self.answer
        return answer(self, event) if callable(answer) else answer


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "failed: TypeError"),
        (("apply t1",), "with 'apply t1', which is not a command"),
        ((Send(7),), "with 'send 7', but that learner is not in the run"),
        ((Apply((9,), (1.0,)),), r"with 'apply t9', but it holds \[1\]"),
        ((Apply((), ()),), r"with 'apply', but it holds \[1\]"),
        ((Drop(1), Drop(1)), r"with 'drop t1', but it holds \[\]"),
        (lambda policy, event: (policy.wake(math.nan, "never"),), "failed: ValueError: a wake needs a finite time"),
        (lambda policy, event: 1 / 0, "failed: ZeroDivisionError: division by zero"),
        (lambda policy, event: sys.exit("enough"), "failed: SystemExit: enough"),
    ],
)
def test_an_answer_that_cannot_be_carried_out_is_the_policys_error(answer: Any, says: str) -> None:
    guarded = GuardedPolicy(RunSetting(line="async", learners=1), slots=9)
    guarded.policy = policy = Odd(expect=1)
    policy.answer = answer
    guarded.handle(Joined(0))
    with pytest.raises(PolicyError, match=says) as caught:
        guarded.handle(Pushed(0, 1, 0))
    assert "\n" not in str(caught.value)


def test_a_generator_and_a_list_of_commands_will_do() -> None:
    guarded = GuardedPolicy(RunSetting(line="async", learners=1), slots=9)
    guarded.policy = policy = Odd(expect=1)
    policy.answer = lambda policy, event: [policy.apply((event.ticket,), "a")]
    guarded.handle(Joined(0))
    assert guarded.handle(Pushed(0, 1, 0)) == (Apply((1,), (1.0,)),)


def test_room_for_one_gradient_less_is_refused() -> None:
    setting = RunSetting(line="k-batch-async:6", learners=3)
    assert setting.slots == 8
    GuardedPolicy(setting, slots=8)
    with pytest.raises(
        RequestError, match="holds up to 6 gradients; with 3 learners that needs 8 slots, but there are 7"
    ):
        GuardedPolicy(setting, slots=7)
