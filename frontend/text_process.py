"""A text process: encodes, renders, decodes and parses what is long, so that the frontend's loop never waits for it.

    python -m frontend.text_process --number 0 --jobs ENDPOINT --results ENDPOINT --tokenizer DIR [--chat-template FILE]

Binds a PULL for jobs, connects to the frontend's PULL for results, and does one job after another. Started by
`text_work.TextPool`, and ends with it, however that ends. Runs at a lower priority than the frontend, whose
clients wait for every token.
"""

import argparse
import logging
import os
import signal

import setproctitle

from common import log
from common.child import watch_supervisor
from common.errors import RequestError, WireError
from common.sockets import bind_pull, connect_push, new_context
from frontend.large_json import parse_large
from frontend.text_messages import (
    RESULT_LIMIT_BYTES,
    DecodeIds,
    EncodeChat,
    EncodeText,
    ForTextProcess,
    Json,
    ParseJson,
    Text,
    TextReady,
    TextRefused,
    TextResult,
    TokenIds,
    decode_for_text_process,
    job_id_of,
)
from frontend.tokenizer import Tokenizer

NICENESS = 5
REASON_LIMIT = 8000
"""Characters of a refusal's text: a template may put all of a chat into its own."""

logger = logging.getLogger(__name__)


def main() -> None:
    """Work until the frontend is gone."""
    arguments = _parse()
    setproctitle.setproctitle(f"trireme-text-{arguments.number}")
    watch_supervisor()
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log.set_up(f"text-{arguments.number}", arguments.log_level, arguments.log_format)
    tokenizer = Tokenizer.load(arguments.tokenizer, arguments.chat_template)
    context = new_context()
    jobs = bind_pull(context, arguments.jobs)
    results = connect_push(context, arguments.results)
    results.send(TextReady(arguments.number).to_wire())
    while True:
        results.send(answer_to(tokenizer, *jobs.recv_multipart()).to_wire())


def answer_to(tokenizer: Tokenizer, data: bytes, *long: bytes) -> TextResult:
    """Do the job that a message holds; one that has more of something than a message may costs itself alone."""
    try:
        job = decode_for_text_process(data, *long)
    except WireError as error:
        return TextRefused(job_id_of(data), str(error), "invalid_parameter", None, 400)
    return result_of(tokenizer, job)


def result_of(tokenizer: Tokenizer, job: ForTextProcess) -> TextResult:
    """Do one job; what cannot be done becomes a TextRefused."""
    try:
        return _done(tokenizer, job)
    except RequestError as error:
        return TextRefused(job.job_id, str(error)[:REASON_LIMIT], error.code, error.param, error.status)
    except Exception as error:
        logger.exception("a %s failed", type(job).__name__)
        return TextRefused(job.job_id, f"internal error: {error}"[:REASON_LIMIT], "internal_error", None, 500)


def _done(tokenizer: Tokenizer, job: ForTextProcess) -> TextResult:
    match job:
        case EncodeText():
            return TokenIds(job.job_id, tokenizer.encode(job.text, add_special_tokens=job.add_special_tokens))
        case EncodeChat():
            text = tokenizer.render(job.chat)
            return TokenIds(job.job_id, tokenizer.encode(text, add_special_tokens=job.add_special_tokens))
        case DecodeIds():
            text = tokenizer.decode(job.token_ids, skip_special_tokens=job.skip_special_tokens)
            if len(text.encode()) > RESULT_LIMIT_BYTES:
                raise RequestError(f"token_ids: their text has more than {RESULT_LIMIT_BYTES} bytes", param="token_ids")
            return Text(job.job_id, text)
        case ParseJson():
            return Json.of(job.job_id, parse_large(job.body, job.id_fields))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m frontend.text_process")
    for name in ("jobs", "results", "tokenizer"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--chat-template", default="")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")
    return parser.parse_args()


if __name__ == "__main__":
    main()
