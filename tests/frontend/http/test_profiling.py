"""`/start_profile` and `/stop_profile`: orders for the supervisor, and when there are none."""

import dataclasses

import pytest

from common.config import ProfilingOptions
from common.messages import Profile
from common.profiling import STEP_LIMIT


@pytest.fixture
def orders(api):
    config = api.engine.config
    api.engine.config = dataclasses.replace(config, profiling=ProfilingOptions(profile_dir="traces"))
    orders: list[Profile] = []
    api.engine.order_profile = orders.append
    return orders


def test_orders(api, orders):
    response = api.post("/start_profile", b"")
    assert response.json() == {"process": "worker", "steps": STEP_LIMIT, "folder": "traces"}
    api.post("/start_profile", {"process": "scheduler", "steps": 7})
    api.post("/stop_profile", {"process": "frontend"})
    assert orders == [Profile("worker", STEP_LIMIT), Profile("scheduler", 7), Profile("frontend", 0)]


@pytest.mark.parametrize(
    "body", [{"process": "supervisor"}, {"steps": 0}, {"steps": STEP_LIMIT + 1}, {"steps": "2"}, []]
)
def test_bad_bodies_are_refused(api, orders, body):
    assert api.post("/start_profile", body).status_code == 400
    assert orders == []


def test_off_without_a_folder(api):
    response = api.post("/start_profile", b"")
    assert response.status_code == 400
    assert "--profile-dir" in response.json()["error"]["message"]
