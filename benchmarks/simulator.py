"""Events a second through a policy object, ours beside a SimPy program, and a million learners.

    make bench

Both programs drive the same policy with the same draws, each in a process of its own, one after the other, three times;
the best of each is compared. An event is a minibatch that is finished (and, with no communication, has arrived).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

LEARNERS, K, PUSHES = 10_000, 100, 1_000_000

OURS = """
import json, resource, sys, time
from offbeat.simulate import server
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
learners, k, pushes = (int(word) for word in sys.argv[1:])
cluster = Cluster(learners=learners, law=parse_law("exp:1"), seed=1)
start = time.perf_counter()
result = server.run(f"k-batch-async:{k}", cluster, updates=pushes // k)
took = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([result.events, took, peak, result.staleness_mean, result.seconds_per_update]))
"""

SIMPY = """
import json, resource, sys, time
import simpy
from offbeat.policies import Joined, Pushed, Send, create
from offbeat.simulate.compute import Draws, parse_law
learners, k, pushes = (int(word) for word in sys.argv[1:])
start = time.perf_counter()
draws = Draws(parse_law("exp:1"), learners, 1)
policy = create(f"k-batch-async:{k}", expect=learners)
for learner in range(learners):
    policy.handle(Joined(learner))
env = simpy.Environment()
enough = env.event()
state = [0, 0]  # pushes, sum of staleness

def learn(learner):
    version = 0
    while True:
        yield env.timeout(draws.take(learner))
        state[0] += 1
        before = policy.version
        for command in policy.handle(Pushed(learner, state[0], version, at_s=env.now)):
            if type(command) is Send:
                version = policy.version
            else:
                state[1] += sum(before - gradient.version for gradient in policy.last_update)
        if policy.version == pushes // k and not enough.triggered:
            enough.succeed()

for learner in range(learners):
    env.process(learn(learner))
env.run(until=enough)
took = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([state[0], took, peak, state[1] / (policy.version * k), env.now / policy.version]))
"""


def measure(program: str, *numbers: int) -> tuple[float, float, float, float, float]:
    words = [sys.executable, "-c", program, *map(str, numbers)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    events, took, peak, staleness, update_s = json.loads(done.stdout)
    return events, took, peak, staleness, update_s


def main() -> None:
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f}")
    print(f"k-batch-async:{K}, {LEARNERS} learners, {PUSHES} pushes, exp:1\n")
    rates = {"offbeat": 0.0, "SimPy": 0.0}
    print(f"{'program':<10}{'events/s':>12}{'seconds':>10}{'memory':>10}{'staleness':>12}{'s/update':>12}")
    for _ in range(3):
        for name, program in (("offbeat", OURS), ("SimPy", SIMPY)):
            events, took, peak, staleness, update_s = measure(program, LEARNERS, K, PUSHES)
            rates[name] = max(rates[name], events / took)
            row = f"{events / took:>12,.0f}{took:>10.2f}{peak / 1e6:>7.0f} MB{staleness:>12.3f}{update_s:>12.6f}"
            print(f"{name:<10}{row}")
    print(f"\noffbeat / SimPy, best of three: {rates['offbeat'] / rates['SimPy']:.2f}x")
    events, took, peak, _, _ = measure(OURS, 1_000_000, 1000, 2_000_000)
    print(f"1,000,000 learners, {events:,.0f} events: {took:.1f} s, {peak / 1e9:.2f} GB at the peak")


if __name__ == "__main__":
    main()
