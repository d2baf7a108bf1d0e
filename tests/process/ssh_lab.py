"""Real sshd on the hosts of a lab: a server with a key of its own on each host, and the ssh command that reaches it.

`sshd` runs on a host's own address only, with files of one temporary folder: no setting of this machine is read or
changed. Only a key made here may log in, as the user who runs the test.
"""

from __future__ import annotations

import getpass
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lab.fixture import wait_for
from offbeat.lab import Lab

PORT = 2222
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")
SSH_KEYGEN, SSH = shutil.which("ssh-keygen"), shutil.which("ssh")
WHY_NOT = "" if SSHD and SSH and SSH_KEYGEN else "sshd and ssh are missing: apt-get install openssh-server"


def start_sshd(lab: Lab, folder: Path, hosts: Sequence[int]) -> str:
    """An sshd on each of these hosts; what `--ssh` is to be given to reach them."""
    folder.mkdir(mode=0o700)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd asks for it
    for name in ("user", "host"):
        words = [str(SSH_KEYGEN), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True, capture_output=True, timeout=30)
    (folder / "config").write_text(
        f"HostKey {folder / 'host'}\nAuthorizedKeysFile {folder / 'user.pub'}\nPidFile none\nUsePAM no\n"
        f"StrictModes no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        f"AllowUsers {getpass.getuser()}\n"
    )
    for host in hosts:
        where = ["-o", f"ListenAddress={lab.network.address(host)}:{PORT}"]
        wait_for(lab.start(host, [str(SSHD), "-D", "-e", "-f", str(folder / "config"), *where]), "Server listening")
    options = ["BatchMode=yes", "StrictHostKeyChecking=no", f"UserKnownHostsFile={folder / 'known'}", "LogLevel=ERROR"]
    return f"{SSH} -F none -p {PORT} -i {folder / 'user'} " + " ".join(f"-o {one}" for one in options)
