"""Quantized targets decode exactly what their rounded weights say, by every method."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from spec_jax import LLM, SamplingParams, SpeculativeConfig
from spec_jax.errors import ConfigError
from spec_jax.kernels import PackedWeight, QuantizedWeight, native
from spec_jax.sharding import Layout
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory, write_gguf
from tests.often import often

pytestmark = pytest.mark.native

WIDE = CONFIG | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
"""Sizes that the blocks of GGUF divide."""
PROMPTS = ["the inn in the inn in the", "a thin thing", "in"]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A Hugging Face directory, a draft of noisier weights, and GGUF files."""
    folder, tensors = tmp_path_factory.mktemp("models"), llama_tensors(WIDE)
    random = np.random.default_rng(3)
    noisy = {n: t + random.normal(0, 0.05, t.shape).astype(t.dtype) for n, t in tensors.items()}
    made = {
        "directory": write_directory(folder / "target", WIDE, tensors),
        "draft": write_directory(folder / "draft", WIDE, noisy),
    }
    for kind in ("Q8_0", "Q4_1"):
        path = folder / f"{kind}.gguf"
        made[kind] = write_gguf(path, WIDE, tensors, quantization=GGMLQuantizationType[kind])
    return {name: str(path) for name, path in made.items()}


def tokens(llm, params=PARAMS):
    return [list(out.token_ids) for out in llm.generate(PROMPTS, params)]


def matrices(llm):
    return [weight for weight in llm.engine.target.weights.values() if weight.shape[1:]]


def plainly(llm):
    """Tokens of the same numbers as plain float32 arrays."""
    other = llm.with_speculation(SpeculativeConfig())
    other.engine.target = other.engine.target.unpacked()
    return tokens(other)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_gguf_file_keeps_its_blocks(models, kind):
    kept = LLM(models[kind], quantization="gguf", activations="float32")
    assert {weight.format for weight in matrices(kept)} == {"int8" if kind == "Q8_0" else "uint4"}
    assert tokens(kept) == tokens(LLM(models[kind], quantization="none"))


AUTO = [
    # what is stored, native code -> dtype, quantization
    ("float32", True, "float32", "none"),
    ("float32", False, "float32", "none"),
    ("bfloat16", True, "bfloat16", "none"),
    ("bfloat16", False, "float32", "none"),
    ("float16", True, "float32", "none"),
    ("Q8_0", True, "float32", "gguf"),
    ("Q8_0", False, "float32", "none"),
]


@pytest.mark.parametrize(("stored", "compiled", "dtype", "quantization"), AUTO)
def test_auto_keeps_what_is_stored_where_that_is_fastest(
    models, tmp_path, monkeypatch, stored, compiled, dtype, quantization
):
    path = models.get(stored)
    if path is None:
        kind = jnp.dtype(stored)
        tensors = {name: value.astype(kind) for name, value in llama_tensors(WIDE).items()}
        path = str(write_directory(tmp_path, WIDE, tensors))
    if not compiled:
        monkeypatch.setattr(native, "available", lambda *args: False)
    llm = LLM(path)
    assert (llm.dtype, llm.quantization) == (dtype, quantization)
    packed = all(isinstance(weight, PackedWeight) for weight in matrices(llm))
    assert packed is compiled
    # A choice that is made replaces `auto`.
    llm = LLM(path, dtype="bfloat16", quantization="int8")
    assert (llm.dtype, llm.quantization) == ("bfloat16", "int8")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_are_rounded(models, quantization):
    rounded = LLM(models["directory"], quantization=quantization, activations="float32")
    formats = {"int8": "int8", "int4": "uint4"}
    assert {weight.format for weight in matrices(rounded)} == {formats[quantization]}
    assert tokens(rounded) == plainly(rounded)


@pytest.mark.parametrize("quantization", ["int8", "int4", "gguf"])
@pytest.mark.parametrize("sharded", often([False, True], [True]))
def test_without_native_code_the_tokens_are_the_same(models, quantization, sharded, monkeypatch):
    model = models["Q4_1" if quantization == "gguf" else "directory"]
    native_tokens = tokens(LLM(model, quantization=quantization, activations="float32"))
    monkeypatch.setattr(native, "available", lambda *args: False)
    layout = Layout.tensor_parallel(2) if sharded else None
    llm = LLM(model, quantization=quantization, layout=layout)
    # On one CPU the same numbers in full are faster.
    kind = QuantizedWeight if sharded else jax.Array
    assert all(isinstance(weight, kind) for weight in matrices(llm))
    assert tokens(llm) == native_tokens


METHODS = {
    "draft_model": {"draft": "draft"},
    "self": {"draft": "target", "verification": "block"},
    "draft_vocab_size": {"draft": "draft", "draft_vocab_size": 100},
    "a plain draft": {"draft": "draft", "draft_quantization": "none"},
    "tree": {"draft": "draft", "num_drafts": 2},
    "prompt_lookup": {"method": "prompt_lookup", "draft_length_policy": "heuristic"},
    "prefix_batch": {"method": "prompt_lookup", "scoring": "prefix_batch"},
    "suffix": {"method": "suffix"},
    "recycle": {"method": "recycle"},
    "early_exit": {"method": "early_exit", "early_exit_layers": 1},
    "universal_vocabulary": {"method": "universal_vocabulary", "draft": "draft"},
    "universal_text": {"method": "universal_text", "draft": "draft"},
}


OFTEN = ["draft_model"]


@pytest.fixture(scope="module", params=["int8", "gguf", "gguf, activations in float32"])
def plain(request, models):
    quantization, _, in_float32 = request.param.partition(",")
    model = models["Q4_1" if quantization == "gguf" else "directory"]
    activations = "float32" if in_float32 else "auto"
    llm = LLM(model, quantization=quantization, activations=activations)
    return model, llm, tokens(llm)


@pytest.mark.parametrize("method", often(METHODS, OFTEN))
def test_every_method_decodes_as_the_quantized_target_does(plain, models, method):
    model, llm, expected = plain
    options = {"method": "draft_model", **METHODS[method]}
    if "draft" in options:
        options["draft"] = model if options["draft"] == "target" else models["draft"]
    speculating = llm.with_speculation(SpeculativeConfig(**options))
    assert tokens(speculating) == expected
    assert speculating.engine.target is llm.engine.target


def test_a_draft_is_quantized_as_its_target_unless_told_otherwise(models):
    llm = LLM(models["Q4_1"], quantization="gguf")

    def formats(**options):
        config = SpeculativeConfig(method="draft_model", draft=models["draft"], **options)
        draft = llm.with_speculation(config).engine.drafter.model
        return {
            weight.format for weight in draft.weights.values() if isinstance(weight, PackedWeight)
        }

    assert formats() == {"float32"}  # it is not a .gguf file
    assert formats(draft_quantization="int8") == {"int8"}


@pytest.mark.parametrize(("quantization", "copy"), [("none", "int8"), ("int8", "int4")])
def test_a_copy_of_the_target_drafts_for_it(models, quantization, copy):
    llm = LLM(models["directory"], quantization=quantization)
    speculating = llm.with_speculation(
        {"draft": f"self:{copy}", "draft_length_policy": "constant", "num_speculative_tokens": 3}
    )
    draft = speculating.engine.drafter.model
    assert draft.config == llm.engine.target.config and draft is not llm.engine.target
    formats = {each.format for each in draft.weights.values() if isinstance(each, PackedWeight)}
    assert formats == {{"int4": "uint4", "int8": "int8"}[copy]}
    assert tokens(speculating) == tokens(llm)
    (output,) = speculating.generate([PROMPTS[0]], SamplingParams(max_tokens=24, ignore_eos=True))
    assert output.metrics.draft_acceptance_rate > 0.3  # of other random weights it is near 0


@pytest.mark.parametrize(
    ("model", "quantization", "draft"),
    [
        ("directory", "int4", "self:int4"),
        ("directory", "int4", "self:int8"),
        ("directory", "int8", "self:int8"),
        ("Q4_1", "gguf", "self:int4"),
    ],
)
def test_a_copy_as_large_as_the_target_is_refused(models, model, quantization, draft):
    said = rf"draft is '{draft}', but .* kept in {quantization}, .* use another draft"
    with pytest.raises(ConfigError, match=said):
        LLM(models[model], quantization=quantization, speculative_config={"draft": draft})


def test_a_draft_has_the_form_of_its_recipe_unless_told_otherwise(models, tmp_path, monkeypatch):
    recipe = tmp_path / "draft.toml"
    recipe.write_text(
        f'name = "draft"\nlicense = "MIT"\nsource.path = "{models["draft"]}"\n'
        '[draft]\nquantization = "int4"\nvocab_size = 100\n'
    )
    llm = LLM(models["directory"], quantization="int8")
    expected = tokens(llm)

    def form(llm=llm, method="draft_model", draft=str(recipe), **options):
        config = SpeculativeConfig(method=method, draft=draft, **options)
        speculating = llm.with_speculation(config)
        assert tokens(speculating) == expected
        draft = speculating.engine.drafter.model
        weights = draft.weights.values()
        formats = {each.format for each in weights if isinstance(each, PackedWeight)}
        return formats, draft.weights.get("head.weight", draft.weights["embed.weight"]).shape[-1]

    size = llm.engine.target.config.vocab_size
    assert form() == ({"uint4"}, 100)
    assert form(draft_quantization="int8") == ({"int8"}, 100)
    assert form(draft_vocab_size=50) == ({"uint4"}, 50)
    assert form(method="universal_vocabulary") == ({"uint4"}, size)
    assert form(draft=models["draft"]) == ({"int8"}, size)
    # It is for native code, and for drafts.
    monkeypatch.setattr(native, "available", lambda *args: False)
    plain = LLM(models["directory"], quantization="int8", activations="float32")
    expected = tokens(plain)
    assert form(plain)[1] == size
    monkeypatch.undo()
    assert LLM(str(recipe)).engine.target.config.vocab_size == size


def test_few_bits_take_little_memory(models):
    def size(target, **options):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(matrices(LLM(target, **options))))

    whole = size(models["directory"])
    assert size(models["directory"], quantization="int8") < 0.3 * whole
    assert size(models["Q4_1"], quantization="gguf") < 0.18 * whole


def logits(llm, model):
    ids = jnp.asarray([llm.tokenizer.encode(PROMPTS[0])], jnp.int32)
    return model.score(ids, model.new_cache(1, 64))[0]


def test_sampling_from_a_quantized_target(models):
    """Greedy rows say nothing of the probabilities: these come from the rounded weights."""
    llm = LLM(models["directory"], quantization="int8", activations="float32", seed=3)
    plain = llm.engine.target.unpacked()
    np.testing.assert_allclose(logits(llm, llm.engine.target), logits(llm, plain), atol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4", "gguf"])
def test_activations_in_8_bits(models, quantization):
    model = models["Q4_1" if quantization == "gguf" else "directory"]
    llm = LLM(model, quantization=quantization)
    assert {weight.activations for weight in matrices(llm)} == {"int8"}
    rounded = logits(llm, llm.engine.target)
    full = logits(llm, llm.engine.target.unpacked())
    assert 0 < np.abs(rounded - full).mean() < 0.02 * np.abs(full).mean()


def test_activations_need_a_quantized_target_and_native_code(models, monkeypatch):
    with pytest.raises(ConfigError, match=r"activations is 'int8', but .* is not quantized; use"):
        LLM(models["directory"], activations="int8")
    with pytest.raises(ConfigError, match=r"activations is 'int8', which needs .* use float32"):
        LLM(models["Q4_1"], activations="int8", tensor_parallel_size=2)
    monkeypatch.setattr(native, "available", lambda *args: False)
    monkeypatch.setattr(native, "description", lambda: "off (SPEC_JAX_NATIVE is 0)")
    with pytest.raises(ConfigError, match=r"native code, and that is off \(SPEC_JAX_NATIVE is 0\)"):
        LLM(models["Q4_1"], activations="int8")


def test_a_plain_draft_of_a_target_with_activations_in_8_bits(models):
    llm = LLM(models["Q4_1"])
    config = SpeculativeConfig(method="draft_model", draft=models["draft"])
    assert tokens(llm.with_speculation(config)) == tokens(llm)
