import pytest

from streamkv.errors import InputError
from streamkv.names import validate_session_name


@pytest.mark.parametrize(
    "name", ["a", "diary", "Log 2024-05-01", "a.b_c-d", "-x", "_", "7", "x" * 100, "a..b", "a."]
)
def test_a_plain_name_is_returned(name: str) -> None:
    assert validate_session_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        " ",
        " a",
        "a ",
        "a/b",
        "../a",
        "a\\b",
        "a\0b",
        "a\n",
        "a\nb",
        "a:b",
        "café",
        "٣",
        "東京",
        "x" * 101,
        None,
        5,
        b"a",
    ],
)
def test_any_other_name_is_refused_with_a_remedy(name: object) -> None:
    with pytest.raises(InputError, match="Use 1 to 100 letters") as caught:
        validate_session_name(name)  # type: ignore[arg-type]  # the mistake under test
    assert caught.value.field == "name" and caught.value.value == name
