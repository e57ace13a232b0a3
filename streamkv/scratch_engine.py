"""An engine over a store of blocks without journals: what left memory lasts as long as the engine.

With it modes are checked whose sessions cannot be journaled yet, from disk like any other block.
"""

from collections.abc import Callable
from pathlib import Path

from streamkv.config import EngineConfig, parse_size
from streamkv.engine import Engine
from streamkv.tiers.ssd import SsdTier
from streamkv.tiers.store_format import StoreIdentity


class ScratchEngine(Engine):
    """As `Engine`, of a config without a store.

    Args:
        model, config, on_progress: as for `Engine`; `ssd_bytes` and `codec` hold for the blocks.
        directory: of the blocks; stays when the engine is closed.

    Raises:
        ConfigError, ModelError, StoreError: as `Engine`.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        directory: Path,
        *,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        assert config.store is None
        self._directory = directory
        self._scratch: SsdTier | None = None
        try:
            super().__init__(model, config, on_progress=on_progress)
        except BaseException:
            self._close_scratch()
            raise

    def _ssd_tier(self) -> SsdTier:
        identity = StoreIdentity(self._adapter.name, self._adapter.fingerprint)
        self._scratch = SsdTier(
            self._directory,
            self._adapter.spec,
            identity,
            limit_bytes=parse_size("ssd_bytes", self.config.ssd_bytes),
            codec=self.config.codec,
        )
        return self._scratch

    def close(self) -> None:
        """As `Engine.close`; the store of blocks is closed, too."""
        try:
            super().close()
        finally:
            self._close_scratch()

    def _close_scratch(self) -> None:
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.close()
