"""All messages between frontend, scheduler, workers and supervisor, with their layout on the wire.

Each class is frozen, has a type code, and has `to_wire` (gives msgpack bytes) and `from_fields` (builds the message
from checked fields). There is one union per direction of each link and one decoder per socket: `decode_for_scheduler`,
`decode_for_frontend`, `decode_for_worker`, `decode_from_worker`, `decode_for_supervisor`, `decode_for_child`. A code
that a socket does not carry raises `WireError`. The messages between clients and the frontend are in
`client_messages`.

    code  message          from -> to               one per
    1     AddRequest       frontend -> scheduler    request
    2     AbortRequests    frontend -> scheduler    abort, stop string, disconnect
    3     FlushCache       frontend -> scheduler    operator's call
    4     AbortSamples     frontend -> scheduler    stop string in one of several samples
    5     MoreFollows      frontend -> scheduler    part of a batch of requests
    10    EngineReady      scheduler -> frontend    start
    11    TokensOut        scheduler -> frontend    step that produced tokens or ended samples
    12    RequestFailed    scheduler -> frontend    request that ends without (further) tokens
    13    EngineStats      scheduler -> frontend    tenth of a second, when something changed
    14    QueueNews        scheduler -> frontend    time that requests have to wait, or have waited
    20    WorkerReady      worker -> scheduler      start
    21    StepResult       worker -> scheduler      step
    22    Unprepared       worker -> scheduler      step size that is prepared in a pause
    30    StepPlan         scheduler -> worker      step
    40    Heartbeat        child -> supervisor      half second
    41    Ready            child -> supervisor      start
    42    Failed           child -> supervisor      failure, as the last message
    50    Stop             supervisor -> child      end of the run
    51    PeerFailed       supervisor -> child      loss of another process
    52    Profile          frontend -> supervisor -> child    trace that is asked for
    53    NewSession       supervisor -> child      restart of the process at the other end

Request ids are int32 numbers chosen by the frontend; none is reused while it is live. A request with n samples is one
AddRequest; what comes back names request id and sample index.
"""

from common.messages.control import Failed, Heartbeat, NewSession, PeerFailed, Profile, Ready, Stop
from common.messages.fields import EARLY_POOLINGS, POOLINGS, STEP_PARTS, WORKER_PARTS, TokenLogprobs
from common.messages.requests import (
    FINISH_REASONS,
    AbortRequests,
    AbortSamples,
    AddRequest,
    EngineReady,
    EngineStats,
    FlushCache,
    MoreFollows,
    QueueNews,
    RequestFailed,
    SampleFinish,
    TokensOut,
)
from common.messages.slots import HEAD, NO_SLOTS, NewSlots, SlotInit, SlotSampling
from common.messages.steps import NOT_A_TOKEN, PROTOCOL_VERSION, StepPlan, StepResult, Unprepared, WorkerReady
from common.wire import decode, kinds_of

__all__ = [
    "EARLY_POOLINGS",
    "FINISH_REASONS",
    "HEAD",
    "NOT_A_TOKEN",
    "NO_SLOTS",
    "POOLINGS",
    "PROTOCOL_VERSION",
    "STEP_PARTS",
    "WORKER_PARTS",
    "AbortRequests",
    "AbortSamples",
    "AddRequest",
    "EngineReady",
    "EngineStats",
    "Failed",
    "FlushCache",
    "ForChild",
    "ForFrontend",
    "ForScheduler",
    "FromWorker",
    "Heartbeat",
    "MoreFollows",
    "NewSession",
    "NewSlots",
    "PeerFailed",
    "Profile",
    "QueueNews",
    "Ready",
    "RequestFailed",
    "SampleFinish",
    "SlotInit",
    "SlotSampling",
    "StepPlan",
    "StepResult",
    "Stop",
    "TokenLogprobs",
    "TokensOut",
    "Unprepared",
    "WorkerReady",
    "decode_for_child",
    "decode_for_frontend",
    "decode_for_scheduler",
    "decode_for_supervisor",
    "decode_for_worker",
    "decode_from_worker",
]

ForScheduler = AddRequest | AbortRequests | AbortSamples | FlushCache | MoreFollows
ForFrontend = EngineReady | TokensOut | RequestFailed | EngineStats | QueueNews
FromWorker = WorkerReady | StepResult | Unprepared
ForSupervisor = Heartbeat | Ready | Failed | Profile
ForChild = Stop | PeerFailed | Profile | NewSession


_FOR_SCHEDULER = kinds_of(ForScheduler)
_FOR_FRONTEND = kinds_of(ForFrontend)
_FOR_WORKER = kinds_of(StepPlan)
_FROM_WORKER = kinds_of(FromWorker)
_FOR_SUPERVISOR = kinds_of(ForSupervisor)
_FOR_CHILD = kinds_of(ForChild)


def decode_for_scheduler(data: bytes) -> ForScheduler:
    """A message from the frontend; raises WireError."""
    return decode(data, _FOR_SCHEDULER, "frontend -> scheduler")  # type: ignore[no-any-return]


def decode_for_frontend(data: bytes) -> ForFrontend:
    """A message from the scheduler; raises WireError."""
    return decode(data, _FOR_FRONTEND, "scheduler -> frontend")  # type: ignore[no-any-return]


def decode_for_worker(data: bytes) -> StepPlan:
    """A message from the scheduler; raises WireError."""
    return decode(data, _FOR_WORKER, "scheduler -> worker")  # type: ignore[no-any-return]


def decode_from_worker(data: bytes) -> FromWorker:
    """A message from a worker; raises WireError."""
    return decode(data, _FROM_WORKER, "worker -> scheduler")  # type: ignore[no-any-return]


def decode_for_supervisor(data: bytes) -> ForSupervisor:
    """A message from a child; raises WireError."""
    return decode(data, _FOR_SUPERVISOR, "child -> supervisor")  # type: ignore[no-any-return]


def decode_for_child(data: bytes) -> ForChild:
    """A message from the supervisor; raises WireError."""
    return decode(data, _FOR_CHILD, "supervisor -> child")  # type: ignore[no-any-return]
