"""`offbeat train` as users meet it: what it prints, how it ends, who dies, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from offbeat.processes.launcher import Launcher, RankLauncher
from offbeat.runs.metrics import format_accuracy
from offbeat.server.supervisor import Supervisor
from process.test_ddp_script import Ended as Finished
from process.test_ddp_script import bounded, free_port
from train.programs import (
    Blow,
    Program,
    descendants,
    left_files,
    offbeat,
    resume_words,
    strike,
    train_words,
    weights,
)

MATRIX = bool(os.environ.get("OFFBEAT_MATRIX"))
HERE = Path(__file__).parents[2]
SAMPLES = 1438  # of digits, to train on
LIMIT_S = 90.0


def metrics_of(folder: Path, run: str = "run") -> list[dict[str, Any]]:
    lines = (folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# --- somebody dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("deaths", "sync"), [(1, "k-async:2"), (4, "k-async:2")])
def test_a_dead_learner_of_k_async_leaves_its_samples_to_the_others(deaths: int, sync: str, tmp_path: Path) -> None:
    words = ["train", "digits-mlp", "--sync", sync, "--learners", "3", "--run-dir", "run", "--train.epochs", "8"]
    blow = Blow(point="served", count=5, learner=1, whom="self", times=deaths)
    ended = offbeat(tmp_path, *words, "--json", blow=blow)
    assert (ended.code, ended.left) == (0, [])
    assert ended.err.count("learner 1 died (SIGKILL) and is restarted") == min(deaths, 3)
    assert ended.err.count("learner 1 ended: SIGKILL") == max(0, deaths - 3)  # it is started again three times
    assert "Traceback" not in ended.err
    assert ended.result["accuracy"] > 0.9
    for record in metrics_of(tmp_path):
        accounted = record["samples"] + sum(record["dropped"].values()) + record.get("held", 0)
        assert accounted == record["epoch"] * SAMPLES, record
    assert left_files(tmp_path) == []


@pytest.mark.parametrize("learner", [0, 1])
def test_a_dead_learner_of_ring_ends_the_run_with_one_line(learner: int, tmp_path: Path) -> None:
    blow = Blow(point="reduced", count=6, learner=learner, whom="self")
    ended = offbeat(tmp_path, *train_words("ring", 3, save__every_updates=2), blow=blow)
    assert (ended.code, ended.left) == (1, [])
    said = (
        f"offbeat: learner {learner} died (SIGKILL); "
        "continue from the last checkpoint with: offbeat train --resume run\n"
    )
    assert ended.err == said
    assert "Traceback" not in ended.out
    assert [name for name in left_files(tmp_path) if "checkpoints/" not in name] == []
    assert offbeat(tmp_path, *resume_words()).code == 0
    assert left_files(tmp_path) == []


def test_a_learner_of_ring_that_dies_at_the_start_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    ended = offbeat(tmp_path, *train_words("ring", 3), blow=Blow(point="born", learner=1, whom="self"))
    assert (ended.code, ended.err, ended.left) == (1, "offbeat: learner 1 died (SIGKILL)\n", [])
    assert "Traceback" not in ended.out
    assert left_files(tmp_path) == []


# --- what is printed ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run that was not disturbed, and what it printed with --json."""
    folder = tmp_path_factory.mktemp("trained")
    ended = offbeat(folder, *train_words("ring", 2), "--json")
    assert (ended.code, ended.left) == (0, [])
    return folder, ended.out, ended.err


def test_json_is_one_object_and_nothing_else(trained: tuple[Path, str, str]) -> None:
    folder, out, err = trained
    result = json.loads(out)
    wanted = {"accuracy", "loss", "strategy", "learners", "updates", "samples_per_s", "seconds", "staleness_mean"}
    assert wanted | {"run_dir"} <= result.keys()
    assert (result["strategy"], result["learners"], result["run_dir"], result["stopped"]) == ("ring", 2, "run", False)
    assert re.search(r"^epoch 2/2  update 24  loss", err, re.MULTILINE) and "\x1b" not in err
    there = {path.name for path in (folder / "run").iterdir()}
    assert there == {
        *("config.json", "metrics.jsonl", "log.jsonl", "trace.json", "checkpoints", "weights.safetensors"),
        *("summary.txt", "machine.json", "energy.json", "live.json"),
    }


def test_evaluate_gives_what_the_run_said(trained: tuple[Path, str, str]) -> None:
    folder, out, _ = trained
    result = json.loads(out)
    ended = offbeat(folder, "evaluate", "run", "--json")
    assert ended.code == 0
    assert (ended.result["accuracy"], ended.result["loss"]) == (result["accuracy"], result["loss"])
    ended = offbeat(folder, "evaluate", "run")
    right = format_accuracy(result["accuracy"], result["test_samples"])
    assert right in ended.out and f"accuracy on the test set is {right}" in (folder / "run" / "summary.txt").read_text()


def test_a_run_ends_when_the_accuracy_that_is_wanted_is_held(tmp_path: Path) -> None:
    """Every model has 0.1 %: one evaluation touches it, and the second holds it."""
    ended = offbeat(tmp_path, *train_words("ring", 1, train__epochs=5, train__stop_at=0.001), "--json")
    assert (ended.code, ended.result["epochs"]) == (0, 2)


def test_quiet_leaves_the_summary(tmp_path: Path) -> None:
    ended = offbeat(tmp_path, *train_words("ring", 2, train__epochs=1), "--quiet")
    assert (ended.code, ended.err) == (0, "")
    assert re.fullmatch(r"accuracy +\d+\.\d % \(\d+\.\d-\d+\.\d\)", ended.out.splitlines()[0])
    assert "epoch 1/1" not in ended.out and "note:" not in ended.out


@pytest.mark.parametrize("stopped", [False, True])
def test_on_a_terminal_it_is_drawn_and_the_terminal_is_left_as_it_was(stopped: bool, tmp_path: Path) -> None:
    blow = Blow(point="reduced", count=5, learner=0, what=signal.SIGINT, whom="group")
    before = [strike(blow)] if stopped else []
    program = Program(tmp_path, train_words("ring", 2), before=before, terminal=True)
    settings = termios.tcgetattr(program.terminal)
    ended = program.wait()
    shown = program.shown.decode()
    assert (ended.code, ended.left) == (130 if stopped else 0, [])
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0  # the cursor is hidden, and shown again
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "\x1b[2K" in shown and "\x1b[?1049h" not in shown  # drawn in place, not on a screen of its own
    assert termios.tcgetattr(program.terminal) == settings
    tail = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown[shown.rindex("\x1b[?25h") :])
    assert "accuracy" in tail and "run/checkpoints" in tail
    program.close()


# --- the user's own -----------------------------------------------------------------------------------------------

MINE = """
import torch
from torch.utils.data import TensorDataset

def model(width=8):
    return torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

def data(samples=64):
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1, keepdim=True)
    return TensorDataset(inputs[16:], targets[16:]), TensorDataset(inputs[:16], targets[:16])

def loss(outputs, targets):
    if torch.is_grad_enabled():
        print("a loss was asked for")
    return (outputs - targets).square().mean()
"""


@pytest.mark.parametrize("sync", ["ring", "async"] if MATRIX else ["async"])
def test_model_data_and_loss_may_be_the_users_own(sync: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    own = ["--model.name", "mine:model", "--data.name", "mine:data", "--train.loss", "mine:loss"]
    small = [
        "--train.epochs",
        "3",
        "--lr",
        "0.05",
        "--train.batch-size",
        "8",
        "--run-dir",
        "run",
        "--set",
        "model.options.width=5",
    ]
    words = ["train", "digits-softmax", "--sync", sync, "--learners", "2", *own, *small]
    ended = offbeat(tmp_path, *words)
    assert (ended.code, ended.err) == (0, "")
    assert len(re.findall(r"^learner [01] \| a loss was asked for$", ended.out, re.MULTILINE)) == 18
    assert "accuracy" not in ended.out
    losses = [record["loss"] for record in metrics_of(tmp_path)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert offbeat(tmp_path, "evaluate", "run", "--json").result["loss"] == losses[-1]


@pytest.mark.parametrize("sync", ["ring", "full-sync", "async"] if MATRIX else ["ring", "async"])
def test_a_model_that_raises_ends_the_run_with_its_traceback_and_one_line(sync: str, tmp_path: Path) -> None:
    ended = offbeat(tmp_path, *train_words(sync, 2), "--model.name", "train.programs:fails")
    assert (ended.code, ended.left) == (1, [])
    assert ended.err.count("\n") == 1
    assert re.match(r"offbeat: learner [01]: ValueError: this model has had enough \(traceback above\)", ended.err)
    raised = re.findall(r"^learner [01] \| ValueError: this model has had enough$", ended.out, re.MULTILINE)
    assert len(raised) == ended.out.count("Traceback") == 1  # though it is the same in both
    assert re.search(r"^learner [01] \| 3 to go$", ended.out, re.MULTILINE)
    assert left_files(tmp_path) == []


# --- wrong requests -----------------------------------------------------------------------------------------------

WRONG = {
    "an unknown field": (["--train.epoch", "3"], "did you mean '--train.epochs'?"),
    "a wrong type": (["--train.epochs", "many"], "train.epochs"),
    "out of bounds": (["--train.momentum", "1.5"], "train.momentum"),
    "an impossible K": (["--sync", "k-sync:3", "--learners", "2"], "K=3 exceeds the 2 learners"),
    "an unknown recipe": (["digits-cn"], "digits-cnn"),
    "an unknown strategy": (["--sync", "rign"], "did you mean 'ring'?"),
    "a model that cannot be built": (
        ["--model.name", "resnet18", "--data.name", "text"],
        "model resnet18 needs images",
    ),
    "a file that is not there": (["nowhere/recipe.toml"], "nowhere/recipe.toml"),
    "data that is not there": (
        ["text-transformer", "--set", "data.options.folder=nowhere"],
        "nowhere",
    ),
    "an output that the loss cannot take": (
        ["--set", "model.options.classes=3"],
        "has classes=3, but data digits has 10",
    ),
    "a loss that does not fit": (["--train.loss", "torch.nn.functional:mse_loss"], "the loss fails on outputs"),
    "no such device": (["--device", "cuda:7"], "device: 'cuda:7' does not exist"),
    "nothing to go on from": (["--resume", "nowhere"], "nowhere is not the folder of a run"),
}


def no_start() -> None:
    """What is one's own is tried in a fork of its own; but nothing of a run is started."""

    def refuse(launcher: Launcher) -> None:
        Path("started").touch()
        raise AssertionError("something was started")

    for kind in (Launcher, RankLauncher, Supervisor):
        kind.start = refuse  # type: ignore[method-assign,assignment]  # in a process of its own


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_is_one_line_and_starts_and_leaves_nothing(what: str, tmp_path: Path) -> None:
    words, said = WRONG[what]
    ended = offbeat(tmp_path, "train", *words, before=no_start)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("offbeat: ") and ended.err.count("\n") == 1
    assert said in ended.err, ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["err", "out", "tmp"]


# --- who can connect ----------------------------------------------------------------------------------------------


def listening(pid: int) -> list[str]:
    """The addresses, as the kernel writes them, on which a process listens by TCP."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if with_number := re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink())):
                sockets.add(with_number[1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and cells[9] in sockets:
                found.append(cells[1].partition(":")[0])
    return found


def look_who_listens(owner: type, name: str) -> Callable[[], None]:
    """Before a minibatch, all processes of the run are looked at."""

    def lay() -> None:
        leader, folder, original = os.getpid(), Path.cwd(), getattr(owner, name)

        def looked(self: Any, *given: Any) -> Any:
            told = {pid: listening(pid) for pid in (leader, *descendants(leader))}
            (folder / f"listening-{self.number}").write_text(json.dumps(told), encoding="utf-8")
            return original(self, *given)

        setattr(owner, name, looked)

    return lay


@pytest.mark.parametrize("sync", ["ring", "k-async:2"])
def test_nothing_listens_beyond_loopback(sync: str, tmp_path: Path) -> None:
    from offbeat.train.reduced_trainer import ReducedTrainer
    from offbeat.train.served_trainer import ServedTrainer

    point = (ReducedTrainer, "_update") if sync == "ring" else (ServedTrainer, "_minibatch")
    words = train_words(sync, 2, train__epochs=1, train__batch_size=256)
    assert offbeat(tmp_path, *words, before=look_who_listens(*point)).code == 0
    for learner in range(2):
        told = json.loads((tmp_path / f"listening-{learner}").read_text(encoding="utf-8"))
        assert len(told) >= (3 if sync == "ring" else 4)  # supervisor, learners; a coordinator that updates
        addresses = {address for found in told.values() for address in found}
        assert addresses == set()


# --- torchrun -----------------------------------------------------------------------------------------------------


def torchrun(folder: Path, *words: str, restarts: int = 0) -> Finished:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    there = ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", "offbeat"]
    return bounded([*launch, *there, *words], LIMIT_S, PYTHONPATH=str(HERE / "tests"), TMPDIR=str(folder))


def under_torchrun(words: list[str], folder: Path) -> list[str]:
    """As offbeat would launch it, but for the number of learners, which is torchrun's to say."""
    at = words.index("--learners")
    words = words[:at] + words[at + 2 :]
    return [str(folder / "run") if word == "run" else word for word in words]


@pytest.mark.parametrize("sync", ["ring", "full-sync", "k-async:2"] if MATRIX else ["full-sync"])
def test_under_torchrun_it_trains_to_the_same_bits(sync: str, tmp_path: Path) -> None:
    words = train_words(sync, 2)
    done = torchrun(tmp_path, *under_torchrun(words, tmp_path))
    assert done.code == 0, done.text
    assert "Traceback" not in done.text
    assert len(re.findall(r"^accuracy ", done.text, re.MULTILINE)) == 1
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.json", "metrics.jsonl", "log.jsonl", "trace.json", "weights.safetensors", "summary.txt"} <= there
    assert {"machine.json", "energy.json", "live.json"} <= there
    assert offbeat(tmp_path, "watch", "run", "--json").result["state"] == "ended"
    assert left_files(tmp_path) == []
    if sync != "k-async:2":
        (tmp_path / "forked").mkdir()
        assert offbeat(tmp_path / "forked", *words).code == 0
        assert weights(tmp_path) == weights(tmp_path / "forked")


def striking_words(folder: Path) -> list[str]:
    words = [*train_words("ring", 2), "--set", f"model.options.marker={folder / 'struck'}"]
    words[words.index("--model.name") + 1] = "train.programs:strikes"
    return words


def check_same_bits(words: list[str], folder: Path) -> None:
    """As in a run that nobody disturbs: the signal has gone out already."""
    assert (folder / "struck").exists()
    (folder / "forked").mkdir()
    assert offbeat(folder / "forked", *words).code == 0
    assert weights(folder) == weights(folder / "forked")


@pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")
def test_under_torchrun_a_dead_rank_of_ring_is_restarted_from_the_checkpoint(tmp_path: Path) -> None:
    words = striking_words(tmp_path)
    done = torchrun(tmp_path, *under_torchrun(words, tmp_path), restarts=1)
    assert done.code == 0, done.text
    assert re.search(r"resumed from update-000000\d\d", done.text), done.text
    assert len(re.findall(r"^accuracy ", done.text, re.MULTILINE)) == 1
    assert left_files(tmp_path) == []
    check_same_bits(words, tmp_path)


@pytest.mark.skipif(not MATRIX, reason="torchrun takes its time to end: make test-matrix")
@pytest.mark.parametrize("what", [signal.SIGTERM, signal.SIGINT])
def test_under_torchrun_a_signal_saves_and_ends(what: int, tmp_path: Path) -> None:
    words = striking_words(tmp_path)
    done = torchrun(tmp_path, *under_torchrun(words, tmp_path), "--set", f"model.options.signal_to_parent={int(what)}")
    assert done.code != 0  # torchrun's own: it was asked to end
    assert "stopped   asked to stop" in done.text, done.text
    assert "KeyboardInterrupt" not in done.text
    assert (tmp_path / "run" / "weights.safetensors").exists()
    assert left_files(tmp_path) == []
    done = torchrun(tmp_path, *resume_words(str(tmp_path / "run")))
    assert done.code == 0, done.text
    check_same_bits(words, tmp_path)
