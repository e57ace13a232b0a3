"""Options that several commands share, made from the fields of `EngineConfig` and `SamplingParams`.

Invariant: defaults and checks are those of the two classes; here stand only names and help. What
is not given on the command line is not given to them either.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from streamkv.cli.places import chosen_store
from streamkv.config import EngineConfig, choose_dtype
from streamkv.model_files import DEFAULT_MODEL
from streamkv.sampling_params import SamplingParams

ModelOption = Annotated[
    str, typer.Option("--model", help="smollm2-135m, a directory, a .gguf file or a hub id.")
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Directory of sessions and stored blocks; one model each.",
        show_default="~/.local/share/streamkv/MODEL",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Type of weights and KV: auto, float32, bfloat16, float16.",
        show_default="auto",
    ),
]
SystemOption = Annotated[
    str | None, typer.Option("--system", help="System prompt of a new session, kept whole.")
]
TenantOption = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        help="Share blocks with the sessions of this tenant; else nothing is shared.",
    ),
]
SharedPromptOption = Annotated[
    bool,
    typer.Option("--shared-prompt", help="Share the blocks of --system with every tenant."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts, nothing else.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

Command = Callable[..., None]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a command needs to open an engine."""

    model: str
    config: EngineConfig

    @property
    def store(self) -> Path:
        """The store; only for commands that have one."""
        assert self.config.store is not None
        return Path(self.config.store)


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a dataclass as an option."""

    name: str
    flag: str
    kind: type
    help: str

    def parameter(self, owner: type) -> inspect.Parameter:
        [field] = [field for field in dataclasses.fields(owner) if field.name == self.name]
        show_default = False if field.default is None else str(field.default)
        option = typer.Option(*self.flag.split(), help=self.help, show_default=show_default)
        annotation = Annotated[self.kind | None, option]  # type: ignore[name-defined]
        return _keyword(self.name, annotation, None)


_ENGINE = (
    _Field("window_size", "--window --window-size", int, "Newest tokens attended."),
    _Field("num_sink_tokens", "--sinks", int, "First tokens attended for ever."),
    _Field("dtype", "--dtype", str, "auto, float32, bfloat16 or float16."),
    _Field("device", "--device", str, "auto, cpu or cuda: a GPU."),
    _Field("num_threads", "--threads", int, "Threads of the CPU path; all cores unless given."),
    _Field("compile", "--compile", str, "Compile the decode step in the background: auto or off."),
)
_PERSISTENT = (
    _Field("cpu_bytes", "--cpu-bytes", str, "Size of the cpu pool; 0 turns it off."),
    _Field("ssd_bytes", "--ssd-bytes", str, "Limit of the store's file."),
    _Field("codec", "--codec", str, "Of stored blocks: zstd or raw, both lossless."),
    _Field("retain", "--retain", str, "Blocks to keep: all, window or none."),
    _Field("on_pressure", "--on-pressure", str, "When the disk is too slow: wait or drop."),
    _Field(
        "checkpoint_tokens",
        "--checkpoint-tokens",
        int,
        "Tokens between checkpoints; 0.5 s unless given.",
    ),
    _Field("session_tokens", "--session-tokens", int, "Most tokens that a session may have."),
    _Field("max_stored_sessions", "--max-stored-sessions", int, "Most sessions of the store."),
    _Field(
        "expire_after", "--expire-after", str, "Delete sessions asleep for longer, such as 30d."
    ),
)
_ATTENTION = (
    _Field("attention", "--attention", str, "Mode of a new session: window, recall or full."),
    _Field("recall_blocks", "--recall-blocks", int, "Old blocks a session may recall; 0: none."),
    _Field("recall_stride", "--recall-stride", int, "Tokens between two choices of old blocks."),
    _Field(
        "position_policy",
        "--position-policy",
        str,
        "How far away recalled blocks seem: far, cache or absolute.",
    ),
    _Field("digest_bytes", "--digest-bytes", str, "On a GPU, of what blocks are chosen by."),
    _Field(
        "gpu_bytes", "--gpu-bytes", str, "Size of the gpu pool; what sessions need unless given."
    ),
)
_MANY = (
    _Field("max_sessions", "--max-sessions", int, "Sessions with room in the gpu pool at once."),
    _Field("turn_tokens", "--turn-tokens", int, "Tokens of a turn, where not all have room."),
    _Field("sleep_after", "--sleep-after", float, "Seconds after which an idle session sleeps."),
    _Field("mixed_chunk", "--mixed-chunk", int, "Tokens read at a time while others answer."),
    _Field("batch_invariant", "--batch-invariant", bool, "The same bits whoever shares a step."),
)
_CHUNK = (_Field("prefill_chunk", "--chunk", int, "Tokens computed in one step."),)
_SAMPLING = (
    _Field("temperature", "--temperature", float, "0 always takes the likeliest token."),
    _Field("top_k", "--top-k", int, "Keep so many of the likeliest tokens; 0 keeps all."),
    _Field("top_p", "--top-p", float, "Keep the likeliest tokens up to this probability."),
    _Field("min_p", "--min-p", float, "Keep tokens so likely relative to the likeliest."),
    _Field("repetition_penalty", "--repetition-penalty", float, "Above 1 discourages repetition."),
    _Field("seed", "--seed", int, "The same seed draws the same answer; drawn anew unless given."),
    _Field("max_tokens", "--max-tokens", int, "Most tokens of an answer; no limit unless given."),
)


_WORKLOAD = {
    "num_sessions": "--sessions",
    "num_awake": "--awake",
    "num_tokens": "--tokens",
    "tokens_per_day": "--tokens-per-day",
    "sleeps_per_day": "--sleeps-per-day",
    "pcie_gbps": "--pcie-gbps",
    "ssd_gbps": "--ssd-gbps",
    "ssd_endurance_tbw": "--ssd-endurance-tbw",
    "gpu_memory": "--gpu-memory",
}


def flag_of(field: str) -> str | None:
    """The option by which a field is given on the command line; `None`: there is none."""
    known = (*_ENGINE, *_PERSISTENT, *_ATTENTION, *_MANY, *_CHUNK, *_SAMPLING)
    flags = {each.name: each.flag.split()[0] for each in known} | _WORKLOAD
    return flags.get(field)


def with_many_sessions(command: Command) -> Command:
    """The options of `with_engine`, and those that matter to many sessions at once."""
    fields = (*_ENGINE, *_ATTENTION, *_PERSISTENT, *_MANY, *_CHUNK)
    return _with_options(command, fields, has_store=True)


def with_engine(command: Command) -> Command:
    """Give a command the options of an engine with a store, as its argument `options`."""
    return _with_options(command, (*_ENGINE, *_ATTENTION, *_PERSISTENT), has_store=True)


def with_bare_engine(command: Command) -> Command:
    """Give a command the options of an engine without a store, as its argument `options`."""
    return _with_options(command, (*_ENGINE, *_CHUNK), has_store=False)


def with_sizes(command: Command) -> Command:
    """Give a command the options that sizes depend on, as its argument `options`; opens nothing."""
    wanted = {"window_size", "num_sink_tokens", "dtype", "recall_blocks", "recall_stride"}
    wanted |= {"digest_bytes", "cpu_bytes", "ssd_bytes", "checkpoint_tokens", "prefill_chunk"}
    known = (*_ENGINE, *_CHUNK, *_ATTENTION, *_PERSISTENT)
    fields = tuple(field for field in known if field.name in wanted)
    # There will be a store, else nothing sleeps; where does not matter.
    return _with_options(command, fields, has_store=False, fixed={"store": "."})


def with_sampling(command: Command) -> Command:
    """Give a command the options of a generation, as its argument `params`."""

    def run(**given: Any) -> None:
        params = SamplingParams(**_taken(given, _SAMPLING))
        command(params=params, **given)

    return _dressed(
        run, command, "params", [field.parameter(SamplingParams) for field in _SAMPLING]
    )


def _with_options(
    command: Command,
    fields: tuple[_Field, ...],
    has_store: bool,
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> Command:
    def run(**given: Any) -> None:
        model = given.pop("model")
        chosen = _taken(given, fields) | dict(fixed)
        if has_store:
            # By the type that the engine will take: a store holds one.
            dtype = choose_dtype(chosen.get("dtype", "auto"), chosen.get("device", "auto"))
            chosen["store"] = str(chosen_store(model, given.pop("store"), dtype))
        command(options=EngineOptions(model, EngineConfig(**chosen)), **given)

    extra = [_keyword("model", ModelOption, DEFAULT_MODEL)]
    if has_store:
        extra.append(_keyword("store", StoreOption, None))
    extra += [field.parameter(EngineConfig) for field in fields]
    return _dressed(run, command, "options", extra)


def _taken(given: dict[str, Any], fields: tuple[_Field, ...]) -> dict[str, Any]:
    """The values that were given for `fields`, taken out of `given`."""
    values = {field.name: given.pop(field.name) for field in fields}
    return {name: value for name, value in values.items() if value is not None}


def _dressed(
    run: Command, command: Command, replaced: str, extra: list[inspect.Parameter]
) -> Command:
    """`run` with the name and parameters of `command`, `extra` in place of one of them."""
    signature = inspect.signature(command, eval_str=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != replaced
    ]
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    parameters = [*own, *extra]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
