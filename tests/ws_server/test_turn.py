"""One request on a scripted session: what is sent, in which order, and how it ends."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from websockets.exceptions import ConnectionClosedError

from streamkv.errors import ConfigError
from streamkv.ws_server.messages import (
    Done,
    DoneReason,
    ErrorCode,
    ErrorReply,
    Feed,
    FeedProgress,
    Generate,
    Say,
    ServerMessage,
    TextDelta,
    Usage,
)
from streamkv.ws_server.turn import Turn


class Line:
    """Where messages go; acts on the turn when a certain one is sent.

    Attributes:
        sent: messages in order.
        at: after so many messages `act` is called.
    """

    def __init__(self, at: int = -1, act: Any = None) -> None:
        self.sent: list[ServerMessage] = []
        self.at = at
        self.act = act

    async def send(self, message: ServerMessage) -> None:
        self.sent.append(message)
        if len(self.sent) == self.at:
            self.act()


def new_turn(
    line: Line, message: Say | Generate | Feed, answer: Iterable[str] = ("a", "b", "c")
) -> Turn:
    engine = ScriptedEngine(answer=lambda text: answer)
    return Turn(message, engine.session("diary"), line.send, lambda token_index: 100 + token_index)


def run(turn: Turn) -> None:
    asyncio.run(turn.run())
    assert turn.is_over


def texts(line: Line) -> list[str]:
    return [message.text for message in line.sent if isinstance(message, TextDelta)]


def ended(line: Line) -> Done:
    *_, last = line.sent
    assert isinstance(last, Done)
    assert sum(isinstance(message, Done | ErrorReply) for message in line.sent) == 1
    return last


def test_an_answer_is_numbered_and_ends_with_what_it_used() -> None:
    line = Line()
    run(new_turn(line, Say("x", "hello", {"max_tokens": 3}, token_ids=True)))
    assert line.sent[:3] == [
        TextDelta("x", 105, "a", 5, 1001),
        TextDelta("x", 106, "b", 6, 1002),
        TextDelta("x", 107, "c", 7, 1003),
    ]
    done = ended(line)
    assert (done.id, done.reason, done.token_index) == ("x", DoneReason.LENGTH, 8)
    assert done.usage == Usage(input_tokens=5, output_tokens=3)
    assert done.timings is not None and done.timings.first_delta_s is not None


def test_a_delta_without_text_is_sent_only_to_who_asked_for_token_ids() -> None:
    for token_ids, expected in ((False, ["a", "c"]), (True, ["a", "", "c"])):
        line = Line()
        run(new_turn(line, Generate(1, token_ids=token_ids), ("a", "", "c")))
        assert texts(line) == expected
        done = ended(line)
        assert done.reason is DoneReason.STOP
        assert done.usage == Usage(0, 3)


def test_a_stop_lets_the_step_in_hand_be_sent_and_the_first_reason_counts() -> None:
    line = Line(at=2)
    turn = new_turn(line, Generate(1), iter("abcdef"))

    def stop() -> None:
        turn.stop(DoneReason.CANCELLED)
        turn.stop(DoneReason.GOING_AWAY)

    line.act = stop
    run(turn)
    assert texts(line) == ["a", "b"]
    done = ended(line)
    assert (done.reason, done.token_index) == (DoneReason.CANCELLED, 2)


def test_a_turn_stopped_before_it_began_generates_nothing() -> None:
    line = Line()
    turn = new_turn(line, Say(1, "hello"))
    turn.stop(DoneReason.GOING_AWAY)
    run(turn)
    assert ended(line).reason is DoneReason.GOING_AWAY
    assert ended(line).usage == Usage(5, 0)


def test_an_answer_that_is_complete_is_not_said_to_be_cancelled() -> None:
    line = Line(at=3)
    turn = new_turn(line, Generate(1, {"max_tokens": 3}))
    line.act = lambda: turn.stop(DoneReason.CANCELLED)
    run(turn)
    assert ended(line).reason is DoneReason.LENGTH


def test_a_feed_reports_each_step_and_stops_between_two() -> None:
    line = Line()
    run(new_turn(line, Feed(1, text="0123456789")))
    assert line.sent[:-1] == [
        FeedProgress(1, 4, 4, 4, 0.0),
        FeedProgress(1, 8, 8, 8, 0.0),
        FeedProgress(1, 10, 10, 10, 0.0),
    ]
    assert (ended(line).reason, ended(line).usage) == (DoneReason.FED, Usage(10, 0))
    cut = Line(at=1)
    turn = new_turn(cut, Feed(1, ids=list(range(10))))
    cut.act = lambda: turn.stop(DoneReason.CANCELLED)
    run(turn)
    assert (ended(cut).reason, ended(cut).token_index) == (DoneReason.CANCELLED, 4)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Say(1, "fail"), ErrorCode.SESSION_STATE),
        (Say(1, "bug"), ErrorCode.INTERNAL),
        (Feed(1, text=""), ErrorCode.BAD_INPUT),
    ],
)
def test_a_failure_is_the_one_end(message: Say | Feed, code: ErrorCode) -> None:
    line = Line()
    run(new_turn(line, message))
    [reply] = line.sent
    assert isinstance(reply, ErrorReply)
    assert (reply.id, reply.code) == (1, code)


def test_bad_options_are_refused_before_anything_is_done() -> None:
    for params in ({"temperature": -1.0}, {"temprature": 1.0}):
        with pytest.raises(ConfigError, match="temp"):
            new_turn(Line(), Generate(1, params))


def test_a_client_that_is_gone_ends_it_in_silence() -> None:
    def lost() -> None:
        raise ConnectionClosedError(None, None)

    for at in (1, 4):
        line = Line(at, lost)
        asyncio.run(new_turn(line, Generate(1)).run())
        assert len(line.sent) == at


def test_it_is_over_before_its_end_is_sent() -> None:
    """The client may send the next request at once."""
    line, seen = Line(at=4), list[bool]()
    turn = new_turn(line, Generate(1))
    line.act = lambda: seen.append(turn.is_over)
    run(turn)
    assert seen == [True]
