"""A client's side of the protocol without a socket."""

import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Close

from streamkv.errors import InputError, ServerError
from streamkv.ws_server.dialogue import (
    FEED_CHARS,
    FEED_IDS,
    Dialogue,
    RemoteError,
    accept,
    accept_step,
    feed_messages,
    frame_of,
    is_cut_short,
    socket_options,
)
from streamkv.ws_server.messages import (
    Done,
    DoneReason,
    ErrorCode,
    ErrorReply,
    Feed,
    GoingAway,
    Say,
    StatsReply,
    TextDelta,
)
from streamkv.ws_server.protocol import MAX_MESSAGE_BYTES, encode


def delta(request_id: int, seq: int) -> TextDelta:
    return TextDelta(request_id, seq, f"word {seq} ", seq)


def test_replies_to_the_turn_are_kept_while_another_is_awaited() -> None:
    dialogue = Dialogue()
    turn, stats = dialogue.new_id(), dialogue.new_id()
    assert (turn, stats) == (1, 2)
    dialogue.begin_turn(turn)
    assert dialogue.receive(encode(delta(turn, 0)), stats) is None
    assert dialogue.receive(encode(delta(turn, 1)), stats) is None
    assert dialogue.receive(encode(StatsReply(stats, {})), stats) == StatsReply(stats, {})
    assert dialogue.receive(encode(delta(turn, 2)), turn) == delta(turn, 2)
    assert [dialogue.take_early(turn) for _ in range(3)] == [delta(turn, 0), delta(turn, 1), None]


def test_what_is_left_of_an_earlier_turn_is_not_taken_for_the_next() -> None:
    dialogue = Dialogue()
    dialogue.begin_turn(1)
    dialogue.receive(encode(delta(1, 0)), 5)
    assert dialogue.take_early(5) is None
    dialogue.begin_turn(2)
    assert dialogue.take_early(2) is None
    assert dialogue.receive(encode(delta(1, 1)), 2) is None
    assert dialogue.take_early(2) is None


def test_an_error_without_an_id_answers_whatever_is_awaited() -> None:
    error = ErrorReply(None, ErrorCode.BAD_JSON, "Not JSON.", "Send JSON.")
    assert Dialogue().receive(encode(error), 9) == error


def test_a_message_of_a_newer_server_is_skipped() -> None:
    assert Dialogue().receive('{"type":"weather","id":9}', 9) is None


def test_a_server_that_ends_is_told_from_a_lost_connection() -> None:
    lost = ConnectionClosedError(None, None)
    going_away = ConnectionClosedError(Close(1001, "bye"), None)
    announced, said = Dialogue(), GoingAway("diary", 5, 6)
    assert announced.receive(encode(said), 1) is None
    assert announced.going_away == said
    for dialogue, error, text in (
        (Dialogue(), lost, "The connection was lost"),
        (Dialogue(), ConnectionClosedError(Close(1011, ""), None), "The connection was lost"),
        (Dialogue(), going_away, "The server is shutting down"),
        (announced, lost, "The server is shutting down"),
    ):
        assert str(dialogue.lost(error)).startswith(text)


def test_long_input_is_cut_and_nothing_is_lost() -> None:
    dialogue = Dialogue()
    text = "日" * (2 * FEED_CHARS + 1)
    messages = list(feed_messages(dialogue, text))
    assert [len(message.text or "") for message in messages] == [FEED_CHARS, FEED_CHARS, 1]
    assert [message.id for message in messages] == [1, 2, 3]
    assert all(len(frame_of(message).encode()) <= MAX_MESSAGE_BYTES for message in messages)
    ids = [2**31 - 1] * (FEED_IDS + 2)
    first, second = feed_messages(dialogue, ids)
    assert (first.ids, second) == (ids[:FEED_IDS], Feed(5, ids=ids[:2]))
    assert len(frame_of(first)) <= MAX_MESSAGE_BYTES
    assert list(feed_messages(dialogue, "")) == []
    with pytest.raises(InputError, match="neither text nor token ids"):
        list(feed_messages(dialogue, b"bytes"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (Say(1, "\ud800"), "invalid Unicode"),
        (Say(1, "hi", {"temperature": float("nan")}), "not JSON"),
        (Say(1, "hi", {"stop": {"a"}}), "not JSON"),
        (Say(1, "x" * MAX_MESSAGE_BYTES), "too long"),
        (Say(1, "日" * (MAX_MESSAGE_BYTES // 3)), "too long"),
    ],
)
def test_a_frame_that_would_cost_the_connection_is_not_sent(message: Say, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        frame_of(message)


def test_an_error_is_raised_with_all_that_the_server_said() -> None:
    reply = ErrorReply(4, ErrorCode.BAD_OPTION, "seed=-1: below zero.", "Use 0.", "seed")
    with pytest.raises(RemoteError, match=r"below zero\. Use 0\. \[bad_option\]") as caught:
        accept(reply)
    assert (caught.value.code, caught.value.field) == (ErrorCode.BAD_OPTION, "seed")
    with pytest.raises(ServerError, match="answered a turn with 'stats'"):
        accept_step(StatsReply(4, {}))
    assert accept_step(delta(4, 0)) == delta(4, 0)


def test_only_a_cancelled_feed_is_cut_short() -> None:
    assert [reason for reason in DoneReason if is_cut_short(Done(1, reason))] == [
        DoneReason.CANCELLED,
        DoneReason.GOING_AWAY,
    ]


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("ws://localhost:8765", None),
        ("ws://127.0.0.1:8765/x", None),
        ("ws://[::1]:8765", None),
        ("wss://example.org", True),
        ("ws://192.168.0.7:8765", True),
        ("ws://localhost.example.org", True),
    ],
)
def test_only_this_machine_is_reached_without_a_proxy(url: str, proxy: bool | None) -> None:
    assert socket_options(url)["proxy"] is proxy
