"""A client socket with keys, over real sockets: who gets in, who does not, and what each is told."""

import asyncio
import contextlib
import threading

import msgpack
import pytest
import zmq

from common import client_messages as wire
from common.errors import AccessError, ConfigError, EngineDeadError
from common.keys import make_client_keys, make_server_keys, read_pair, revoke_client_keys, server_keys
from common.sampling_params import SamplingParams
from frontend import AsyncClient, Client
from tests.support.ports import reserved_port
from tests.support.running_frontend import RunningFrontend

ABC = SamplingParams(max_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("k") / "keys"
    make_server_keys(made)
    make_client_keys(made, "alice")
    return made


@pytest.fixture(scope="module")
def keyed(folder, tmp_path_factory):
    """A frontend that lets alice in."""
    with reserved_port() as port:
        server = {"client_endpoint": f"tcp://127.0.0.1:{port}", "client_keys": str(folder)}
        with contextlib.closing(RunningFrontend(tmp_path_factory.mktemp("f"), server=server)) as running:
            yield running


def keys_of(folder, name: str = "alice") -> dict:
    return {"server_key": folder / "server.key", "client_keys": folder / f"{name}.key_secret"}


def test_with_the_right_keys_a_client_works(keyed, folder):
    with Client(keyed.endpoint, **keys_of(folder)) as client:
        assert client.generate("abc", ABC).text == "abc"

    async def main() -> None:
        async with AsyncClient(keyed.endpoint, **keys_of(folder)) as client:
            assert (await client.generate("abc", ABC)).text == "abc"

    asyncio.run(main())


def test_keys_may_be_given_as_text(keyed, folder):
    pair = read_pair(folder / "alice.key_secret")
    own = (pair.public.decode(), pair.secret.decode())
    with Client(keyed.endpoint, server_key=server_keys(folder).public.decode(), client_keys=own) as client:
        assert client.ping() >= 0


def stranger(_folder) -> dict:
    public, secret = zmq.curve_keypair()
    return {"client_keys": (public.decode(), secret.decode())}


def wrong_server(_folder) -> dict:
    return {"server_key": zmq.curve_keypair()[0].decode()}


def wrong_secret(folder) -> dict:
    pair = read_pair(folder / "alice.key_secret")
    return {"client_keys": (pair.public.decode(), zmq.curve_keypair()[1].decode())}


def no_keys(_folder) -> dict:
    return {"client_keys": None, "server_key": None}


REFUSED = [
    (stranger, "does not let this client in: its key .* is not authorised"),
    (wrong_server, "the engine's key is another one than server_key"),
    (wrong_secret, "the engine's key is another one than server_key, or it takes no keys|not authorised"),
    (no_keys, "it wants keys"),
]


@pytest.mark.parametrize(("change", "match"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_other_keys_are_refused_by_name_and_cost_the_engine_nothing(keyed, folder, change, match):
    wrong = {**keys_of(folder), **change(folder)}
    with pytest.raises(AccessError, match=match):
        Client(keyed.endpoint, timeout_s=20, **wrong)

    async def main() -> None:
        async with AsyncClient(keyed.endpoint, timeout_s=20, **wrong):
            pass

    with pytest.raises(AccessError, match=match):
        asyncio.run(main())
    with Client(keyed.endpoint, **keys_of(folder)) as client:
        assert client.generate("abc", ABC).text == "abc"


def connection_count(running) -> int:
    """How many connections the frontend believes to have, once its monitor's events are read."""

    async def count() -> int:
        return running.frontend._engine.connections.client_count

    return asyncio.run_coroutine_threadsafe(count(), running.frontend._ended.get_loop()).result(20)


def test_connections_that_were_refused_are_not_counted_as_open(keyed, folder):
    """Counted for ever, a few thousand strangers would have had everybody cut off."""
    for change, _ in REFUSED:
        for _ in range(3):
            with pytest.raises(AccessError):
                Client(keyed.endpoint, timeout_s=20, **{**keys_of(folder), **change(folder)})
    with Client(keyed.endpoint, **keys_of(folder)) as client:
        while connection_count(keyed) != 1:  # it hears of their ends a moment later
            client.ping()


def test_keys_for_an_engine_without_any_are_refused(shared_frontend, folder):
    with pytest.raises(AccessError, match="it takes no keys"):
        Client(shared_frontend.endpoint, timeout_s=20, **keys_of(folder))


def test_a_revoked_key_is_refused_at_its_next_message_and_at_the_door(keyed, folder):
    make_client_keys(folder, "bob")
    secret = keys_of(folder, "bob")
    pair = read_pair(secret["client_keys"])
    with Client(keyed.endpoint, **secret) as bob, Client(keyed.endpoint, **keys_of(folder)) as alice:
        assert bob.generate("abc", ABC).text == "abc"
        revoke_client_keys(folder, "bob")
        with pytest.raises(AccessError, match="was revoked"):
            bob.generate("abc", ABC)
        with pytest.raises(AccessError, match="was revoked"):
            bob.status()
        with bob._together():
            at_once = [bob.submit("abc", ABC) for _ in range(3)]
        for stream in at_once:
            with pytest.raises(AccessError, match="was revoked"):
                stream.result()
        assert alice.generate("abc", ABC).text == "abc"
    own = (pair.public.decode(), pair.secret.decode())
    with pytest.raises(AccessError, match="is not authorised"):
        Client(keyed.endpoint, timeout_s=20, server_key=secret["server_key"], client_keys=own)


def overwritten(path) -> None:
    path.write_text(f'curve\n    public-key = "{zmq.curve_keypair()[0].decode()}"\n')


@pytest.fixture
def soon(monkeypatch):
    """The engine looks at the keys more often."""
    monkeypatch.setattr("frontend.client_server.KEY_CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr("common.keys.RELOAD_INTERVAL_S", 0.05)


@pytest.mark.parametrize(
    "take_away",
    [
        lambda path: path.unlink(),
        overwritten,
        lambda path: path.write_text(""),
        lambda path: path.rename(f"{path}.old"),
    ],
    ids=["removed", "overwritten", "emptied", "renamed"],
)
def test_what_runs_for_a_revoked_key_ends_with_an_error(keyed, folder, soon, take_away):
    """It went on to its end."""
    make_client_keys(folder, "dave")
    params = SamplingParams(max_tokens=400, n=2)
    scheduler = keyed.scheduler
    scheduler.gate.clear()
    with Client(keyed.endpoint, **keys_of(folder, "dave")) as dave, Client(keyed.endpoint, **keys_of(folder)) as alice:
        streams = [client.generate("abc", params, stream=True) for client in (dave, dave, alice)]
        scheduler.wait_until(lambda: scheduler.live_count == 3)
        take_away(folder / "clients" / "dave.key")
        for stream in streams[:2]:
            with pytest.raises(AccessError, match="was revoked"):
                list(stream)
        scheduler.wait_until(lambda: scheduler.live_count == 1)
        scheduler.gate.set()
        assert sum(len(delta.token_ids) for delta in streams[2]) == 800
    for path in [*folder.glob("dave*"), *folder.glob("clients/dave*")]:
        path.unlink()


def test_a_text_that_is_being_encoded_for_a_revoked_key_ends_too(keyed, folder, soon, monkeypatch):
    make_client_keys(folder, "erin")
    waiting = threading.Event()

    async def never(*_, **__):
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(keyed.frontend._engine, "prompt_ids", never)
    with Client(keyed.endpoint, **keys_of(folder, "erin")) as erin:
        stream = erin.generate("abc " * 1000, ABC, stream=True)
        assert waiting.wait(20)
        revoke_client_keys(folder, "erin")
        with pytest.raises(AccessError, match="was revoked"):
            list(stream)


def test_a_key_that_is_added_gets_in_without_a_restart(keyed, folder):
    public, secret = zmq.curve_keypair()
    own = {"server_key": folder / "server.key", "client_keys": (public.decode(), secret.decode())}
    with pytest.raises(AccessError):
        Client(keyed.endpoint, timeout_s=20, **own)
    (folder / "clients" / "carol.key").write_text(f'curve\n    public-key = "{public.decode()}"\n')
    with Client(keyed.endpoint, timeout_s=20, **own) as client:
        assert client.ping() >= 0


def test_the_users_own_programs_on_this_machine_need_no_keys(keyed):
    with Client(keyed.config.local_client_endpoint()) as client:
        assert client.generate("abc", ABC).text == "abc"


def test_local_connections_are_counted_on_when_the_others_are_cut(keyed, folder):
    """The count began anew, and fell below zero when they ended."""
    connections, door = keyed.frontend._engine.connections, keyed.frontend._clients._monitor
    local_endpoint = keyed.frontend._config.endpoint("client", 0)
    with Client(local_endpoint) as local, Client(keyed.endpoint, **keys_of(folder)) as far:
        while connections.client_count != 2:
            local.ping()
        door._reader._loop.call_soon_threadsafe(door._cut)
        with pytest.raises(EngineDeadError):
            while True:
                far.ping()
        assert far.ping() < 20
        while connections.client_count != 2:
            local.ping()
    with Client(local_endpoint) as local:
        while connections.client_count != 1:
            local.ping()


def test_a_client_knows_the_engine_and_the_engine_the_client_after_a_restart(run_frontend, folder):
    with reserved_port() as port:
        server = {"client_endpoint": f"tcp://127.0.0.1:{port}", "client_keys": str(folder)}
        first = run_frontend(server=server)
        with Client(first.endpoint, timeout_s=20, **keys_of(folder)) as client:
            assert client.ping() >= 0
            first.stop()
            with pytest.raises(EngineDeadError):
                client.timeout_s = 0.1
                client.ping()
            run_frontend(server=server)
            client.timeout_s = 20
            assert client.generate("abc", ABC).text == "abc"


def test_a_raw_client_needs_three_options_more(keyed, folder):
    pair = read_pair(folder / "alice.key_secret")
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.set(zmq.LINGER, 0)
        raw.set(zmq.CURVE_PUBLICKEY, pair.public)
        raw.set(zmq.CURVE_SECRETKEY, pair.secret)
        raw.set(zmq.CURVE_SERVERKEY, server_keys(folder).public)
        raw.connect(keyed.endpoint)
        raw.send(wire.Ping("p").to_wire())
        assert raw.poll(20_000)
        assert msgpack.unpackb(raw.recv()) == [wire.Pong.CODE, "p"]


def test_one_key_without_the_other_is_a_mistake_at_once(folder):
    with pytest.raises(ConfigError, match="go together"):
        Client("tcp://127.0.0.1:1", server_key=folder / "server.key")
    with pytest.raises(ConfigError, match="go together"):
        AsyncClient("tcp://127.0.0.1:1", client_keys=folder / "alice.key_secret")
