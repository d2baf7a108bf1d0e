"""Write a collective by hand, verify it, break it and see what the check says.

python own_schedule.py
"""

from offbeat import schedules, topology
from offbeat.errors import ScheduleError

# Three ranks in a chain: everything flows to rank 2, the sum flows back.
CHAIN = """
schedule chain all-reduce ranks=3 chunks=1
0>1 c0 +
1>2 c0 +
2>1 c0 =
1>0 c0 =
"""

# The same in one step fewer: rank 1 passes on before rank 0's gradient has come, so somebody is forgotten.
HASTY = """
schedule hasty-chain all-reduce ranks=3 chunks=1
0>1 c0 + | 1>2 c0 +
2>1 c0 =
1>0 c0 =
"""


def main() -> None:
    chain = schedules.Schedule.parse(CHAIN)
    schedules.verify(chain)
    print(schedules.grid(chain))

    machine = topology.build("uniform:bandwidth=1GB/s,latency=10us", ranks=3)
    cost = schedules.price(chain, machine, size_bytes=10_000_000)
    ring = schedules.price(schedules.build("ring", ranks=3), machine, size_bytes=10_000_000)
    print(f"\nproved; 10 MB take {cost.seconds * 1e3:.2f} ms, and {ring.seconds * 1e3:.2f} ms by ring\n")

    try:
        schedules.verify(schedules.Schedule.parse(HASTY))
    except ScheduleError as error:
        print(error)


if __name__ == "__main__":
    main()
