"""calibrate under torchrun: which hosts are measured. The measurement itself is that of a lab (tests/process)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.fixture import StartLab
from offbeat.cli import main
from offbeat.errors import RequestError
from offbeat.measure.torchrun_hosts import hosts_of, leave_torchrun
from offbeat.predict.calibration import read_calibration
from offbeat.processes.torchrun_rank import torchrun_rank


def told(*addresses: str, ranks: int = 1, boots: tuple[str, ...] = (), error: str = "") -> list[dict[str, Any]]:
    """What the ranks say: so many on each address."""
    each = boots or tuple(f"boot {address}" for address in addresses)
    rows = [
        {"address": address, "ranks": ranks, "cores": 8, "boot": boot, "error": ""}
        for address, boot in zip(addresses, each, strict=True)
        for _ in range(ranks)
    ]
    rows[0]["error"] = error
    return rows


def test_the_hosts_are_those_of_the_ranks_one_after_the_other() -> None:
    found = hosts_of(told("10.0.0.1", "10.0.0.2", ranks=2))
    assert found.addresses == ("10.0.0.1", "10.0.0.2")
    assert [found.leader(host) for host in range(found.count)] == [0, 2]
    assert (found.cores, found.shared) == (8, False)


def test_hosts_of_one_machine_share_its_cores() -> None:
    assert hosts_of(told("10.0.0.1", "10.0.0.2", boots=("same", "same"))).shared
    assert not hosts_of(told("10.0.0.1", "10.0.0.2", boots=("", ""))).shared  # not known


def test_ranks_that_are_no_hosts_are_refused() -> None:
    with pytest.raises(RequestError, match="the same --nproc-per-node on every host"):
        hosts_of([*told("10.0.0.1", ranks=2), *told("10.0.0.2")])
    with pytest.raises(RequestError, match="one torchrun on each host"):
        hosts_of(told("10.0.0.1", "10.0.0.1"))


def test_what_the_first_rank_cannot_do_ends_all() -> None:
    with pytest.raises(RequestError, match="cannot write x"):
        hosts_of(told("10.0.0.1", "10.0.0.2", error="calibrate: cannot write x"))


def test_one_host_needs_no_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    assert main(["calibrate", "digits-mlp", "-o", str(tmp_path / "c.json")]) == 2
    assert "--nnodes 2" in capsys.readouterr().err
    assert main(["calibrate", "digits-mlp", "--lab", "2x1,1Gbit/s", "-o", str(tmp_path / "c.json")]) == 2
    assert "remove --lab" in capsys.readouterr().err


def test_who_has_left_torchrun_starts_processes_that_do_not_join_it() -> None:
    own = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none", "OFFBEAT_KEY": "run.key"}
    leave_torchrun(own)
    assert own == {"OFFBEAT_KEY": "run.key"} and torchrun_rank(own) is None


@pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="a calibration takes long: make test-matrix")
def test_two_hosts_are_calibrated_and_a_training_on_them_is_predicted(start_lab: StartLab, tmp_path: Path) -> None:
    lab = start_lab(hosts=2, bandwidth="400Mbit/s")
    main(["keys", str(tmp_path / "run.key")])
    path = tmp_path / "c.json"
    words = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--node-rank", "{host}", "--master-addr", "{host0}", "--master-port", "29400", "-m", "offbeat", "calibrate",
        "digits-mlp", "--quick", "--rounds", "1", "-o", str(path),
    ]  # fmt: skip
    environment = {**os.environ, "OFFBEAT_KEY": str(tmp_path / "run.key")}
    for process in [lab.start(host, words, environment=environment) for host in range(2)]:
        assert process.wait(timeout_s=240) == 0, process.output
    network = read_calibration(path).network
    assert network is not None
    assert network.hosts == 2 and network.shared  # a lab's hosts share this machine's cores
    assert 10e6 < min(network.sends) <= max(network.sends) < 60e6  # of 50 MB/s
    assert main(["simulate", "ring", "--learners", "2", "--hosts", "2", "--calibration", str(path)]) == 0
