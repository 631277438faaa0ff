"""The messages between client programs and the frontend, with their layout on the wire.

The client connects a DEALER socket to the frontend's ROUTER. A message is one frame, a msgpack array
`[type code, field, field, ...]`, its fields in the order of the class's attributes; docs/protocol.md writes the same
down for clients in other languages.

    code  message          direction   meaning
    60    Hello            to engine   optional first message: the protocol version the client speaks
    61    Generate         to engine   a prompt; answered by Deltas* (if it streams), then one Final or ErrorReply
    62    Abort            to engine   end a request; it is answered by its Final, an unknown id by nothing
    63    Tokenize         to engine   answered by TokenizeReply or ErrorReply
    64    Detokenize       to engine   answered by DetokenizeReply or ErrorReply
    65    GetStatus        to engine   answered by StatusReply
    66    Ping             to engine   answered by Pong
    67    Embed            to engine   answered by EmbedReply or ErrorReply
    68    Resume           to engine   a Generate or Embed once more, after a loss; answered as that
    80    Welcome          to client   answer to Hello
    81    Deltas           to client   new output of one or more of the client's requests
    82    Final            to client   the end of a request, with its whole output
    83    ErrorReply       to client   a request or message that could not be served
    84    TokenizeReply    to client
    85    DetokenizeReply  to client
    86    StatusReply      to client
    87    Pong             to client
    88    EmbedReply       to client

Request ids are the client's own strings; they need to be unique among its own live requests only. Bytes that are not a
message cost that one message and are answered by an ErrorReply.
"""

import msgpack

from common.client_messages.output import Delta, SampleResult, SampleSoFar, TokenLogprob, TopLogprob
from common.client_messages.replies import (
    PARAM_LIMIT,
    Deltas,
    DetokenizeReply,
    EmbedReply,
    ErrorReply,
    Final,
    Pong,
    StatusReply,
    TokenizeReply,
    Welcome,
)
from common.client_messages.requests import (
    CLIENT_PROTOCOL_VERSION,
    FRAMES_LIMIT,
    ID_LIMIT,
    MORE_FOLLOWS,
    OLDEST_CLIENT_PROTOCOL_VERSION,
    Abort,
    Detokenize,
    Embed,
    Generate,
    GetStatus,
    Hello,
    Ping,
    Prompt,
    Resume,
    Tokenize,
)
from common.wire import decode, kinds_of

__all__ = [
    "CLIENT_PROTOCOL_VERSION",
    "FRAMES_LIMIT",
    "ID_LIMIT",
    "MORE_FOLLOWS",
    "OLDEST_CLIENT_PROTOCOL_VERSION",
    "PARAM_LIMIT",
    "Abort",
    "Delta",
    "Deltas",
    "Detokenize",
    "DetokenizeReply",
    "Embed",
    "EmbedReply",
    "ErrorReply",
    "Final",
    "Generate",
    "GetStatus",
    "Hello",
    "Ping",
    "Pong",
    "Prompt",
    "Resume",
    "SampleResult",
    "SampleSoFar",
    "StatusReply",
    "TokenLogprob",
    "Tokenize",
    "TokenizeReply",
    "TopLogprob",
    "Welcome",
    "decode_from_client",
    "decode_to_client",
    "request_id_of",
]

FromClient = Hello | Generate | Abort | Tokenize | Detokenize | GetStatus | Ping | Embed | Resume
ToClient = Welcome | Deltas | Final | ErrorReply | TokenizeReply | DetokenizeReply | StatusReply | Pong | EmbedReply

_FROM_CLIENT, _TO_CLIENT = kinds_of(FromClient), kinds_of(ToClient)

ITEM_LIMIT = 1 << 17
"""Most items in all arrays and maps of a client's message together."""
_START_BYTES = 4 * ID_LIMIT + 64
"""So many bytes at the start of a message contain its type code and request id."""


def decode_from_client(data: bytes) -> FromClient:
    """A message from a client; raises WireError."""
    return decode(data, _FROM_CLIENT, "client -> engine", item_limit=ITEM_LIMIT)  # type: ignore[no-any-return]


def decode_to_client(data: bytes) -> ToClient:
    """A message from the engine; raises WireError."""
    return decode(data, _TO_CLIENT, "engine -> client")  # type: ignore[no-any-return]


def request_id_of(data: bytes) -> str:
    """The request id of a message that could not be decoded, so that the error can name it; empty if there is none.

    Whatever follows the id may be unreadable, such as a map with integer keys.
    """
    reader = msgpack.Unpacker(raw=False)
    try:
        reader.feed(data[:_START_BYTES])
        if reader.read_array_header() < 2:
            return ""
        code = reader.unpack()
        if code == Resume.CODE and reader.read_array_header() > 1:
            reader.unpack()  # the request's own code
        request_id = reader.unpack()
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        return ""
    readable = type(code) is int and isinstance(request_id, str) and len(request_id) <= ID_LIMIT
    return request_id if readable else ""
