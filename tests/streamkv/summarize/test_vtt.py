from streamkv.summarize.cues import Cue, ReadWarnings
from streamkv.summarize.source import PhysicalLine
from streamkv.summarize.vtt import read_vtt


def read(text: str) -> tuple[list[Cue], list[str]]:
    lines = [PhysicalLine(i, line) for i, line in enumerate(text.split("\n"), start=1)]
    warnings = ReadWarnings("a.vtt")
    cues = list(read_vtt(lines, warnings))
    return cues, [str(warning) for warning in warnings.kept]


def test_header_comments_styles_and_names_of_cues_are_left_out() -> None:
    cues, warnings = read(
        "WEBVTT - a title\nKind: captions\n\nNOTE\nnot spoken\nneither\n\nSTYLE\n::cue {}\n\n"
        "the first one\n00:01.000 --> 00:02.000 align:start\nHello\n\nNOTE done\n\n"
        "00:02.000 --> 00:03.000\nNOTE is a word too\n"
    )
    assert [cue.text for cue in cues] == ["Hello", "NOTE is a word too"]
    assert warnings == []


def test_voices_are_speakers() -> None:
    cues, _ = read(
        "WEBVTT\n\n100:00:01.000 --> 100:00:02.000\n"
        "<v.loud Ada Byron>No <i>way</i>!</v>\n<v Grace>Yes</v> indeed\nsaid she\n"
    )
    assert cues == [
        Cue("No way!", 3, 360001.0, 360002.0, "Ada Byron"),
        Cue("Yes indeed said she", 3, 360001.0, 360002.0, "Grace"),
    ]


def test_a_name_with_a_colon_is_a_speaker_too() -> None:
    cues, _ = read("WEBVTT\n\n1\n00:01.000 --> 00:02.000\nAda Byron: No &amp; no\n")
    assert cues == [Cue("No & no", 4, 1.0, 2.0, "Ada Byron")]


def test_an_unclosed_voice_tag_loses_no_text() -> None:
    cues, _ = read("WEBVTT\n\n00:01.000 --> 00:02.000\n<v It is blue\n")
    assert "It is blue" in cues[0].rendered


def test_a_missing_header_is_named() -> None:
    cues, warnings = read("00:01.000 --> 00:02.000\none\n")
    assert [cue.text for cue in cues] == ["one"]
    assert warnings == ["a.vtt:1: a VTT file that does not begin with WEBVTT"]


def test_a_header_without_a_blank_line_after_it_hides_no_cue() -> None:
    cues, warnings = read("WEBVTT\n00:01.000 --> 00:02.000\none\n")
    assert [cue.text for cue in cues] == ["one"]
    assert warnings == []


# "~" stands for a space, which nobody would see at the end of a line.
ROLLING = """WEBVTT
Kind: captions

00:00:16.000 --> 00:00:18.390 align:start position:0%
~
so<00:00:16.400><c> we</c><00:00:16.640><c> begin</c>

00:00:18.390 --> 00:00:18.400 align:start position:0%
so we begin
~

00:00:18.400 --> 00:00:20.000 align:start position:0%
so we begin
with<00:00:18.640><c> a</c><00:00:18.800><c> word</c>

00:00:20.000 --> 00:00:20.010 align:start position:0%
with a word
~

00:00:20.010 --> 00:00:22.000 align:start position:0%
with a word
yeah

00:00:22.000 --> 00:00:22.010 align:start position:0%
yeah
~

00:00:22.010 --> 00:00:24.000 align:start position:0%
yeah
yeah

00:00:24.000 --> 00:00:26.000 align:start position:0%
yeah
with<00:00:24.640><c> a</c><00:00:24.800><c> word</c>
"""


def test_rolling_captions_are_read_once_and_real_repetitions_kept() -> None:
    cues, warnings = read(ROLLING.replace("~", " "))
    assert [cue.text for cue in cues] == [
        "so we begin",
        "with a word",
        "yeah",
        "yeah",
        "with a word",
    ]
    assert [cue.start_s for cue in cues] == [16.0, 18.4, 20.01, 22.01, 24.0]
    assert warnings == []


def test_without_word_timings_a_repeated_line_is_a_repetition() -> None:
    cues, _ = read("WEBVTT\n\n00:01.000 --> 00:02.000\nyes\n\n00:02.000 --> 00:03.000\nyes\n")
    assert [cue.text for cue in cues] == ["yes", "yes"]
