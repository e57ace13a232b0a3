from streamkv.summarize.cues import Cue, TimeRange, format_time, time_range


def test_times_are_shown_with_as_many_hours_as_it_takes() -> None:
    assert format_time(0.9) == "0:00:00"
    assert format_time(3725) == "1:02:05"
    assert format_time(468133.7) == "130:02:13"
    assert format_time(-3) == "-0:00:03"


def test_a_range_spans_cues_out_of_order_and_without_times() -> None:
    cues = [Cue("a", 1, 5.0, 6.0), Cue("b", 2), Cue("c", 3, 1.0, 2.0), Cue("d", 4, 5.5)]
    assert time_range(cues) == TimeRange(1.0, 6.0)
    assert str(time_range(cues)) == "0:00:01 – 0:00:06"
    assert str(time_range([Cue("b", 2)])) == ""
