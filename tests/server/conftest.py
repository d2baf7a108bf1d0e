"""One nursery for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collectives.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()
