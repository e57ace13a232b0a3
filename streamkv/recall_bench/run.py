"""A run: all questions of some lengths in some modes, in an order that shows every length early.

One engine is open at a time: first that of the window and of recall, then the dense one. What has
been answered in the file already is not asked again.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from streamkv.config import EngineConfig, require_int
from streamkv.engine import Engine
from streamkv.errors import ConfigError, ModelError
from streamkv.model_files import resolve_model
from streamkv.recall_bench import modes
from streamkv.recall_bench.answers import AnswerFile, NotPossible, Task
from streamkv.recall_bench.asking import ask, turn_tokens
from streamkv.recall_bench.modes import DENSE, FULL, RECALL, Reading
from streamkv.recall_bench.question import QuestionMaker
from streamkv.tiers.spec import KVSpec
from streamkv.tokenizer import Tokenizer, load_tokenizer

OnProgress = Callable[[float, str], None]
"""Called with the fraction that is done and a text for people."""

OpenEngine = Callable[[EngineConfig], AbstractContextManager[Engine]]


@dataclass(frozen=True, slots=True)
class RecallPlan:
    """What is asked.

    Attributes:
        lengths: tokens of the streams.
        questions: how many for each length.
        depths: of the needles, 0 to 1, taken in turn.
        modes: that answer.
        recall_blocks: old blocks recalled into attention in mode `recall`.
        feed_in: mode in which streams are read: `window`, `recall`, or `same` as the answer's.

    Raises:
        ConfigError: a value that makes no sense.
    """

    lengths: tuple[int, ...]
    questions: int
    depths: tuple[float, ...]
    modes: tuple[str, ...]
    recall_blocks: int
    feed_in: str

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ConfigError("lengths", "", "no length", "Use some, such as 1024,4096.")
        for length in self.lengths:
            require_int("lengths", length, 1)
        require_int("questions", self.questions, 1)
        if not self.depths:
            raise ConfigError("depths", "", "no depth", "Use some, such as 0.1,0.5,0.9.")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                remedy = "Use numbers from 0 (the start of the stream) to 1 (its end)."
                raise ConfigError("depths", depth, "outside 0 to 1", remedy)
        modes.require_modes(self.modes, self.feed_in)
        require_int("recall_blocks", self.recall_blocks, 0)

    def tasks(self, answering: Sequence[str], lengths: Sequence[int]) -> Iterator[Task]:
        """Every question of `lengths` for each mode of `answering`."""
        for index in range(self.questions):
            for length in lengths:
                for mode in answering:
                    yield Task(length, index, mode)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What has to be known of a model before it is loaded.

    Attributes:
        tokenizer: of the model.
        trained_length: positions seen in training.
        spec: layout of its KV.
    """

    tokenizer: Tokenizer
    trained_length: int
    spec: KVSpec

    @classmethod
    def read(
        cls, model: str, dtype: str, on_progress: Callable[[str], None] | None = None
    ) -> "ModelFacts":
        """Read config and tokenizer, no weights.

        Raises:
            ModelError: not found, or its config does not state its sizes.
        """
        directory = resolve_model(model, on_progress)
        try:
            config = json.loads((directory / "config.json").read_text("utf-8"))
            config = config.get("text_config", config)
            num_heads = config["num_attention_heads"]
            spec = KVSpec(
                config["num_hidden_layers"],
                config.get("num_key_value_heads") or num_heads,
                config.get("head_dim") or config["hidden_size"] // num_heads,
                dtype,
            )
            trained_length = int(config["max_position_embeddings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"model={model!r}: its config does not state its sizes ({error!r}). "
                f"Check {directory / 'config.json'}."
            ) from error
        return cls(load_tokenizer(directory), trained_length, spec)


class RecallRun:
    """Carries out a plan.

    Args:
        plan: what is asked.
        config: options of the engine; its window is that of all modes but `dense`.
        facts: of the model.
        maker: makes the questions.
        file: takes the answers.
        open_engine: opens an engine of the model.
        on_progress: told where the run stands.
    """

    def __init__(
        self,
        plan: RecallPlan,
        config: EngineConfig,
        facts: ModelFacts,
        maker: QuestionMaker,
        file: AnswerFile,
        open_engine: OpenEngine,
        on_progress: OnProgress = lambda fraction, text: None,
    ) -> None:
        self._plan = plan
        self._config = config
        self._facts = facts
        self._maker = maker
        self._file = file
        self._open_engine = open_engine
        self._on_progress = on_progress
        # For `dense`: the stream, what comes after it, and a whole number of blocks.
        block_size = facts.spec.block_size
        self._room = -(-turn_tokens(facts.tokenizer) // block_size) * block_size
        self._done = self._total = 0

    def execute(self) -> None:
        """Ask what has not been answered yet.

        Raises:
            ConfigError, InputError, ModelError: as `Engine` and `QuestionMaker.make`.
        """
        near = [mode for mode in self._plan.modes if mode != DENSE]
        dense = [DENSE] if DENSE in self._plan.modes else []
        fitting = self._fitting_lengths() if dense else []
        near_tasks = self._file.missing(self._plan.tasks(near, self._plan.lengths))
        dense_tasks = self._file.missing(self._plan.tasks(dense, fitting))
        self._done, self._total = 0, sum(task.length for task in [*near_tasks, *dense_tasks])
        if near_tasks:
            readings = modes.readings(near, self._plan.feed_in)
            self._ask_all(self._near_config(near), near_tasks, readings)
        if dense_tasks:
            longest = max(task.length for task in dense_tasks)
            config = modes.dense_config(self._config, longest + self._room)
            self._ask_all(config, dense_tasks, [Reading(DENSE, (DENSE,))])

    def _fitting_lengths(self) -> list[int]:
        """Lengths that the model was trained for; says why of the others."""
        fitting = []
        for length in self._plan.lengths:
            num_tokens = length + self._room + self._config.num_sink_tokens
            if num_tokens <= self._facts.trained_length:
                fitting.append(length)
            else:
                reason = (
                    f"{length:,} tokens with the question make {num_tokens:,}, beyond the trained "
                    f"length of {self._facts.trained_length:,}"
                )
                self._file.refuse(NotPossible(DENSE, length, reason))
        return fitting

    def _near_config(self, near: Sequence[str]) -> EngineConfig:
        needed = {*near, self._plan.feed_in} & {RECALL, FULL}
        if not needed:
            return modes.window_config(self._config, is_forking=len(near) > 1)
        attention = RECALL if RECALL in needed else FULL
        longest = max(self._plan.lengths) + self._room
        blocks, spec = self._plan.recall_blocks if RECALL in needed else 0, self._facts.spec
        config = self._config
        if FULL in near:
            config = modes.with_room_for_full(config, spec, longest, blocks)
        return modes.recall_config(config, spec, attention, blocks, longest)

    def _ask_all(
        self, config: EngineConfig, tasks: Sequence[Task], readings: Sequence[Reading]
    ) -> None:
        with self._open_engine(config) as engine:
            wanted: dict[tuple[int, int], set[str]] = {}
            for task in tasks:
                wanted.setdefault((task.length, task.index), set()).add(task.mode)
            for (length, index), answering in wanted.items():
                question = self._maker.make(length, index)
                for reading in readings:
                    left = tuple(mode for mode in reading.modes if mode in answering)
                    if not left:
                        continue
                    label = f"{length:,} tokens in {reading.fed_in}"
                    told = self._telling(label)
                    asked = Reading(reading.fed_in, left)
                    for answer in ask(engine, question, asked, self._plan.recall_blocks, told):
                        self._done += length
                        self._file.append(answer)
                        told(0)

    def _telling(self, label: str) -> Callable[[int], None]:
        def tell(num_tokens: int) -> None:
            done = self._done + num_tokens
            num_answers = len(self._file.answers)
            text = f"{num_answers} answers, {done:,} tokens, {label}"
            self._on_progress(min(done / max(self._total, 1), 1.0), text)

        return tell
