"""The OpenAI-compatible HTTP API on top of `frontend.engine.Engine`: Starlette, uvicorn and msgspec, nothing else.

requests.py     what a body may hold, decoded and checked
prompts.py      chats and completion prompts in the forms that the engine takes
replies.py      what is sent back: whole bodies and stream chunks
chat.py, completions.py, utilities.py   the endpoints
streams.py      server-sent events, disconnects
middleware.py   request ids, API keys, the body limit
errors.py       the one form of every error
metrics.py      Prometheus figures
endpoints.py    the table of all endpoints
openapi.py, docs_page.py        the description of them, for programs and for people
app.py, server.py   all of it put together, and served
"""
