"""Checks whether the HTTP API can use its TLS files. Called before uvicorn reads them, and by the pre-flight."""

import ssl

from common.config import ServerOptions
from common.errors import ConfigError


def check_tls(server: ServerOptions) -> None:
    """Refuse certificate and key as serving with them would.

    Raises:
        ConfigError: a file that cannot be read or is none, a key with a passphrase, or two that do not belong together.
    """
    if not server.ssl_certfile:
        return
    for option, name in (("--ssl-certfile", server.ssl_certfile), ("--ssl-keyfile", server.ssl_keyfile)):
        try:
            open(name, "rb").close()
        except OSError as error:
            raise ConfigError(f"{option}: cannot read {name}: {error.strerror}") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server.ssl_certfile, server.ssl_keyfile, _no_passphrase)
    except ssl.SSLError as error:
        reason = str(error.reason or error).replace("_", " ").lower()
        raise ConfigError(
            f"--ssl-certfile {server.ssl_certfile} and --ssl-keyfile {server.ssl_keyfile}: no certificate with its key "
            f"in PEM ({reason})"
        ) from None


def _no_passphrase() -> str:
    raise ConfigError("--ssl-keyfile has a passphrase, and nobody is there to type it: give a key without one")
