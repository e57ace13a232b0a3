"""Chat in the terminal, for months if you like: run it again and it goes on.

python examples/endless_chat.py
"""

from streamkv import Engine, EngineConfig, SamplingParams

MODEL = "smollm2-135m"
STORE = "~/.local/share/streamkv/examples"


def main() -> None:
    """Read lines, answer each, until the input ends."""
    config = EngineConfig(window_size=2048, store=STORE, ssd_bytes="2GiB")
    params = SamplingParams(temperature=0.3, max_tokens=300)
    with (
        Engine(MODEL, config, on_progress=print) as engine,
        engine.session("diary", system="You are a friendly assistant.") as session,
    ):
        print(f"{session.num_tokens} tokens so far. An empty line ends.")
        while text := input("> ").strip():
            session.say(text)
            for delta in session.generate(params):
                print(delta.text, end="", flush=True)
            print()


if __name__ == "__main__":
    main()
