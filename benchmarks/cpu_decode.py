"""Decoding on CPU against Hugging Face transformers: same weights, prompts, dtype and threads.

    pip install torch==2.13.0
    python benchmarks/cpu_decode.py            # about 15 minutes on two idle cores

Every figure is the time of a whole call, prompt included, compilation apart. The systems take
turns within each repeat, so that a machine whose speed drifts drifts for all. Needs PyTorch;
llama-cpp-python, if installed, gets rows of its own at the same precision.
"""

import argparse
import gc
import importlib.util
import os
import platform
import resource
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from spec_jax import LLM, SamplingParams, SpeculativeConfig
from spec_jax.checkpoints import locate
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.engine.engine import Engine
from tests.prompts import COPY_PROMPTS, PROMPTS
from tests.torch_reference import load_llama

ROOT = Path(__file__).resolve().parents[1]
RECIPE = str(ROOT / "checkpoints" / "smollm2-135m-instruct.toml")
THREADS = os.cpu_count()
TOKENS = 64
LOOKAHEAD = 4
HF_LOOKAHEADS = (10, 4)  # transformers' own default, and ours


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


def ours(llm, prompts):
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    def call():
        # One request at a time: latency, not throughput.
        return sum(llm.generate(ids, params)[0].usage.completion_tokens for ids in prompts)

    return call


def hugging_face(model, prompts, **options):
    def call():
        count = 0
        for ids in prompts:
            with torch.inference_mode():
                out = model.generate(
                    torch.tensor([ids]),
                    attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
                    do_sample=False,
                    max_new_tokens=TOKENS,
                    eos_token_id=None,
                    pad_token_id=0,
                    **options,
                )
            count += out.shape[1] - len(ids)
        return count

    return call


def llama_cpp(path, prompts):
    from llama_cpp import Llama

    model = Llama(str(path), n_ctx=1024, n_threads=THREADS, n_batch=512, verbose=False)

    def call():
        count = 0
        for ids in prompts:
            model.reset()
            tokens = model.generate(ids, temp=0.0)
            for _ in range(TOKENS):
                next(tokens)
                count += 1
        return count

    return call


def unquantized_gguf(path, dtype, out):
    """The same dequantized weights as a GGUF file of the benchmark's precision."""
    import gguf

    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = gguf.GGMLQuantizationType.F32
        if dtype == "bfloat16" and values.ndim > 1:
            kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def streaming_bandwidth():
    """GB/s at which all threads together read memory (the best of five sums over 1 GiB)."""
    data = np.ones(2**28, np.float32)
    parts = np.array_split(data, THREADS)
    best = 0.0
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(5):
            begin = time.perf_counter()
            list(pool.map(np.add.reduce, parts))
            best = max(best, data.nbytes / (time.perf_counter() - begin))
    return best / 1e9


def greedy_steps(model, rows, steps=16):
    """A function that times greedy steps, each scoring `rows` tokens, in a loop on device."""

    def run(model, cache, tokens):
        def step(_, carry):
            cache, tokens = carry
            logits, cache = model.score(tokens, cache)
            return cache.with_lengths(cache.lengths + 1), jnp.argmax(logits, -1).astype(jnp.int32)

        return jax.lax.fori_loop(0, steps, step, (cache, tokens))

    tokens = jnp.ones((1, rows), jnp.int32)
    lowered = model.jit(run, donate_argnums=1).lower(model, model.new_cache(1, 256), tokens)
    compiled = lowered.compile()

    def seconds_per_step():
        cache = jax.block_until_ready(model.new_cache(1, 256))
        begin = time.perf_counter()
        jax.block_until_ready(compiled(model, cache, tokens))
        return (time.perf_counter() - begin) / steps

    return seconds_per_step


def weight_bytes(model):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))


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


def report(dtype, repeats):
    plain = LLM(RECIPE, dtype=dtype)
    lookup = plain.with_speculation(
        SpeculativeConfig(method="prompt_lookup", num_speculative_tokens=LOOKAHEAD)
    )
    model = plain.engine.target

    def encode(prompts):
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return [plain.tokenizer.encode_chat(chat) for chat in chats]

    chat, copy = encode(PROMPTS[:2]), encode(COPY_PROMPTS[:3])
    _, path = locate(RECIPE, lambda line: None)
    reference = load_llama(path, getattr(torch, dtype))

    print(f"\n### {dtype}\n")
    show("prompts", "system", "tokens/s, median (range)", "ratio")
    show("---", "---", "---", "---")
    systems = {"spec-jax": ours(plain, chat), "transformers": hugging_face(reference, chat)}
    gguf_path = None
    if importlib.util.find_spec("llama_cpp"):
        gguf_path = Path(tempfile.mkdtemp()) / f"{dtype}.gguf"
        systems["llama.cpp"] = llama_cpp(unquantized_gguf(path, dtype, gguf_path), chat)
    rates = interleaved(systems, repeats)
    for name, values in rates.items():
        ratios = [ours / other for ours, other in zip(rates["spec-jax"], values, strict=True)]
        show("chat, plain", name, spread(values), spread(ratios, 2))

    systems = {
        "spec-jax, prompt lookup": ours(lookup, copy),
        "spec-jax, plain": ours(plain, copy),
        "transformers, plain": hugging_face(reference, copy),
    }
    for k in HF_LOOKAHEADS:
        systems[f"transformers, prompt lookup {k}"] = hugging_face(
            reference, copy, prompt_lookup_num_tokens=k
        )
    rates = interleaved(systems, repeats)
    mine = rates["spec-jax, prompt lookup"]
    for name, values in rates.items():
        ratios = [ours / other for ours, other in zip(mine, values, strict=True)]
        show(f"copy, K = {LOOKAHEAD}", name, spread(values), spread(ratios, 2))
    del reference
    if gguf_path is not None:
        gguf_path.unlink()
    gc.collect()

    print()
    widths = (*range(1, 10), 17)
    steps = {rows: greedy_steps(model, rows) for rows in widths}
    seconds = {
        rows: statistics.median(step() for _ in range(repeats)) for rows, step in steps.items()
    }
    show("rows scored", *widths)
    show("---", *["---"] * len(widths))
    show("ms", *(f"{seconds[rows] * 1e3:.1f}" for rows in widths))
    show("v(K)", *(f"{seconds[rows] / seconds[1]:.2f}" for rows in widths))
    reached, possible = weight_bytes(model) / seconds[1] / 1e9, streaming_bandwidth()
    print(f"\nBandwidth of one step: {reached:.1f} GB/s of {possible:.1f} GB/s streaming.")

    # Both ideals are of the calls alone: no drafting cost but the draft's own steps.
    calls = steps[1], steps[LOOKAHEAD + 1]
    efficiency("Prompt lookup", lookup, copy, *calls, 0, repeats)
    mirror = plain.with_speculation(SpeculativeConfig())
    mirror.engine = Engine(
        model,
        DraftModel(model, LOOKAHEAD),
        Constant(LOOKAHEAD),
        "token",
        max_model_len=plain.max_model_len,
    )
    efficiency("Self-draft", mirror, chat, *calls, LOOKAHEAD, repeats)
    for name, llm in (("plain", plain), ("prompt lookup", lookup)):
        print(f"Compilation, {name}: {llm.engine.compile_seconds:.1f} s.")
        needed, taken = llm.engine.memory()
        print(
            f"Memory, {name}: {taken / needed:.3f} of weights and caches ({needed / 1e6:.0f} MB)."
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"Peak of the process so far, PyTorch's model included: {peak / 1e9:.2f} GB.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    versions = f"jax {jax.__version__}, torch {torch.__version__}"
    versions += f", transformers {transformers.__version__}"
    print(f"{platform.machine()}, {THREADS} threads, {versions}")
    for dtype in options.dtype or ("float32", "bfloat16"):
        report(dtype, options.repeats)


if __name__ == "__main__":
    main()
