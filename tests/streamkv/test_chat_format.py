"""The turns of a model are found in its chat template, without the template's own words."""

import jinja2
import pytest

from streamkv.chat import PLAIN, ChatFormat, TurnFormat
from streamkv.chat_format import find_format
from streamkv.errors import ModelError

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are Zed, made by Zed Inc.<|im_end|>\n' }}{% endif %}" + CHATML
)

# Drops the reasoning of earlier turns, and shows an empty one in the last.
REASONING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA = (
    "{{ bos_token }}{% set ns = namespace(first=true) %}"
    "{{ '<|head|>system<|/head|>\n\nToday Date: 26 Jul 2024\n\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}"
    "{% set messages = messages[1:] %}{% endif %}{{ '<|eot|>' }}"
    "{% for m in messages %}"
    "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise('no system') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# The system prompt goes into the newest user turn.
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{{ bos_token }}"
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + (system if loop.last else '') + m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)

MARKERS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|head|>", "<|/head|>", "<|eot|>"]


def renderer(template):
    """The template as the tokenizer would render it."""

    def fail(message):
        raise jinja2.TemplateError(message)

    compiled = jinja2.Environment(trim_blocks=True).from_string(template)

    def render(messages, invite):
        try:
            return compiled.render(
                messages=messages, add_generation_prompt=invite, bos_token="<s>", **{"raise": fail}
            )
        except jinja2.TemplateError as error:
            raise ModelError(str(error)) from error

    return render


CHATML_FORMAT = ChatFormat(
    source="template",
    system=TurnFormat("<|im_start|>system\n", "<|im_end|>\n"),
    user=TurnFormat("<|im_start|>user\n", "<|im_end|>\n"),
    header="<|im_start|>assistant\n",
    close="<|im_end|>\n",
)


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM], ids=["plain", "default_system"])
def test_a_template_that_grows_by_suffixes_is_followed(template):
    # The token that begins a stream is here the one that begins a turn: it must stay.
    assert find_format(renderer(template), MARKERS, "<|im_start|>") == CHATML_FORMAT


def test_a_template_that_rewrites_earlier_turns_lends_its_markers():
    found = find_format(renderer(REASONING), MARKERS)
    assert (found.source, found.user, found.system, found.header, found.close) == (
        "markers",
        CHATML_FORMAT.user,
        CHATML_FORMAT.system,
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
    )
    assert "rewrites earlier turns" in found.notes[0]


def test_words_of_the_template_in_the_system_turn_are_left_out():
    found = find_format(renderer(LLAMA), MARKERS, "<s>")
    assert found.source == "template"
    assert found.system == TurnFormat("<|head|>system<|/head|>\n\n", "<|eot|>", True, True)
    assert found.user == TurnFormat("<|head|>user<|/head|>\n\n", "<|eot|>", True, True)
    assert found.bos == "<s>"
    assert "words of its own" in found.notes[0]


def test_a_template_without_system_turn_gives_the_system_prompt_a_user_turn():
    found = find_format(renderer(GEMMA), ["<start_of_turn>", "<end_of_turn>"], "<s>")
    assert found.source == "template"
    assert found.user == TurnFormat("<start_of_turn>user\n", "<end_of_turn>\n", True, True)
    assert found.system == found.user
    assert (found.header, found.bos) == ("<start_of_turn>model\n", "<s>")
    assert "no system turn" in found.notes[0]


def test_a_template_that_moves_the_system_prompt_never_leaks_a_placeholder():
    found = find_format(renderer(MISTRAL), MARKERS, "<s>")
    assert found.source == "markers"
    assert found.user == TurnFormat("[INST] ", "[/INST]")
    assert found.system == found.user
    assert (found.header, found.close, found.bos) == ("", "</s>", "<s>")


def test_a_template_that_fails_gives_way_to_the_markers_of_its_family():
    found = find_format(renderer("{{ raise('broken') }}"), MARKERS)
    assert (found.source, found.user) == ("markers", CHATML_FORMAT.user)
    assert found.system == CHATML_FORMAT.system


def test_a_template_that_fails_without_known_markers_gives_plain_lines():
    found = find_format(renderer("{{ raise('broken') }}"), ["<s>"])
    assert (found.source, found.user) == ("plain", PLAIN.user)
    assert "cannot be rendered" in found.notes[0]


def test_a_model_without_template_gets_plain_lines():
    assert find_format(None, MARKERS) == PLAIN
