"""CURVE keys of the client socket: making and reading them, and the list of clients that may connect.

A folder of keys, as `launch.py keys DIR` makes it and `--client-keys DIR` reads it:

    server.key            the engine's public key: clients get it
    server.key_secret     its secret key (mode 0600): stays here
    clients/NAME.key      public keys of the clients that may connect; removing a file revokes its key
    NAME.key_secret       a client's secret key (mode 0600), to be moved to where the client runs

The files are ZeroMQ certificates, as `zmq.auth` and tools for other languages write them. Keys are Z85 texts of 40
characters. Called by the launcher's verb `keys`, by the frontend for its socket, and by the SDK. Opens no sockets.
"""

import contextlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, shown

KEY_LENGTH = 40
SERVER_NAME = "server"
CLIENTS_FOLDER = "clients"
SETTLED_S = 0.1
"""What changed less than this ago is read again: its time stamp may not tell of a further change."""
RELOAD_INTERVAL_S = 1.0
"""How old what is known of the files may get: a file that was written over does not change its folder's time stamp."""

_NAME = re.compile(r"[\w.-]{1,64}")
_NOT_Z85 = re.compile(rb"[^0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]")


@dataclass(frozen=True)
class KeyPair:
    """A public and a secret key, in Z85; the secret is not shown."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"


@dataclass(frozen=True)
class ClientKeys:
    """What a client proves itself with, and whom it expects to meet."""

    own: KeyPair
    server_public: bytes


def make_server_keys(folder: Path) -> bool:
    """Make the engine's keys in a folder unless they are there; whether they were made.

    Raises:
        ConfigError: the folder cannot be written.
    """
    if _secret_file(folder, SERVER_NAME).exists():
        return False
    _make(folder, folder, SERVER_NAME)
    return True


def make_client_keys(folder: Path, name: str) -> Path:
    """Make a client's keys and let it connect; the file with its secret.

    Raises:
        ConfigError: a name that is none or taken, or the folder cannot be written.
    """
    if not _NAME.fullmatch(name) or name == SERVER_NAME or name.startswith("."):
        raise ConfigError(f"{name!r} is no name for a client: wanted up to 64 letters, digits, dots, - and _")
    if _public_file(folder, name).exists() or _secret_file(folder, name).exists():
        raise ConfigError(f"the client {name} has keys in {folder} already; revoke them first, or take another name")
    _make(folder / CLIENTS_FOLDER, folder, name)
    return _secret_file(folder, name)


def revoke_client_keys(folder: Path, name: str) -> None:
    """Let a client connect no more.

    Raises:
        ConfigError: no such client.
    """
    if not _NAME.fullmatch(name) or not _public_file(folder, name).exists():
        raise ConfigError(f"no client {name} in {folder / CLIENTS_FOLDER}")
    _public_file(folder, name).unlink()
    _secret_file(folder, name).unlink(missing_ok=True)


def server_keys(folder: Path) -> KeyPair:
    """The engine's own keys; raises ConfigError, with what to do."""
    if not _secret_file(folder, SERVER_NAME).exists():
        raise ConfigError(f"--client-keys {folder}: no {SERVER_NAME}.key_secret there; run launch.py keys {folder}")
    return read_pair(_secret_file(folder, SERVER_NAME))


def client_keys(
    own: "str | os.PathLike[str] | Sequence[str] | None", server_public: "str | os.PathLike[str] | None"
) -> ClientKeys | None:
    """A client's keys from what a program names; None if it names none.

    Args:
        own: a certificate file with the secret key, or the pair (public, secret).
        server_public: the engine's public key, or a certificate file that holds it.

    Raises:
        ConfigError: only one of both, a file that cannot be read, or text that is no key.
    """
    if own is None and server_public is None:
        return None
    if own is None or server_public is None:
        raise ConfigError("server_key and client_keys go together; only one was given")
    if isinstance(own, str | os.PathLike):
        pair = read_pair(Path(own))
    else:
        public, secret = own
        pair = KeyPair(_checked(public, "client_keys"), _checked(secret, "client_keys"))
    return ClientKeys(pair, read_public(server_public))


def read_pair(path: Path) -> KeyPair:
    """The keys in a certificate file with a secret that nobody else may read.

    Raises:
        ConfigError: not such a file.
    """
    public, secret = _read(path)
    if not secret:
        raise ConfigError(f"{path} holds no secret key; wanted a .key_secret file")
    if os.stat(path).st_mode & 0o077:
        raise ConfigError(f"{path} can be read by others: chmod 600 it")
    return KeyPair(_checked(public, str(path)), _checked(secret, str(path)))


def read_public(key: "str | os.PathLike[str]") -> bytes:
    """A public key, given as it is or as a certificate file.

    Raises:
        ConfigError: neither.
    """
    if isinstance(key, str) and len(key) == KEY_LENGTH and not os.path.exists(key):
        return _checked(key, "server_key")
    return _checked(_read(Path(key))[0], str(key))


class AuthorisedKeys:
    """The public keys in a folder, read again when the folder changes, and now and again in case a file in it has.

    Args:
        folder: of the keys; its `clients` holds those that may connect.

    Raises:
        ConfigError: a file there is no certificate. Later ones are skipped.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / CLIENTS_FOLDER
        self._files: dict[str, tuple[tuple[int, int, int], bytes]] = {}
        self._names: dict[bytes, str] = {}
        self._changed_ns = -1
        self._next_look_s = 0.0
        for path in self._folder.glob("*.key"):
            read_public(path)

    def name_of(self, public: bytes) -> str | None:
        """Whose key it is; None if it may not connect."""
        try:
            changed_ns = os.stat(self._folder).st_mtime_ns
            now_s = time.monotonic()  # a clock that is set back must not keep a revoked key
            if changed_ns != self._changed_ns or now_s >= self._next_look_s:
                self._read_changed()
                self._changed_ns = changed_ns
                settled = time.time() - changed_ns / 1e9 > SETTLED_S
                self._next_look_s = now_s + RELOAD_INTERVAL_S if settled else 0.0
        except OSError:
            return None
        return self._names.get(public)

    def _read_changed(self) -> None:
        """Read the files that are new or not what they were; one that is no certificate lets nobody in."""
        files: dict[str, tuple[tuple[int, int, int], bytes]] = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(".key"):
                    self._read_file(entry, files)
        self._files = files
        self._names = {public: name.removesuffix(".key") for name, (_, public) in files.items()}

    def _read_file(self, entry: "os.DirEntry[str]", files: "dict[str, tuple[tuple[int, int, int], bytes]]") -> None:
        with contextlib.suppress(OSError, ConfigError):  # taken out meanwhile, or half written
            found = os.stat(entry.path)
            version = (found.st_mtime_ns, found.st_size, found.st_ino)
            known = self._files.get(entry.name)
            is_known = known is not None and known[0] == version and time.time() - version[0] / 1e9 > SETTLED_S
            files[entry.name] = known if known and is_known else (version, read_public(Path(entry.path)))


def _make(public_folder: Path, secret_folder: Path, name: str) -> None:
    from zmq.auth import create_certificates

    earlier = os.umask(0o077)
    try:
        for folder in (public_folder, secret_folder):
            folder.mkdir(parents=True, exist_ok=True)
        public_file = create_certificates(secret_folder, name)[0]
        os.chmod(public_file, 0o644)
        os.replace(public_file, public_folder / f"{name}.key")
    except OSError as error:
        raise ConfigError(f"cannot write keys to {secret_folder}: {error.strerror}") from None
    finally:
        os.umask(earlier)


def _public_file(folder: Path, name: str) -> Path:
    return folder / CLIENTS_FOLDER / f"{name}.key"


def _secret_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.key_secret"


def _read(path: Path) -> tuple[bytes, bytes | None]:
    from zmq.auth import load_certificate

    try:
        return load_certificate(path)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror or 'there is none'}") from None
    except ValueError:
        raise ConfigError(f"{path} holds no key; wanted a certificate of ZeroMQ") from None


def _checked(key: str | bytes, where: str) -> bytes:
    raw = key.encode() if isinstance(key, str) else key
    if len(raw) != KEY_LENGTH:
        raise ConfigError(f"{where}: a key has {KEY_LENGTH} characters (Z85), this has {len(raw)}")
    if wrong := _NOT_Z85.search(raw):
        raise ConfigError(f"{where}: a key is written in Z85, which has no {shown(wrong[0].decode('latin-1'))}")
    return raw
