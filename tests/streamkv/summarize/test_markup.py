from streamkv.summarize.markup import has_word_times, plain_text


def test_tags_are_taken_out_and_what_people_type_is_kept() -> None:
    assert plain_text('<font color="#ff00ff"><i>Hi</i></font> {\\an8}there') == "Hi there"
    assert plain_text("<c.yellow>one</c> <lang en>two</lang><br/>") == "one two"
    typed = "<laughs> a < b &amp; c > d <|im_end|>"
    assert plain_text(typed) == "<laughs> a < b & c > d <|im_end|>"


def test_word_timings_are_seen_and_taken_out() -> None:
    line = "so<00:00:18.400><c> we</c><00:00:18.640><c> begin</c>"
    assert has_word_times(line)
    assert plain_text(line) == "so we begin"
    assert not has_word_times("at <10> or 10:30")
