from pathlib import Path

import pytest

from streamkv.errors import InputError
from streamkv.summarize.cues import ReadWarnings
from streamkv.summarize.readers import TranscriptFormat, open_transcript

CUE = "00:00:01.000 --> 00:00:02.000\nhello\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.vtt", "WEBVTT\n\n" + CUE, TranscriptFormat.VTT),
        ("a.txt", "\n\ufeffWEBVTT\n\n" + CUE, TranscriptFormat.SRT),
        ("a.txt", "WEBVTT\n\n" + CUE, TranscriptFormat.VTT),
        ("a.vtt", CUE, TranscriptFormat.VTT),
        ("a.txt", "1\n" + CUE, TranscriptFormat.SRT),
        ("a.SRT", "just text", TranscriptFormat.SRT),
        ("a.log", "just text", TranscriptFormat.TEXT),
    ],
)
def test_the_format_is_told_by_the_content(
    tmp_path: Path, name: str, content: str, expected: TranscriptFormat
) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert open_transcript(path).format is expected


@pytest.mark.parametrize(
    "content", ["WEBVTT\n\nNOTE nothing else\n", "[00:01]\n\n", "1\n00:01.000 --> 00:02.000\n\n"]
)
def test_a_file_without_any_text_in_it_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(content)
    with pytest.raises(InputError, match="no text in it"):
        open_transcript(path)


def test_a_transcript_can_be_read_again_and_stays_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe" + "Ada: eins\r\nzwei\rdrei\n".encode("utf-16-le"))
    transcript = open_transcript(path)
    assert next(transcript.cues(ReadWarnings("a.txt"))).speaker == "Ada"
    for _ in range(2):
        cues = transcript.cues(ReadWarnings("a.txt"))
        assert [cue.text for cue in cues] == ["eins", "zwei", "drei"]
