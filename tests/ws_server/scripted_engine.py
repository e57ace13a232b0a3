"""A small deterministic engine that answers by a script, for the edges of the protocol.

One character of input is one token, and so is one piece of an answer. A gate, if given, lets one
step pass for each `gate.release()`. Run as a program it serves until it is told to stop.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterable

from streamkv.errors import InputError, SessionError
from streamkv.outputs import Delta, FinishReason, Progress, SessionStats
from streamkv.sampling_params import SamplingParams
from streamkv.ws_server.server import serve


def numbers() -> Iterable[str]:
    """An answer without end."""
    number = 0
    while True:
        yield f"{number} "
        number += 1


class ScriptedSession:
    def __init__(self, engine: "ScriptedEngine", name: str, system: str | None) -> None:
        self.engine = engine
        self.name = name
        self.system = system
        self.is_open = True
        self.resumed = False
        self.text = ""
        self.text_chars = 0
        self.ids: list[int] = []
        self.num_tokens = 0
        self.num_generated = 0

    async def _step(self) -> None:
        if self.engine.gate is None:
            await asyncio.sleep(0)
        else:
            self.engine.num_waiting += 1
            self.engine.loop = asyncio.get_running_loop()
            await self.engine.gate.acquire()

    async def afeed(self, items: str | Iterable[str | list[int]]) -> AsyncGenerator[Progress, None]:
        if items == "":
            raise InputError("items", items, "an empty feed", "Feed at least one character.")
        num_fed = 0
        for item in [items] if isinstance(items, str) else items:
            for start in range(0, len(item), self.engine.prefill_chunk):
                await self._step()
                piece = item[start : start + self.engine.prefill_chunk]
                if isinstance(piece, str):
                    self.text += piece
                    self.text_chars += len(piece)
                else:
                    self.ids += piece
                num_fed += len(piece)
                self.num_tokens += len(piece)
                yield Progress(num_fed, self.num_tokens, self.text_chars, float("inf"))

    async def asay(self, text: str) -> None:
        if text == "fail":
            raise SessionError("The script says so. Say something else.")
        if text == "bug":
            raise ZeroDivisionError("a secret")
        self.text += text
        self.num_tokens += len(text)

    async def agenerate(self, params: SamplingParams) -> AsyncGenerator[Delta, None]:
        pieces = iter(self.engine.answer(self.text))
        limit = params.max_tokens or sys.maxsize
        for count, piece in enumerate(pieces, start=1):
            await self._step()
            index = self.num_tokens
            self.num_tokens += 1
            self.num_generated += 1
            reason = FinishReason.LENGTH if count == limit else None
            yield Delta(piece, 1000 + count, index, reason)
            if reason is not None:
                return

    def stats(self) -> SessionStats:
        return SessionStats(self.name, self.num_tokens, self.num_tokens, 4, 8, self.text_chars, 1)

    async def adelete(self) -> None:
        del self.engine.sessions[self.name]
        self.is_open = False

    async def aclose(self) -> None:
        self.is_open = False


class ScriptedEngine:
    def __init__(
        self,
        answer: Callable[[str], Iterable[str]] = lambda text: numbers(),
        gate: asyncio.Semaphore | None = None,
        prefill_chunk: int = 4,
    ) -> None:
        self.answer = answer
        self.gate = gate
        self.prefill_chunk = prefill_chunk
        self.num_waiting = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.sessions: dict[str, ScriptedSession] = {}

    def open_gate(self) -> None:
        """Let all further steps pass; from any thread, once a step has waited."""
        gate, self.gate = self.gate, None
        assert gate is not None and self.loop is not None
        self.loop.call_soon_threadsafe(gate.release)

    @property
    def model_name(self) -> str:
        return "script"

    def session(self, name: str, *, system: str | None = None) -> ScriptedSession:
        if "/" in name:
            raise InputError("name", name, "has a path character", "Use letters and digits.")
        if name in self.sessions:
            assert not self.sessions[name].is_open, "opened twice"
            self.sessions[name].is_open = self.sessions[name].resumed = True
        else:
            self.sessions[name] = ScriptedSession(self, name, system)
        return self.sessions[name]


def main() -> None:
    engine = ScriptedEngine()
    serve(engine, port=0, ready=lambda url: print(url, flush=True))
    print("open sessions:", [s.name for s in engine.sessions.values() if s.is_open], flush=True)


if __name__ == "__main__":
    main()
