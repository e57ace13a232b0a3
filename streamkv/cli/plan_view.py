"""How a plan for many sessions looks: for people and for scripts."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from streamkv.cli.console import Output
from streamkv.config import EngineConfig, format_size
from streamkv.plan_shortfalls import Remedy, Shortfall
from streamkv.session_needs import Workload
from streamkv.session_plan import SessionPlan, Speeds
from streamkv.tiers.spec import KVSpec

_FLAGS = {
    "gpu_memory": "--gpu-memory",
    "digest_bytes": "--digest-bytes",
    "cpu_bytes": "--cpu-bytes",
    "ssd_bytes": "--ssd-bytes",
    "window_size": "--window",
    "num_awake": "--awake",
    "num_sessions": "--sessions",
    "num_tokens": "--tokens",
}
_HEADER = ("tier", "a token", "a block", "for one session", "room for")


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan, and what it was made of.

    Attributes:
        model: name.
        spec, config, work, speeds, plan: what was asked, and the answer.
        no_gpu: why no GPU is planned; empty if one is.
        endurance_bytes: that may be written to the ssd; `None`: not known.
    """

    model: str
    spec: KVSpec
    config: EngineConfig
    work: Workload
    speeds: Speeds
    plan: SessionPlan
    no_gpu: str
    endurance_bytes: float | None

    @property
    def years(self) -> float | None:
        """How long the ssd lasts, as far as that is known."""
        if self.plan.writes is None or self.endurance_bytes is None:
            return None
        return self.plan.writes.years(self.endurance_bytes)

    def show(self, output: Output) -> None:
        """Tables and sentences for people."""
        work, plan = self.work, self.plan
        output.line(
            f"{self.model} in {self.spec.dtype}: {work.num_sessions:,} sessions of "
            f"{work.num_tokens:,} tokens, {work.num_awake:,} of them awake"
        )
        output.line()
        output.columns(self._tiers(), _HEADER)
        output.line()
        for sentence in (*self._gpu(), *self._disk(), *self._wake()):
            output.line(sentence)
        output.line()
        if plan.fits:
            output.line("ok    all of it fits")
        for short in plan.shortfalls:
            output.line(f"FAIL  {_sentence(short)}", "red")

    def as_json(self) -> dict[str, Any]:
        """All numbers, in bytes and seconds."""
        plan = asdict(self.plan)
        if self.plan.writes is not None:
            plan["writes"] |= {"total": self.plan.writes.total, "ssd_years": self.years}
        if self.plan.gpu is not None:
            plan["gpu"] |= {"spare_bytes": self.plan.gpu.spare_bytes, "fits": self.plan.gpu.fits}
        for short, found in zip(plan["shortfalls"], self.plan.shortfalls, strict=True):
            short["remedies"] = [
                asdict(remedy) | {"flag": _flag(remedy)} for remedy in found.remedies
            ]
        asked = {
            "model": self.model,
            "dtype": self.spec.dtype,
            "window_size": self.config.window_size,
        }
        asked |= {"num_sink_tokens": self.config.num_sink_tokens, **asdict(self.work)}
        asked |= {"speeds_bytes_per_s": asdict(self.speeds), "no_gpu": self.no_gpu or None}
        return {"fits": self.plan.fits, **asked, **plan}

    def _tiers(self) -> Iterator[tuple[str, ...]]:
        plan = self.plan
        token, block = format_size(plan.token_bytes), format_size(plan.block_bytes)
        awake = _blocks(plan.awake_blocks, plan.block_bytes)
        if plan.gpu is not None:
            most = f"{plan.gpu.max_sessions:,} awake sessions"
        else:
            most = f"{self.work.num_awake:,} awake, if {self._pool()} of memory are free"
        asleep = _blocks(plan.asleep_blocks, plan.block_bytes)
        yield "gpu" if plan.gpu is not None else "memory", token, block, awake, most
        yield "cpu", token, block, asleep, f"{plan.cpu_sessions:,} sleeping sessions"
        room = f"{plan.ssd_sessions:,} sessions"
        if self._has_histories():
            room += f", {plan.ssd_histories:,} with all of their history"
        yield (
            "ssd, at most",
            format_size(plan.ssd_token_bytes),
            format_size(plan.ssd_block_bytes),
            _blocks(plan.asleep_blocks, plan.ssd_block_bytes),
            room,
        )

    def _has_histories(self) -> bool:
        return self.work.num_tokens > self.config.num_sink_tokens + self.config.window_size

    def _pool(self) -> str:
        return format_size(self.plan.pool_blocks * self.plan.block_bytes)

    def _gpu(self) -> Iterator[str]:
        gpu = self.plan.gpu
        if gpu is None:
            advice = "--gpu-memory 80GiB plans for one."
            yield f"gpu: not planned, because {self.no_gpu}. {advice}"
        else:
            working = gpu.working_bytes + gpu.graph_bytes + gpu.recall_bytes
            spare = f"{format_size(gpu.spare_bytes)} to spare" if gpu.fits else "nothing to spare"
            digests = f", digests {format_size(gpu.digest_bytes)}" if gpu.digest_bytes else ""
            yield (
                f"gpu: {format_size(gpu.free_bytes)} free: weights "
                f"{format_size(gpu.weight_bytes)}, graphs and working memory "
                f"{format_size(working)}{digests}, pool {format_size(gpu.pool_bytes)}; {spare}."
            )
        if self.config.recall_blocks > 0:
            yield (
                f"digests for recall: {format_size(self.plan.digest_host_bytes)} in host memory "
                f"for {self.work.num_awake:,} awake sessions, beside the cpu pool."
            )

    def _disk(self) -> Iterator[str]:
        plan = self.plan
        digests = ""
        if plan.digest_file_bytes:
            digests = f" and {format_size(plan.digest_file_bytes)} of digests"
        yield (
            f"disk: beside ssd_bytes at most {format_size(plan.journal_bytes)} of journals, and "
            f"the text that was fed{digests}."
        )
        if plan.writes is None:
            yield "written to the ssd: give --tokens-per-day to know."
            return
        parts = {
            "blocks": plan.writes.blocks,
            "open blocks at sleep": plan.writes.open_blocks,
            "journals": plan.writes.journals,
            "digests": plan.writes.digests,
        }
        shown = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)
        lasts = "" if self.years is None else f" The disk lasts {self.years:,.1f} years of it."
        yield (
            f"written to the ssd in a day: at most {format_size(plan.writes.total)} ({shown})."
            f"{lasts}"
        )

    def _wake(self) -> Iterator[str]:
        wake, speeds = self.plan.wake, self.speeds
        mean = "" if wake.mean_s is None else f", {_seconds(wake.mean_s)} on average"
        yield (
            f"waking one session: {format_size(wake.num_bytes)} of blocks and "
            f"{format_size(wake.file_bytes)} of files: {_seconds(wake.pinned_s)} with its blocks "
            f"in the cpu pool ({speeds.pinned / 1e9:g} GB/s), {_seconds(wake.ssd_s)} from the ssd "
            f"({speeds.ssd / 1e9:g} GB/s){mean}. This is bytes over "
            "bandwidth, a bound and no measurement."
        )


def _blocks(count: int, block_bytes: int) -> str:
    return f"{format_size(count * block_bytes)} ({count:,} blocks)"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def _sentence(short: Shortfall) -> str:
    if not short.remedies:
        return f"{short.tier}: {short.problem}. No option by itself makes it fit."
    return f"{short.tier}: {short.problem}. Use {', or '.join(map(_flag, short.remedies))}."


def _flag(remedy: Remedy) -> str:
    """An option as it is typed."""
    value = f"{remedy.value >> 20}MiB" if remedy.is_size and remedy.value else str(remedy.value)
    return f"{_FLAGS[remedy.option]} {value}"
