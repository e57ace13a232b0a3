"""What an engine with the default options would take of this machine's GPU, or why that is unknown.

Nothing is loaded; the GPU is asked what it has free.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from streamkv.cli.console import Output
from streamkv.cli.doctor_checks import Check, Level
from streamkv.cli.doctor_model import local_directory, read_size
from streamkv.config import EngineConfig, choose_dtype, format_size
from streamkv.errors import ConfigError
from streamkv.gpu_plan import DeviceMemory, GpuPlan, plan_gpu, require_room


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan, or why there is none.

    Attributes:
        plan: the parts of the GPU's memory.
        refusal: what an engine would refuse it with; `None` if it fits.
        problem: why there is no plan; empty if there is one.
    """

    plan: GpuPlan | None = None
    refusal: ConfigError | None = None
    problem: str = ""

    def check(self) -> Check | None:
        """The plan as a finding; without one there is none."""
        if self.plan is None:
            return None
        if self.refusal is not None:
            finding = f"{self.refusal.field}={self.refusal.value!r}: {self.refusal.problem}"
            return Check("gpu memory", Level.WARN, finding, self.refusal.remedy)
        spare = format_size(self.plan.spare_bytes)
        return Check("gpu memory", Level.OK, f"device=cuda fits with {spare} to spare")

    def as_json(self) -> dict[str, Any]:
        """For scripts: the parts in bytes, or the problem."""
        if self.plan is None:
            return {"problem": self.problem}
        computed = {"spare_bytes": self.plan.spare_bytes, "fits": self.plan.fits}
        refusal = str(self.refusal) if self.refusal is not None else None
        return dataclasses.asdict(self.plan) | computed | {"refusal": refusal}

    def show(self, output: Output) -> None:
        """The parts in lines for people, or the reason."""
        if self.plan is None:
            output.line(f"gpu memory: no plan, because {self.problem}")
        else:
            output.columns(_rows(self.plan), ("gpu memory with device=cuda", "size"))
        output.line()


def gpu_report(model: str, config: EngineConfig) -> PlanReport:
    """The plan for the GPU of this machine. Imports torch, and looks at the GPU if there is one."""
    memory = this_gpu()
    if isinstance(memory, str):
        return PlanReport(problem=memory)
    return plan_report(memory, model, choose_dtype(config.dtype, "cuda"), config)


def this_gpu() -> DeviceMemory | str:
    """Memory of the GPU of this machine, or why there is none to compute on. Imports torch."""
    try:
        # Imported only here: it takes seconds, and fails where transformers is not the right one.
        import torch

        from streamkv.device import gpu_problem
    except ImportError as error:
        return f"the engine cannot be imported ({error})"
    problem = gpu_problem()
    if problem is not None:
        return problem
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return DeviceMemory(total_bytes, free_bytes)


def plan_report(memory: DeviceMemory, model: str, dtype: str, config: EngineConfig) -> PlanReport:
    """The plan for a GPU with that memory."""
    directory = local_directory(model)
    if directory is None:
        return PlanReport(problem=f"{model} is not on this machine yet")
    try:
        size, spec = read_size(directory, dtype)
    except KeyError as error:
        return PlanReport(problem=f"the config in {directory} states no {error}")
    except (OSError, ValueError) as error:
        return PlanReport(problem=f"the size of {model} cannot be read ({error})")
    plan = plan_gpu(memory, size, spec, config)
    try:
        require_room(plan, spec, config)
    except ConfigError as error:
        return PlanReport(plan, error)
    return PlanReport(plan)


def _rows(plan: GpuPlan) -> list[tuple[str, str]]:
    parts = {
        "free": plan.free_bytes,
        "weights": plan.weight_bytes,
        "graphs and workspaces": plan.graph_bytes,
        "logits and activations": plan.working_bytes,
        "queries and scores for recall": plan.recall_bytes,
        "digests for recall": plan.digest_bytes,
        f"gpu pool, {plan.num_blocks} blocks": plan.pool_bytes,
    }
    for name in ("queries and scores for recall", "digests for recall"):
        if parts[name] == 0:
            del parts[name]
    rows = [(name, format_size(num_bytes)) for name, num_bytes in parts.items()]
    spare = format_size(plan.spare_bytes) if plan.fits else "none"
    return [*rows, ("to spare", spare), ("max_sessions that fit", str(plan.max_sessions))]
