"""Jobs and events survive their way through a line of JSON."""

import pytest

from streamkv.cli.demo_job import (
    Ask,
    Event,
    Failed,
    GoOn,
    Job,
    Note,
    Read,
    Reading,
    Ready,
    StepDone,
    Tier,
    Wrote,
    decode_event,
    decode_job,
    encode_event,
    encode_job,
)


def test_a_job_comes_back_as_it_was() -> None:
    steps = (Read(1000), GoOn(50), Ask('What is "ü"?\n', 48))
    job = Job("tiny", "/tmp/a b", "text.txt", 508, 4, 1 << 29, steps)
    assert decode_job(encode_job(job)) == job


@pytest.mark.parametrize(
    "event",
    [
        Note("Converting ..."),
        Ready(2, 1.5, 0.25, True, 1000, 960, 4000),
        Reading(512, 1536, 6000, 4, 508, {"gpu": Tier(9, 100, 200), "ssd": Tier(0, 0, 10)}),
        Wrote("🙂\u2028\n", 7, 1537, 0.25),
        Wrote("", None, 1538, float("inf")),
        StepDone(2),
        Failed("error", 3),
    ],
)
def test_an_event_is_one_line_and_comes_back_as_it_was(event: Event) -> None:
    line = encode_event(event)
    assert len(line.splitlines()) == 1
    assert decode_event(line) == event


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"kind": "Nap"}', '{"kind": "Note", "x": 1}'])
def test_what_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"not an event|Expecting value"):
        decode_event(line)
