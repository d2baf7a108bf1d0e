"""The race, on curves made by hand: who is first, who is advised, and the words."""

from __future__ import annotations

import math
import re

import pytest

from offbeat.predict.race import (
    Contender,
    RaceResult,
    TrainingCurve,
    advice,
    advised,
    by_bytes,
    chart_of,
    explain_result,
    ranked,
    variants,
    worth_drawing,
)
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law

MACHINES = "equal learners"
CLUSTER = Cluster(learners=8, law=parse_law("exp:1"))


def curve(
    reached_s: float | None,
    seed: int = 0,
    *,
    samples: int = 1000,
    accuracy: float = 0.96,
    staleness: float = 0.0,
    wait: float = 0.0,
    waste: float = 0.0,
) -> TrainingCurve:
    """A run that goes straight up, to the end at 100 s with ten times the samples."""
    middle = () if reached_s is None else ((reached_s, 0.93),)
    return TrainingCurve(
        seed=seed,
        points=((0.0, 0.1), *middle, (100.0, accuracy)),
        reached_s=reached_s,
        reached_updates=None if reached_s is None else 10,
        reached_samples=None if reached_s is None else samples,
        accuracy=accuracy,
        test_samples=359,
        best=accuracy,
        seconds=100.0,
        updates=100,
        samples=10 * samples,
        staleness=staleness,
        waste_share=waste,
        wait_share=wait,
    )


def racer(
    strategy: str,
    *times: float | None,
    variant: str = "",
    option: str = "",
    samples: int = 1000,
    accuracy: float = 0.96,
    staleness: float = 0.0,
    wait: float = 0.0,
    waste: float = 0.0,
) -> RaceResult:
    """A strategy with a run for each time; None: it did not get there."""
    curves = tuple(
        curve(one, seed, samples=samples, accuracy=accuracy, staleness=staleness, wait=wait, waste=waste)
        for seed, one in enumerate(times)
    )
    return RaceResult(Contender(strategy, CLUSTER, variant, option), curves)


def names(racers: list[RaceResult]) -> list[str]:
    return [one.label for one in racers]


# --- medians ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "median"),
    [
        ((3.0,), 3.0),
        ((5.0, 1.0, 3.0), 3.0),
        ((4.0, 1.0, 2.0, 3.0), 3.0),
        ((None, 1.0, 2.0), 2.0),
        ((None, 1.0), math.inf),
        ((None, None, 1.0), math.inf),
        ((None, 1.0, 2.0, 3.0), 3.0),
    ],
)
def test_the_median_is_a_run_that_was_and_the_slower_of_the_middle_two(
    times: tuple[float | None, ...], median: float
) -> None:
    assert racer("ring", *times).median_s == median


def test_samples_and_their_pace_are_those_of_the_run_with_the_median_time() -> None:
    runs = (curve(2.0, 0, samples=100), curve(4.0, 1, samples=800), curve(9.0, 2, samples=900))
    one = RaceResult(Contender("ring", CLUSTER), runs)
    assert (one.samples_needed, one.samples_per_s) == (800, 200.0)


def test_who_did_not_get_there_is_measured_to_the_end() -> None:
    one = racer("ring", None, samples=1000)
    assert one.samples_needed == math.inf
    assert one.samples_per_s == 100.0  # 10,000 in 100 s


def test_times_are_sorted_and_those_that_are_missing_come_last() -> None:
    assert racer("ring", None, 3.0, 1.0).times == (1.0, 3.0, math.inf)


# --- ranking ------------------------------------------------------------------------------------------------------


def test_the_fastest_is_first_and_who_did_not_get_there_is_ranked_by_the_end() -> None:
    racers = [
        racer("async", None, accuracy=0.5),
        racer("ring", 3.0),
        racer("k-sync:3", None, accuracy=0.9),
        racer("k-async:2", 2.0),
    ]
    assert names(ranked(racers)) == ["k-async:2", "ring", "k-sync:3", "async"]


def test_who_ended_within_chance_of_each_other_is_ranked_by_time() -> None:
    ended = {"async": (0.80, 9.0), "ring": (0.81, 20.0), "k-sync:3": (0.60, 1.0)}
    racers = [
        RaceResult(Contender(name, CLUSTER), (curve(None, accuracy=right)._replace(seconds=seconds),))
        for name, (right, seconds) in ended.items()
    ]
    assert names(ranked(racers)) == ["async", "ring", "k-sync:3"], "a point on 359 samples is noise"


def test_a_rank_is_by_the_median_and_not_by_the_luckiest_run() -> None:
    assert names(ranked([racer("async", 1.0, 9.0, 9.0), racer("ring", 4.0, 4.0, 4.0)])) == ["ring", "async"]


# --- who is advised -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ring", "server", "chosen"),
    [
        ((2.0, 2.1, 2.2), (1.0, 1.1, 1.2), "async"),  # far apart
        ((1.04,), (1.0,), "ring"),  # close, and one seed cannot tell
        ((1.14,), (1.0,), "ring"),  # one seed shows no spread, and there may be one
        ((1.16,), (1.0,), "async"),  # but not that much
        ((1.08, 1.12, 1.3), (0.9, 1.0, 1.1), "ring"),  # 1.12 and 1.0, but they overlap
        ((1.12, 1.12, 1.3), (0.9, 1.0, 1.1), "async"),  # 1.12 and 1.0, and they do not
        ((1.1, 1.2, 1.4), (0.9, 1.0, 1.15), "async"),  # they overlap, but 1.2 is far
        ((1.1, 1.12, 1.3), (0.9, 1.0, None), "ring"),  # a run that did not get there is as slow as can be
        ((1.0, None, None), (0.9, 1.0, 1.15), "async"),  # it overlaps, but has no median
    ],
)
def test_the_simpler_one_is_advised_where_the_seeds_cannot_tell(
    ring: tuple[float | None, ...], server: tuple[float | None, ...], chosen: str
) -> None:
    found = advised([racer("async", *server), racer("ring", *ring)])
    assert found is not None
    assert found.label == chosen


def test_a_plain_all_reduce_is_simpler_than_a_variant_and_that_than_a_server() -> None:
    plain = racer("torus:2x2", 1.03)
    variant = racer("ring", 1.02, variant="split by speed")
    barrier = racer("full-sync", 1.01)
    policy = racer("k-async:2", 1.0)
    everyone = [policy, barrier, variant, plain]
    found = []
    while everyone:
        chosen = advised(everyone)
        assert chosen is not None
        found.append(chosen)
        everyone.remove(chosen)
    assert found == [plain, variant, barrier, policy]


def test_of_two_that_are_equally_simple_the_faster_is_advised() -> None:
    found = advised([racer("async", 1.01), racer("k-async:2", 1.0)])
    assert found is not None
    assert found.strategy == "k-async:2"


def test_nobody_is_advised_if_nobody_got_there() -> None:
    racers = [racer("ring", None, accuracy=0.4), racer("async", None, None, 1.0, accuracy=0.7)]
    racers.append(racer("k-async:2", None, accuracy=0.68))
    assert advised(racers) is None
    assert advice(racers, 0.93, MACHINES) == [
        "no strategy reached 93.0 %; the best final accuracy is 70.0 % (65.1-74.5), with async",
        "the same within chance on 359 test samples: k-async:2",
        "try more epochs (--epochs), another learning rate (--lr) or a lower --target",
    ]


# --- words --------------------------------------------------------------------------------------------------------


def test_the_advice_says_what_to_use_how_sure_that_is_and_why() -> None:
    racers = [
        racer("ring", 8.0, 8.0, 8.8, samples=1600, wait=0.5),
        racer("k-sync:6", 2.0, 2.2, 2.4, samples=1100, waste=0.25),
        racer("k-sync:4", 2.4, 2.42, 2.6, samples=1089, waste=0.5),
        racer("async", 4.0, 4.4, 4.8, samples=4400, staleness=7.0),
    ]
    assert advice(racers, 0.93, MACHINES) == [
        "use k-sync:6: 93.0 % after 2.2 s, seeds from 2 s to 2.4 s (500 samples/s, 1,100 samples to the target, "
        "25 % thrown away)",
        "1.10x as fast as k-sync:4 (2.42 s): 1.11x the samples per second, 1.01x the samples to reach the target; "
        "the difference is within the spread of the seeds",
        "2.00x as fast as async (4.4 s): 0.50x the samples per second, 0.25x the samples to reach the target",
        "3.64x as fast as ring (8 s): 2.50x the samples per second, 0.69x the samples to reach the target",
        "the machines: equal learners",
    ]


def test_a_plain_all_reduce_is_called_plain_and_who_was_a_little_faster_is_told() -> None:
    racers = [racer("ring", 2.0, 2.2, 2.4), racer("k-async:2", 1.9, 2.0, 2.5, staleness=1.0)]
    assert advice(racers, 0.93, MACHINES) == [
        "use plain ring: 93.0 % after 2.2 s, seeds from 2 s to 2.4 s (454.5 samples/s, 1,000 samples to the target)",
        "k-async:2 was 1.10x as fast (2 s), but the difference is within the spread of the seeds, so use "
        "the simpler one",
        "the machines: equal learners",
    ]


def test_a_close_race_with_one_seed_has_no_spread_to_tell_of() -> None:
    racers = [racer("ring", 2.04), racer("async", 2.0, staleness=3.0), racer("k-sync:2", None, accuracy=0.8)]
    assert advice(racers, 0.93, MACHINES)[:2] == [
        "use plain ring: 93.0 % after 2.04 s (490.2 samples/s, 1,000 samples to the target)",
        "async was 1.02x as fast (2 s), but one seed is not enough to decide (use --seeds 3 or more), so "
        "use the simpler one",
    ]


def test_a_variant_comes_with_what_to_write_and_with_the_plain_one_beside_it() -> None:
    racers = [
        racer("ring", 8.0),
        racer("async", None, accuracy=0.85, staleness=7.0),
        racer("ring", 2.0, variant="split by speed", option="--train.split auto"),
        racer("ring", 3.0, variant="without learner 3", option="remove it: --learners 7"),
    ]
    assert advice(racers, 0.93, MACHINES) == [
        "use ring, split by speed: 93.0 % after 2 s (500 samples/s, 1,000 samples to the target)",
        "use --train.split auto",
        "1.50x as fast as ring, without learner 3 (3 s): 1.50x the samples per second, "
        "1.00x the samples to reach the target",
        "async did not reach the target: it ended at 85.0 % (80.9-88.3)",
        "4.00x as fast as ring (8 s): 4.00x the samples per second, 1.00x the samples to reach the target",
        "the machines: equal learners",
    ]


def test_leaving_one_out_is_told_in_words() -> None:
    racers = [racer("ring", 3.0, variant="without learner 3", option="remove it: --learners 7")]
    assert advice(racers, 0.93, MACHINES)[1:] == ["remove it: --learners 7", "the machines: equal learners"]


def test_seeds_that_did_not_get_there_are_counted() -> None:
    line = advice([racer("async", 2.0, 2.0, None)], 0.93, MACHINES)[0]
    assert line.startswith("use async: 93.0 % after 2 s, 1 of 3 seeds did not reach it (")


def test_the_same_time_is_called_as_fast() -> None:
    assert advice([racer("ring", 2.0), racer("full-sync", 2.0)], 0.93, MACHINES)[1] == "full-sync was as fast (2 s)"


def test_what_is_zero_is_not_told() -> None:
    assert explain_result(racer("ring", 2.0)) == "500 samples/s, 1,000 samples to the target"
    assert explain_result(racer("async", None, staleness=7.04, wait=0.1, waste=0.2)) == (
        "100 samples/s, gradients 7.0 versions old, 10 % of the time waiting, 20 % thrown away"
    )


# --- the picture --------------------------------------------------------------------------------------------------


def drawn(racers: list[RaceResult], target: float | None = 0.93) -> str:
    return chart_of([(one.label, list(one.curves)) for one in racers], title="a race", target=target)


def dots(picture: str) -> int:
    return len(re.findall(r"<circle[^>]* r=\"5", picture))


def test_there_is_a_dot_where_more_than_half_of_the_seeds_got_there() -> None:
    most, half = racer("ring", 20.0, 30.0, None), racer("async", 20.0, None)
    assert "target: 93.0 % right" in drawn([most, half])
    assert dots(drawn([most])) == 1
    assert dots(drawn([half])) == 0


def test_against_bytes_the_axis_is_logarithmic_where_one_sends_much_less() -> None:
    def sent(strategy: str, megabytes: float) -> RaceResult:
        one = curve(20.0)
        sizes = tuple(int(megabytes * part * 1e6) for part in (0.0, 0.2, 1.0))
        return RaceResult(Contender(strategy, CLUSTER), (one._replace(sent_bytes=sizes, reached_bytes=sizes[1]),))

    def picture(*racers: RaceResult) -> str:
        lines = [(one.label, list(one.curves)) for one in racers]
        return chart_of(lines, title="a race", target=0.93, by_bytes=True)

    ring, coded = sent("ring", 100.0), sent("ring:codec=1-bit", 5.0)
    assert (ring.bytes_needed, coded.bytes_needed) == (20_000_000, 1_000_000)
    assert by_bytes([ring, coded]) == [coded, ring]
    both = picture(ring, coded)
    assert "sent by learners and servers, MB" in both and "marked at x = 20" in both and "marked at x = 1." in both
    assert dots(both) == 2 and "cut at" not in both
    assert "cut at" in picture(ring, sent("async", 25.0))


def test_a_picture_without_a_target_has_neither_dots_nor_the_line() -> None:
    picture = drawn([racer("ring", 20.0)], target=None)
    assert "target" not in picture
    assert dots(picture) == 0


def test_who_is_many_times_slower_does_not_squeeze_the_others() -> None:
    def last_tick(racers: list[RaceResult]) -> float:
        ticks = re.findall(r'text-anchor="middle"[^>]*>([\d.]+)</text>', drawn(racers))
        return max(map(float, ticks))

    far, near = [racer("async", 2.0), racer("ring", 60.0)], [racer("async", 30.0), racer("ring", 60.0)]
    assert last_tick(far) <= 6.0  # 3 times the fastest
    assert last_tick(near) >= 60.0  # all of it: 1.3 times the slowest
    assert "cut at 3x the fastest" in drawn(far)
    assert "cut at" not in drawn(near)


def test_of_many_the_first_are_drawn_and_the_plain_all_reduce_whatever_its_rank() -> None:
    ring = racer("ring", 50.0)
    some = [racer(f"k-async:{k}", float(k)) for k in range(1, 12)]
    assert names(worth_drawing([*some, ring])) == [*names(some[:5]), "ring"]
    assert names(worth_drawing([*some[:3], ring, *some[3:]])) == names([*some[:3], ring, *some[3:5]])
    assert names(worth_drawing(some)) == names(some[:6])
    assert names(worth_drawing([*some[:5], ring])) == [*names(some[:5]), "ring"]
    other = racer("ring", 40.0, variant="split by speed")
    assert names(worth_drawing([*some, other, ring])) == [*names(some[:5]), "ring"]


# --- who is in the race -------------------------------------------------------------------------------------------


def test_slow_learners_bring_a_split_by_speed_and_everybody_without_them() -> None:
    found = variants([Contender("async", CLUSTER), Contender("torus:2x4", CLUSTER)], slow=(5, 2))
    assert [one.label for one in found] == [
        "torus:2x4, split by speed",
        "torus:2x4, without learners 2, 5",
        "async, without learners 2, 5",
    ]
    assert [one.cluster.learners for one in found] == [8, 6, 6] and found[1].cluster.ids == (0, 1, 3, 4, 6, 7)
    assert [one.split for one in found] == ["auto", "", ""] and found[1].option == "remove it: --learners 6"
    assert variants([Contender("async", CLUSTER)], slow=()) == []
