"""Is a training that does not learn told so, and one that does left alone? Runs made to fail, and healthy ones.

    python benchmarks/not_learning.py

Exits with 1 if one of the 20 that fail is not warned of, or one of the 40 healthy ones is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "digits.py"
SHUFFLED = """
import torch
from torch.utils.data import TensorDataset
from offbeat.datasets import digits

def sets():
    data = digits()
    labels = torch.from_numpy(data.digits)
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    tests = TensorDataset(torch.from_numpy(data.test_images), torch.from_numpy(data.test_digits))
    return TensorDataset(torch.from_numpy(data.images), labels), tests
"""


def offbeat(folder: str, *words: str) -> tuple[str, float]:
    """The warning, if there was one, and the accuracy."""
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", words[0], "--json", *words[1:]],
        capture_output=True, text=True, timeout=300, check=False, cwd=folder,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-500:]}")
    said = json.loads(done.stdout)
    return said.get("warning") or "", 100 * (said.get("accuracy") or 0.0)


def main() -> None:
    def train(recipe: str, sync: str, *more: str) -> tuple[str, ...]:
        return ("train", recipe, "--sync", sync, "--learners", "2", "--quiet", *more)

    def virtual(recipe: str, sync: str, *more: str) -> tuple[str, ...]:
        return ("simulate", sync, "--recipe", recipe, "--learners", "4", "--compute", "exp:1", *more)

    def run(sync: str, *more: str) -> tuple[str, ...]:
        return ("run", "--learners", "2", "--sync", sync, *more)

    wild = {"digits-mlp": "3", "digits-cnn": "1.5"}  # 30 times what is good for them
    lines = ("ring", "k-async:1", "async", "softsync:2")
    failing = [train(recipe, line, "--train.lr", rate) for recipe, rate in wild.items() for line in lines]
    failing += [virtual(recipe, line, "--lr", rate) for recipe, rate in wild.items() for line in lines[:2]]
    failing += [train(recipe, line, "--data.name", "shuffled:sets") for recipe in wild for line in lines[:2]]
    momentum = ("--train.momentum", "0.99", "--staleness", "keep")
    failing += [train("digits-cnn", "async", *momentum), train("digits-mlp", "async", *momentum)]
    failing += [run(line, str(EXAMPLE), "--lr", "1.5") for line in ("async", "k-async:1")]
    recipes = ("digits-softmax", *wild)
    healthy = [train(recipe, line) for recipe in recipes for line in (*lines, "full-sync", "local-sgd:2")]
    healthy += [virtual(recipe, line) for recipe in recipes for line in (*lines, "k-sync:2", "downpour")]
    healthy += [run(line, str(EXAMPLE)) for line in ("async", "full-sync", "k-async:1", "softsync:2")]
    missed = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "shuffled.py").write_text(SHUFFLED)
        for number, words in enumerate(failing):
            said, accuracy = offbeat(folder, *words)
            missed += not said
            print(
                f"fails {number + 1:2} {' '.join(words[:8])[:70]:<70} {accuracy:5.1f}  {said or 'NOT WARNED'}",
                flush=True,
            )
        for number, words in enumerate(healthy):
            said, accuracy = offbeat(folder, *words)
            wrong += bool(said)
            print(f"learns {number + 1:2} {' '.join(words[:8])[:70]:<70} {accuracy:5.1f}  {said}", flush=True)
    print(f"{len(failing) - missed} of {len(failing)} that fail were warned of; {wrong} of {len(healthy)} healthy ones")
    raise SystemExit(bool(missed or wrong))


if __name__ == "__main__":
    main()
