"""`streamkv doctor --self-check`: what comes back from a tier is what went down, as a table."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import typer

from streamkv.cli.console import Output
from streamkv.cli.exit_codes import ExitCode
from streamkv.config import choose_dtype

if TYPE_CHECKING:
    from streamkv.self_check import Outcome

_HEADER = ("mode", "tier", "blocks read", "tokens", "largest difference", "tokens that differ")


def check_tiers(model: str, dtype: str | None, device: str, output: Output) -> None:
    """Compare, show, and leave with 1 if anything differs or was not exercised.

    Raises:
        ConfigError, ModelError, StoreError: no engine opens.
        typer.Exit: something is wrong.
    """
    with output.busy(f"Loading {model} ..."):
        # Imported only here: it takes seconds.
        from streamkv import self_check

    options: dict[str, Any] = {"device": device, "dtype": choose_dtype(dtype or "auto", device)}
    # A step that is swapped in the middle for a faster one adds in another order.
    options["compile"] = "off"
    config = dataclasses.replace(self_check.CONFIG, **options)
    outcomes = list(self_check.self_check(model, config, on_progress=output.note))
    output.columns([_row(outcome) for outcome in outcomes], _HEADER)
    output.line()
    failed = [outcome for outcome in outcomes if outcome.problem]
    for outcome in failed:
        output.line(f"FAIL  {outcome.mode}, {outcome.tier}: {outcome.problem}.", "red")
    if not failed:
        output.line("ok    what came back from every tier is what was computed.")
    output.json(
        {"ok": not failed, "model": model, "cases": [_as_json(outcome) for outcome in outcomes]}
    )
    if failed:
        raise typer.Exit(ExitCode.FOUND_PROBLEM)


def _row(outcome: "Outcome") -> tuple[str, ...]:
    return (
        outcome.mode,
        outcome.tier,
        f"{outcome.num_blocks:,}",
        f"{outcome.num_tokens:,}",
        f"{outcome.largest_difference:.2g}",
        f"{outcome.num_different:,}",
    )


def _as_json(outcome: "Outcome") -> dict[str, Any]:
    """For scripts; JSON has no infinity, so a difference without bounds is null."""
    largest = outcome.largest_difference
    shown = {"largest_difference": largest if math.isfinite(largest) else None}
    return dataclasses.asdict(outcome) | shown | {"problem": outcome.problem}
