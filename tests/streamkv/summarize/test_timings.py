import pytest

from streamkv.summarize.timings import Timing, parse_timing, split_leading_time


@pytest.mark.parametrize(
    ("line", "start_s", "end_s"),
    [
        ("00:00:01,500 --> 00:00:04,000", 1.5, 4.0),
        ("00:01.250 --> 00:02.000 align:start size:50%", 1.25, 2.0),
        ("130:02:13.000 --> 130:02:14.714", 468133.0, 468134.714),
        ("1:2:3 -> 1:2:4", 3723.0, 3724.0),
        ("00:00:01.000--->00:00:02.000", 1.0, 2.0),
        ("00:00:01:500 --> 00:00:02:5", 1.5, 2.5),
        ("0:00:00.378,0:00:11.378", 0.378, 11.378),
        ("  00:00:00,033  -->  00:00:07,033X1:40", 0.033, 7.033),
        ("00:00.000 --> 00:01.000line:40%", 0.0, 1.0),
        ("00:00:00, --> 00:00:02,", 0.0, 2.0),
    ],
)
def test_a_timing_is_read_in_every_spelling(line: str, start_s: float, end_s: float) -> None:
    assert parse_timing(line) == Timing(start_s, end_s)


@pytest.mark.parametrize(
    "line", ["", "Hello there", "we go --> there", "At 10:30, or 10:45.", "a -> b", "12", "10:30"]
)
def test_text_is_no_timing(line: str) -> None:
    assert parse_timing(line) is None


def test_a_broken_timing_keeps_the_start_if_that_can_be_read() -> None:
    problem = "malformed timing; the text is kept"
    assert parse_timing("00:00:09,000 --> 00:0x:11") == Timing(9.0, None, problem)
    assert parse_timing("0?:00:09,000 --> 00:00:11,000") == Timing(None, None, problem)
    assert parse_timing("00:09.000 00:10.000") == Timing(9.0, None, problem)


def test_doubtful_times_are_read_and_named() -> None:
    assert parse_timing("00:75:00,000 --> 00:76:00,000") == Timing(
        4500.0, 4560.0, "minutes or seconds above 59 in a timing"
    )
    assert parse_timing("00:00:17,484 --> 00:00:16,543") == Timing(
        17.484, 16.543, "a cue ends before it begins"
    )


@pytest.mark.parametrize(
    ("line", "time_s", "rest"),
    [
        ("[00:01:02] Ada: hi", 62.0, "Ada: hi"),
        ("(1:05) hi", 65.0, "hi"),
        ("[04:05:43:07]", 366_187.0, ""),
        ("[-00:00:00:03]", -3.0, ""),
        ("00:21:14\tAda:\thello", 1274.0, "Ada:\thello"),
        ("00:00:02.867", 2.0, ""),
        ("0:05", 5.0, ""),
        ("101:00:00 late", 363_600.0, "late"),
        ("10:30 we met", None, "10:30 we met"),
        ("[1] a footnote", None, "[1] a footnote"),
        ("plain", None, "plain"),
    ],
)
def test_a_leading_time_is_taken_off_a_plain_line(
    line: str, time_s: float | None, rest: str
) -> None:
    assert split_leading_time(line) == (time_s, rest)
