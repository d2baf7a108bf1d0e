"""Ask every command for absurd sizes and files, and see that each answer comes soon, is small, and is one line.

    python benchmarks/absurd_requests.py [--jobs 2] [--only WORD] [--show]
    python benchmarks/absurd_requests.py --estimates

Each request must be refused (exit code 2), ask for confirmation with its estimate (exit code 2, `--yes-large`), fail in
one line (exit code 1) or come to its end, in under 10 s and 1 GB of memory of all its processes together, without a
traceback. Prints a table by command.

With `--estimates`, 30 requests that take seconds or hundreds of megabytes are run, and the estimate that each would be
refused with is set beside what it took: processor time and memory from there on. Each must be within a factor of 3,
where the estimate or what it took is at least a second, or 100 MB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

MOST_S, MOST_BYTES = 10.0, 1_000_000_000
HUGE = ("100000", "9999999", "999999999")
FILES = (
    "/dev/zero",
    "/dev/urandom",
    "/dev/full",
    "/proc/self/mem",
    "big.json",
    "pipe",
    "deep.json",
    "noise",
    ".",
    "loop",
)


def requests() -> Iterator[str]:
    """The lines, without `offbeat`."""
    for many in HUGE:
        for line in (
            "async",
            "k-sync:4",
            "full-sync",
            "k-batch-async:1000",
            "ring",
            "local-sgd:4",
            "downpour",
            "ssp:1",
        ):
            yield f"simulate {line} --learners {many}"
            yield f"simulate {line} --learners 4 --updates {many}"
        yield f"simulate k-sync:{many} --learners {many}"
        yield f"simulate k-batch-async:{many} --learners 2"
        yield f"simulate ring --size 100MB --layers 100000 --learners {many}"
        yield f"simulate async --shards {many} --size 100MB --learner-bandwidth 1GB/s"
        yield f"simulate async --show {many}"
        yield f"simulate async --learners 2 4 {many}"
        yield f"simulate k-sync:1..{many} --learners {many}"
        yield f"simulate async --log l.jsonl --updates {many}"
        yield f"simulate async --trace t.json --learners {many}"
        yield f"simulate ring --curve --learners {many} --size 100MB"
        yield f"compare --learners {many}"
        yield f"compare async full-sync --learners {many}"
        yield f"compare async ring --learners 4 --updates {many}"
        yield f"schedule ring --ranks {many}"
        yield f"schedule --ranks {many}"
        yield f"schedule central --ranks {many}"
        yield f"schedule tree --collective broadcast --ranks {many}"
        yield f"schedule torus:{many}x{many}"
        yield f"schedule hierarchical:2x{many}"
        yield f"schedule ring --topology cluster:{many}x{many}"
        yield f"schedule --topology fully-connected --ranks {many}"
        yield f"schedule ring --ranks 8 --svg s.svg --size {many}GB"
        yield f"schedule torus:{many}"
        yield f"topology uniform --ranks {many}"
        yield f"topology fully-connected --ranks {many}"
        yield f"topology ring --ranks {many}"
        yield f"topology torus:{many}x{many}"
        yield f"topology cluster:{many}x{many}"
        yield f"topology cluster:{many}xdgx1"
        yield f"topology cluster:{many}xcluster:{many}x8"
        yield f"topology hub-spoke --ranks {many}"
        yield f"train digits-softmax --learners {many}"
        yield f"train digits-softmax --servers {many} --sync async"
        yield f"train digits-softmax --workers {many} --learners 1"
        yield f"train digits-softmax --batch-size {many} --learners 1 --train.accumulate {many}"
        yield f"train digits-softmax --train.threads {many}"
        yield f"train digits-mlp --set model.options.hidden={many}000 --learners 2"
        yield f"train text-transformer --set model.options.width={many} --learners 1"
        yield f"run --learners {many} hello.py"
        yield f"run --servers {many} --learners 1 hello.py"
        yield f"run --threads {many} --learners 1 hello.py"
        yield f"bench allreduce --ranks {many}"
        yield f"bench server --learners {many}"
        yield f"bench allreduce --size {many}GB"
        yield f"bench scaling --learners {many}"
        yield f"bench policies --learners {many}"
        yield f"calibrate digits-softmax --learners {many}"
        yield f"profile digits-mlp --batch-size {many}"
        yield f"lab --hosts {many} -- true"
    for file in FILES:
        yield f"train {file}"
        yield f"train --resume {file}"
        yield f"report {file}"
        yield f"replay {file}"
        yield f"watch {file} --json"
        yield f"evaluate {file}"
        yield f"run {file}"
        yield f"simulate async --calibration {file}"
        yield f"schedule ring --calibration {file}"
        yield f"strategies --plugin {file}"
        yield f"train images-resnet50 --set data.options.folder={file}"
        yield f"compare --calibration {file}"
    for size in ("0", "-1", "1e30GB", "999999TB", "nan"):
        yield f"schedule ring --size {size}"
        yield f"simulate ring --size {size} --learners 4"
        yield f"simulate async --compute constant:{size}"
        yield f"bench allreduce --size {size}"
    yield f"simulate async --recipe digits-softmax --learners {HUGE[-1]}"
    yield f"compare async --recipe digits-softmax --target 0.9 --learners {HUGE[-1]}"
    yield "replay run-large-event"
    yield "replay run-many-learners"
    yield "report run-large-event"
    yield "report run-many-learners"
    yield "watch run-large-event --json"
    yield "strategies " + "x" * 100_000
    yield "schedule " + "ring:" * 20_000
    yield "simulate k-sync:1..1000000000 --learners 8"
    yield "train --name " + "a" * 10_000
    yield "recipes " + "b" * 100_000
    yield "examples ../../etc/passwd"


LARGE = (
    "simulate async --learners 4 --updates 300000",
    "simulate async --learners 200 --updates 300000",
    "simulate full-sync --learners 4 --updates 100000",
    "simulate full-sync --learners 64 --updates 6000",
    "simulate k-sync:2 --learners 4 --updates 100000",
    "simulate k-async:2 --learners 8 --updates 150000",
    "simulate k-batch-sync:4 --learners 4 --updates 100000",
    "simulate k-batch-async:4 --learners 8 --updates 100000",
    "simulate local-sgd:4 --learners 4 --updates 30000",
    "simulate downpour --learners 4 --updates 100000",
    "simulate ssp:2 --learners 8 --updates 300000",
    "simulate async --learners 4 --updates 80000 --size 100MB --learner-bandwidth 1GB/s",
    "simulate full-sync --learners 8 --updates 10000 --size 100MB --learner-bandwidth 1GB/s",
    "simulate k-sync:2 --learners 4 --updates 20000 --size 10MB --learner-bandwidth 1GB/s",
    "simulate async --learners 4 --updates 60000 --log async.jsonl",
    "simulate full-sync --learners 8 --updates 8000 --log full.jsonl",
    "simulate ring --learners 64 --updates 60000",
    "simulate ring --learners 800 --updates 2000",
    "compare async full-sync --learners 16 --updates 10000",
    "topology fully-connected --ranks 1000",
    "topology uniform --ranks 300000",
    "topology ring --ranks 300000",
    "topology torus:400x400",
    "topology cluster:20000x8",
    "schedule ring --ranks 2000",
    "schedule direct --ranks 600",
    "schedule torus:40x40",
    "schedule hierarchical:40x40",
    "schedule halving-doubling --ranks 2048",
    "schedule --ranks 256",
)
FACTOR = 3.0
PROBE = """
import json, resource, sys, time
from offbeat import cli
from offbeat.commands import estimates

def rss():
    told = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in told if line.startswith("VmRSS:"))

def check(given, estimate):
    found.setdefault("estimate", [estimate.seconds, estimate.memory_bytes])
    found.setdefault("at", [time.process_time(), rss()])

found = {}
estimates.check = check
code = cli.main(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found["took"] = [time.process_time() - found["at"][0], max(0, peak - found["at"][1])]
print(json.dumps(found | {"code": code or 0}), file=sys.stderr)
"""


def weigh(folder: Path, only: str) -> int:
    """Estimates beside what was taken; 1 where one is wrong."""
    wrong = 0
    print(f"{'request':90}{'estimated':>18}{'took':>18}{'factor':>14}")
    lines = [line for line in LARGE if only in line]
    for line in lines:
        ended = subprocess.run(
            [sys.executable, "-c", PROBE, *line.split()], cwd=folder, capture_output=True, text=True, check=False
        )
        try:
            found = json.loads(ended.stderr.strip().splitlines()[-1])
            (seconds, size), (took_s, took_bytes) = found["estimate"], found["took"]
        except (ValueError, KeyError, IndexError):
            print(f"{line:90}  failed: {(ended.stderr.strip().splitlines() or [''])[-1][:100]}", flush=True)
            wrong += 1
            continue
        shares = [
            max(estimated, 1e-9) / max(taken, 1e-9) if max(estimated, taken) >= least else None
            for estimated, taken, least in ((seconds, took_s, 1.0), (size, took_bytes, 100e6))
        ]
        bad = any(share is not None and not 1 / FACTOR <= share <= FACTOR for share in shares)
        wrong += bad or found["code"] != 0
        told = " ".join("-" if share is None else f"{share:.2f}" for share in shares)
        costs = [f"{one_s:.1f} s {size / 1e6:,.0f} MB" for one_s, size in ((seconds, size), (took_s, took_bytes))]
        print(f"{line:90}{costs[0]:>18}{costs[1]:>18}{told:>14}{'  WRONG' if bad else ''}", flush=True)
    print(f"{len(lines) - wrong} of {len(lines)} within a factor of {FACTOR:g}")
    return 1 if wrong else 0


def prepare(folder: Path) -> None:
    """Files that requests name."""
    (folder / "hello.py").write_text("import offbeat\noffbeat.join()\n", encoding="utf-8")
    with (folder / "big.json").open("wb") as file:
        file.write(b'{"a": "')
        file.truncate(6 << 30)  # a hole: no disk is filled
    os.mkfifo(folder / "pipe")
    (folder / "deep.json").write_text("[" * 1_000_000, encoding="utf-8")
    (folder / "noise").write_bytes(os.urandom(1 << 20))
    (folder / "loop").symlink_to(folder / "loop")
    head = '{"kind": "run", "format": 1, "strategy": "async", "expect": 2, "learners": 2, "seed": 0}\n'
    for name, line in (
        ("run-large-event", '{"kind": "decision", "event": "' + "9" * 100_000_000 + '", "commands": [], "why": []}\n'),
        (
            "run-many-learners",
            '{"kind": "span", "learner": 999999, "what": "compute", "start_s": 0, "end_s": 1, "version": 0}\n' * 2,
        ),
    ):
        run = folder / name
        run.mkdir()
        (run / "log.jsonl").write_text(head + line, encoding="utf-8")
        (run / "config.json").write_text("{}", encoding="utf-8")


class Answer(NamedTuple):
    line: str
    code: int
    seconds: float
    memory_bytes: int
    said: str

    @property
    def wrong(self) -> str:
        if "Traceback (most recent call last)" in self.said:
            return "traceback"
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}"
        if self.seconds > MOST_S:
            return f"{self.seconds:.1f} s"
        if self.memory_bytes > MOST_BYTES:
            return f"{self.memory_bytes / 1e9:.2f} GB"
        return ""


def ask(line: str, folder: Path, *, cpu: bool) -> Answer:
    words = [sys.executable, "-m", "offbeat", *line.split()]
    with tempfile.TemporaryFile() as out:
        began_s = time.monotonic()
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder, start_new_session=True
        )
        most, used_s = 0, 0.0
        while process.poll() is None:
            most = max(most, _memory_of(process.pid))
            used_s = _cpu_of(process.pid) if cpu else time.monotonic() - began_s
            if used_s > 1.5 * MOST_S or time.monotonic() - began_s > 120 or most > 2 * MOST_BYTES:
                break
            time.sleep(0.05)
        seconds = used_s if cpu else time.monotonic() - began_s
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        out.seek(0)
        said = out.read(200_000).decode(errors="replace")
    return Answer(line, code, seconds, most, said)


def _cpu_of(root: int) -> float:
    """Seconds of processor time of a process and of its children that have ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        told = Path(f"/proc/{root}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return sum(int(word) for word in told[11:15]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _memory_of(root: int) -> int:
    """Of a process and what it has started, without what they share."""
    total, look = 0, [root]
    while look:
        pid = look.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += _own_bytes(pid)
            for task in Path(f"/proc/{pid}/task").iterdir():
                look += [int(word) for word in (task / "children").read_text(encoding="ascii").split()]
    return total


def _own_bytes(pid: int) -> int:
    told = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in told if line.startswith("RssAnon:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--cpu", action="store_true", help="judge by processor time: on a busy machine")
    parser.add_argument("--show", action="store_true", help="print every answer")
    parser.add_argument("--estimates", action="store_true", help="run 30 large requests beside their estimates")
    given = parser.parse_args()
    if given.estimates:
        with tempfile.TemporaryDirectory() as made:
            return weigh(Path(made), given.only)
    lines = [line for line in dict.fromkeys(requests()) if given.only in line]
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(given.jobs) as pool:
        prepare(Path(made))
        answers = []
        for answer in pool.map(lambda line: ask(line, Path(made), cpu=given.cpu), lines):
            answers.append(answer)
            if answer.wrong or given.show:
                last = (answer.said.strip().splitlines() or [""])[-1]
                what = f"{answer.wrong or 'ok':12} {answer.code} {answer.seconds:5.1f} s"
                print(f"{what}  {answer.line[:70]}  | {last[:150]}", flush=True)
    asked, good = Counter(answer.line.split()[0] for answer in answers), Counter[str]()
    for answer in answers:
        good[answer.line.split()[0]] += not answer.wrong
    slowest = {name: max(one.seconds for one in answers if one.line.split()[0] == name) for name in asked}
    print(f"{'command':12}{'asked':>8}{'good':>8}{'slowest':>10}")
    for name, many in asked.items():
        print(f"{name:12}{many:>8}{good[name]:>8}{slowest[name]:>8.1f} s")
    print(f"{sum(good.values())} of {len(answers)} good")
    return 0 if sum(good.values()) == len(answers) else 1


if __name__ == "__main__":
    raise SystemExit(main())
