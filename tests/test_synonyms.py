"""A word from elsewhere is answered with lines that exist."""

from __future__ import annotations

import pytest

from offbeat import policies, schedules
from offbeat import spec as grammar
from offbeat.errors import RequestError
from offbeat.strategy import ALL_REDUCE, AUTO, NATIVE, family_of, strategies
from offbeat.synonyms import SYNONYMS

ASKED_FOR = (
    "ddp", "ps", "parameter-server", "horovod", "sync", "easgd", "hogwild", "diloco", "fedavg", "backup-workers",
    "gossip", "pipeline", "allreduce", "bsp", "asgd", "byteps", "fsdp", "sgp", "adpsgd", "zero", "elastic-averaging",
)  # fmt: skip


def test_the_words_people_bring_are_in_the_table_and_none_hides_a_strategy() -> None:
    assert set(ASKED_FOR) <= SYNONYMS.keys()
    assert not SYNONYMS.keys() & strategies().keys()
    assert all(grammar.parse(word).name == word for word in SYNONYMS)


@pytest.mark.parametrize("word", SYNONYMS)
def test_every_suggested_line_can_be_made_for_2_learners(word: str) -> None:
    assert SYNONYMS[word].lines
    for line in SYNONYMS[word].lines:
        if family_of(line) != ALL_REDUCE:
            policies.create(line, expect=2)
        elif line not in (AUTO, NATIVE):
            schedules.build(line, ranks=2)


@pytest.mark.parametrize("word", SYNONYMS)
def test_an_unknown_strategy_is_answered_with_its_lines(word: str) -> None:
    with pytest.raises(RequestError) as caught:
        family_of(f"{word}:4")
    says = str(caught.value)
    assert says.startswith(f"unknown strategy '{word}' ({SYNONYMS[word].meaning}); ") and "\n" not in says
    assert says.endswith(" or ".join(SYNONYMS[word].lines))
    assert ("not implemented" in says) != SYNONYMS[word].exact


def test_where_only_one_kind_is_read_only_lines_of_that_kind_are_suggested() -> None:
    with pytest.raises(RequestError, match=r"\); write ring$"):
        schedules.build("sync", ranks=4)
    with pytest.raises(RequestError, match=r"\); write full-sync$"):
        policies.create("sync", expect=4)
    with pytest.raises(RequestError, match="local-sgd:8 is of another kind; known: central, direct, ring"):
        schedules.build("fedavg", ranks=4)


def test_backup_workers_are_the_k_sync_that_the_answer_names() -> None:
    assert "k-sync:K with K = P - B" in SYNONYMS["backup-workers"].meaning
    line, same = (policies.create(text, expect=4) for text in ("backup:1", "k-sync:3"))
    assert line.snapshot() == same.snapshot()
