"""Simulate five policies on eight learners with heavy-tailed compute times, and say what limits each.

python compare_policies.py
"""

from offbeat.simulate import server
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
from offbeat.simulate.diagnosis import why


def main() -> None:
    cluster = Cluster(learners=8, law=parse_law("pareto:2,1"), seed=1)
    for strategy in ("full-sync", "k-sync:6", "k-async:4", "k-batch-async:4", "async"):
        result = server.run(strategy, cluster, updates=2000)
        print(f"{strategy:<16}{result.minibatches_per_s:6.2f} gradients/s   {why(result)}")


if __name__ == "__main__":
    main()
