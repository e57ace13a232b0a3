"""A short run of everything that touches a GPU, to be watched by compute-sanitizer.

    python -P tests/gpu_short_run.py [--eager] [--profile]
    CUDA_LAUNCH_BLOCKING=1 python -P tests/gpu_short_run.py

A tiny random Llama (2 layers, head_dim 64, bf16): prefill in chunks, those of a long window by
causal squares; decode steps of one to three sessions in captured graphs; demotion into a small
pinned cpu pool and an ssd store, promotion when a session is resumed. Prints OK if every token is
there, and the streams of a resumed session and of one that stayed open are the same.

`--eager` captures no graphs: a capture is not possible under PYTORCH_NO_CUDA_MEMORY_CACHING=1, with
which every tensor is an allocation of its own, so that memcheck sees every access beyond one.
`--profile` replays the graphs under torch.profiler.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from streamkv import Engine, EngineConfig, SamplingParams, Session

# Only now, since tests/ has a streamkv/ of its own.
sys.path.append(str(Path(__file__).parent))
from conftest import save_random_model, save_tiny_tokenizer

WINDOW_SIZE = 2048
CHUNK = 1024
NUM_FED = 2 * WINDOW_SIZE + 300
NUM_TOKENS = 70
"""More than a block, so that a decoding session seals one."""

LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
CUT = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3, max_tokens=NUM_TOKENS,
                     ignore_eos=True)  # fmt: skip
PARAMS = (GREEDY, CUT, SamplingParams(seed=5, max_tokens=NUM_TOKENS, ignore_eos=True))


def save_model(directory: Path) -> None:
    """The model and its tokenizer."""
    vocab_size = save_tiny_tokenizer(directory)
    save_random_model(directory, "llama", {**LLAMA, "vocab_size": vocab_size})


def engine_config(store: Path, *, eager: bool) -> EngineConfig:
    """Tiers that blocks really pass through."""
    return EngineConfig(
        window_size=WINDOW_SIZE,
        prefill_chunk=CHUNK,
        device="cuda",
        dtype="bfloat16",
        max_sessions=4,
        cpu_bytes="4MiB",
        store=str(store),
        retain="all",
        compile="off" if eager else "auto",
    )


def ids(seed: int, num_tokens: int) -> list[int]:
    """Some tokens."""
    return [3 + (seed + 7 * index * index) % 300 for index in range(num_tokens)]


async def generated(session: Session, params: SamplingParams) -> list[int | None]:
    return [delta.token_id async for delta in session.agenerate(params)]


async def together(sessions: Sequence[Session]) -> list[list[int | None]]:
    """Tokens of sessions that generate at the same time, each in its own way."""
    pairs = zip(sessions, PARAMS, strict=False)
    return await asyncio.gather(*(generated(session, params) for session, params in pairs))


def feed(session: Session, seed: int) -> Session:
    session.feed([ids(seed, NUM_FED)]).run()
    return session


def run(engine: Engine) -> str | None:
    """Every part once. Returns what is wrong."""
    sessions = [feed(engine.session(f"s{number}"), number) for number in range(3)]
    scores = list(sessions[2].score([ids(40, 100)]))
    for count in (1, 2, 3):
        for tokens in asyncio.run(together(sessions[:count])):
            if len(tokens) != NUM_TOKENS:
                return f"{len(tokens)} of {NUM_TOKENS} tokens"
    found = []
    for name, closes in (("open", False), ("closed", True)):
        session = feed(engine.session(name), 11)
        if closes:
            session.close()
            session = engine.session(name)
        found.append(asyncio.run(generated(session, GREEDY)))
        session.close()
    counters = engine.counters()
    if found[0] != found[1]:
        return "a resumed session goes on in another way than one that stayed open"
    if not scores or not counters["promotions"] or not counters["demotions"]:
        return f"not everything ran: {len(scores)} scores, {counters}"
    return None


def main() -> int:
    """Run; 0 if all is well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--eager", action="store_true", help="capture no graphs")
    parser.add_argument("--profile", action="store_true", help="under torch.profiler")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this run needs a GPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        save_model(model)
        config = engine_config(Path(directory) / "store", eager=options.eager)
        with Engine(str(model), config) as engine:
            profiler = torch.profiler.profile() if options.profile else contextlib.nullcontext()
            with profiler:
                problem = run(engine)
                torch.cuda.synchronize()
            if problem is None and engine.wait_until_fast() is options.eager:
                problem = "decode steps were captured" if options.eager else "no step was captured"
    print(problem or "OK")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
