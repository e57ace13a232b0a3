from pathlib import Path

import pytest
from cli_runner import Run

from streamkv import Engine, EngineConfig

TEXT = "".join(f"Line {n} of the text that is scored: {n * n}.\n" for n in range(80))
SETTING = ["--window", "64", "--sinks", "4"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text(TEXT)
    return path


def test_perplexity_is_of_the_predictions_in_the_range(
    run: Run, text: Path, tiny_model_dir: Path
) -> None:
    config = EngineConfig(window_size=64)
    with Engine(str(tiny_model_dir), config) as engine, engine.session("s") as session:
        scores = [s for s in session.score(TEXT) if 101 <= s.token_index <= 399]
    mean = -sum(score.logprob for score in scores) / 299
    args = [text, "--model", tiny_model_dir, *SETTING, "--tokens", 400, "--from", 100]
    ran = run("bench", "ppl", *args, "--json").json
    assert ran["mean_nll"] == pytest.approx(mean, abs=1e-5)
    assert ran["num_predictions"] == 299
    assert (ran["first_index"], ran["last_index"]) == (100, 398)
    assert ran["tokens_per_s"] > 0
    assert ran["dtype"] == "float32"
    chunked = run("bench", "ppl", *args, "--chunk", 37, "--json").json
    assert chunked["mean_nll"] == pytest.approx(mean, abs=1e-5)
    shown = run("bench", "ppl", *args).out
    assert shown.startswith(f"{mean:.4f} nats, perplexity ")


def test_a_text_that_is_too_short_is_2(run: Run, text: Path, tiny_model_dir: Path) -> None:
    ran = run("bench", "ppl", text, "--model", tiny_model_dir, *SETTING)
    assert ran.code == 2
    assert "tokens, not 16,385" in ran.err


def test_a_range_without_predictions_is_2(run: Run, text: Path, tiny_model_dir: Path) -> None:
    ran = run("bench", "ppl", text, "--model", tiny_model_dir, "--tokens", 10, "--from", 9)
    assert ran.code == 2
    assert ran.err.startswith("error: tokens=10: out of range.")


def test_decoding_is_timed_after_a_full_window(run: Run, tiny_model_dir: Path) -> None:
    args = ["--model", tiny_model_dir, *SETTING, "--tokens", 12]
    ran = run("bench", "decode", *args, "--json").json
    assert (ran["num_tokens"], ran["context"], ran["window_size"]) == (12, 68, 64)
    assert ran["tokens_per_s"] == pytest.approx(1000 / ran["median_ms"])
    assert ran["median_ms"] <= ran["p90_ms"] <= ran["max_ms"]
    assert "tokens/s: median" in run("bench", "decode", *args).out
