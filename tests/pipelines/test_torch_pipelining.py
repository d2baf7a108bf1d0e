"""torch.distributed.pipelining beside us: its tables are proved, ours run in its runtime."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining import schedules as theirs

from offbeat.errors import ScheduleError
from offbeat.pipelines import PIPELINES, PipelineSchedule, build, prove, without_messages

TIME_LIMIT_S = 120


def stages_of(ranks: int, chunks: int) -> list[Any]:
    """What a schedule of torch asks its stages, without processes."""
    return [
        SimpleNamespace(
            group_size=ranks,
            group_rank=0,
            num_stages=ranks * chunks,
            stage_index=stage,
            is_last=False,
            submod=nn.Module(),
        )
        for stage in range(chunks)
    ]


MULTIPLE = {
    "LoopedBFS": (theirs.ScheduleLoopedBFS, 2, None),
    "Interleaved1F1B": (theirs.ScheduleInterleaved1F1B, 2, "interleaved-1f1b:2"),
    "InterleavedZeroBubble": (theirs.ScheduleInterleavedZeroBubble, 2, None),
    "ZeroBubble, one stage a rank": (theirs.ScheduleInterleavedZeroBubble, 1, "zb-h1"),
    "ZBVZeroBubble": (theirs.ScheduleZBVZeroBubble, 2, "zb-v"),
    "DualPipeV": (theirs.ScheduleDualPipeV, 2, "dualpipe-v"),
}


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8), (4, 16)])
@pytest.mark.parametrize("name", MULTIPLE)
def test_the_tables_that_torch_writes_are_proved(name: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    kind, chunks, ours = MULTIPLE[name]
    made = kind(stages_of(ranks, chunks), microbatches, loss_fn=nn.MSELoss())
    read = {}
    for form in ("compute_only", "compute_comms"):
        made._dump_csv(str(tmp_path / form), format=form)
        read[form] = PipelineSchedule.from_csv(form, (tmp_path / form).read_text())
        assert (read[form].ranks, read[form].stages, read[form].microbatches) == (ranks, ranks * chunks, microbatches)
        prove(read[form])
    assert without_messages(read["compute_comms"]).rows == without_messages(read["compute_only"]).rows
    if ours is not None:
        assert build(ours, stages=ranks, microbatches=microbatches).rows == read["compute_only"].rows


def drawn_by_torch(kind: Any, ranks: int, microbatches: int, path: Path) -> PipelineSchedule:
    """What torch's visualizer shows of a schedule with one stage a rank."""
    stage = stages_of(ranks, 1)[0]
    order = kind(stage, microbatches, loss_fn=nn.MSELoss())._get_pipeline_order()
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(order[rank] for rank in sorted(order))
    return PipelineSchedule.from_csv("drawn", path.read_text())


def test_torchs_gpipe_is_ours(tmp_path: Path) -> None:
    drawn = drawn_by_torch(theirs.ScheduleGPipe, 4, 8, tmp_path / "gpipe.csv")
    prove(drawn)
    assert without_messages(drawn).rows == build("gpipe", stages=4, microbatches=8).rows


def test_the_proof_finds_that_torch_draws_1f1b_wrongly(tmp_path: Path) -> None:
    """Its last rank begins with microbatch 1: the table that is drawn is not the one that runs (torch 2.13)."""
    drawn = drawn_by_torch(theirs.Schedule1F1B, 4, 8, tmp_path / "1f1b.csv")
    with pytest.raises(ScheduleError, match="rank 3"):
        prove(drawn)


def test_our_tables_give_the_right_gradients_in_torchs_runtime(tmp_path: Path) -> None:
    lines = [line for row in PIPELINES.values() for line in row.lines]
    sizes = {2: 4, 3: 6}
    for ranks, microbatches in sizes.items():
        (tmp_path / str(ranks)).mkdir()
        for line in lines:
            text = build(line, stages=ranks, microbatches=microbatches).csv()
            (tmp_path / str(ranks) / f"{line.replace(':', '-')}.csv").write_text(text)
    program = Path(__file__).with_name("torch_runtime.py")
    words = [sys.executable, str(program), *(str(tmp_path / str(ranks)) for ranks in sizes)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    differ = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert len(differ) == len(lines) * len(sizes)
    assert max(map(float, differ.values())) < 1e-12
