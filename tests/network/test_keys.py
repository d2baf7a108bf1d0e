"""The key of a run: the same everywhere from a secret, in a file that nobody else may read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.cli import main
from offbeat.errors import OffbeatError, RequestError
from offbeat.network.keys import RunKey, derive, is_open, key_of, read, read_from, secret_of

SECRET = "0123456789abcdef" * 4
# Made once: a secret must give the same key with every version of the library, on every host.
FINGERPRINT_OF_SECRET = "306bf4831c665008"


def test_a_secret_gives_the_same_key_and_certificate_in_every_process_byte_for_byte() -> None:
    program = "from offbeat.network.keys import key_of; import sys; sys.stdout.buffer.write(key_of().pem)"
    environment = {**os.environ, "OFFBEAT_SECRET": SECRET}
    printed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout
    own = derive(bytes.fromhex(SECRET))
    assert printed == own.pem
    assert own.fingerprint == FINGERPRINT_OF_SECRET
    assert derive(b"another secret") != own


def test_offbeat_keys_writes_a_file_for_its_owner_only_and_never_over_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.key"
    mask = os.umask(0)
    try:
        assert main(["keys", str(path)]) == 0
    finally:
        os.umask(mask)
    told = capsys.readouterr().out
    key = read(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert key.fingerprint in told and "OFFBEAT_KEY=" in told
    assert main(["keys", str(path)]) == 2
    assert "a key is never overwritten" in capsys.readouterr().err
    assert read(path) == key
    assert main(["keys", str(tmp_path / "other.key")]) == 0
    assert read(tmp_path / "other.key") != key


def test_a_key_is_not_printed_by_accident() -> None:
    key = derive(b"secret")
    assert repr(key) == f"RunKey({key.fingerprint})"


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    main(["keys", str(path)])
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(RequestError, match=r"other users may read .*chmod 600"):
            read(path)


@pytest.mark.parametrize("text", [b"", b"nonsense", b"x" * 100_000, b"-----BEGIN CERTIFICATE-----\nAA=\n-----END"])
def test_what_is_no_key_is_refused_in_one_line(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "run.key"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(RequestError, match="is not a file of offbeat keys"):
        read(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for wrong in (tmp_path, tmp_path / "nothing", tmp_path / "pipe"):
        with pytest.raises(RequestError, match="OFFBEAT_KEY: "):
            read(wrong)


def test_a_key_that_does_not_work_is_refused_where_it_is_read(tmp_path: Path) -> None:
    one, other = derive(b"one"), derive(b"other")
    path = tmp_path / "run.key"
    for broken in (RunKey(b"\0\0\0", b"\0\0\0"), RunKey(one.private, b"\0"), RunKey(one.private, other.certificate)):
        path.write_bytes(broken.pem)
        path.chmod(0o600)
        with pytest.raises(RequestError, match="its key and certificate do not work"):
            read(path)


def test_a_standard_input_that_is_closed_holds_no_key() -> None:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    try:
        with pytest.raises(RequestError, match="standard input did not begin with a key"):
            read_from(descriptor)
    finally:
        os.close(descriptor)


def test_the_environment_names_a_key_or_a_secret_or_says_open(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    main(["keys", str(path)])
    assert key_of({}) is None and secret_of({}) is None and not is_open({})
    assert key_of({"OFFBEAT_KEY": str(path)}) == read(path)
    assert secret_of({"OFFBEAT_KEY": str(path)}) == read(path).signing_secret
    assert key_of({"OFFBEAT_SECRET": SECRET}) == derive(bytes.fromhex(SECRET))
    assert secret_of({"OFFBEAT_SECRET": SECRET}) == bytes.fromhex(SECRET)
    assert key_of({"OFFBEAT_KEY": str(path), "OFFBEAT_SECRET": SECRET}) == read(path)
    assert is_open({"OFFBEAT_NETWORK_TRUST": "open"})


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="'open' or not set; got 'yes'"):
        is_open({"OFFBEAT_NETWORK_TRUST": "yes"})
    with pytest.raises(RequestError, match="contradict each other"):
        is_open({"OFFBEAT_NETWORK_TRUST": "open", "OFFBEAT_KEY": "run.key"})
    with pytest.raises(OffbeatError, match="32 hexadecimal digits"):
        key_of({"OFFBEAT_SECRET": "short"})


def test_without_the_library_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(OffbeatError, match=r"pip install 'offbeat\[hosts\]'"):
        derive(b"secret")
