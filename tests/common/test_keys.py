"""Keys of the client socket: made once, private, read back, and revoked at once."""

import os
import stat
import time

import pytest
import zmq

from common.errors import ConfigError
from common.keys import (
    AuthorisedKeys,
    client_keys,
    make_client_keys,
    make_server_keys,
    read_pair,
    read_public,
    revoke_client_keys,
    server_keys,
)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "new" / "keys"
    assert make_server_keys(made)
    return made


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_come_back_and_secrets_are_private(folder):
    secret = make_client_keys(folder, "alice")
    assert secret == folder / "alice.key_secret"
    assert mode(secret) == mode(folder / "server.key_secret") == 0o600
    assert mode(folder) == 0o700
    assert server_keys(folder).public == read_public(folder / "server.key")
    assert read_pair(secret).public == read_public(folder / "clients" / "alice.key")
    assert read_pair(secret).secret.decode() not in repr(read_pair(secret))
    assert not list(folder.glob("alice.key")), "the public key is with those that may connect, and nowhere else"


def test_what_is_there_is_kept(folder):
    before = server_keys(folder)
    assert not make_server_keys(folder)
    assert server_keys(folder) == before
    make_client_keys(folder, "alice")
    with pytest.raises(ConfigError, match="the client alice has keys in .* already"):
        make_client_keys(folder, "alice")


@pytest.mark.parametrize("name", ["", "server", "../alice", "a/b", ".hidden", "a b", "x" * 65])
def test_names_that_are_none(folder, name):
    with pytest.raises(ConfigError, match="is no name for a client"):
        make_client_keys(folder, name)
    with pytest.raises(ConfigError, match="no client"):
        revoke_client_keys(folder, name)


def test_authorised_keys_follow_the_folder(folder):
    public = read_pair(make_client_keys(folder, "alice")).public
    authorised = AuthorisedKeys(folder)
    assert authorised.name_of(public) == "alice"
    assert authorised.name_of(b"x" * 40) is None
    bob = read_pair(make_client_keys(folder, "bob")).public
    assert authorised.name_of(bob) == "bob"
    revoke_client_keys(folder, "alice")
    assert authorised.name_of(public) is None
    assert authorised.name_of(bob) == "bob"
    os.rename(folder / "clients", folder / "elsewhere")
    assert authorised.name_of(bob) is None


def test_a_clock_that_is_set_back_does_not_keep_a_key_that_was_written_over(folder, monkeypatch):
    monkeypatch.setattr("common.keys.RELOAD_INTERVAL_S", 0.0)
    public = read_pair(make_client_keys(folder, "alice")).public
    path = folder / "clients" / "alice.key"
    for old in (path, path.parent):
        os.utime(old, (1.0, 1.0))
    authorised = AuthorisedKeys(folder)
    assert authorised.name_of(public) == "alice"
    now_s = time.time()
    monkeypatch.setattr("common.keys.time.time", lambda: now_s - 3600)
    path.write_text(path.read_text().replace(public.decode(), zmq.curve_keypair()[0].decode()))
    assert authorised.name_of(public) is None


def test_a_file_that_is_no_key_ends_the_start_and_later_costs_only_itself(folder):
    public = read_pair(make_client_keys(folder, "alice")).public
    authorised = AuthorisedKeys(folder)
    (folder / "clients" / "broken.key").write_text("curve\n")
    assert authorised.name_of(public) == "alice"
    with pytest.raises(ConfigError, match=r"broken\.key holds no key"):
        AuthorisedKeys(folder)


def test_a_client_names_files_or_keys(folder):
    secret = make_client_keys(folder, "alice")
    from_files = client_keys(secret, folder / "server.key")
    pair = read_pair(secret)
    as_texts = client_keys((pair.public.decode(), pair.secret.decode()), server_keys(folder).public.decode())
    assert from_files == as_texts
    assert client_keys(None, None) is None


@pytest.mark.parametrize(
    ("own", "server", "match"),
    [
        (None, "x" * 40, "server_key and client_keys go together"),
        (("a" * 40, "b" * 40), None, "server_key and client_keys go together"),
        (("a" * 40, "b" * 39), "x" * 40, "client_keys: a key has 40 characters .* this has 39"),
        ("nowhere.key_secret", "x" * 40, "cannot read the key file nowhere.key_secret"),
        (("a" * 40, "b" * 40), "short", "cannot read the key file short"),
        (("a" * 39 + "~", "b" * 40), "x" * 40, "client_keys: a key is written in Z85, which has no '~'"),
        (("a" * 40, "b" * 39 + '"'), "x" * 40, "client_keys: a key is written in Z85, which has no '\"'"),
    ],
)
def test_keys_that_are_none(own, server, match):
    with pytest.raises(ConfigError, match=match):
        client_keys(own, server)


def test_a_secret_that_others_can_read_is_refused(folder):
    os.chmod(folder / "server.key_secret", 0o640)
    with pytest.raises(ConfigError, match="can be read by others: chmod 600 it"):
        server_keys(folder)
    with pytest.raises(ConfigError, match="holds no secret key"):
        read_pair(folder / "server.key")


def test_a_folder_without_keys_says_what_to_run(tmp_path):
    with pytest.raises(ConfigError, match=f"run launch.py keys {tmp_path}"):
        server_keys(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write keys to"):
        make_server_keys(tmp_path / "file")


def test_certificates_of_other_tools_are_taken(folder):
    public, _secret = zmq.curve_keypair()
    (folder / "clients").mkdir(exist_ok=True)
    text = f'#  a comment\nmetadata\n    name = "carol"\ncurve\n    public-key = "{public.decode()}"\n'
    (folder / "clients" / "carol.key").write_text(text)
    assert AuthorisedKeys(folder).name_of(public) == "carol"
