"""What a command line came to in a test, and the type of what runs one."""

import json
from dataclasses import dataclass
from typing import IO, Any, Protocol


@dataclass(frozen=True)
class Ran:
    """What a command printed and exited with."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its standard output, which must be one JSON value and nothing else."""
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        """Its standard output, one JSON value per line."""
        return [json.loads(line) for line in self.out.splitlines()]


class Run(Protocol):
    """`run("chat", "diary", stdin="hello\\n")`: one command line, in this process."""

    def __call__(self, *args: object, stdin: str | IO[str] = "") -> Ran: ...
