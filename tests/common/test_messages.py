"""Every message survives the wire, and nothing else gets in."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import messages as m
from common.errors import WireError
from common.sampling_params import SamplingParams
from common.wire import pack, unpack

LOGPROBS = m.TokenLogprobs(3, -0.5, 2, array("i", [7, 9]), array("f", [-0.25, -0.5]))
SAMPLING = m.SlotSampling(
    temperature=0.5,
    seed=2**64 - 1,
    end_token_ids=(2,),
    bias_token_ids=array("i", [5]),
    bias_values=array("f", [1.5]),
    bad_token_ids=((1, 2),),
    pooling="last",
)
SLOT = m.SlotInit(
    slot=65535,
    token_ids=array("i", [1, 2, 3]),
    prompt_count=2,
    computed_count=2,
    block_ids=array("i", [4]),
    sampling=SAMPLING,
)
EXAMPLES = {
    m.decode_for_scheduler: [
        m.AddRequest(
            request_id=7,
            prompt_token_ids=array("i", [1, 2, 3]),
            params=SamplingParams(stop="x", logit_bias={3: 1.5}, seed=9, structured_outputs={"choice": ["a", "b"]}),
            end_token_ids=(0, 2),
            bad_token_ids=((1,), (2, 3)),
            deadline_s=1.5,
        ),
        m.AddRequest(
            request_id=8,
            prompt_token_ids=array("i", [1]),
            params=SamplingParams(n=3, max_tokens=4),
            outputs=(array("i", [5, 6]), None, array("i")),
        ),
        m.AddRequest(
            request_id=8, prompt_token_ids=array("i", [1]), params=SamplingParams(max_tokens=1), pooling="mean"
        ),
        m.AbortRequests(array("i", [1, 2])),
        m.AbortSamples(array("i", [1, 1]), array("B", [0, 3])),
        m.FlushCache(),
        m.MoreFollows(),
        m.MoreFollows(follows=False),
    ],
    m.decode_for_frontend: [
        m.EngineReady(max_model_len=64, max_num_seqs=4, block_size=16, block_count=8, vocab_size=100),
        m.TokensOut(
            request_ids=array("i", [1, 2]),
            token_ids=array("i", [5, 6, 7]),
            sample_indices=array("B", [0, 1]),
            token_counts=array("B", [1, 2]),
            cached_counts=array("i", [16, -1]),
            prefill_us=array("i", [1200, -1]),
            preemption_counts=array("B", [0, 2]),
            finishes=(m.SampleFinish(1, "length"),),
            logprobs=(LOGPROBS,),
            prompt_logprobs=((0, (LOGPROBS, LOGPROBS)),),
            embeddings=((1, array("f", [0.5, -0.25])),),
        ),
        m.TokensOut(request_ids=array("i", [1, 2]), token_ids=array("i", [5, 6])),
        m.RequestFailed(1, "queue_full", "too many", 429, None, 500),
        m.QueueNews(array("i", [4, 5]), array("i", [3])),
        m.EngineStats(
            running_count=3, steps=2**40, parts_us=array("i", [1, 2, 3, 4, 5, 6]), step_sizes=array("i", [0, 7])
        ),
    ],
    m.decode_for_worker: [
        m.StepPlan(
            step_id=1,
            decode_slots=array("H", [3, 1]),
            decode_block_counts=array("B", [0, 1]),
            chunk_slots=array("H", [65535]),
            chunk_token_counts=array("i", [2]),
            chunk_samples=array("B", [1]),
            chunk_block_counts=array("i", [1]),
            block_ids=array("i", [8, 9]),
            new_slots=m.NewSlots.of(SLOT),
            cleared_slots=array("H", [2]),
            copy_block_ids=array("i", [1, 2]),
            mask_slots=array("H", [3]),
            masks=(b"\x01\x00\x00\x80",),
        ),
        m.StepPlan(step_id=2**40, decode_slots=array("H", [3, 1])),
    ],
    m.decode_from_worker: [
        m.WorkerReady(
            protocol_version=m.PROTOCOL_VERSION,
            rank=0,
            max_model_len=64,
            block_size=16,
            block_count=8,
            host_block_count=0,
            block_bytes=2**40,
            vocab_size=100,
            device_name="cpu",
            link_bytes_per_s=50_000_000_000,
            unprepared_count=132,
        ),
        m.Unprepared(131),
        m.StepResult(
            step_id=2**40,
            token_ids=array("i", [5, -1]),
            logprobs=(LOGPROBS,),
            parts_us=array("i", [1, 2, 3, 4]),
            embeddings=((2, array("f", [1.0])),),
        ),
    ],
    m.decode_for_supervisor: [
        m.Heartbeat("worker-0", "serving", 12),
        m.Ready("frontend", "x"),
        m.Failed("a", "b"),
        m.Profile("worker", 50),
    ],
    m.decode_for_child: [
        m.Stop(1000),
        m.PeerFailed("worker-0", "killed by signal 9"),
        m.Profile("worker", 50),
        m.NewSession("worker-0", "killed by signal 9", 2),
    ],
}
CASES = [(decode, message) for decode, messages in EXAMPLES.items() for message in messages]


@pytest.mark.parametrize(("decode", "message"), CASES, ids=lambda value: type(value).__name__)
def test_a_message_comes_back_equal(decode, message):
    assert decode(message.to_wire()) == message


@pytest.mark.parametrize(("decode", "message"), CASES, ids=lambda value: type(value).__name__)
def test_missing_and_extra_fields_are_refused(decode, message):
    code, fields = unpack(message.to_wire())
    with pytest.raises(WireError, match="fields, wanted"):
        decode(pack([code, *fields, 1]))
    if fields:
        with pytest.raises(WireError, match="ends before this field"):
            decode(pack([code, *fields[:-1]]))


@pytest.mark.parametrize(("decode", "message"), CASES, ids=lambda value: type(value).__name__)
def test_a_field_of_another_type_is_refused(decode, message):
    code, fields = unpack(message.to_wire())
    for index in range(len(fields)):
        broken = [*fields[:index], {"a": [1]} if not isinstance(fields[index], dict) else 5, *fields[index + 1 :]]
        with pytest.raises(WireError):
            decode(pack([code, *broken]))


@pytest.mark.parametrize("counts", [(), (1, 1)], ids=["no counts", "counts"])
@pytest.mark.parametrize("token_ids", [(), (5,), (5, 6, 7)])
def test_rows_and_tokens_that_do_not_add_up_are_refused(counts, token_ids):
    message = m.TokensOut(
        request_ids=array("i", [1, 2]), token_ids=array("i", token_ids), token_counts=array("B", counts)
    )
    with pytest.raises(WireError, match=f"TokensOut: {len(token_ids)} tokens"):
        m.decode_for_frontend(message.to_wire())


@pytest.mark.parametrize("decode", EXAMPLES, ids=lambda decode: decode.__name__)
def test_codes_of_other_links_are_refused(decode):
    own = {type(message) for message in EXAMPLES[decode]}
    for messages in EXAMPLES.values():
        for message in [message for message in messages if type(message) not in own]:
            with pytest.raises(WireError, match="is not carried by the link"):
                decode(message.to_wire())


@given(data=st.binary(max_size=200))
def test_random_bytes_raise_wire_errors_only(data):
    for decode in EXAMPLES:
        with pytest.raises(WireError):
            decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91" * 100_000 + b"\x01",
        b"\x92\x01\xc7\xff\x05abc",
        b"\x92\x01\xd4\x05\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\x80",
    ],
    ids=["empty", "deep", "truncated", "extension", "gigantic", "map"],
)
def test_hostile_bytes_raise_wire_errors(data):
    with pytest.raises(WireError):
        m.decode_for_scheduler(data)


@pytest.mark.parametrize(
    "values",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"min_output_count": 2},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"bias_token_ids": array("i", [3]), "bias_values": array("f", [1.5])},
        {"allowed_token_ids": array("i", [3])},
        {"bad_token_ids": ((1, 2),)},
        {"masked": True},
        {"pooling": "cls"},
    ],
    ids=min,
)
def test_a_single_special_wish_arrives_and_only_then_are_there_special_fields(values):
    plain = m.SlotSampling(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, end_token_ids=(1, 2))
    assert plain.is_plain and plain.to_list()[-1] == [] and m.SlotSampling.from_bytes(plain.packed) == plain
    special = replace(plain, **values)
    assert not special.is_plain and len(special.to_list()[-1]) == 12
    assert m.SlotSampling.from_bytes(special.packed) == special


def slot_init(slot: int, block_count: int, token_count: int, seed: int) -> m.SlotInit:
    return m.SlotInit(
        slot=slot, token_ids=array("i", range(token_count)), prompt_count=token_count, computed_count=token_count - 1,
        block_ids=array("i", range(50, 50 + block_count)),
        sampling=m.SlotSampling(temperature=0.5 + slot % 2, seed=seed),
    )  # fmt: skip


def test_new_slots_come_back_one_by_one_and_share_how_they_sample():
    inits = [slot_init(0, 0, 1, 7), slot_init(3, 4, 9, 2**64 - 1), slot_init(6, 1, 2, 0)]
    plan = m.decode_for_worker(m.StepPlan(step_id=1, new_slots=m.NewSlots.of(*inits)).to_wire())
    assert [*plan.new_slots] == inits and len(plan.new_slots.samplings) == 2
    assert plan.new_slots.slots == [0, 3, 6] and [*plan.new_slots.block_ids] == [50, 51, 52, 53, 50]


def test_how_slots_sample_is_one_object_for_equal_bytes_unless_these_are_many():
    few, many = m.SlotSampling(top_k=7), m.SlotSampling(allowed_token_ids=array("i", range(1000)))
    assert m.SlotSampling.from_bytes(few.packed) is m.SlotSampling.from_bytes(few.packed)
    assert m.SlotSampling.from_bytes(many.packed) is not m.SlotSampling.from_bytes(many.packed)


@pytest.mark.parametrize("id_count", [1, 1000])
def test_how_a_slot_samples_is_not_packed_once_more_where_it_was_received(monkeypatch, id_count):
    """The worker did so to see how long it is."""
    data = m.SlotSampling(top_k=id_count, allowed_token_ids=array("i", range(id_count))).packed
    monkeypatch.setattr(m.SlotSampling, "to_list", lambda self: pytest.fail("packed again"))
    assert m.SlotSampling.from_bytes(data).with_seed(3).packed == data


GOOD_HEAD = (3, 1, 4, 2, 3, 0, 9)
"""Slot 3: one block, four tokens of which two are computed and three the prompt's, the first sampling, seed 9."""


@pytest.mark.parametrize(
    ("head", "ids", "text"),
    [
        (GOOD_HEAD, 6, "6 ids, the slots' counts add up to 5"),
        ((-1, *GOOD_HEAD[1:]), 5, "slot -1"),
        ((65536, *GOOD_HEAD[1:]), 5, "slot 65536"),
        ((3, -1, 6, *GOOD_HEAD[3:]), 5, "-1 blocks"),
        ((3, 5, 0, *GOOD_HEAD[3:]), 5, "0 tokens with prompt_count 3 and computed_count 2"),
        ((3, 1, 4, 4, 3, 0, 9), 5, "computed_count 4"),
        ((3, 1, 4, -1, 3, 0, 9), 5, "computed_count -1"),
        ((3, 1, 4, 2, 0, 0, 9), 5, "prompt_count 0"),
        ((3, 1, 4, 2, 5, 0, 9), 5, "prompt_count 5"),
        ((3, 1, 4, 2, 3, 1, 9), 5, "sampling 1"),
        ((3, 1, 4, 2, 3, -1, 9), 5, "sampling -1"),
    ],
)
def test_new_slots_that_cannot_be_are_refused(head, ids, text):
    fields = [m.HEAD.pack(*head), bytes(4 * ids), [m.SlotSampling().packed]]
    with pytest.raises(WireError, match=f"NewSlots: .*{text}"):
        m.NewSlots.from_list(fields)
    with pytest.raises(WireError, match="NewSlots: heads of 31 bytes, wanted 32"):
        m.NewSlots.from_list([fields[0][:31], *fields[1:]])


@pytest.mark.parametrize("sampling", [None, [], 7, b"", b"\xc1", b"\x90\x90", b"\x90", b"\x80"])
def test_bytes_that_are_no_sampling_are_refused(sampling):
    with pytest.raises(WireError):
        m.SlotSampling.from_bytes(sampling)


@pytest.mark.parametrize("special", [None, (), b"", {}, [0.0], [[]], 7])
def test_special_fields_of_another_form_are_refused(special):
    with pytest.raises(WireError, match="SlotSampling.special"):
        m.SlotSampling.from_list([*m.SlotSampling().to_list()[:-1], special])


def test_a_plan_for_256_decoding_requests_stays_under_two_kilobytes_even_when_every_row_gets_a_block():
    plan = m.StepPlan(
        step_id=10**9,
        decode_slots=array("H", range(256)),
        decode_block_counts=array("B", [1] * 256),
        block_ids=array("i", range(10**6, 10**6 + 256)),
    )
    assert len(plan.to_wire()) < 2048


@pytest.mark.parametrize("count", [1, 3, 5, 6])
def test_a_result_names_all_of_the_workers_parts_or_none(count):
    result = m.StepResult(step_id=1, token_ids=array("i"), parts_us=array("i", range(count)))
    with pytest.raises(WireError, match=f"parts_us: wanted 0 or 4 numbers, got {count}"):
        m.decode_from_worker(result.to_wire())


def test_a_worker_of_another_protocol_version_is_refused_by_name():
    ready = EXAMPLES[m.decode_from_worker][0]
    code, fields = unpack(ready.to_wire())
    with pytest.raises(WireError, match=rf"version {m.PROTOCOL_VERSION + 1}, this is {m.PROTOCOL_VERSION}"):
        m.decode_from_worker(pack([code, m.PROTOCOL_VERSION + 1, *fields[1:]]))
