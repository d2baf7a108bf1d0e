"""Strategies in simulated time, by the policies and schedules that run for real. No torch.

    from offbeat.simulate import server
    from offbeat.simulate.cluster import Cluster
    from offbeat.simulate.compute import parse_law

    cluster = Cluster(learners=8, law=parse_law("exp:1"), seed=1)  # compute times: exponential, 1 s on average
    result = server.run("k-async:4", cluster, updates=1000)
    print(result.seconds_per_update, result.staleness_mean, result.wait_share)

`collective` simulates all-reduce training, `compare` says what limits a strategy. On the command line: `offbeat
simulate`, `offbeat compare`.
"""
