"""What structured outputs may be asked for, and how the demand travels."""

import pytest

from common.errors import RequestError
from common.sampling_params import SamplingParams
from common.structured_outputs import StructuredOutputs


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"json": {"type": "object"}}, ("json", '{"type": "object"}')),
        ({"json": '{"type": "object"}'}, ("json", '{"type": "object"}')),
        ({"json": {}}, ("json", "{}")),
        ({"json_object": True}, ("json", '{"type":"object"}')),
        ({"regex": "a+", "json": None, "json_object": False}, ("regex", "a+")),
        ({"choice": ["a", "b"]}, ("choice", '["a", "b"]')),
        ({"grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
    ],
)
def test_demands_survive_the_wire(given, key):
    params = SamplingParams(structured_outputs=given)
    assert params.structured_outputs.key == key
    again = SamplingParams.from_wire(params.to_wire())
    assert again.structured_outputs.key == key
    assert StructuredOutputs.from_any(params.structured_outputs) is params.structured_outputs


@pytest.mark.parametrize(
    "given",
    [
        {}, {"regex": "a", "json": {}}, {"json": "{"}, {"json": [1]}, {"json": 5}, {"regex": ""}, {"regex": 5},
        {"choice": []}, {"choice": ["a", 5]}, {"choice": [""]}, {"grammar": ""}, {"what": 1}, "json", 5,
        {"json": {"a": object()}},
    ],
)  # fmt: skip
def test_refusals_name_the_parameter(given):
    with pytest.raises(RequestError) as refused:
        SamplingParams(structured_outputs=given)
    assert refused.value.param == "structured_outputs"
