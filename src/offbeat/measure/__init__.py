"""Real speeds, measured: systems that do the same work, alternately in one run on one machine.

`bench` is the parent and loads no torch: it starts the processes that measure (`allreduce_rank`, `ddp_rank`,
`mpi_rank`) through a `crew`, asks them one at a time, and turns their seconds into the numbers that are reported.
"""
