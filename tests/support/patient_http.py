"""httpx with time for a busy machine, on which its own limit of five seconds is a bet."""

from functools import partial

import httpx

TIMEOUT_S = 60.0

get = partial(httpx.get, timeout=TIMEOUT_S)
post = partial(httpx.post, timeout=TIMEOUT_S)
