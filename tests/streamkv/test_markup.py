"""Only markup yields special tokens, and text between two of them stays together."""

from streamkv.chat import Segment
from streamkv.markup import Marker, MarkupSplitter

START = Marker(1, "<start>")
STARTED = Marker(2, "<started>")
END = Marker(3, "<end>", strips_left=True, strips_right=True)

SPLITTER = MarkupSplitter([START, STARTED, END])


def split(*segments):
    """The pieces of (text, is_markup) pairs."""
    return list(SPLITTER.split(Segment(*segment) for segment in segments))


def test_markup_and_content_between_markers_are_one_run():
    pieces = split(("<start>user\n", True), ("\nHi", False), ("!<start>", True))
    assert pieces == [START, "user\n\nHi!", START]


def test_a_marker_spelled_by_content_is_text():
    assert split(("<start>", True), ("<end><start>", False)) == [START, "<end><start>"]


def test_a_marker_spelled_by_content_and_markup_together_is_text():
    assert split(("<sta", True), ("rt>", False)) == ["<start>"]


def test_the_longest_marker_is_taken():
    assert split(("<started>", True)) == [STARTED]


def test_a_marker_may_take_whitespace_away():
    assert split(("a \n<end>\n b", True)) == ["a", END, "b"]
    assert split((" <end> ", True), (" x", False)) == [END, "x"]


def test_the_marker_that_markup_begins_with():
    assert SPLITTER.leading_marker("<end>\n") == "<end>"
    assert SPLITTER.leading_marker("\n<end>") == ""
    assert MarkupSplitter([]).leading_marker("<end>") == ""


def test_empty_segments_give_nothing():
    assert split(("", True), ("", False)) == []
