"""Engines whose old blocks lie in one tier, and how they get there."""

from pathlib import Path
from typing import Any

from streamkv import Engine, EngineConfig, Session


def open_over(tier: str, model_dir: Path, tmp_path: Path, **options: Any) -> Engine:
    """An engine whose old blocks lie in `tier`: in `gpu` only if somebody holds them there."""
    cpu_bytes = "64MiB" if tier == "cpu" else 0
    store = str(tmp_path / "store") if tier == "ssd" else None
    given = options | {"cpu_bytes": cpu_bytes, "ssd_bytes": "64MiB", "store": store}
    return Engine(str(model_dir), EngineConfig(**given))


def bring_back(session: Session, engine: Engine, tier: str) -> int:
    """Leave mode `full` and take it up again; returns how many blocks came back from the tier."""
    counter = {"gpu": "shared", "cpu": "cpu_reads", "ssd": "ssd_reads"}[tier]
    before = engine.counters()[counter]
    holder = session.fork("holder") if tier == "gpu" else None
    session.set_mode("window")
    engine._tiers.flush()
    session.set_mode("full")
    if holder is not None:
        holder.delete()
    return engine.counters()[counter] - before
