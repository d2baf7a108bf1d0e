"""Real speeds, measured: systems that do the same work, alternately in one run on one machine.

The parent loads no torch. It starts the processes that measure through a `Harness`, has them take turns in rounds, and
makes rows of what they answer: a `BenchResult`, which the terminal, the JSON file and the report's page show.
"""
