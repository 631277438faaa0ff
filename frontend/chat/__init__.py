"""What a chat's answer is made of: reasoning, content and tool calls, split as the text grows.

    parts        the pieces, and a whole message put together from them
    reasoning    `<think>...</think>` apart from what follows
    call_reader  one tool call as JSON, read character by character
    tool_formats how models write tool calls: detected from the template, and as a grammar
    tool_parser  tool calls apart from the text around them
    tools        what a request says of tools: checked, and written into the prompt
    answer       all of it for one request

Knows nothing of HTTP, tokens or the engine. What comes out does not depend on how the text was cut into pieces.
"""
