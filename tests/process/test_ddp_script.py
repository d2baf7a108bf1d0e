"""An ordinary DDP script trains the same model by offbeat as by gloo, under torchrun and by any strategy.

Two ranks run under torchrun itself. Jobs of four ranks would spend most of their time importing torch, so this file,
started as a program, imports it once and forks the ranks of every job.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("ddp_script.py")
TORCHRUN_LIMIT_S = 60.0  # these end only what hangs
JOB_LIMIT_S = 20.0
QUICK_S = 10.0  # what a wrong strategy may take; the job itself needs a tenth of it
CLOSE = 1e-6  # four gradients added in another order
STRATEGIES = ("ring", "halving-doubling", "torus:2x2", "hierarchical:2x2")
WRONG = {  # a strategy for two ranks -> what its message must say
    "torus:3x5": "'torus:3x5': a shape of 3x5 has 15 ranks, not 2",
    "rign": "did you mean 'ring'?",
}


@dataclass(frozen=True)
class Ended:
    """How a program ended, and all it wrote."""

    code: int
    text: str
    seconds: float


def clean_environment() -> dict[str, str]:
    """Ours, without what would tell a rank about another job."""
    foreign = ("OFFBEAT_", "TORCHELASTIC_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    return {key: value for key, value in kept.items() if key not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}


def bounded(words: list[str], limit_s: float, **environment: str) -> Ended:
    """Run a program to its end; whatever it started is killed with it, at the latest after `limit_s`."""
    start = time.monotonic()
    with subprocess.Popen(
        words,
        env=clean_environment() | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            text, _ = program.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            kill_group(program.pid)
            text, _ = program.communicate()
            pytest.fail(f"still running after {limit_s:g} s: {' '.join(words)}\n{text[-4000:]}")
        finally:
            kill_group(program.pid)
    return Ended(program.returncode, text, time.monotonic() - start)


def kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(leader, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def torchrun(ranks: int, script: Path, *words: str, limit_s: float = TORCHRUN_LIMIT_S, **environment: str) -> Ended:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    there = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return bounded([*launch, *there, str(script), *words], limit_s, **environment)


# --- two ranks under torchrun -------------------------------------------------------------------------------------


def trained_by(backend: str, out: Path) -> tuple[str, bytes]:
    """What a job of two ranks under torchrun leaves: the digest that it wrote, and the parameters themselves."""
    out.mkdir()
    done = torchrun(2, SCRIPT, "--backend", backend, "--out", str(out))
    assert done.code == 0, done.text
    assert f"on 2 ranks by {backend}" in done.text
    parameters = np.load(out / "parameters.npy")
    assert np.isfinite(parameters).all()
    return (out / "sha256").read_text(encoding="utf-8"), parameters.tobytes()


@pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")
def test_under_torchrun_two_ranks_train_the_same_bits_by_offbeat_as_by_gloo(tmp_path: Path) -> None:
    assert trained_by("offbeat", tmp_path / "offbeat") == trained_by("gloo", tmp_path / "gloo")


def test_under_torchrun_a_wrong_strategy_ends_the_job_with_its_message(tmp_path: Path) -> None:
    done = torchrun(2, SCRIPT, "--backend", "offbeat", "--out", str(tmp_path), OFFBEAT_STRATEGY="rign")
    assert done.code != 0
    assert WRONG["rign"] in done.text, done.text
    assert done.seconds < 4 * QUICK_S  # torchrun has to start, too, and other tests run beside it
    assert not list(tmp_path.iterdir())


# --- more jobs, whose ranks are forked from one process that has imported torch --------------------------------------


@dataclass(frozen=True)
class Job:
    """The script with a backend on so many ranks; `strategy` may be '' for none."""

    backend: str
    ranks: int
    strategy: str = ""


@dataclass(frozen=True)
class Outcome:
    """How each rank of a job ended (None: it had to be killed) and what it wrote."""

    codes: list[int | None]
    texts: list[str]
    seconds: float
    parameters: list[float] = field(default_factory=list)


GOOD_JOBS = (Job("offbeat", 4), *(Job("offbeat", 4, strategy) for strategy in STRATEGIES))
WRONG_JOBS = tuple(Job("offbeat", 2, strategy) for strategy in WRONG)
GLOO = Job("gloo", 4)


def one_rank(job: Job, rank: int, port: int, out: Path) -> None:
    """In a forked process: be this rank, as if a launcher had started the script."""
    log = os.open(out / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if job.strategy:
        os.environ["OFFBEAT_STRATEGY"] = job.strategy
    sys.argv = [str(SCRIPT), "--backend", job.backend, "--out", str(out)]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def run_job(job: Job, out: Path) -> Outcome:
    out.mkdir()
    fork = multiprocessing.get_context("fork")
    port, start = free_port(), time.monotonic()
    ranks = [fork.Process(target=one_rank, args=(job, rank, port, out)) for rank in range(job.ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(max(0.0, start + JOB_LIMIT_S - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    texts = [(out / f"rank-{rank}").read_text(encoding="utf-8") for rank in range(job.ranks)]
    saved = out / "parameters.npy"
    parameters: list[float] = np.load(saved).tolist() if saved.exists() else []  # float32 -> float is exact
    return Outcome(codes, texts, time.monotonic() - start, parameters)


def main(folder: Path) -> None:
    """Run every job of `jobs.json` in this folder, and write their outcomes beside it."""
    import torch._dynamo  # as the first step of any torch optimizer does: once here, not once a rank
    import torch.nn.parallel  # noqa: F401

    jobs = [Job(**fields) for fields in json.loads((folder / "jobs.json").read_text(encoding="utf-8"))]
    outcomes = [asdict(run_job(job, folder / str(number))) for number, job in enumerate(jobs)]
    (folder / "outcomes.json").write_text(json.dumps(outcomes), encoding="utf-8")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Job, Outcome]:
    folder = tmp_path_factory.mktemp("jobs")
    jobs = (GLOO, *GOOD_JOBS, *WRONG_JOBS)
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")
    done = bounded([sys.executable, __file__, str(folder)], limit_s=TORCHRUN_LIMIT_S + JOB_LIMIT_S * len(jobs))
    assert done.code == 0, done.text
    read = json.loads((folder / "outcomes.json").read_text(encoding="utf-8"))
    return {job: Outcome(**fields) for job, fields in zip(jobs, read, strict=True)}


@pytest.mark.parametrize("job", GOOD_JOBS, ids=lambda job: job.strategy or "no-strategy")
def test_four_ranks_train_by_offbeat_what_they_train_by_gloo(job: Job, outcomes: Mapping[Job, Outcome]) -> None:
    by_gloo, by_offbeat = outcomes[GLOO], outcomes[job]
    for outcome in (by_gloo, by_offbeat):
        assert outcome.codes == [0] * 4, "\n".join(outcome.texts)
    assert "by offbeat" in by_offbeat.texts[0]
    assert len(by_offbeat.parameters) > 40_000
    difference = np.abs(np.array(by_offbeat.parameters) - np.array(by_gloo.parameters))
    assert difference.max() <= CLOSE


@pytest.mark.parametrize("job", WRONG_JOBS, ids=lambda job: job.strategy)
def test_a_wrong_strategy_is_named_on_every_rank_at_once(job: Job, outcomes: Mapping[Job, Outcome]) -> None:
    outcome = outcomes[job]
    assert outcome.codes == [1, 1], "\n".join(outcome.texts)
    for text in outcome.texts:
        assert WRONG[job.strategy] in text
    assert outcome.seconds < QUICK_S
    assert not outcome.parameters


if __name__ == "__main__":
    main(Path(sys.argv[1]))
