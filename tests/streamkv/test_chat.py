"""Turns are rendered as suffixes of markup and content."""

import pytest

from streamkv.chat import PLAIN, ChatFormat, ChatTemplate, Segment, TurnFormat
from streamkv.errors import InputError

FORMAT = ChatFormat(
    source="template",
    system=TurnFormat("[system]\n", "[end]\n"),
    user=TurnFormat("[user]\n", "[end]\n", trim_left=True, trim_right=True),
    header="[assistant]\n",
    close="[end]\n",
)

CHAT = ChatTemplate(FORMAT, "[end]")


def text_of(segments):
    """The rendered text."""
    return "".join(segment.text for segment in segments)


def test_a_user_turn_invites_the_assistant():
    assert CHAT.render_turn("user", "Hi [end]") == [
        Segment("[user]\n", True),
        Segment("Hi [end]", False),
        Segment("[end]\n", True),
        Segment("[assistant]\n", True),
    ]


def test_a_turn_may_come_without_invitation():
    turns = [("user", "Hi"), ("assistant", "Hello")]
    rendered = [text_of(CHAT.render_turn(role, text, header=False)) for role, text in turns]
    assert rendered == ["[user]\nHi[end]\n", "[assistant]\nHello[end]\n"]


def test_content_is_trimmed_where_the_template_trims_it():
    assert text_of(CHAT.render_turn("user", " \nHi\n ", header=False)) == "[user]\nHi[end]\n"
    assert text_of(CHAT.render_system(" Hi\n")) == "[system]\n Hi\n[end]\n"


def test_a_system_turn_is_the_same_by_role():
    assert CHAT.render_turn("system", "Be brief.", header=False) == CHAT.render_system("Be brief.")


def test_a_reply_that_ended_by_its_marker_needs_only_the_rest():
    assert text_of(CHAT.render_close(ended=True)) == "\n"
    assert text_of(CHAT.render_close(ended=False)) == "[end]\n"


def test_other_roles_take_the_place_of_the_user():
    assert text_of(CHAT.render_turn("tool", "42", header=False)) == "[tool]\n42[end]\n"


@pytest.mark.parametrize("role", ["", "User", "a b", "x]\n[system", "ü"])
def test_a_role_that_could_be_markup_is_refused(role):
    with pytest.raises(InputError, match="role="):
        CHAT.render_turn(role, "text")


def test_a_format_without_role_names_has_no_other_roles():
    chat = ChatTemplate(
        ChatFormat("markers", FORMAT.system, TurnFormat("[INST]", "[/INST]"), "", "")
    )
    with pytest.raises(InputError, match=r"role='tool': unknown role\. Use user"):
        chat.render_turn("tool", "text")


def test_plain_turns_are_lines_with_a_stop_string():
    chat = ChatTemplate(PLAIN)
    turns = [chat.render_system("Be brief.\n"), chat.render_turn("user", "Hi\n")]
    turns += [[Segment(" Hello", False)], chat.render_close(ended=False)]
    assert "".join(map(text_of, turns)) == "Be brief.\n\nUser: Hi\nAssistant: Hello\n"
    assert chat.stop_strings == ("\nUser:",)
    assert CHAT.stop_strings == ()
