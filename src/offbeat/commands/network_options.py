"""The options of commands that leave this host: the key of the run, or that the network is trusted."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from offbeat.commands.base import option
from offbeat.network import keys

NETWORK_OPTIONS = (
    option(
        "--key",
        read=Path,
        metavar="FILE",
        help=f"key file of the run, from `offbeat keys FILE`; the same on all hosts (default: {keys.KEY})",
        group="network",
    ),
    option(
        "--network-trust",
        choices=(keys.OPEN,),
        help="leave this host without a key: nothing is encrypted, and whoever reaches the port may join",
        group="network",
    ),
)


def use_network(words: argparse.Namespace) -> None:
    """Put what was given into the environment, where this process and the learners that it starts find it."""
    if words.key is not None:
        os.environ[keys.KEY] = str(words.key.absolute())
    if words.network_trust is not None:
        os.environ[keys.TRUST] = words.network_trust
    keys.is_open()  # they must not contradict each other
