"""When choices are made and used, and from which blocks."""

from streamkv.recall_schedule import Choice, Known, RecallSchedule
from streamkv.window import Window

B = 64


def schedule(stride: int = 256, num_blocks: int = 4) -> RecallSchedule:
    return RecallSchedule(stride, num_blocks, B)


def test_steps_end_at_every_multiple_of_the_stride() -> None:
    made = schedule()
    assert [made.next_boundary(n) for n in (0, 1, 255, 256, 257)] == [256, 256, 256, 512, 512]
    assert [n for n in range(600) if made.chooses_at(n)] == [256, 512]


def test_a_choice_is_taken_once_when_its_token_comes() -> None:
    made = schedule()
    made.put(Choice(512, Known((1, 2))))
    made.put(Choice(768, Known((3,))))
    assert made.take(511) is None
    assert made.take(512) == Choice(512, Known((1, 2)))
    assert made.take(513) is None
    assert made.take(900) == Choice(768, Known((3,)))


def test_of_two_choices_that_are_due_the_newer_counts() -> None:
    made = schedule()
    made.put(Choice(512, Known((1,))))
    made.put(Choice(768, Known((2,))))
    assert made.take(800) == Choice(768, Known((2,))) and made.take(800) is None


def test_a_choice_for_an_answer_replaces_what_was_to_come() -> None:
    made = schedule()
    made.put(Choice(512, Known((1,))))
    made.put(Choice(768, Known((2,))))
    made.put(Choice(700, Known((9,))))
    assert made.take(600) == Choice(512, Known((1,)))
    assert made.take(2000) == Choice(700, Known((9,)))


def test_a_stream_that_goes_back_forgets_its_choices_and_says_which() -> None:
    made = schedule()
    choices = [Choice(512, Known((1,))), Choice(768, Known((2,), (0.5,)))]
    for choice in choices:
        made.put(choice)
    assert made.next_choice() == choices[0]
    assert made.clear() == choices
    assert made.take(9999) is None and made.next_choice() is None
    assert choices[1].is_of(768, (2,))
    assert not choices[1].is_of(767, (2,)) and not choices[1].is_of(768, (1,))


def test_blocks_of_which_a_token_leaves_while_the_choice_holds_are_candidates() -> None:
    """By looking at every token of every query that the choice may be for."""
    made, window = schedule(stride=64), Window(200, ((0, 4),))
    for token_index in range(0, 3000, 37):
        last_query = token_index + 2 * 64 - 1
        left = {token // B for token in range(max(0, last_query - 200 + 1))}
        assert made.candidates(window, token_index, 1000) == len(left)


def test_no_query_is_farther_from_a_block_than_the_trained_length() -> None:
    made = schedule(stride=64)
    for token_index in range(0, 2000, 13):
        last_query = token_index + 2 * 64 - 1
        within = [block for block in range(60) if last_query - block * B < 500]
        assert made.first_within(token_index, 500) == within[0]


def test_only_sealed_blocks_are_candidates() -> None:
    made, window = schedule(), Window(100)
    assert made.candidates(window, 2000, 7) == 7
    assert made.candidates(window, 0, 0) == 0


def test_a_choice_that_was_put_back_is_taken_again() -> None:
    made = schedule()
    for choice in (Choice(64, Known((1,))), Choice(128, Known((2,)))):
        made.put(choice)
    assert not made.is_due(63) and made.is_due(64)
    assert (made.next_due(0), made.next_due(64), made.next_due(128)) == (64, 128, None)
    taken = made.take(100)
    assert taken == Choice(64, Known((1,))) and not made.is_due(100)
    made.put_back(taken)
    assert made.take(100) == taken and made.take(100) is None
    assert made.take(128) == Choice(128, Known((2,)))
