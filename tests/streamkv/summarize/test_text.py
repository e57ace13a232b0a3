from streamkv.summarize.cues import Cue, ReadWarnings
from streamkv.summarize.source import PhysicalLine
from streamkv.summarize.text import read_text


def read(text: str) -> list[Cue]:
    lines = [PhysicalLine(i, line) for i, line in enumerate(text.split("\n"), start=1)]
    return list(read_text(lines, ReadWarnings("a.txt")))


def test_each_line_that_is_not_blank_is_a_cue() -> None:
    assert read("one\n\n  two   words \n") == [Cue("one", 1), Cue("two words", 3)]


def test_times_and_speakers_at_the_start_of_a_line_are_read() -> None:
    assert read("[00:01:00] Ada: hello\n00:21:14\tGrace Hopper:\thi\n") == [
        Cue("hello", 1, 60.0, None, "Ada"),
        Cue("hi", 2, 1274.0, None, "Grace Hopper"),
    ]


def test_a_time_alone_on_a_line_holds_for_the_lines_below_it() -> None:
    assert read("[00:00:00:04]\nCDR: Roger.\nClock.\n\n[04:05:43:07]\nCC: Go.") == [
        Cue("Roger.", 2, 4.0, None, "CDR"),
        Cue("Clock.", 3, 4.0),
        Cue("Go.", 6, 366187.0, None, "CC"),
    ]


def test_a_speaker_alone_on_a_line_is_kept() -> None:
    assert [cue.rendered for cue in read("Ada:\nhello")] == ["Ada:", "hello"]
