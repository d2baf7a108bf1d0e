"""A cluster in a box: hosts that are Linux namespaces on this machine, joined by a network of stated bandwidth.

    with Lab(Network.of(hosts=3, bandwidth="1Gbit/s")) as lab:
        server = lab.start(0, ["python", "serve.py"])
        print(lab.run(1, ["python", "ask.py", lab.network.address(0)]).stdout)
        lab.cut(2)

The command is `offbeat lab`; tests use the fixture `start_lab`. Nothing here knows torch or what the programs do.
"""

from offbeat.lab.hosts import Lab
from offbeat.lab.network import Direction, Network

__all__ = ["Direction", "Lab", "Network"]
