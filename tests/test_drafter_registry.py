"""Drafters from outside of the package become methods, and what is wrong with one is said."""

import copy
import importlib.metadata
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import (
    LLM,
    ConfigError,
    DrafterSetting,
    SamplingParams,
    SpeculativeConfig,
    register_drafter,
)
from spec_jax.cli.commands import parse
from spec_jax.config import METHODS, CustomConfig, config_class
from spec_jax.drafters import Draft, Drafter, pytree, static
from spec_jax.engine import custom
from spec_jax.engine.methods import make_drafting
from spec_jax.testing import tiny_checkpoint
from tests.checkpoints import tiny


@pytree
class Repeat(Drafter):
    """Drafts the tokens of a table after the row's last one."""

    next: np.ndarray
    lookahead: int = static()
    fixed_length = True

    def init(self, prompt):
        return jnp.zeros((len(prompt.lengths), 1), jnp.int32)

    def propose(self, state, context):
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        tokens = jnp.repeat(jnp.asarray(self.next)[last], self.lookahead, axis=1)
        lengths = jnp.full((len(last),), self.lookahead, jnp.int32)
        return Draft(tokens=tokens, probs=None, lengths=lengths), state

    def commit(self, state, committed):
        return state


def repeat(setting):
    vocab = setting.target.model.config.vocab_size
    return Repeat(np.arange(vocab, dtype=np.int32), setting.lookahead)


def test_a_registered_drafter_is_a_method(forgotten, tmp_path):
    register_drafter("repeat", repeat)
    plain = LLM(str(tiny.write_directory(tmp_path / "target")))
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    expected = plain.generate("the the in", params)[0]
    config = SpeculativeConfig(method="repeat", num_speculative_tokens=2)
    for llm in (
        plain.with_speculation(config),
        plain.with_speculation(
            SpeculativeConfig(method="custom", num_speculative_tokens=2), repeat
        ),
    ):
        (output,) = llm.generate("the the in", params)
        assert output.token_ids == expected.token_ids and output.metrics.draft_tokens > 0
        assert type(llm.engine.drafter) is Repeat and llm.engine.drafter.lookahead == 2
    assert SpeculativeConfig.of({"method": "repeat"}).lookahead == 8


@config_class
class StrictConfig(CustomConfig):
    method: str = "strict"
    verification: Literal["token"] = "token"
    draft: str | None = None


def test_only_declared_options_are_supported(forgotten):
    register_drafter("plain", repeat)
    register_drafter("strict", repeat, options=StrictConfig)
    SpeculativeConfig(method="plain", verification="block", draft_length_policy="adaptive")
    SpeculativeConfig(method="strict", draft="d", num_speculative_tokens=2)
    for given, said in (
        ({"method": "plain", "draft": "d"}, "draft is 'd' but method is 'plain'"),
        ({"method": "plain", "num_drafts": 2}, "num_drafts is 2 but method is 'plain'"),
        ({"method": "plain", "draft_length_policy": "confidence"}, "'confidence' but method"),
        ({"method": "strict"}, "method 'strict' needs draft="),
        (
            {"method": "strict", "draft": "d", "verification": "block"},
            "verification is 'block' but method is 'strict'",
        ),
        ({"method": "plian"}, "Did you mean 'plain'?"),
    ):
        with pytest.raises(ConfigError) as error:
            SpeculativeConfig(**given)
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "factory", "options", "said"),
    [
        ("prompt_lookup", repeat, CustomConfig, "there is a method 'prompt_lookup' already"),
        ("custom", repeat, CustomConfig, "there is a method 'custom' already"),
        ("twice", repeat, CustomConfig, "there is a method 'twice' already"),
        ("", repeat, CustomConfig, "the name of a drafter is ''"),
        (3, repeat, CustomConfig, "the name of a drafter is 3"),
        ("mine", "repeat", CustomConfig, "the factory of drafter 'mine' is 'repeat'"),
        ("mine", repeat, {"num_drafts": None}, "the options of drafter 'mine' are {'num_drafts'"),
        ("mine", repeat, dict, "give a class derived from CustomConfig"),
    ],
)
def test_what_cannot_be_registered(forgotten, name, factory, options, said):
    register_drafter("twice", repeat)
    with pytest.raises(ConfigError) as error:
        register_drafter(name, factory, options=options)
    assert said in str(error.value)
    assert "mine" not in METHODS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speculative_config": {"method": "custom"}}, "method is 'custom', which is for"),
        (
            {"speculative_config": {"method": "ngram"}, "drafter": repeat},
            "drafter is given but method is 'prompt_lookup'",
        ),
    ],
)
def test_a_drafter_and_its_method_go_together(options, said):
    with pytest.raises(ConfigError, match=said):  # before anything is loaded
        LLM("nothing/here", **options)


def proposing(**changes):
    def propose(self, state, context):
        draft, state = Repeat.propose(self, state, context)
        wrong = copy.copy(draft)
        for name, change in changes.items():
            object.__setattr__(wrong, name, change(draft))  # past the checks of annotations
        return wrong, state

    return lambda setting: pytree(type("Wrong", (Repeat,), {"propose": propose}))(
        np.arange(16, dtype=np.int32), setting.lookahead
    )


class NoTree(Drafter):
    lookahead, fixed_length = 4, True
    init = propose = commit = print


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda setting: 3, "int, is not a drafter; make its class a subclass of"),
        (lambda setting: Drafter(), "does not implement `propose`"),
        (lambda setting: NoTree(), "is not a pytree"),
        (lambda setting: Repeat(np.arange(16), 9), "has lookahead 9, but num_speculative_tokens"),
        (lambda setting: Repeat("text", 4), "holds 'text', which is not an array"),
        (proposing(tokens=lambda draft: draft.tokens[:, :1]), "tokens of shape (2, 1)"),
        (proposing(lengths=lambda draft: draft.lengths.astype(jnp.float32)), "dtype float32"),
        (
            proposing(probs=lambda draft: jnp.zeros((2, 4, 9))),
            "probs of shape (2, 4, 9) and dtype float32; for 2 rows of a vocabulary of 16",
        ),
    ],
)
def test_what_is_wrong_with_a_drafter_is_said(factory, said):
    config = SpeculativeConfig(method="custom", num_speculative_tokens=4)
    target = tiny_checkpoint(0, num_layers=1)
    with pytest.raises(ConfigError) as error:
        make_drafting(DrafterSetting(config, target, lambda: target, factory))
    assert said in str(error.value)


def test_a_state_keeps_its_shape():
    @pytree
    class Growing(Repeat):
        def commit(self, state, committed):
            return jnp.concatenate([state, state], axis=1)

    config = SpeculativeConfig(method="custom", num_speculative_tokens=2)
    target = tiny_checkpoint(0, num_layers=1)
    make = lambda setting: Growing(np.arange(16, dtype=np.int32), setting.lookahead)  # noqa: E731
    with pytest.raises(ConfigError, match="changes the shape of its state in `commit`"):
        make_drafting(DrafterSetting(config, target, lambda: target, make))


def test_processes_compare_their_drafters(monkeypatch):
    config = SpeculativeConfig(method="custom")
    one = Repeat(jnp.arange(16), 4)
    assert custom.fingerprint(config, one) is None
    monkeypatch.setattr(custom.distributed, "process", lambda: (0, 2))
    known = custom.fingerprint(config, one)
    assert known == custom.fingerprint(config, Repeat(jnp.arange(16), 4))
    for other in (Repeat(jnp.arange(16) + 1, 4), Repeat(jnp.arange(16), 5)):
        assert custom.fingerprint(config, other) != known
    assert custom.fingerprint(SpeculativeConfig(method="prompt_lookup"), one) is None


MODULE = """
import tests.test_drafter_registry as mine
from spec_jax import register_drafter
register_drafter(NAME, mine.repeat)
"""


def installed(path, name, module):
    """A package with an entry point, as an installer writes it."""
    (path / f"{module}.py").write_text(MODULE.replace("NAME", repr(name)))
    info = path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[spec_jax.drafters]\nrepeating = {module}\n")


def test_an_installed_package_brings_a_method(forgotten, tmp_path, monkeypatch):
    installed(tmp_path, "repeating", "outside_drafter")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.metadata.entry_points(group="spec_jax.drafters", name="repeating")
    assert SpeculativeConfig(method="repeating").method == "repeating"


def test_an_entry_point_that_registers_nothing_is_said(forgotten, tmp_path, monkeypatch):
    installed(tmp_path, "another", "outside_drafter_of_another_name")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="which does not register it"):
        SpeculativeConfig(method="repeating")


def test_the_command_line_takes_the_name_of_an_installed_drafter(forgotten, tmp_path, monkeypatch):
    installed(tmp_path, "repeating", "outside_drafter_of_the_command_line")
    monkeypatch.syspath_prepend(str(tmp_path))
    options = parse("generate", ["p", "--target", "t", "--method", "repeating"])
    assert options.speculative.method == "repeating"
