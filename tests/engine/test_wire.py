"""The worker protocol as bytes: everything survives, sizes are bounded, and noise is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preempt_engine.config import EngineConfig
from preempt_engine.errors import WireProtocolError
from preempt_engine.executor.shares import ModelShares, select_share_codec
from preempt_engine.executor.step_codec import StepDecoder, StepEncoder
from preempt_engine.executor.wire import (
    HEADER,
    VERSION,
    ComputedReport,
    CopiedReport,
    FrameBuffer,
    Init,
    MessageKind,
    PoisonedReport,
    Ready,
    StepDone,
    decode_body,
    decode_step_done,
    encode_body,
    encode_step_done,
    make_frame,
)
from preempt_engine.step import ScheduledSequence, SchedulerOutput, SequenceKey, StateCheck

_WORDS = st.integers(0, 2**32 - 1)
# The word that stands for "none" is no id of a token or a block.
_IDS = st.integers(0, 2**32 - 2)
_POSITIONS = st.integers(0, 2**31 - 2)


@st.composite
def _items(draw: st.DrawFn, key: SequenceKey, known: bool) -> ScheduledSequence:
    start = draw(_POSITIONS)
    end = draw(st.just(start + 1) | st.integers(start + 1, 2**31))
    return ScheduledSequence(
        key=key,
        start=start,
        end=end,
        logits_start=draw(st.sampled_from([start, end])),
        reset=not known or draw(st.booleans()),
        new_token_ids=draw(st.lists(_IDS, max_size=3)),
        new_block_ids=draw(st.lists(_IDS, max_size=3)),
        num_stale_blocks=draw(st.integers(0, 2)),
        num_stale_tokens=draw(st.integers(0, 2)),
        full_logits=draw(st.booleans()),
    )


@st.composite
def _histories(draw: st.DrawFn) -> list[SchedulerOutput]:
    """Steps as a scheduler could send them: nothing is dropped or continued that is not known."""
    names = draw(st.lists(st.text(max_size=5), min_size=1, max_size=4, unique=True))
    known: set[SequenceKey] = set()
    steps = []
    pairs = st.lists(st.tuples(_WORDS, _WORDS), max_size=3)
    for step_id in range(draw(st.integers(1, 4))):
        parents = draw(st.lists(st.sampled_from(sorted(known)), max_size=3)) if known else []
        forks = [
            (parent, SequenceKey(parent.request_id, 10 * (step_id + 1) + index))
            for index, parent in enumerate(parents)
        ]
        known |= {child for _, child in forks}
        dropped = draw(st.lists(st.sampled_from(sorted(known)), unique=True)) if known else []
        known -= set(dropped)
        keys = draw(
            st.lists(st.builds(SequenceKey, st.sampled_from(names), st.integers(0, 2)), unique=True)
        )
        scheduled = [draw(_items(key, key in known)) for key in keys]
        known |= set(keys)
        check = draw(
            st.none()
            | st.builds(
                StateCheck,
                st.integers(0, 9),
                st.lists(_WORDS, min_size=len(keys), max_size=len(keys)),
            )
        )
        steps.append(
            SchedulerOutput(
                step_id=step_id,
                forks=forks,
                dropped=dropped,
                poison_block_ids=draw(st.lists(_WORDS, max_size=3)),
                swap_in=draw(pairs),
                block_copies=draw(pairs),
                scheduled=scheduled,
                swap_out=draw(pairs),
                state_check=check,
            )
        )
    return steps


@settings(max_examples=50)
@given(_histories(), st.booleans())
def test_steps_arrive_as_they_were_sent(steps: list[SchedulerOutput], report: bool) -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    for step in steps:
        assert decoder.decode(encoder.encode(step, report=report)) == (step, report)


def test_no_field_of_a_step_is_left_behind() -> None:
    """A field that is added to a step and not to the wire is equal to its default on arrival."""
    item = ScheduledSequence(
        SequenceKey("a", 1),
        start=1,
        end=3,
        logits_start=2,
        reset=True,
        new_token_ids=[4],
        new_block_ids=[5],
        num_stale_blocks=1,
        num_stale_tokens=1,
        full_logits=False,
    )
    step = SchedulerOutput(
        step_id=1,
        forks=[(SequenceKey("b", 1), SequenceKey("b", 2))],
        dropped=[SequenceKey("b", 1)],
        poison_block_ids=[6],
        swap_in=[(1, 2)],
        block_copies=[(7, 8)],
        scheduled=[item],
        swap_out=[(3, 4)],
        state_check=StateCheck(1, [9]),
    )
    for message, empty in ((step, SchedulerOutput(0)), (item, None)):
        for field in msgspec.structs.fields(message):
            default = field.default if empty is None else getattr(empty, field.name)
            assert getattr(message, field.name) != default, f"{field.name}: give this test a value"
    encoder, decoder = StepEncoder(), StepDecoder()
    first = SchedulerOutput(
        0, scheduled=[msgspec.structs.replace(item, key=SequenceKey("b", 1), new_block_ids=[1, 2])]
    )
    decoder.decode(encoder.encode(first, report=False))
    assert decoder.decode(encoder.encode(step, report=False))[0] == step


@settings(max_examples=50)
@given(_histories(), st.data())
def test_a_damaged_step_is_refused_by_name_or_is_another_step(
    steps: list[SchedulerOutput], data: st.DataObject
) -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    for step in steps[:-1]:
        decoder.decode(encoder.encode(step, report=False))
    body = bytearray(encoder.encode(steps[-1], report=False))
    position = data.draw(st.integers(0, len(body) - 1))
    if data.draw(st.booleans(), label="cut"):
        del body[position:]
    else:
        body[position] ^= data.draw(st.integers(1, 255))
    try:
        decoder.decode(bytes(body))
    except WireProtocolError:
        return


@pytest.mark.parametrize("num_sequences", [1, 64, 256])
@pytest.mark.parametrize("context", [100, 4000])
def test_a_decode_step_costs_64_bytes_and_16_per_sequence(num_sequences: int, context: int) -> None:
    """The bound of the protocol; each sequence gets a new block here, the dearest case."""
    encoder = StepEncoder()
    keys = [SequenceKey(f"a-long-request-identifier-{index}") for index in range(num_sequences)]
    prefill = [
        ScheduledSequence(key, 0, context, context - 1, True, [7] * context, [1]) for key in keys
    ]
    encoder.encode(SchedulerOutput(0, scheduled=prefill), report=False)
    decode = [
        ScheduledSequence(key, context, context + 1, context, False, [7], [2]) for key in keys
    ]
    body = encoder.encode(SchedulerOutput(1, scheduled=decode), report=True)
    assert HEADER.size + len(body) <= 64 + 16 * num_sequences


def test_a_sequence_that_was_never_introduced_is_refused() -> None:
    encoder = StepEncoder()
    item = ScheduledSequence(SequenceKey("a"), 0, 1, 0, True, [1], [0])
    encoder.encode(SchedulerOutput(0, scheduled=[item]), report=False)
    later = msgspec.structs.replace(item, reset=False)
    body = encoder.encode(SchedulerOutput(1, scheduled=[later]), report=False)
    with pytest.raises(WireProtocolError, match="never introduced"):
        StepDecoder().decode(body)


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 30))
def test_frames_are_cut_from_a_stream_however_it_arrives(bodies: list[bytes], size: int) -> None:
    stream = b"".join(make_frame(MessageKind.STEP, body) for body in bodies)
    buffer = FrameBuffer()
    received = []
    for start in range(0, len(stream), size):
        buffer.feed(stream[start : start + size])
        while (frame := buffer.next_frame()) is not None:
            assert frame.kind is MessageKind.STEP
            received.append(frame.body)
    assert received == bodies


def test_a_frame_of_another_version_is_refused() -> None:
    frame = bytearray(make_frame(MessageKind.CLOSE))
    frame[2] = VERSION + 1
    buffer = FrameBuffer()
    buffer.feed(bytes(frame))
    with pytest.raises(WireProtocolError, match=f"version {VERSION + 1}"):
        buffer.next_frame()


def test_what_is_no_frame_is_refused() -> None:
    buffer = FrameBuffer()
    buffer.feed(b"Traceback (most recent call last)")
    with pytest.raises(WireProtocolError, match="no header"):
        buffer.next_frame()


def test_a_configuration_arrives_whole_and_is_validated() -> None:
    config = EngineConfig(model="exact", tensor_parallel_size=2, worker_hooks=("a:b",), seed=-1)
    assert decode_body(encode_body(Init(config, 5)), Init) == Init(config, 5)
    ready = encode_body(Ready(1, 2, 3, 4, [5]))
    with pytest.raises(WireProtocolError, match="Init"):
        decode_body(ready, Init)


def test_answers_arrive_with_their_reports() -> None:
    done = StepDone(
        3,
        b"share",
        [
            PoisonedReport([1]),
            CopiedReport([(1, 2)]),
            ComputedReport("r", 1, 2, [3], [4], [5], 6),
        ],
    )
    assert decode_step_done(encode_step_done(done)) == done
    assert decode_step_done(encode_step_done(StepDone(3, b"", []))) == StepDone(3, b"", [])


@given(st.binary(max_size=40))
def test_a_damaged_answer_is_refused_by_name_or_is_another_answer(body: bytes) -> None:
    try:
        decode_step_done(body)
    except WireProtocolError:
        return


def test_only_rows_that_are_asked_for_travel_whole() -> None:
    np = pytest.importorskip("numpy")

    class Logits:
        num_rows, vocab_size = 2, 3
        values = np.array([[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]], dtype=np.float32)

        def argmax(self, rows: range) -> list[int]:
            return [int(self.values[row].argmax()) for row in rows]

        def row(self, index: int) -> object:
            return self.values[index].copy()

    items = [
        ScheduledSequence(SequenceKey("greedy"), 4, 5, 4, False, [1], [], full_logits=False),
        ScheduledSequence(SequenceKey("sampled"), 4, 5, 4, False, [1], [], full_logits=True),
    ]
    step = SchedulerOutput(0, scheduled=items)
    codec = ModelShares(vocab_size=3)
    shares = [codec.encode(rank, step, Logits()) for rank in range(2)]
    assert [len(share) for share in shares] == [2 * 4 + 3 * 4, 0]
    logits = codec.combine(step, shares)
    assert logits.argmax([1, 0]) == [2, 1]
    assert logits.row(1).tolist() == [5.0, 4.0, 6.0]
    with pytest.raises(AssertionError, match="not asked for"):
        logits.row(0)
    with pytest.raises(WireProtocolError, match="rank 1"):
        codec.combine(step, [shares[0], b"more"])


def test_a_share_of_another_size_names_its_rank() -> None:
    codec = select_share_codec(EngineConfig(model="exact"), 64)
    step = SchedulerOutput(
        0, scheduled=[ScheduledSequence(SequenceKey("a"), 0, 1, 0, True, [1], [0])]
    )
    with pytest.raises(WireProtocolError, match="rank 1"):
        codec.combine(step, [bytes(8), bytes(16)])
