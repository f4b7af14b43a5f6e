"""Other installed libraries in the same run, with the same weights, prompts and threads."""

import dataclasses
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from spec_jax.benchmarking.results import BenchRequest, Setting, System
from spec_jax.benchmarking.systems import BenchTask, digest, system_of
from spec_jax.checkpoints import locate
from spec_jax.checkpoints.bucket import weights_in
from spec_jax.checkpoints.draft_directory import MANIFEST
from spec_jax.checkpoints.files import read_json
from spec_jax.config import COPIES, SpeculativeConfig
from spec_jax.errors import BenchmarkError, ConfigError, did_you_mean
from spec_jax.llm import LLM

TRANSFORMERS, LLAMA_CPP = "transformers", "llama-cpp"
BASELINES = {TRANSFORMERS: ("torch", "torch"), LLAMA_CPP: ("llama_cpp", "llama-cpp-python")}
"""Name -> the module that it needs, and the package of it, which this one does not bring along."""
THREADS = os.cpu_count() or 1
GREEDY = Setting()


def check_baseline(name: str) -> None:
    """Refuses a library that is not known or not installed.

    Raises:
      ConfigError: with what to install.
    """
    if name not in BASELINES:
        raise ConfigError(f"baseline is {name!r}.{did_you_mean(name, BASELINES)}")
    module, package = BASELINES[name]
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"baseline {name!r} needs {package}: pip install {package}.")


class Completion(NamedTuple):
    """The generated tokens, the target's calls, and seconds to the first token and to the end."""

    token_ids: list[int]
    calls: int
    first_token_seconds: float
    seconds: float


@dataclasses.dataclass
class Baseline:
    """A system of another library: one request at a time.

    `complete` is like `complete_with_transformers` without the model, and `stops` are
    end-of-sequence tokens.
    """

    system: System
    complete: Callable[..., Completion]
    stops: Sequence[int]

    def can(self, setting: Setting, batch_size: int) -> bool:
        """Only single rows: each library pads and schedules batches in another way."""
        return batch_size == 1

    def run(self, task: BenchTask) -> tuple[float, list[BenchRequest]]:
        """Decodes the prompts one after another."""
        begin, requests = time.perf_counter(), []
        for prompt, seed in zip(task.prompts, task.seeds, strict=True):
            ids, calls, first, seconds = self.complete(
                prompt.token_ids,
                task.max_tokens,
                task.setting,
                seed=seed,
                stops=() if task.ignore_eos else self.stops,
            )
            requests.append(
                BenchRequest(
                    prompt=prompt.number,
                    category=prompt.category,
                    prompt_tokens=len(prompt.token_ids),
                    tokens=len(ids),
                    finish_reason="length" if len(ids) == task.max_tokens else "stop",
                    digest=digest(ids),
                    rounds=calls,
                    first_token_seconds=first,
                    seconds=seconds,
                    decode_seconds=max(seconds - first, 0.0),
                )
            )
        return time.perf_counter() - begin, requests


def prepare_baselines(
    names: Sequence[str],
    llm: LLM,
    reference: str,
    configs: Sequence[SpeculativeConfig],
    on_note: Callable[[str], None],
) -> Iterator[Baseline]:
    """Loads other libraries' models and yields their systems.

    The methods are taken from our systems, if the libraries have them too. `llm` gives the target's
    precision and end-of-sequence tokens; `on_note` is called with what is left out, and why.
    """
    if not names:
        return
    _, path = locate(reference, lambda line: None)
    if weights_in(path) is not None:
        raise BenchmarkError(
            f"{reference} is in an object store, where other libraries do not read it; copy it to "
            "a disk, or leave --baseline out."
        )
    if TRANSFORMERS in names:
        yield from _transformers(path, llm, configs, on_note)
    if LLAMA_CPP in names:
        if path.suffix != ".gguf":
            on_note(f"llama-cpp is left out: it reads .gguf files, and the target is {path.name}")
            return
        complete = partial(complete_with_llama_cpp, open_llama_cpp(path, llm.max_model_len))
        yield Baseline(system_of(SpeculativeConfig(), "llama.cpp"), complete, llm.eos_token_ids)


def _transformers(
    path: Path,
    llm: LLM,
    configs: Sequence[SpeculativeConfig],
    on_note: Callable[[str], None],
) -> Iterator[Baseline]:
    import torch

    torch.set_num_threads(THREADS)
    dtype = getattr(torch, llm.dtype)
    device = _torch_device(llm.engine.target.platform)
    try:
        model = load_transformers(path, dtype, device)
    except Exception as error:  # of any kind: what it cannot read is for it to say
        raise BenchmarkError(
            f"transformers cannot read {path}: {_reason(error)}; leave --baseline transformers out."
        ) from error
    drafts: dict[str, Any] = {}
    for config in (SpeculativeConfig(), *configs):
        usual = (config.draft_length_policy, config.verification, config.scoring)
        if usual != ("constant", "coupled", "block") or config.num_drafts > 1:
            continue
        options: dict[str, Any] = {}
        if config.method == "prompt_lookup":
            options = {"prompt_lookup_num_tokens": config.lookahead}
        elif config.method == "draft_model" and config.draft:
            if config.draft not in drafts:
                drafts[config.draft] = _draft(config.draft, model, on_note)
            if drafts[config.draft] is None:
                continue
            options = {"assistant_model": drafts[config.draft], "lookahead": config.lookahead}
        elif config.method != "none":
            continue
        complete = partial(complete_with_transformers, model, **options)
        yield Baseline(system_of(config, TRANSFORMERS), complete, llm.eos_token_ids)


def _torch_device(platform: str) -> str:
    """Where PyTorch computes beside a target on this platform.

    Raises:
      BenchmarkError: it cannot compute there, and its times elsewhere would not compare.
    """
    import torch

    if platform == "cpu":
        return "cpu"
    if platform == "gpu" and torch.cuda.is_available():
        return "cuda"
    raise BenchmarkError(
        f"transformers cannot be compared on this {platform.upper()}: PyTorch {torch.__version__} "
        "computes on CPUs and with CUDA on GPUs; leave --baseline transformers out, or install a "
        "PyTorch with CUDA on a machine with a GPU."
    )


def _draft(reference: str, target: Any, on_note: Callable[[str], None]) -> Any:
    """A draft for a target, both of transformers; None, with a note, if it cannot read it."""
    if reference in COPIES:
        on_note(f"transformers has no draft {reference}, and no row of it")
        return None
    _, path = locate(reference, lambda line: None)
    try:
        return load_transformers(path, target.dtype, target.device, target)
    except Exception as error:
        note = f"transformers cannot read the draft {path.name}, and has no row of it"
        on_note(f"{note}: {_reason(error)}")
        return None


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def load_transformers(
    path: Path, dtype: Any, device: Any = "cpu", target: Any | None = None
) -> Any:
    """A causal language model of transformers, from a directory or a .gguf file.

    `dtype` and `device` are torch's, and a draft may borrow weights from its `target`.

    Raises:
      ValueError: weights are missing; transformers itself would draw them at random.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, logging

    # It warns of weights that a draft borrows, which is checked below, and draws bars of progress.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if path.suffix == ".gguf":
        # What `from_pretrained(gguf_file=...)` does, without the `accelerate` that it asks for.
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config = dict(load_gguf_checkpoint(path)["config"])
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config)
        )
        read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
        lacking = model.load_state_dict(read["tensors"], strict=False).missing_keys
        if set(lacking) - {"lm_head.weight"}:  # which may be the embedding
            raise ValueError(f"it finds no {lacking[0]} there")
        model.tie_weights()
        model = model.to(dtype)
    else:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, output_loading_info=True
        )
        model, info = loaded
        lacking = set(info["missing_keys"])
        if target is not None and (path / MANIFEST).is_file():
            lacking -= _borrow(model, target, read_json(path / MANIFEST))
        if lacking:
            raise ValueError(f"it finds no {min(lacking)} there")
    model.generation_config = GenerationConfig(pad_token_id=0)  # its sampling is given, not found
    return model.to(device).eval()


def _borrow(draft: Any, target: Any, manifest: Mapping[str, Any]) -> set[str]:
    """Completes a draft that `spec-jax train-draft` wrote with its target's weights.

    It proposes the tokens that it was trained to propose, as here. Returns the names, of
    transformers, of the weights that it got.
    """
    import torch

    names = {module: f"{name}.weight" for name, module in draft.named_modules()}
    got = set()
    if "embed.weight" in manifest["borrowed"]:
        got.add(names[draft.get_input_embeddings()])
        draft.set_input_embeddings(target.get_input_embeddings())
    if "head.weight" in manifest["borrowed"]:
        got.add(names[draft.get_output_embeddings()])
        weight = target.get_output_embeddings().weight
        head = torch.nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        head.weight = weight
        if manifest["outputs"] is not None:
            others = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
            others[manifest["outputs"]] = False
            head.register_forward_hook(lambda _, __, out: out.masked_fill(others, -torch.inf))
        draft.set_output_embeddings(head)
    return got


def complete_with_transformers(
    model: Any,
    ids: list[int],
    tokens: int,
    setting: Setting = GREEDY,
    *,
    seed: int = 0,
    stops: Sequence[int] = (),
    lookahead: int | None = None,
    **options: Any,
) -> Completion:
    """One request of transformers: at most `tokens` tokens after the prompt `ids`.

    With `lookahead` the option `assistant_model` drafts this many tokens in each round, as here:
    without schedule, and without a stop at a token of low confidence. Further options are
    arguments of `generate`.
    """
    import torch

    if lookahead is not None:
        config = options["assistant_model"].generation_config
        config.num_assistant_tokens, config.assistant_confidence_threshold = lookahead, 0.0
        config.num_assistant_tokens_schedule = "constant"
    sampling: dict[str, Any] = {"do_sample": False}
    if setting.temperature:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": setting.temperature, "top_k": 0}
        sampling["top_p"] = setting.top_p
    calls: list[None] = []
    puts: list[float] = []
    streamer = SimpleNamespace(put=lambda _: puts.append(time.perf_counter()), end=lambda: None)
    hook = model.register_forward_hook(lambda *_: calls.append(None))
    begin = time.perf_counter()
    try:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids], device=model.device),
                attention_mask=torch.ones((1, len(ids)), dtype=torch.long, device=model.device),
                max_new_tokens=tokens,
                eos_token_id=list(stops) or None,
                pad_token_id=0,
                streamer=streamer,
                **sampling,
                **options,
            )
    finally:
        hook.remove()
    end = time.perf_counter()
    generated = out[0, len(ids) :].tolist()
    # The streamer gets the prompt first.
    return Completion(generated, len(calls), puts[1] - begin, end - begin)


def open_llama_cpp(path: Path, context: int) -> Any:
    """A model of llama.cpp, with all threads of this machine."""
    threads = {"n_threads": THREADS, "n_threads_batch": THREADS}
    llama = importlib.import_module("llama_cpp").Llama
    return llama(str(path), n_ctx=context, n_batch=512, verbose=False, **threads)


def complete_with_llama_cpp(
    model: Any,
    ids: list[int],
    tokens: int,
    setting: Setting = GREEDY,
    *,
    seed: int = 0,
    stops: Sequence[int] = (),
) -> Completion:
    """One request of llama.cpp; see `complete_with_transformers`."""
    begin = time.perf_counter()
    model.reset()
    model.set_seed(seed % 2**32)
    stream = model.generate(
        ids, temp=setting.temperature, top_p=setting.top_p, top_k=0, min_p=0.0, repeat_penalty=1.0
    )
    generated, first = [], 0.0
    for _ in range(tokens):
        generated.append(next(stream))
        first = first or time.perf_counter() - begin
        if generated[-1] in stops:
            break
    return Completion(generated, len(generated), first, time.perf_counter() - begin)
