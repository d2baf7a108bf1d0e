"""A learner: what a program gets from `offbeat.join`, and how its gradients reach the coordinator and the shards."""
