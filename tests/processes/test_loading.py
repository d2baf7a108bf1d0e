"""Modules are loaded without the garbage collector, which is as it was before, afterwards."""

from __future__ import annotations

import gc

import pytest

from offbeat.processes.loading import loading


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_while_modules_are_loaded_and_then_as_it_was(was_on: bool) -> None:
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(ImportError), loading():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
