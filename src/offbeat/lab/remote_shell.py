"""A remote shell between the hosts of a lab, for programs that start others by ssh, as mpirun does.

    python remote_shell.py SOCKET HOST COMMAND...

runs COMMAND by `sh` on HOST (its name or address), with the caller's standard streams, and ends with its exit code. No
host can enter another one. But they share files, so the caller passes its streams to whoever has the lab, through a
Unix socket in a file (remote_shell_server.py). A command whose caller has ended is killed.
"""

from __future__ import annotations

import array
import json
import socket
import sys

MOST_BYTES = 1 << 16


def main(path: str, host: str, command: list[str]) -> int:
    """The caller's side, on a host. It imports the standard library only."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ask:
        ask.connect(path)
        streams = array.array("i", [0, 1, 2])
        request = json.dumps({"host": host, "command": " ".join(command)}).encode()
        ask.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        answer = ask.recv(MOST_BYTES)
    told = json.loads(answer) if answer else {"error": "the lab has ended"}
    if "error" in told:
        print(f"remote shell: {told['error']}", file=sys.stderr)
        return 255
    code = int(told["code"])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
