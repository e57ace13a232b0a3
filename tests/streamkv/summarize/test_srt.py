from streamkv.summarize.cues import Cue, ReadWarnings
from streamkv.summarize.source import PhysicalLine
from streamkv.summarize.srt import read_srt


def read(text: str) -> tuple[list[Cue], list[str]]:
    lines = [PhysicalLine(i, line) for i, line in enumerate(text.split("\n"), start=1)]
    warnings = ReadWarnings("a.srt")
    cues = list(read_srt(lines, warnings))
    return cues, [str(warning) for warning in warnings.kept]


def test_a_clean_file_gives_one_cue_per_turn_and_no_warning() -> None:
    cues, warnings = read(
        "1\n00:00:01,000 --> 00:00:02,500\nAda: Hello,\nthere.\nGrace: Hi.\n\n"
        "2\n00:00:02,500 --> 00:00:03,000\n<i>Right.</i>\n"
    )
    assert cues == [
        Cue("Hello, there.", 2, 1.0, 2.5, "Ada"),
        Cue("Hi.", 2, 1.0, 2.5, "Grace"),
        Cue("Right.", 8, 2.5, 3.0),
    ]
    assert warnings == []


def test_missing_blank_lines_do_not_join_cues() -> None:
    cues, warnings = read(
        "1\n00:00:01,000 --> 00:00:02,000\none\n2\n00:00:02,000 --> 00:00:03,000\ntwo\n"
        "00:00:03,000 --> 00:00:04,000\nthree"
    )
    assert [cue.text for cue in cues] == ["one", "two", "three"]
    assert warnings == []


def test_blank_lines_at_the_start_and_around_the_number_are_harmless() -> None:
    cues, warnings = read("\n\n1\n00:00:01,000 --> 00:00:02,000\none\n\n\n\n")
    assert [(cue.text, cue.start_s) for cue in cues] == [("one", 1.0)]
    assert warnings == []


def test_a_malformed_number_is_named_and_left_out() -> None:
    cues, warnings = read("#1O\n00:00:01,000 --> 00:00:02,000\none\n")
    assert [cue.text for cue in cues] == ["one"]
    assert warnings == ["a.srt:1: malformed number of a cue"]


def test_a_malformed_timing_is_named_and_its_text_kept_in_order() -> None:
    cues, warnings = read(
        "1\n00:00:01,000 --> 00:00:02,000\none\n\n2\n0x:00:02 --> 00:00:03,000\ntwo\n\n"
        "3\n00:00:03,000 --> 00:00:04,000\nthree\n"
    )
    assert [(cue.text, cue.start_s) for cue in cues] == [
        ("one", 1.0),
        ("two", None),
        ("three", 3.0),
    ]
    assert warnings == ["a.srt:6: malformed timing; the text is kept"]


def test_a_missing_timing_is_named_and_its_text_kept_in_order() -> None:
    cues, warnings = read(
        "1\n00:00:01,000 --> 00:00:02,000\none\n\n2\ntwo\n\n3\n00:00:03,000 --> 00:00:04,000\nthree"
    )
    assert [cue.text for cue in cues] == ["one", "two", "three"]
    assert warnings == [
        "a.srt:5: the number of a cue without a timing",
        "a.srt:6: text without a timing; kept",
    ]


def test_a_blank_line_inside_a_cue_loses_no_text() -> None:
    cues, warnings = read("1\n00:00:01,000 --> 00:00:02,000\none\n\nmore\n\nand more\n")
    assert [cue.text for cue in cues] == ["one", "more", "and more"]
    assert len(warnings) == 2


def test_cues_out_of_order_stay_in_the_order_of_the_file() -> None:
    cues, warnings = read(
        "1\n00:00:05,000 --> 00:00:06,000\nlate\n\n2\n00:00:01,000 --> 00:00:02,000\nearly\n\n"
        "3\n00:00:01,000 --> 00:00:02,000\nsame time\n"
    )
    assert [cue.text for cue in cues] == ["late", "early", "same time"]
    assert warnings == ["a.srt:6: a cue begins before the one above it; kept in this order"]


def test_a_cue_without_text_is_named() -> None:
    cues, warnings = read("1\n00:00:01,000 --> 00:00:02,000\n\n2\n00:00:02,000 --> 00:00:03,000\nb")
    assert [cue.text for cue in cues] == ["b"]
    assert warnings == ["a.srt:2: a cue without text"]


def test_many_warnings_are_counted_and_the_first_kept() -> None:
    _, warnings = read("1\n00:00:01,000 --> 00:00:02,000\n\n" * 300)
    assert len(warnings) == 200
