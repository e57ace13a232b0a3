"""An engine whose blocks may lie on disk while no journal is kept, and how blocks get there."""

from pathlib import Path
from typing import Any

from streamkv import Engine, EngineConfig, Session
from streamkv.tiers.ssd import SsdTier
from streamkv.tiers.store_format import StoreIdentity


class ScratchEngine(Engine):
    """An engine over a store of blocks that lasts as long as the engine."""

    def __init__(self, model: str, config: EngineConfig, directory: Path) -> None:
        self._directory = directory
        self._scratch: SsdTier | None = None
        super().__init__(model, config)

    def _ssd_tier(self) -> SsdTier:
        identity = StoreIdentity(self._adapter.name, self._adapter.fingerprint)
        self._scratch = SsdTier(
            self._directory, self._adapter.spec, identity, limit_bytes=64 * 2**20, codec="zstd"
        )
        return self._scratch

    def close(self) -> None:
        super().close()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None


def open_over(tier: str, model_dir: Path, tmp_path: Path, **options: Any) -> Engine:
    """An engine whose old blocks lie in `tier`: in `gpu` only if somebody holds them there."""
    cpu_bytes = "64MiB" if tier == "cpu" else 0
    config = EngineConfig(**(options | {"cpu_bytes": cpu_bytes}))
    if tier == "ssd":
        return ScratchEngine(str(model_dir), config, tmp_path / "blocks")
    return Engine(str(model_dir), config)


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
