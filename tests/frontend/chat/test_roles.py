"""Roles that OpenAI's API does not have: the chat template decides, and none is left out in silence."""

import pytest

from common.errors import RequestError
from frontend.chat.roles import check_roles
from frontend.prompt import ChatPrompt
from frontend.tokenizer import Tokenizer

ASKED = {"role": "user", "content": "Hi"}
OF_ROLES = (
    "{% for m in messages %}{% if m.role in ['user', 'critic'] %}[{{ m.role }}: {{ m.content }}]{% endif %}{% endfor %}"
)
OF_ANY_ROLE = "{% for m in messages %}[{{ m.role }}: {{ m.content | tojson }}]{% endfor %}"


@pytest.fixture
def render(byte_tokenizer):
    """Renders messages with a template."""

    def make(template: str, *messages: dict, tools: list | None = None) -> str:
        return Tokenizer(byte_tokenizer.raw, {}, template).render(ChatPrompt(messages=messages, tools=tools))

    return make


@pytest.mark.parametrize("role", ["critic", "user"])
def test_a_role_that_the_template_names_is_rendered(render, role):
    assert render(OF_ROLES, ASKED, {"role": role, "content": "Oh"}) == f"[user: Hi][{role}: Oh]"


def test_a_template_may_pass_any_role_on_and_write_its_text_in_another_form(render):
    assert render(OF_ANY_ROLE, {"role": "usr", "content": 'a\n"b"'}) == '[usr: "a\\n\\"b\\""]'


@pytest.mark.parametrize("role", ["usr", "developer", "function", "User", ""])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]], ids=["", "tools"])
def test_a_message_of_a_role_that_the_template_leaves_out_is_refused(render, role, tools):
    """The model answered as if it had not been there."""
    with pytest.raises(
        RequestError, match=f"leaves out messages of the role '{role}'; wanted a role that it"
    ) as caught:
        render(OF_ROLES, {"role": "critic", "content": "x"}, ASKED, {"role": role, "content": "x"}, tools=tools)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("content", ["", None])
def test_a_message_without_a_text_leaves_nothing_to_miss(render, content):
    assert render(OF_ROLES, ASKED, {"role": "usr", "content": content}) == "[user: Hi]"


def test_usual_chats_are_rendered_once():
    roles = ("system", "user", "assistant", "tool")
    check_roles([{"role": role, "content": "x"} for role in roles], lambda _: pytest.fail("rendered once more"))
