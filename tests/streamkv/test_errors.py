"""What a caller may rely on in an exception."""

import pytest

from streamkv import errors
from streamkv.errors import ConfigError, InputError, StreamKVError, UnknownOptionError

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, Exception)
]


def test_one_except_clause_catches_all() -> None:
    assert len(CLASSES) > 10
    assert all(issubclass(error, StreamKVError) for error in CLASSES)


def test_the_tree_of_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    parents: list[str] = []
    for line in errors.__doc__.split("\n\n")[1].splitlines():
        name = line.strip("│ ├└─").split()[0]
        depth = (len(line) - len(line.lstrip("│ ├└─"))) // 4
        parents[depth:] = [name]
        if depth:
            assert issubclass(getattr(errors, name), getattr(errors, parents[depth - 1])), name
    assert {error.__name__ for error in CLASSES} == {
        word for word in errors.__doc__.split() if word in vars(errors)
    }


@pytest.mark.parametrize("kind", [ConfigError, InputError, UnknownOptionError])
def test_a_bad_value_is_a_value_error_with_its_parts(
    kind: type[ConfigError] | type[InputError],
) -> None:
    error = kind("seed", -1, "below zero", "Use 0 or more.")
    assert isinstance(error, ValueError)
    assert str(error) == "seed=-1: below zero. Use 0 or more."
    assert (error.field, error.value, error.problem, error.remedy) == (
        "seed",
        -1,
        "below zero",
        "Use 0 or more.",
    )


def test_a_long_input_is_shown_short_and_kept_whole() -> None:
    error = InputError("text", "x" * 10**6, "too long", "Cut it.")
    assert len(str(error)) < 200 and "..." in str(error)
    assert error.value == "x" * 10**6
