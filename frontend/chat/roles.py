"""Roles of the client's own: a chat template may know more roles than OpenAI's API has, and many pass any role on.

Others leave a message of a role that they do not know out, without a word, and the model would answer as if it had not
been there. So such a chat is rendered once more, with marks instead of those messages' texts. Called by the tokenizer.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.errors import RequestError

_USUAL = frozenset({"system", "user", "assistant", "tool"})
_MARK = "mark{}kram"
_ANY_MARK = re.compile(_MARK.format(r"(\d+)"))


def check_roles(messages: Sequence[Mapping[str, Any]], render: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
    """Refuse a role that the chat template leaves out.

    Args:
        render: what the template makes of messages.

    Raises:
        RequestError: naming the role.
    """
    own = [index for index, message in enumerate(messages) if message["role"] not in _USUAL and message.get("content")]
    if not own:
        return
    marked = list(messages)
    for index in own:
        marked[index] = {**messages[index], "content": _MARK.format(index)}
    shown = set(_ANY_MARK.findall(render(marked)))
    for index in own:
        if str(index) not in shown:
            raise RequestError(
                f"messages: the model's chat template leaves out messages of the role {messages[index]['role']!r:.80}; "
                "wanted a role that it knows, such as 'user'",
                param="messages",
            )
