"""What programs around `offbeat.join()` silently got wrong is right now, or one line and exit code 2."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from process.forked_scripts import fork_scripts
from process.test_ddp_script import bounded
from train.programs import Ended, offbeat

Run = Callable[..., Ended]
SCRIPT = Path(__file__).with_name("joined_programs.py")


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    def run(line: str, *words: str, learners: int = 2, script: Path = SCRIPT) -> Ended:
        command = ("run", "--learners", str(learners), "--sync", line, str(script), *words)
        return offbeat(tmp_path_factory.mktemp("run"), *command, before=fork_scripts)

    return run


def test_a_model_that_prepare_returned_and_nobody_uses_is_told(run: Run) -> None:
    code, out, err, _ = run("ring", "ignored")
    assert code == 2 and "Traceback" not in out
    line = r"learner 0 \| offbeat: joined_programs.py:\d+: the model that learner.prepare returned was not used"
    assert re.search(line, out)
    assert err == "offbeat: run: 2 learners failed: 0, 1\n"


def test_with_a_server_the_model_itself_may_be_used(run: Run) -> None:
    code, out, _, _ = run("full-sync", "ignored")
    assert code == 0 and "ignored: 96 seen" not in out, "each goes through its own loader"


@pytest.mark.parametrize("line", ["ring", "full-sync"])
def test_a_weighted_sampler_is_kept(run: Run, line: str) -> None:
    code, out, _, _ = run(line, "weighted")
    assert code == 0 and "offbeat: note: " in out and "WeightedRandomSampler" in out
    found = re.search(r"weighted: (\d+) seen, \d+ different, largest (\d+)", out)
    assert found is not None and int(found[1]) == (96 if line == "ring" else 192) and int(found[2]) < 48


def test_a_batch_sampler_of_ones_own_is_shared_out_however_learners_are_seeded(run: Run) -> None:
    code, out, _, _ = run("ring", "batches", learners=3)
    assert code == 0 and "batches: 96 seen, 96 different" in out
    assert "note: the order of the loader is kept, since it has a custom batch sampler (Batches)" in out


def test_a_program_that_makes_its_own_gloo_group_has_the_strategy_of_the_run(tmp_path: Path) -> None:
    script = tmp_path / "own_group.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(type(dist.group.WORLD).__name__, dist.group.WORLD.options.strategy)\n"
        "dist.destroy_process_group()\n",
        encoding="utf-8",
    )
    words = [sys.executable, "-m", "offbeat", "run", "--learners", "2", "--sync", "halving-doubling", str(script)]
    ended = bounded(words, 60.0)  # `import torch` does as OFFBEAT_REPLACE says: not in a fork
    assert ended.code == 0 and ended.text.count("OffbeatGroup halving-doubling") == 2, ended.text


@pytest.mark.parametrize("line", ["ring", "async"])
def test_a_script_that_never_joins_is_told(run: Run, line: str, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("print('hello')\n", encoding="utf-8")
    code, out, err, _ = run(line, script=script)
    assert code == 2 and out.count("hello") == 2
    assert err.endswith("offbeat: run: alone.py never called offbeat.join(), so its 2 copies trained independently\n")


def test_a_fused_optimizer_runs_by_the_plain_rule_with_a_note(run: Run) -> None:
    code, out, _, _ = run("full-sync", "fused")
    assert code == 0 and "offbeat: note: fused=True has no effect on the servers" in out
    assert "fused: 96 seen, 96 different" in out


def test_state_that_is_loaded_too_late_and_calls_inside_a_minibatch_are_told(run: Run) -> None:
    code, out, _, _ = run("full-sync", "late")
    assert code == 2 and "the servers got their state in learner.prepare; call load_state_dict before it" in out
    code, out, _, _ = run("full-sync", "inside")
    assert code == 2 and "barrier must be called between minibatches, not inside one" in out


@pytest.mark.parametrize("line", ["full-sync", "ring"])
def test_a_checkpoint_of_the_scripts_own_goes_on_bit_for_bit(run: Run, line: str, tmp_path: Path) -> None:
    ends = {}
    for case in ("saved", "resumed", "resumed-plain"):
        code, out, err, _ = run(line, case, str(tmp_path))
        assert code == 0, out + err
        found = re.search(rf"{case}: (\S+ after \d+)$", out, re.MULTILINE)
        assert found is not None
        ends[case] = found[1]
    assert ends["resumed"] == ends["saved"] == ends["resumed-plain"], "optimizer, schedule and order of samples"


def test_any_line_goes_on_from_the_checkpoint_of_another(run: Run, tmp_path: Path) -> None:
    assert run("full-sync", "saved", str(tmp_path)).code == 0
    for line in ("k-async:1", "local-sgd:2", "downpour", "ring"):
        code, out, err, _ = run(line, "resumed", str(tmp_path))
        assert code == 0 and "resumed: 96 seen, 96 different" in out, out + err
