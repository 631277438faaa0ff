"""Values nested to any depth, wherever a value of any form is taken: an answer or a refusal, never a failure."""

import pytest

CHAT = '{"messages":[{"role":"user","content":"x"}],"max_tokens":1,%s}'
TOOL = '"tools":[{"type":"function","function":{"name":"f","parameters":@}}]'
PLACES = {
    "tools": ("/v1/chat/completions", CHAT % TOOL),
    "tools to be called": ("/v1/chat/completions", CHAT % ('"tool_choice":"required",' + TOOL)),
    "a tool's other fields": ("/v1/chat/completions", CHAT % '"tools":[{"x":@,"function":{"name":"f"}}]'),
    "response_format": (
        "/v1/chat/completions",
        CHAT % '"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":@}}',
    ),
    "structured_outputs": ("/v1/completions", '{"prompt":"x","max_tokens":1,"structured_outputs":{"json":@}}'),
    "chat_template_kwargs": ("/v1/chat/completions", CHAT % '"chat_template_kwargs":{"x":@}'),
    "content": ("/v1/chat/completions", '{"messages":[{"role":"user","content":@}],"max_tokens":1}'),
    "a message's other fields": (
        "/v1/chat/completions",
        '{"messages":[{"role":"user","content":"x","y":@}],"max_tokens":1}',
    ),
    "arguments": (
        "/v1/chat/completions",
        '{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":@}}]}],"max_tokens":1}',
    ),
    "tool_calls": ("/v1/chat/completions", '{"messages":[{"role":"assistant","tool_calls":@}],"max_tokens":1}'),
    "prompt": ("/v1/completions", '{"prompt":@,"max_tokens":1}'),
    "an unknown field": ("/v1/completions", '{"prompt":"x","max_tokens":1,"frobnicate":@}'),
    "logit_bias": ("/v1/completions", '{"prompt":"x","max_tokens":1,"logit_bias":@}'),
    "input": ("/v1/responses", '{"input":@}'),
    "tools of responses": (
        "/v1/responses",
        '{"input":"x","max_output_tokens":1,"tool_choice":"required","tools":[{"type":"function","name":"f","parameters":@}]}',
    ),
    "metadata": ("/v1/responses", '{"input":"x","max_output_tokens":1,"metadata":{"x":@}}'),
    "text.format": (
        "/v1/responses",
        '{"input":"x","max_output_tokens":1,"text":{"format":{"type":"json_schema","name":"x","schema":@}}}',
    ),
    "tools of messages": (
        "/v1/messages",
        '{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"tool_choice":{"type":"any"},'
        '"tools":[{"name":"f","input_schema":@}]}',
    ),
    "tool_use": (
        "/v1/messages",
        '{"messages":[{"role":"assistant","content":[{"type":"tool_use","name":"f","input":@}]}],"max_tokens":1}',
    ),
    "tool_result": (
        "/v1/messages",
        '{"messages":[{"role":"user","content":[{"type":"tool_result","content":@}]}],"max_tokens":1}',
    ),
    "/tokenize": ("/tokenize", '{"messages":[{"role":"user","content":"x"}],' + TOOL + "}"),
    "/v1/embeddings": ("/v1/embeddings", '{"input":@}'),
}
SHAPES = {
    "lists": ("[", "1", "]"),
    "objects": ('{"a":', "1", "}"),
    "schemas": ('{"properties":{"a":', "{}", "}}"),
    "schemas of items": ('{"items":', "{}", "}"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_nested_to_any_depth_are_taken_or_refused(make_api, place, shape):
    """The grammar of calls failed on a schema 250 deep."""
    api = make_api().ready(max_model_len=100_000)
    path, body = PLACES[place]
    opening, inner, closing = SHAPES[shape]
    for depth in (60, 250, 480, 960, 2000):
        sent = body.replace("@", opening * depth + inner + closing * depth)
        response = api.post(path, sent.encode())
        assert response.status_code in (200, 400), f"{depth} deep: {response.text[:300]}"
    assert api.engine.core.live_count == 0


@pytest.mark.parametrize("key", ["$defs", "definitions"])
@pytest.mark.parametrize("definitions", ["5", '"x"', "[1]", "true", "null", "{}", '{"a":5}'])
def test_definitions_that_are_none_are_refused(make_api, key, definitions):
    api = make_api().ready(max_model_len=4096)
    body = PLACES["tools to be called"][1].replace("@", f'{{"type":"object","{key}":{definitions}}}')
    response = api.post("/v1/chat/completions", body.encode())
    if definitions in ("null", "{}", '{"a":5}'):
        assert response.status_code == 200
    else:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert f"{key} of 'f'" in response.json()["error"]["message"]
