"""`LLM`: text in, text out."""

import copy
import dataclasses
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from spec_jax import checkpoints, distributed
from spec_jax.config import (
    AUTO,
    Activations,
    KvCacheDtype,
    LlmDtype,
    LoadingOptions,
    Offload,
    Quantization,
    SamplingParams,
    SpeculativeConfig,
    cache_directory,
    check_choice,
    check_integer,
    check_path,
)
from spec_jax.config.other_names import NOT_OF_INSTANCES
from spec_jax.config.unsupported import (
    NOT_OF_CALLS,
    NOT_OF_LLM,
    MissingAttribute,
    explaining_attributes,
    explaining_unknown,
    ignored_by_llm,
)
from spec_jax.engine.compile_cache import keep_programs
from spec_jax.engine.custom import DrafterFactory, DrafterSetting, choose, fingerprint
from spec_jax.engine.dispatcher import Device, Dispatcher, Entry
from spec_jax.engine.engine import Engine
from spec_jax.engine.loading import Loader, layout_of
from spec_jax.engine.methods import make_engine
from spec_jax.engine.progress import Bar
from spec_jax.engine.request_builder import Message, Prompt, RequestBuilder, match
from spec_jax.engine.requests import Request, RequestInput
from spec_jax.engine.scheduler import Scheduler
from spec_jax.engine.transcription import Sound, Transcriber
from spec_jax.engine.warm_up import compile_reading
from spec_jax.errors import ConfigError
from spec_jax.outputs import RequestOutput, StreamChunk, Transcription
from spec_jax.sharding import Layout
from spec_jax.text.messages import TemplateOptions
from spec_jax.text.tokenizer import Tokenizer


class LLM:
    """A target model, decoded with or without speculation.

    Several threads may call it: the requests of all calls, open streams included, are decoded
    together in one running batch. Siblings (`with_speculation`) have separate batches, which take
    turns step by step. If several processes decode together, only one thread of each may call
    it, because all processes must make the same calls in the same order, closing a stream included.

    Between calls it keeps the caches of its last batch, so that a prompt that continues an earlier
    text computes only the rest. They are freed when a sibling decodes, when a request needs another
    shape, or when a stream is closed and nothing else runs.

    Compiled programs are kept for later processes, 2 GiB at most, in $SPEC_JAX_CACHE/xla or
    ~/.cache/spec-jax/xla, unless JAX already has a compilation cache. So are weights that were
    packed for native code, 8 GiB at most, beside them.

    Args:
      model: the target model: a Hugging Face directory, a .gguf file, a recipe
        (.toml), a folder of a bucket (`gs://`, `s3://`) or a hub id `org/name[@revision]`.
      speculative_config: how to draft and verify; plain decoding if None. A mapping may also use
        vLLM's names (`SpeculativeConfig.of`).
      drafter: for the method `custom`, a function of a `DrafterSetting` that returns your drafter
        (`spec_jax.drafters`).
      layout: how the models are sharded over several devices or processes: a layout file
        (`sharding/*.toml`) or a `Layout`; by default JAX's first device. It decides which devices
        JAX has, so make the `LLM` before anything else uses them.
      tensor_parallel_size: instead of a layout, the number of this machine's devices that the
        models are sharded over (`Layout.tensor_parallel`); 1 is one device.
      dtype: `float32` or `bfloat16`, of weights that are not quantized, and of caches. `auto` is
        the checkpoint's dtype where the machine is fastest with it, but float32 on a CPU without
        native code, and for GGUF blocks.
      quantization: how the target's matrices are kept: `none`; rounded to `int8`, one scale an
        output, or to `int4`, a scale and a minimum for 32 inputs; or `gguf`, which keeps the
        blocks of a quantized .gguf file as they are and rounds nothing. The output is exactly
        the quantized target's. `auto` is `gguf` for such files if native code computes, and
        `none` otherwise.
      activations: what products with quantized matrices of target and draft round their inputs to.
        `int8`, for a quantized target in native code on CPU, rounds 32 neighbouring inputs to 8
        bits with one scale, as llama.cpp does: several tokens in a call then cost little more than
        one. The output is exactly what the target with such products decodes. `auto` is `int8`
        where it can be, and `float32` otherwise, which rounds nothing.
      kv_cache_dtype: `int8` keeps keys and values of target and draft in 8 bits, with a scale for
        each head of each token; the output is exactly what the target with such a cache decodes.
        `auto` keeps them in `dtype`, or on CPU in float32.
      offload: `host` keeps the matrices of the target's blocks in host memory and streams them to
        the devices in every call, for targets that do not fit; the devices hold two blocks at a
        time. Speculation amortises the transfer over the accepted tokens. The draft, and
        the layers that `early_exit` drafts with, stay on the devices.
      resident_layers: with offload `host`, how many of the first blocks stay on the devices anyway:
        as many as fit.
      max_model_len: the limit of prompt and completion together, in tokens; by default the model's.
        With LongRoPE (Phi-3 of 128k tokens) it chooses the rotary frequencies of all texts: give at
        most the original context (4,096) for the frequencies of short texts.
      max_num_seqs: the largest number of requests decoded at once; the next one follows as soon as
        one finishes.
      seed: seeds of requests without a seed derive from it.
      generation_config: `auto` samples requests without parameters as the model's
        generation_config.json says; `none` decodes them greedily.
      on_progress: called with a line of text while loading and compiling.

    Raises:
      ConfigError: an argument is unknown, a value is out of range, or two contradict each other.
      CheckpointError: a model cannot be loaded.
      VocabularyMismatchError: the draft model's token ids mean other text than the target's.
    """

    if not TYPE_CHECKING:
        __getattr__ = explaining_attributes(NOT_OF_INSTANCES)
        from_pretrained = MissingAttribute("from_pretrained", "write LLM(model)")

    @explaining_unknown(NOT_OF_LLM, ignored_by_llm)
    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        drafter: DrafterFactory | None = None,
        layout: str | os.PathLike[str] | Layout | None = None,
        tensor_parallel_size: int | None = None,
        dtype: LlmDtype = AUTO,
        quantization: Quantization | None = AUTO,
        activations: Activations = AUTO,
        kv_cache_dtype: KvCacheDtype = AUTO,
        offload: Offload = "none",
        resident_layers: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int | None = 8,
        seed: int | None = 0,
        generation_config: str = AUTO,
        on_progress: Callable[[str], None] | None = None,
    ):
        check_path("model", model)
        check_choice("generation_config", generation_config, (AUTO, "none"))
        for name, value in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len)):
            if value is not None:
                check_integer(name, value, 1)
        seed = 0 if seed is None else seed
        check_integer("seed", seed, 0, 2**64)
        speculation = choose(speculative_config, drafter)
        self.layout = layout_of(layout, tensor_parallel_size, offload)
        self._loader = Loader(
            self.layout,
            LoadingOptions(
                dtype=dtype,
                quantization=AUTO if quantization is None else quantization,
                activations=activations,
                kv_cache_dtype=kv_cache_dtype,
                offload=offload,
                resident_layers=resident_layers,
            ),
            on_progress,
        )
        if self.layout is not None:
            distributed.start(self.layout)
        keep_programs(cache_directory() / "xla")
        self._target = os.fspath(model)
        checkpoint, self.max_model_len = self._loader.target(
            self._target, max_model_len, speculation
        )
        self.tokenizer: Tokenizer = checkpoint.tokenizer
        self.eos_token_ids = checkpoint.eos_token_ids
        settings = checkpoint.sampling if generation_config == AUTO else {}
        self._default_params = checkpoints.default_sampling_params(checkpoint.name, settings)
        within = checkpoint.model.with_max_length(self.max_model_len)
        self._request_builder = RequestBuilder(checkpoint, self.max_model_len, seed)
        self._device = Device()
        self._checkpoint = dataclasses.replace(checkpoint, model=within)
        self._speculate(speculation, drafter, 8 if max_num_seqs is None else max_num_seqs)

    def __repr__(self) -> str:
        return (
            f"LLM({self.name!r}, dtype={self.dtype!r}, quantization={self.quantization!r}, "
            f"method={self.speculative_config.method!r})"
        )

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

    @property
    def engine(self) -> Engine:
        """The engine that decodes its requests."""
        return self._scheduler.engine

    @property
    def max_num_seqs(self) -> int:
        """The largest number of requests decoded at once; it may be set between calls."""
        return self._scheduler.max_num_seqs

    @max_num_seqs.setter
    def max_num_seqs(self, limit: int) -> None:
        check_integer("max_num_seqs", limit, 1)
        self._scheduler.max_num_seqs = limit

    def with_speculation(
        self,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        drafter: DrafterFactory | None = None,
    ) -> "LLM":
        """A second `LLM` that drafts or verifies differently.

        It shares the target's weights, and the draft model's if both name the same.
        """
        speculation = choose(speculative_config, drafter)
        sibling = copy.copy(self)
        sibling._request_builder = copy.copy(self._request_builder)  # the copy counts separately
        sibling._loader = copy.copy(self._loader)  # each keeps its last draft
        sibling._speculate(speculation, drafter, self.max_num_seqs)
        return sibling

    def _speculate(
        self, config: SpeculativeConfig, factory: DrafterFactory | None, max_num_seqs: int
    ) -> None:
        checkpoint, loader = self._checkpoint, self._loader

        def load_draft() -> checkpoints.Checkpoint:
            return loader.draft(config, self._target, checkpoint, self.max_model_len)

        self.speculative_config = config
        setting = DrafterSetting(config, checkpoint, load_draft, factory)
        engine, on_finished = make_engine(setting, self.max_model_len, loader.on_progress)
        self._scheduler = Scheduler(engine, max_num_seqs, self.tokenizer, on_finished)
        self._dispatcher = Dispatcher(self._scheduler, self._device)
        self._consensus = {
            "models": (self._target, checkpoint.model.config, self.dtype),
            "offload": (loader.options.offload, loader.options.resident_layers),
            "speculation": config,
            "drafter": fingerprint(config, engine.drafter),
            "layout": self.layout,
        }

    def _complete(
        self,
        prompts: Sequence[Prompt | RequestInput],
        params: Sequence[SamplingParams],
        use_tqdm: Bar = False,
    ) -> list[RequestOutput]:
        entries = self._entries(prompts, params, streaming=False)
        return self._dispatcher.outputs(entries, [each.n for each in params], use_tqdm)

    def _entries(
        self,
        prompts: Sequence[Prompt | RequestInput],
        params: Sequence[SamplingParams],
        *,
        streaming: bool,
    ) -> list[Entry]:
        """The requests, after a check that all processes will decode the same ones."""
        entries = self._request_builder.entries(prompts, params)
        requests = [request for request, _ in entries]
        distributed.agree(
            self._consensus
            | {
                "limits": (self.max_model_len, self.max_num_seqs, streaming),
                "prompts": [each.prompt_token_ids for each in requests],
                "encoder inputs": [each.source_digest for each in requests],
                "sampling parameters": params,
                "seeds": [each.key.tolist() for each in requests],
            }
        )
        return entries

    @property
    def dispatcher(self) -> Dispatcher:
        """What hands the chunks of its running batch to callers."""
        return self._dispatcher

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        may_draft: bool = True,
        prediction: str = "",
    ) -> list[Entry]:
        """The requests of a call of `generate`, one for each completion; the errors are the same.

        Other processes of the run are not asked whether they make the same ones. With `may_draft`
        false they decode plainly. `prediction` is a text that the output may resemble: the method
        `prompt_lookup` drafts from it, too, and no model reads it.
        """
        several, params = match(prompts, sampling_params, self._default_params)
        entries = self._request_builder.entries(several, params)
        predicted: list[int] = []
        if prediction and self.engine.drafter.uses_predictions:
            room = self.max_model_len * self.tokenizer.longest_token
            predicted = self.tokenizer.encode(prediction[:room], add_special_tokens=False)
        changes: Any = {"may_draft": may_draft, "prediction": predicted}
        return [(dataclasses.replace(each, **changes), origin) for each, origin in entries]

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that come without any; see `generation_config`."""
        return self._default_params

    @explaining_unknown(NOT_OF_CALLS)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Bar = False,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
          prompts: one prompt or several; each is text, token ids, or a mapping with one of them as
            its `prompt` or `prompt_token_ids`.
          sampling_params: one for all prompts, or one for each; by default
            `get_default_sampling_params`.
          use_tqdm: whether standard error shows a bar, or a function that makes one, like `tqdm`.

        Returns:
          One result per prompt, in order. A request that fails alone (NaN logits, every token
          masked) has `finish_reason` "error" and the reason in `error`.

        Raises:
          RequestError: a prompt is empty, too long, or not text; nothing was decoded.
          ConfigError: the parameters do not fit the prompts or the verification, or another
            process of this run was called with other ones.
          GenerationError: a later failure; its `outputs` are the results up to it.
        """
        several, params = match(prompts, sampling_params, self._default_params)
        return self._complete(several, params, use_tqdm)

    @explaining_unknown(NOT_OF_CALLS)
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamChunk, None, None]:
        """Completes prompts and yields the text as it comes; same arguments as `generate`.

        The concatenated texts of a prompt's chunks are its output's text, and its last chunk
        carries the output; each of several completions (`n`) has a separate output. Yielded
        chunks stay valid after a later error of the device, which is raised unchanged. Closing or
        dropping the iterator frees the memory of its requests.
        """
        several, params = match(prompts, sampling_params, self._default_params)
        entries = self._entries(several, params, streaming=True)
        return self._dispatcher.chunks(entries, streaming=True)

    def warm_up(
        self,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        num_tokens: int = 4000,
        num_seqs: int = 1,
    ) -> None:
        """Compiles what requests need; later ones of the same kinds need not wait.

        Args:
          sampling_params: of later requests, one or several ways; which of them are set matters,
            their values do not.
          num_tokens: tokens of the longest text, prompt and completion together, that nothing is
            compiled for afterwards. Caches have room for as many from now on.
          num_seqs: requests at a time that nothing is compiled for afterwards. Batches have room
            for as many from now on.
        """
        params = self._default_params if sampling_params is None else sampling_params
        ways = [params] if isinstance(params, SamplingParams) else params
        self.engine.reserve(num_tokens, num_seqs)
        longest = min(self.max_model_len - 1, num_tokens)
        kinds: dict[bool, Request] = {}
        for way in ways:
            fewest = max(1, way.min_tokens)
            # What a warm-up says is drafted from by nobody, and takes no other request's seed.
            once: Any = {"n": 1, "max_tokens": fewest, "seed": 0, "namespace": "warm-up"}
            once = dataclasses.replace(way, **once)
            has_logprobs = once.logprobs is not None
            if has_logprobs not in kinds:
                kinds[has_logprobs] = self.request([0], once)
                smaller = kinds.get(False) if has_logprobs else None
                compile_reading(self.engine, kinds[has_logprobs], longest, smaller)
            for _ in self.stream([[0]], once):
                pass

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; vLLM's name of `tokenizer`."""
        return self.tokenizer

    @explaining_unknown(NOT_OF_CALLS)
    def encode_chat(
        self, messages: Sequence[Message], **template: Unpack[TemplateOptions]
    ) -> list[int]:
        """The token ids of one conversation; same arguments and errors as `chat`."""
        return self.encode_prompt(self.tokenizer.apply_chat_template(messages, **template))

    def encode_prompt(self, text: str) -> list[int]:
        """The token ids of a chat template's text, whose special tokens are written out.

        Raises:
          RequestError: it has more characters than the context can hold.
        """
        return self._request_builder.encode(text, 0, add_special_tokens=False)

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        use_tqdm: Bar = False,
        **template: Unpack[TemplateOptions],
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        **template: Unpack[TemplateOptions],
    ) -> Iterator[StreamChunk]: ...

    @explaining_unknown(NOT_OF_CALLS)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        use_tqdm: Bar = False,
        **template: Unpack[TemplateOptions],
    ) -> list[RequestOutput] | Iterator[StreamChunk]:
        """Answers one conversation or several through the model's chat template.

        Args:
          messages: `{"role": ..., "content": ...}` of one conversation, or a list of such lists. A
            content is a text, or a list of `{"type": "text", "text": ...}`.
          sampling_params: one for all conversations, or one for each, like `generate`.
          stream: yield the answers as they come, like `stream`.
          use_tqdm: the same as in `generate`.
          add_generation_prompt: whether the prompt ends with the begin of the assistant's message.
          continue_final_message: whether the last message is continued instead of answered, with
            `add_generation_prompt=False`.
          tools: JSON schemas of functions that the template describes to the model.
          chat_template_kwargs: variables of the template, such as Qwen3's `enable_thinking`.

        Raises:
          RequestError: for the same reasons as `generate`; or a message is malformed, or the
            template refuses it.
          ConfigError: for the same reasons as `generate`; or the model has no chat template, or two
            arguments contradict each other.
        """
        prompts = self._request_builder.conversations(messages, **template)
        if stream:
            if use_tqdm:
                raise ConfigError("use_tqdm shows how many answers are complete; leave stream out.")
            return self.stream(prompts, sampling_params)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def transcribe(
        self,
        sounds: Sound | Sequence[Sound],
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        sampling_params: SamplingParams | None = None,
    ) -> list[Transcription]:
        """Transcribes audio with a speech model such as Whisper.

        Audio is read in windows of 30 seconds; windows of several files are decoded together.

        Args:
          sounds: one or several, each the path of an audio file, or samples of one channel at
            16 kHz.
          language: the spoken language, such as `de`; by default the model detects it in the first
            window.
          task: `transcribe`, or `translate` into English.
          timestamps: whether segments have begins and ends; otherwise each window is one.
          sampling_params: greedy by default. `max_tokens` is for each window, at most half of the
            decoder's context.

        Returns:
          One result for each of `sounds`, in order.

        Raises:
          RequestError: one of `sounds` cannot be read.
          ConfigError: the model is not a speech model, or does not know the language or the task.
        """
        transcriber = Transcriber(self._checkpoint, self._complete)
        return transcriber.run(sounds, language, task, timestamps, sampling_params)

    @property
    def reads_speech(self) -> bool:
        """Whether the target is a speech model, for `transcribe`."""
        encoder = self._checkpoint.model.config.encoder
        return encoder is not None and encoder.mel_bins > 0

    def request(
        self, prompt: Prompt | RequestInput, sampling: SamplingParams, index: int = 0
    ) -> Request:
        """Checks a prompt and its parameters, and makes a request of them.

        `index` names the prompt in messages; the errors are the same as for `generate`.
        """
        return self._request_builder.request(prompt, sampling, index)
