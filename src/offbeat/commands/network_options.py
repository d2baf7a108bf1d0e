"""The options of commands that leave this host: the key of the run, where it listens, and hosts that ssh starts."""

from __future__ import annotations

import argparse
import ipaddress
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat import plugins
from offbeat.commands.base import option, refuse
from offbeat.errors import RequestError
from offbeat.network import keys
from offbeat.policies import create
from offbeat.processes.ssh_hosts import (
    SSH,
    HostProgram,
    HostShare,
    host_program,
    learners_on_this,
    others_of,
    parse_hosts,
    split_ssh,
)
from offbeat.spec import parse_count
from offbeat.strategy import ALL_REDUCE, family_of

SPREAD = "spread"
_CONNECT_S = 10.0
NETWORK_OPTIONS = (
    option(
        "--key",
        read=Path,
        metavar="FILE",
        help=f"key file of the run, from `offbeat keys FILE`; the same on all hosts; - reads the key from standard "
        f"input (default: {keys.KEY})",
        group="network",
    ),
    option(
        "--network-trust",
        choices=(keys.OPEN,),
        help="leave this host without a key: nothing is encrypted, and whoever reaches the port may join",
        group="network",
    ),
)
# Of commands that start a run which others may join.
HOST_OPTIONS = (
    option(
        "--hosts",
        read=parse_hosts,
        metavar="HOST:N,...",
        help="start N learners on each of these hosts over ssh, such as alice:4,bob:2; localhost is this host; "
        "parameter-server strategies only",
        group="network",
    ),
    option(
        "--ssh",
        metavar="COMMAND",
        help=f"command that runs a program on another host (default '{SSH}'; needs --hosts)",
        group="network",
    ),
    option(
        "--remote-python",
        metavar="PATH",
        help="Python with offbeat on the other hosts (default: the path of this one; needs --hosts)",
        group="network",
    ),
    option(
        "--listen",
        metavar="ADDRESS:PORT",
        help="let learners on other hosts join here, with `offbeat work`; parameter-server strategies only",
        group="network",
    ),
    option(
        "--remote",
        read=parse_count,
        metavar="N",
        help="how many of the learners join from other hosts (needs --listen)",
        group="network",
    ),
    *NETWORK_OPTIONS,
)


def use_network(words: argparse.Namespace) -> None:
    """Put what was given into the environment, where this process and the learners that it starts find it."""
    if words.key == Path("-"):
        os.environ[keys.KEY] = str(keys.kept_in_memory(keys.read_from(0)))
    elif words.key is not None:
        os.environ[keys.KEY] = str(words.key.absolute())
    if words.network_trust is not None:
        os.environ[keys.TRUST] = words.network_trust
    keys.is_open()  # they must not contradict each other


def check_listens(join: str) -> None:
    """A `PeerError` where no run can be reached: asked before torch is loaded, which takes seconds."""
    from offbeat.network.port import check_trust, dial, parse_place

    place = parse_place(join, "--join")
    check_trust(place, keys.key_of(), is_open=keys.is_open(), what="--join")
    dial(place, None, b"", _CONNECT_S).close()


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherHosts:
    """Where a run listens for learners on other hosts, how many they are, and what is started there."""

    listener: socket.socket
    remote: int
    programs: tuple[HostProgram, ...] = ()


def count_remote(words: argparse.Namespace, sync: str) -> int | None:
    """How many learners join from other hosts; None where the run has no places for them."""
    if words.hosts is None:
        refuse(words, ("ssh", "remote_python"), "needs --hosts")
    elif words.remote is not None:
        raise RequestError("--hosts says how many learners join; remove --remote")
    elif words.ssh is not None:
        split_ssh(words.ssh)
    if words.hosts is None and (words.listen is None) != (words.remote is None):
        raise RequestError("--listen and --remote belong together: where to listen, and how many learners may join")
    if words.hosts is None and words.listen is None:
        return None
    if family_of(sync) == ALL_REDUCE:
        option_name = "--listen" if words.hosts is None else "--hosts"
        raise RequestError(
            f"{option_name}: learners cannot join '{sync}'; choose a parameter-server strategy, or start torchrun on "
            "each host (docs/several-hosts.md)"
        )
    remote: int = words.remote if words.hosts is None else sum(host.learners for host in others_of(words.hosts))
    return remote


def count_all(words: argparse.Namespace, remote: int, learners: int, default_here: int) -> int:
    """The learners of all hosts; `learners` of them were asked for, 0: as many as make sense here, and the remote."""
    here = None if words.hosts is None else learners_on_this(words.hosts)
    if here is not None and learners not in (0, here + remote):
        raise RequestError(f"--hosts has {here + remote} learners, but --learners is {learners}; remove one of them")
    if here is None and learners and remote >= learners:
        raise RequestError(
            f"at least one of the {learners} learners must be on this host, since it evaluates and saves; "
            f"{remote} are on other hosts, so use --learners {remote + 1} or more"
        )
    return learners or remote + (default_here if here is None else here)


def count_servers(words: argparse.Namespace, servers: int, remote: int | None) -> int:
    """How many servers there are with --place spread: as many as hosts."""
    if remote is None:
        raise RequestError(f"--place {SPREAD} needs other hosts: --hosts, or --listen and --remote")
    hosts = servers if words.hosts is None else 1 + len(others_of(words.hosts))
    if hosts < 2:
        raise RequestError(f"--place {SPREAD} needs --servers N: this host and N - 1 that join; got {hosts}")
    if servers not in (1, hosts):
        raise RequestError(f"--place {SPREAD} puts one server on each of {hosts} hosts, but --servers is {servers}")
    return hosts


def check_mirror(words: argparse.Namespace, sync: str, learners: int) -> None:
    """`RequestError` where the servers' state cannot be on a second host, or would not be all that there is."""
    if words.successors is None:
        raise RequestError("--mirror needs --successors: the first of them keeps the copy, and continues from it")
    if words.place == SPREAD:
        raise RequestError(f"--mirror needs all servers on this host; remove --place {SPREAD}")
    rule = create(sync, expect=max(1, learners)).rule
    if rule.delta or rule.fetch_every or (rule.codec is not None and rule.codec.biased):
        raise RequestError(
            f"--mirror: under '{sync}' learners keep state that is on no server; choose a strategy without local steps "
            "and without error feedback"
        )


def open_hosts(words: argparse.Namespace, remote: int, more: Sequence[str] = ()) -> OtherHosts:
    """Listen for learners on other hosts, and say what ssh is to start there: `offbeat work`, with `more` words.

    Where hosts are started from here and there is no key, one is made for this run.
    """
    from offbeat.network.addresses import address_towards
    from offbeat.network.connections import Place
    from offbeat.network.port import format_place, open_port  # TLS: only for who opens a port

    if words.hosts is None:
        return OtherHosts(listener=open_port(words.listen, "--listen"), remote=remote)
    others = others_of(words.hosts)
    if not keys.is_open() and not os.environ.get(keys.KEY) and not os.environ.get(keys.SECRET):
        os.environ[keys.KEY] = str(keys.kept_in_memory(keys.derive(secrets.token_bytes(32))))
    key = keys.key_of()
    listener = open_port(words.listen or format_place(Place(address_towards(others[0].address), 0)), "--listen")
    own = Place(*listener.getsockname()[:2])
    trust = ("--network-trust", keys.OPEN) if key is None else ("--key", "-")
    plugged = tuple(word for name in plugins.named() for word in ("--plugin", name))

    def program(host: HostShare) -> HostProgram:
        anywhere = ipaddress.ip_address(own.address).is_unspecified
        place = own._replace(address=address_towards(host.address)) if anywhere else own
        asked = ("work", "--join", format_place(place), "--learners", str(host.learners), "--attached")
        return host_program(
            host,
            (*asked, *trust, *plugged, *more),
            ssh=words.ssh or SSH,
            python=words.remote_python or "",
            given=b"" if key is None else key.pem,
        )

    return OtherHosts(listener=listener, remote=remote, programs=tuple(map(program, others)))
