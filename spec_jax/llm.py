"""`LLM`: text in, text out."""

import copy
import dataclasses
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spec_jax import checkpoints, distributed
from spec_jax.checkpoints.packing import Packing
from spec_jax.config import (
    AUTO,
    KV_CACHE_DTYPES,
    LLM_DTYPES,
    OFFLOADS,
    QUANTIZATIONS,
    SamplingParams,
    SpeculativeConfig,
    cache_directory,
)
from spec_jax.engine.compile_cache import keep_programs
from spec_jax.engine.detokenization import Row
from spec_jax.engine.engine import Engine
from spec_jax.engine.intake import Intake, Prompt, as_list, completions_of, match_params, text_of
from spec_jax.engine.methods import Setting, make_draft_length_policy, make_drafting
from spec_jax.engine.offloading import layout_to_offload, offloaded
from spec_jax.engine.requests import Request, Start
from spec_jax.engine.scheduler import ROUNDS_PER_CALL, ROUNDS_PER_CHUNK, Scheduler
from spec_jax.engine.transcription import Transcriber
from spec_jax.errors import ConfigError, GenerationError
from spec_jax.kernels import native
from spec_jax.models.config import TransformerConfig
from spec_jax.outputs import RequestOutput, StreamChunk, Transcription
from spec_jax.sharding import Layout, Placement
from spec_jax.text.tokenizer import Tokenizer

Sound = str | os.PathLike[str] | np.ndarray
Message = Mapping[str, str]


class LLM:
    """A target model, decoded with or without speculation.

    Several threads may call it, and its siblings (`with_speculation`): `generate` and `chat` wait
    for each other; a `stream` holds the device only while its next chunk is made, so that other
    calls continue in between, in the same thread too. If several processes decode together, only
    one thread of each may call it, because their calls must have the same order.

    Compiled programs are kept for later processes, 2 GiB at most, in $SPEC_JAX_CACHE/xla or
    ~/.cache/spec-jax/xla, unless JAX has a compilation cache of its own.

    Args:
      model: the target, which is what speaks: a Hugging Face directory, a .gguf file, a recipe
        (.toml) or a hub id `org/name[@revision]`.
      speculative_config: how to draft and verify; plain decoding if None. A mapping may also have
        the names of vLLM's (`SpeculativeConfig.from_dict`).
      layout: how the models are sharded over several devices or processes: a layout file
        (sharding/*.toml) or a `Layout`; by default JAX's first device. It decides which devices
        JAX has, so make the `LLM` before anything else uses them.
      tensor_parallel_size: instead of a layout, the number of this machine's devices that the
        models are sharded over (`Layout.tensor_parallel`).
      dtype: `float32` or `bfloat16`, of weights that are not quantized, and of caches. `auto` is
        the checkpoint's own where the machine is fastest with it: float32 on a CPU without native
        code, and for GGUF blocks.
      quantization: how the target's matrices are kept: `none`; rounded to `int8`, one scale an
        output, or to `int4`, a scale and a minimum for 32 inputs; or `gguf`, which keeps the
        blocks of a quantized .gguf file as they are and rounds nothing. The output is exactly that
        of the quantized target. `auto` is `gguf` for such files if native code computes, and
        `none` otherwise.
      kv_cache_dtype: `int8` keeps keys and values of target and draft in 8 bits, with a scale for
        each head of each token; the output is exactly that of the target with such a cache. `auto`
        keeps them in `dtype`, or on CPU in float32.
      offload: `host` keeps the matrices of the target's blocks in host memory and streams them to
        the devices in every call, for targets that do not fit; the devices hold two blocks at a
        time. Speculation divides the time of that by the tokens that a call keeps. The draft, and
        the layers that `early_exit` drafts with, stay on the devices.
      resident_layers: with offload `host`, how many blocks, the first ones, stay on the devices all
        the same: as many as fit.
      max_model_len: most tokens of prompt and completion together; the model's own by default. With
        LongRoPE (Phi-3 of 128k tokens) it chooses the rotary frequencies of all texts: at most the
        original context (4,096) for those of short ones.
      max_num_seqs: most requests decoded at once; further ones follow as soon as one finishes.
      seed: seeds of requests without their own seed derive from it.
      on_progress: called with a line of text while loading and compiling.

    Raises:
      ConfigError: a value is out of range, or two contradict each other.
      CheckpointError: a model cannot be loaded.
      VocabularyMismatchError: the draft model's token ids mean other text than the target's.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        layout: str | os.PathLike[str] | Layout | None = None,
        tensor_parallel_size: int | None = None,
        dtype: str = AUTO,
        quantization: str = AUTO,
        kv_cache_dtype: str = AUTO,
        offload: str = "none",
        resident_layers: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        seed: int = 0,
        on_progress: Callable[[str], None] | None = None,
    ):
        for name, choice, known in (
            ("dtype", dtype, LLM_DTYPES),
            ("quantization", quantization, QUANTIZATIONS),
            ("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES),
            ("offload", offload, OFFLOADS),
        ):
            if choice not in known:
                raise ConfigError(f"{name} is {choice!r}; choose one of {', '.join(known)}.")
        for name, value in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; give at least 1.")
        if isinstance(speculative_config, Mapping):
            speculative_config = SpeculativeConfig.from_dict(speculative_config)
        if tensor_parallel_size is not None:
            if layout is not None or tensor_parallel_size < 1:
                raise ConfigError(
                    f"tensor_parallel_size is {tensor_parallel_size} and layout is {layout}; give "
                    "one of the two, and at least 1."
                )
            layout = Layout.tensor_parallel(tensor_parallel_size)
        if not 0 <= seed < 2**64:
            raise ConfigError(f"seed is {seed}; give a whole number in [0, 2**64).")
        if layout is not None and not isinstance(layout, Layout):
            layout = Layout.read(layout)
        if offload == "host":
            layout = layout_to_offload(layout)
        if layout is not None:
            distributed.start(layout)
        keep_programs(cache_directory() / "xla")
        self.layout = layout
        self._offload = offload, resident_layers
        self._dtype, self._quantization = dtype, quantization
        self._rounds_cache = kv_cache_dtype == "int8"
        self._on_progress = on_progress
        self._target = os.fspath(model)
        checkpoint = self._load("target", self._target, quantization)
        self.tokenizer: Tokenizer = checkpoint.tokenizer
        self.eos_token_ids = checkpoint.eos_token_ids
        context = checkpoint.model.config.max_position
        ends = not checkpoint.model.config.relative_buckets
        if max_model_len is not None and max_model_len > context and ends:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but {checkpoint.name} was made for a context "
                f"of {context} tokens; give at most {context}."
            )
        self.max_model_len = max_model_len or context
        within = checkpoint.model.within(self.max_model_len)
        self.max_num_seqs = max_num_seqs
        self._intake = Intake(checkpoint, self.max_model_len, seed)
        self._lock, self._request_ids = threading.RLock(), itertools.count()
        self._draft: tuple[tuple[str, str], checkpoints.Checkpoint] | None = None
        self._checkpoint = dataclasses.replace(checkpoint, model=within)
        self._speculate(speculative_config or SpeculativeConfig())

    @property
    def name(self) -> str:
        """The target's name."""
        return self._checkpoint.name

    @property
    def dtype(self) -> str:
        """The target's dtype; see the argument."""
        return self._checkpoint.model.dtype.name

    @property
    def quantization(self) -> str:
        """How the target's matrices are kept; see the argument."""
        return self._checkpoint.quantization

    def with_speculation(self, speculative_config: SpeculativeConfig) -> "LLM":
        """A second `LLM` that drafts or verifies differently.

        It shares the target's weights, and the draft's if it names the same.
        """
        sibling = copy.copy(self)
        sibling._intake = copy.copy(self._intake)  # which counts its own requests
        sibling._speculate(speculative_config)
        return sibling

    def _load(self, role: str, reference: str, quantization: str) -> checkpoints.Checkpoint:
        layout = self.layout
        on_cpu = layout is None and jax.default_backend() == "cpu"

        def place(config: TransformerConfig) -> Placement | None:
            found = layout and layout.place(role, config.axis_sizes)
            return found if role == "draft" else offloaded(found, config, *self._offload)

        checkpoint = checkpoints.load(
            reference,
            dtype=self._dtype,
            packing=Packing(quantization, native=on_cpu and native.available(self._on_progress)),
            place=place,
            target=self._checkpoint if role == "draft" else None,
            on_progress=self._on_progress,
        )
        model = dataclasses.replace(checkpoint.model, rounds_cache=self._rounds_cache)
        return dataclasses.replace(checkpoint, model=model)

    def _speculate(self, config: SpeculativeConfig) -> None:
        def load_draft() -> checkpoints.Checkpoint:
            assert config.draft is not None  # SpeculativeConfig has checked it
            asked, found = self._quantization, self.quantization
            quantization = config.draft_quantization or asked
            if config.draft == self._target and quantization in (asked, found):
                return self._checkpoint
            if self._draft is None or self._draft[0] != (config.draft, quantization):
                draft = self._load("draft", config.draft, quantization)
                draft = dataclasses.replace(draft, model=draft.model.within(self.max_model_len))
                self._draft = (config.draft, quantization), draft
            return self._draft[1]

        self.speculative_config = config
        drafting = make_drafting(Setting(config, self._checkpoint, load_draft))
        self._learn = drafting.learn or (lambda request, token_ids: None)
        self.engine = Engine(
            self._checkpoint.model,
            drafting.drafter,
            make_draft_length_policy(config),
            config.verification,
            scoring=config.scoring,
            max_model_len=self.max_model_len,
            inputs=drafting.inputs,
            host=drafting.host,
            on_progress=self._on_progress,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
          prompts: one prompt or several; each is text, token ids, or a mapping with one of them as
            its `prompt` or `prompt_token_ids`.
          sampling_params: one for all prompts, or one for each.

        Returns:
          One result per prompt, in order. A request that fails by itself (NaN logits, every token
          masked) has `finish_reason` "error" and the reason in `error`.

        Raises:
          RequestError: a prompt is empty, too long, or not text; nothing was decoded.
          ConfigError: the parameters do not fit the prompts or the verification, or another
            process of this run was called with others.
          GenerationError: a later failure; its `outputs` are the results up to it.
        """
        several = as_list(prompts)
        return self._generate(several, match_params(sampling_params, len(several)))

    def _generate(
        self, prompts: Sequence[Prompt | Start], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        with self._lock:
            rows = self._rows(prompts, params, ROUNDS_PER_CALL)
            found: list[list[RequestOutput]] = [[] for _ in prompts]
            try:
                for chunk in self._decode(rows, ROUNDS_PER_CALL):
                    if chunk.output is not None:
                        found[chunk.index].append(chunk.output)
            except Exception as error:
                outputs = [
                    RequestOutput.joined(each) if len(each) == sampling.n else None
                    for each, sampling in zip(found, params, strict=True)
                ]
                done = sum(output is not None for output in outputs)
                raise GenerationError(
                    f"decoding failed after {done} of {len(found)} prompts, whose results are this "
                    f"error's `outputs`: {error}",
                    outputs,
                ) from error
        return [RequestOutput.joined(each) for each in found]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamChunk]:
        """Completes prompts and yields the text as it comes; arguments as for `generate`.

        The concatenated texts of a prompt's chunks are its output's text, and its last chunk
        carries the output; each of several completions (`n`) has an output of its own. Yielded
        chunks stay valid after a later error of the device, which is raised unchanged. Closing or
        dropping the iterator frees the memory of its requests.
        """
        several = as_list(prompts)
        params = match_params(sampling_params, len(several))
        with self._lock:
            rows = self._rows(several, params, ROUNDS_PER_CHUNK)
        return self._decode(rows, ROUNDS_PER_CHUNK)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several through the model's chat template.

        Args:
          messages: `{"role": ..., "content": ...}` of one conversation, or a list of such lists.
          sampling_params: one for all conversations, or one for each.
        """
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self.tokenizer.apply_chat_template(list(each)) for each in several]  # type: ignore[arg-type]
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        outputs = self.generate(ids, sampling_params)
        pairs = zip(outputs, texts, strict=True)
        return [dataclasses.replace(output, prompt=text) for output, text in pairs]

    def transcribe(
        self,
        sounds: Sound | Sequence[Sound],
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        sampling_params: SamplingParams | None = None,
    ) -> list[Transcription]:
        """Writes down what is said in sounds, with a model of speech such as Whisper.

        A sound is read in windows of 30 seconds; those of several sounds are decoded together.

        Args:
          sounds: one or several, each the path of a sound file, or samples of one channel at
            16 kHz.
          language: that is spoken, such as `de`; by default the model tells it from the begin.
          task: `transcribe`, or `translate` into English.
          timestamps: whether segments have begins and ends; otherwise each window is one.
          sampling_params: greedy by default. `max_tokens` is for each window, at most half of the
            decoder's context.

        Returns:
          One result per sound, in order.

        Raises:
          RequestError: a sound cannot be read.
          ConfigError: the model reads no speech, or does not know the language or the task.
        """
        several = [sounds] if isinstance(sounds, str | os.PathLike | np.ndarray) else list(sounds)
        speech, config = self._checkpoint.speech, self.engine.target.config
        if speech is None:
            raise ConfigError(f"{self.name} reads no speech; use a model such as Whisper.")
        params = sampling_params or SamplingParams(max_tokens=config.max_position)
        transcriber = Transcriber(config, speech, self.tokenizer, self._generate)
        with self._lock:
            return transcriber.run(several, language, task, timestamps, params)

    def _rows(
        self,
        prompts: Sequence[Prompt | Start],
        params: Sequence[SamplingParams],
        rounds: int,
    ) -> list[Row]:
        """The requests, after a check that all processes will decode the same ones."""
        rows = []
        for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            text, given = text_of(i, prompt)
            request_id = str(next(self._request_ids))
            for sample, own in enumerate(completions_of(sampling)):
                request = self.request(given, own, i)
                rows.append(Row(i, sample, request_id, text, request, self.tokenizer))
        distributed.agree(
            {
                "its models": (self._target, self._checkpoint.model.config, self.dtype),
                "its offload": self._offload,
                "its speculation": self.speculative_config,
                "its layout": self.layout,
                "its limits": (self.max_model_len, self.max_num_seqs, rounds),
                "its prompts": [row.request.prompt_token_ids for row in rows],
                "its sources": [_digest(row.request.source) for row in rows],
                "its sampling parameters": params,
                "its seeds": [row.request.key.tolist() for row in rows],
            }
        )
        return rows

    def _decode(self, rows: list[Row], rounds: int) -> Iterator[StreamChunk]:
        if not rows:
            return
        with self._lock:
            scheduler = Scheduler(self.engine, rows, self.max_num_seqs, rounds, self._learn)
        while scheduler.busy:
            # Not held while the caller has the chunks: it may wait for another call of ours.
            with self._lock:
                chunks = scheduler.step()
            yield from chunks

    def request(self, prompt: Prompt | Start, sampling: SamplingParams, index: int = 0) -> Request:
        """Checks a prompt and its parameters, and makes a request of them.

        `index` names it in messages; errors are those of `generate`.
        """
        if self.speculative_config.verification == "greedy" and sampling.temperature > 0:
            raise ConfigError(
                f"verification 'greedy' is exact at temperature 0 only, but prompt {index} asks "
                f"for temperature {sampling.temperature}; use verification 'token'."
            )
        return self._intake.request(prompt, sampling, index)


def _digest(source: np.ndarray | None) -> str | None:
    return None if source is None else hashlib.sha256(source.tobytes()).hexdigest()
