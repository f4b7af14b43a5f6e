"""Counting collectives in program text: by hand, and in programs that scan."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spec_jax.planning.hlo import Collective, by_kind, collectives

LOOP = """HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%turn (p: (s32[], f32[4,8], /*index=2*/s32[])) -> (s32[], f32[4,8], s32[]) {
  %p = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)S(1)}, /*index=2*/s32[]{:T(128)}) parameter(0)
  %one = s32[]{:T(128)} constant(STEP)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %n = s32[]{:T(128)} get-tuple-element(%p), index=2
  %next = s32[]{:T(128)} add(%i, %one), metadata={op_name="jit(f)/while(body)/add(1)"}
  %y = f32[4,8]{1,0:T(8,128)} all-reduce(%x), channel_id=1, to_apply=%add
  ROOT %out = (s32[]{:T(128)}, f32[4,8]{1,0}, s32[]{:T(128)}) tuple(%next, %y, %n)
}

%again (q: (s32[], f32[4,8], s32[])) -> pred[] {
  %q = (s32[]{:T(128)}, f32[4,8]{1,0}, s32[]{:T(128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %limit = s32[]{:T(128)} LIMIT
  ROOT %less = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

ENTRY %main (x0: f32[4,8], n0: s32[]) -> f32[4,8] {
  %x0 = f32[4,8]{1,0:T(8,128)} parameter(0)
  %n0 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(2)
  %copied = s32[]{:T(128)} copy(%zero)
  %bound = s32[]{:T(128)} constant(20)
  %start = (s32[]{:T(128)}, f32[4,8]{1,0}, s32[]{:T(128)}) tuple(%copied, %x0, CARRIED)
  %loop = (s32[], f32[4,8]{1,0}, s32[]) while(%start), condition=%again, body=%turnEXTRA
  ROOT %end = f32[4,8]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""
CONSTANT, ELEMENT = "constant(12)", "get-tuple-element(%q), index=2"


def loop(*, limit=CONSTANT, carried="%bound", step="1", extra="") -> str:
    marks = {"LIMIT": limit, "CARRIED": carried, "STEP": step, "EXTRA": extra}
    text = LOOP
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text


@pytest.mark.parametrize(
    "text, turns",
    [
        (loop(), 10),
        (loop(step="4"), 3),
        (loop(limit="constant(2)"), 0),
        (loop(limit=ELEMENT), 18),
        (loop(limit=ELEMENT, carried="%n0"), 1),  # decided as it runs
        (loop(extra=', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{}}'), 7),
    ],
    ids=["constant", "step", "never", "carried", "dynamic", "known"],
)
def test_a_loop_counts_as_often_as_it_turns(text, turns):
    expected = Counter({Collective("all-reduce", "f32[4,8]"): turns})
    assert collectives(text) == expected


CALLS = """HloModule jit_f

%branch_a (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %ga = f32[4]{0} all-reduce(%p), to_apply=%add
  %gd = f32[4]{0} all-reduce(%ga), to_apply=%add
  ROOT %ge = f32[4]{0} all-reduce(%gd), to_apply=%add
}

%branch_b (r: f32[4]) -> f32[4] {
  %r = f32[4]{0} parameter(0)
  %gb = f32[4]{0} all-reduce(%r), to_apply=%add
  ROOT %gc = f32[4]{0} collective-permute(%gb), source_target_pairs={{0,1},{1,0}}
}

%sent (s: f32[4]) -> f32[8] {
  %s = f32[4]{0} parameter(0)
  ROOT %wide = f32[8]{0} all-gather(%s), dimensions={0}
}

%fused (t: f32[4]) -> f32[4] {
  ROOT %t = f32[4]{0} parameter(0)
}

ENTRY %main (x: f32[4], which: pred[]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %which = pred[] parameter(1)
  %text = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="all-gather(%x)"}
  %begun = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), channel_id=3, dimensions={0}
  %done = f32[8]{0} all-gather-done(%begun)
  %later = ((f32[4]{0}), f32[8]{0}, u32[]{:S(8)}) async-start(%x), calls=%sent
  %now = f32[8]{0} async-done(%later), calls=%sent
  %both = (f32[4]{0}, s32[2]{0}) all-to-all(%x, %x), replica_groups={{0,1}}
  %all-reduce.7 = f32[4]{0} add(%x, %x)
  ROOT %chosen = f32[4]{0} conditional(%which, %x, %x), CONDITIONAL
}
"""


@pytest.mark.parametrize(
    "conditional",
    [
        "branch_computations={%branch_a, %branch_b}",
        "true_computation=%branch_b, false_computation=%branch_a",
    ],
)
def test_calls_conditionals_and_asynchronous_pairs(conditional):
    text = CALLS.replace("CONDITIONAL", conditional)
    most = {"all-gather": 2, "all-reduce": 3, "all-to-all": 1}
    assert by_kind(collectives(text)) == most
    least = {"all-gather": 2, "all-reduce": 1, "all-to-all": 1, "collective-permute": 1}
    assert by_kind(collectives(text, branch=min)) == least
    assert collectives(text)[Collective("all-to-all", "(f32[4], s32[2])")] == 1


def test_a_compiled_program_that_scans():
    mesh = Mesh(jax.devices()[:4], ("model",), axis_types=(AxisType.Auto,))
    weight = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P("model")))
    x = jax.ShapeDtypeStruct((2, 16), jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
    whole = NamedSharding(mesh, P())

    def product(x, weight):
        return jax.lax.with_sharding_constraint(x @ weight, whole)

    def turn(x, weight):
        y = product(x, weight)
        x = jax.lax.fori_loop(0, 3, lambda _, y: product(y, weight) * 0.5, y)
        return x, y.sum()

    def f(x, weight, rounds, busy):
        x, sums = jax.lax.scan(lambda x, _: turn(x, weight), x, None, length=5)
        x = jax.lax.cond(busy, lambda x: product(product(x, weight), weight), lambda x: x, x)
        return jax.lax.fori_loop(0, rounds, lambda _, x: product(x, weight), x), sums

    numbers = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    text = jax.jit(f).lower(x, weight, *numbers).compile().as_text()
    assert by_kind(collectives(text)) == {"all-reduce": 5 * (1 + 3) + 2 + 1}
    assert by_kind(collectives(text, branch=min)) == {"all-reduce": 5 * (1 + 3) + 1}
