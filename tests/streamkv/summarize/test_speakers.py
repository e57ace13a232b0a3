import pytest

from streamkv.summarize.speakers import Turn, join_turns, split_speaker


@pytest.mark.parametrize(
    ("line", "turn"),
    [
        ("Ada: hello", Turn("Ada", "hello")),
        ("Ada Lovelace:", Turn("Ada Lovelace", "")),
        (">> DR. HOPPER: yes", Turn("DR. HOPPER", "yes")),
        ("SWIM 1: Splashdown!", Turn("SWIM 1", "Splashdown!")),
        ("Ведущий: да", Turn("Ведущий", "да")),
        ("司会：はい", Turn("司会", "はい")),
        (">> yes", Turn(None, "yes")),
        ("man: hello", Turn(None, "man: hello")),
        ("It is 10:30 now", Turn(None, "It is 10:30 now")),
        ("See https://example.org", Turn(None, "See https://example.org")),
        (
            "This is a long remark about a thing: it broke",
            Turn(None, "This is a long remark about a thing: it broke"),
        ),
        (": odd", Turn(None, ": odd")),
        ("", Turn(None, "")),
    ],
)
def test_a_name_at_the_start_is_the_speaker(line: str, turn: Turn) -> None:
    assert split_speaker(line) == turn


def test_wrapped_lines_become_whole_turns() -> None:
    turns = [Turn("Ada", ""), Turn(None, "a"), Turn(None, "b"), Turn("Grace", "c"), Turn(None, "")]
    assert join_turns(turns) == [Turn("Ada", "a b"), Turn("Grace", "c")]
