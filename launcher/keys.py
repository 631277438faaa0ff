"""The verb `keys`: makes the keys of a client socket that other machines reach, and takes them away again.

    launch.py keys DIR                  the engine's keys, and a client's named `client`
    launch.py keys DIR alice bob        keys for these clients
    launch.py keys DIR --revoke alice   alice gets in no more

Prints what to do with the files; `common.keys` says what is in them. Called by `launcher.command`.
"""

from collections.abc import Sequence
from pathlib import Path

from common.cli import VerbParser, program_name
from common.errors import ConfigError
from common.keys import SERVER_NAME, make_client_keys, make_server_keys, read_public, revoke_client_keys

FIRST_CLIENT = "client"
DESCRIPTION = "Make the keys of a client socket that other machines reach, and take them away again."


def run(arguments: Sequence[str]) -> int:
    """Make or revoke keys; returns the exit code.

    Raises:
        ConfigError: bad arguments, a name that is taken or unknown, a folder that cannot be written.
    """
    parser = VerbParser(prog=f"{program_name()} keys", usage="%(prog)s DIR [NAME ...] [--revoke NAME]",
                        description=DESCRIPTION)  # fmt: skip
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder that --client-keys names")
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        default=[],
        help="clients to make keys for; for the first, `client` if none is named",
    )
    parser.add_argument("--revoke", metavar="NAME", help="a client that may connect no more")
    parsed = parser.parse_args(arguments)
    if parsed.revoke and parsed.names:
        raise ConfigError(f"--revoke takes one name away; {', '.join(parsed.names)} would be made: one at a time")
    if parsed.revoke:
        revoke_client_keys(parsed.folder, parsed.revoke)
        print(f"{parsed.revoke} is revoked; an engine that runs with these keys knows at once")
        return 0
    new = make_server_keys(parsed.folder)
    names = parsed.names or ([FIRST_CLIENT] if new else [])
    if not names:
        raise ConfigError(f"{parsed.folder} has the engine's keys already; name the clients to make keys for")
    _explain(parsed.folder, [make_client_keys(parsed.folder, name) for name in names])
    return 0


def _explain(folder: Path, secrets: Sequence[Path]) -> None:
    server = folder / f"{SERVER_NAME}.key"
    print(f"start the engine with --client-endpoint tcp://0.0.0.0:5555 --client-keys {folder}")
    print(f"its public key is {read_public(server).decode()} ({server})")
    for secret in secrets:
        print(f"move {secret} to the client, which connects with:")
        print(f'  Client("tcp://HOST:5555", server_key="{server.name}", client_keys="{secret.name}")')
