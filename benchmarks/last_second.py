"""Kill a training at many points over its last second, resume it, and compare the bits of its weights.

    python benchmarks/last_second.py [--points 60] [--sync ring] [--whole]

A run is killed with SIGKILL, it and all that it has started, at a point between its last evaluation but one and its
end (with `--whole` at any point after its first checkpoint), and resumed until it says that it is complete. Prints how
many came to the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = ("--learners", "2", "--device", "cpu", "--train.epochs", "4", "--save.every-updates", "5", "--quiet")
MOST_RESUMES = 3
LIMIT_S = 120.0


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "offbeat", "train", *words]


def start(folder: Path, sync: str) -> subprocess.Popen[bytes]:
    words = command("digits-mlp", "--sync", sync, "--run-dir", str(folder), *WORDS)
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def wait_for_epochs(folder: Path, epochs: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            if (folder / "metrics.jsonl").read_bytes().count(b"\n") >= epochs:
                return
        time.sleep(0.002)


def resume(folder: Path) -> tuple[bool, str]:
    """Until it is complete; whether it is, and what was said last."""
    said = ""
    for _ in range(MOST_RESUMES):
        done = subprocess.run(
            command("--resume", str(folder), "--quiet"), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        said = done.stderr.strip()
        if done.returncode == 0 or (done.returncode == 2 and "has completed its" in said):
            return "Traceback" not in said, said
    return False, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--sync", default="ring")
    parser.add_argument("--whole", action="store_true", help="points over the whole of the run")
    given = parser.parse_args()
    epochs = 1 if given.whole else 3
    with tempfile.TemporaryDirectory() as made:
        first = start(Path(made, "whole"), given.sync)
        wait_for_epochs(Path(made, "whole"), epochs, first)
        began = time.monotonic()
        assert first.wait(LIMIT_S) == 0
        last_s = time.monotonic() - began
        expected = Path(made, "whole", "weights.safetensors").read_bytes()
        same = killed = 0
        for at in range(given.points):
            folder = Path(made, f"run-{at}")
            process = start(folder, given.sync)
            wait_for_epochs(folder, epochs, process)
            time.sleep(at / given.points * last_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
            complete, said = resume(folder)
            results = [folder / name for name in ("summary.txt", "weights.safetensors")]
            if complete and all(path.is_file() for path in results) and results[1].read_bytes() == expected:
                same += 1
            else:
                print(f"point {at} ({at / given.points * last_s:.3f} s): {said}")
        print(f"{given.sync}: {killed} of {given.points} killed within {last_s:.2f} s; {same} came to the same bits")
    return 0 if same == given.points else 1


if __name__ == "__main__":
    raise SystemExit(main())
