"""Signs that a training does not learn."""

from __future__ import annotations

import math
from typing import Any

import pytest

from offbeat.runs.learning import Sign, sign_of, sign_of_losses, warning_of, warning_of_losses


def curve(*losses: float | None, accuracies: tuple[float, ...] = (), start: float = 2.3) -> list[dict[str, Any]]:
    """Evaluations at the ends of epochs, of 1,000 samples each, on a test set of 359 in which 10.3 % is chance."""
    return [
        {
            "epoch": at + 1,
            "samples": 1000 * (at + 1),
            "loss": loss,
            "train_loss": loss,
            "start_loss": start,
            "accuracy": accuracies[at] if accuracies else 0.9,
            "test_samples": 359,
            "chance": 0.103,
        }
        for at, loss in enumerate(losses)
    ]


def name_of(evaluations: list[dict[str, Any]], *, ended: bool = False) -> str:
    sign = sign_of(evaluations, ended=ended)
    return "" if sign is None else sign.name


@pytest.mark.parametrize("ended", [False, True])
def test_a_training_that_learns_has_no_sign(ended: bool) -> None:
    losses = (1.9, 1.0, 0.5, 0.2, 0.1, 0.115, 0.09)  # a rise when it is small is noise
    for many in range(1, len(losses) + 1):
        assert name_of(curve(*losses[:many]), ended=ended) == ""


def test_an_accuracy_at_chance_counts_at_the_second_time_and_at_the_end() -> None:
    once = curve(2.0, accuracies=(0.11,))
    assert name_of(once) == ""
    assert name_of(once, ended=True) == "guessing"
    assert name_of(curve(2.0, 1.9, accuracies=(0.11, 0.13))) == "guessing"
    assert name_of(curve(2.0, 1.9, accuracies=(0.11, 0.16)), ended=True) == ""  # 12.6 to 20.2 %: above chance
    assert name_of(curve(2.0, 1.9, accuracies=(0.11, 0.05))) == "guessing"


def test_evaluations_within_an_epoch_do_not_count_as_two() -> None:
    parts = curve(2.0, 2.0, accuracies=(0.1, 0.1))
    parts[0]["epoch"], parts[1]["epoch"] = 0.5, 1.0
    assert name_of(parts) == ""


def test_a_loss_as_at_the_start_counts_at_the_second_time_and_at_the_end() -> None:
    assert name_of(curve(2.25)) == ""
    assert name_of(curve(2.25), ended=True) == "as at the start"
    assert name_of(curve(2.4, 2.25)) == "as at the start"
    assert name_of(curve(2.4, 1.5), ended=True) == ""


def test_a_loss_that_rises_over_an_epoch_counts_at_once() -> None:
    assert name_of(curve(1.2, 1.5)) == "rising"
    assert name_of(curve(1.2, 1.25)) == ""


def test_a_loss_that_is_no_number_and_updates_that_are_all_skipped() -> None:
    assert name_of(curve(1.2, None)) == "not finite"
    skipped = curve(1.2, 1.2)
    skipped[1] |= {"samples": 1000, "dropped": {"not finite": 1000}}
    sign = sign_of(skipped, ended=False)
    assert sign is not None and sign.text == (
        "no gradient was applied over a whole epoch: 1,000 samples gave gradients that are not finite"
    )


def test_a_run_that_is_stopped_right_after_an_evaluation_has_no_sign() -> None:
    first, second = curve(1.2, 1.2)
    assert name_of([first, first | {"train_loss": None}], ended=True) == ""
    assert name_of([first, second | {"train_loss": None}], ended=True) == ""


def test_what_an_older_version_wrote_has_no_sign() -> None:
    assert name_of([{"epoch": 1, "samples": 10, "accuracy": 0.1, "loss": 2.3}], ended=True) == ""


def test_where_most_targets_are_one_class_the_loss_decides() -> None:
    one = {"epoch": 1, "samples": 100, "accuracy": 0.9, "chance": 0.9, "test_samples": 100, "start_loss": 0.7}
    assert sign_of([one | {"train_loss": 0.2}], ended=True) is None
    found = sign_of([one | {"train_loss": 0.69}], ended=True)
    assert found is not None and found.name == "guessing"


def test_an_accuracy_that_was_there_and_is_lost_counts_at_the_end() -> None:
    past = {"epoch": 1, "samples": 100, "accuracy": 0.543, "chance": 0.1, "test_samples": 359}
    now = {"epoch": 30, "samples": 3000, "accuracy": 0.223, "chance": 0.1, "test_samples": 359}
    assert sign_of([past, now], ended=False) is None
    assert sign_of([past, now], ended=True) == Sign("fallen back", "the accuracy fell from 54.3 % (epoch 1) to 22.3 %")
    assert sign_of([past, now | {"accuracy": 0.5}], ended=True) is None


def test_losses_alone_tell_too() -> None:
    falling, flat = [1.0 / (1 + step) for step in range(40)], [1.0, 1.02] * 20
    assert sign_of_losses(falling, 2) is None and sign_of_losses(flat[:7], 2) is None  # too few
    found = sign_of_losses(flat, 2)
    assert found is not None and "unless it began with trained weights" in warning_of_losses(found)
    broken = sign_of_losses([*falling[:30], *[math.nan] * 10], 2)
    assert broken is not None and broken.name == "not finite"


def test_the_warning_is_one_line_with_what_to_try() -> None:
    line = warning_of(Sign("rising", "training loss rises: 1, then 2"), "--train.lr 0.01")
    assert line == "this run does not learn: training loss rises: 1, then 2; try --train.lr 0.01"
