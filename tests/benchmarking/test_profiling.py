# ruff: noqa: E501 (rows of tables, and program text)
"""Wall time is divided once, and ops belong to the parts that they were traced in."""

from collections import Counter
from types import SimpleNamespace

import pytest

from spec_jax.benchmarking import traces
from spec_jax.benchmarking.parts import Op, OpInfo, ProgramOps, describe
from spec_jax.benchmarking.traces import Span, divide, read


def op(name: str) -> Op:
    return Op("m", 1, name)


A, B, C, LOOP = map(op, ("a", "b", "c", "loop"))


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        # A loop has what its body leaves; two bodies side by side, a gap before the second.
        (
            [Span(10, 60, LOOP, "t"), Span(20, 30, A, "t"), Span(30, 35, B, "t"), Span(40, 50, A, "t")],
            {(None, LOOP): 25, (None, A): 20, (None, B): 5, (None, None): 50},
        ),
        # Ops that follow each other on one thread, and what lies outside of the recording.
        (
            [Span(-20, 10, A, "t"), Span(10, 20, B, "t"), Span(90, 130, C, "t"), Span(200, 300, A)],
            {(None, A): 10, (None, B): 10, (None, C): 10, (None, None): 70},
        ),
        # Two threads at once share the time; alone each has all of it.
        (
            [Span(0, 40, A, "t"), Span(20, 60, B, "u")],
            {(None, A): 30, (None, B): 30, (None, None): 40},
        ),
        # A loop's thread waits while another one runs the body.
        (
            [Span(0, 100, LOOP, "t"), Span(10, 30, A, "u"), Span(20, 40, B, "v")],
            {(None, LOOP): 70, (None, A): 15, (None, B): 15},
        ),
        # An op that nobody knows to run others, on the same thread.
        ([Span(0, 100, C, "t"), Span(10, 100, A, "t")], {(None, C): 10, (None, A): 90}),
        # An op that runs on after its thread has begun another one, whose time is not counted twice.
        ([Span(0, 50, A, "t"), Span(20, 100, B, "t")], {(None, A): 20, (None, B): 80}),
        # Until another thread notes its end; a loop, until all that it runs has ended.
        (
            [Span(0, 10, A, "t", (30, "u")), Span(40, 45, LOOP, "t", (80, "u")), Span(45, 50, A, "u")],
            {(None, A): 35, (None, LOOP): 35, (None, None): 30},
        ),
        # What runs on the thread that notes an end only later was not waited for.
        (
            [Span(0, 10, A, "t", (90, "u")), Span(20, 50, B, "u"), Span(50, 60, C, "u")],
            {(None, A): 20, (None, B): 30, (None, C): 10, (None, None): 40},
        ),
        # Annotations of the host hold ops and time without any.
        (
            [Span(0, 50, "propose"), Span(10, 60, A, "t"), Span(60, 70, "propose")],
            {
                ("propose", None): 20,
                ("propose", A): 40,
                (None, A): 10,
                (None, None): 30,
            },
        ),
        # Loops alone: the innermost.
        ([Span(0, 100, LOOP, "t"), Span(50, 100, op("inner"), "u")], {(None, LOOP): 50, (None, op("inner")): 50}),
        ([], {(None, None): 100}),
    ],
)  # fmt: skip
def test_every_moment_counts_once(spans, expected):
    found = divide(spans, 0, 100, {LOOP, op("inner")})
    assert {key: value for key, value in found.items() if value} == expected
    assert sum(found.values()) == 100


PROGRAM = """HloModule jit_counted, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum.0 = f32[] add(%a, %b)
}

%fused (p.0: f32[8]) -> f32[8] {
  %p.0 = f32[8]{0} parameter(0)
  ROOT %doubled = f32[8]{0} add(%p.0, %p.0), metadata={op_name="jit(counted)/while/body/verify/add"}
}

%inner_body (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %copy.1 = f32[8]{0} copy(%p.1)
}

%inner_test (p.2: f32[8]) -> pred[] {
  %p.2 = f32[8]{0} parameter(0)
  ROOT %go.1 = pred[] constant(true)
}

%body (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  %drafted = f32[8]{0} while(%p.3), condition=%inner_test, body=%inner_body, metadata={op_name="jit(counted)/while/body/propose/while"}
  %scored = f32[8]{0} custom-call(%drafted), custom_call_target="spec_jax_product", metadata={op_name="jit(counted)/while/body/score/jit(run_kind)/propose/ffi_call"}
  %copy.2 = f32[8]{0} copy(%scored)
  %padded = f32[8]{0} reduce-window(%p.3), to_apply=%add
  %copy.3 = f32[8]{0} copy(%padded)
  %copy.4 = f32[8]{0} copy(%p.3)
  %keys = f32[8]{0} add(%copy.2, %copy.2), metadata={op_name="jit(counted)/while/body/scored/proposed/add"}
  %checked = f32[8]{0} fusion(%keys, %copy.3, %copy.4), kind=kLoop, calls=%fused
  ROOT %done = f32[8]{0} negate(%checked, %copy.4), metadata={op_name="jit(counted)/while/body/commit/neg" source_file="loop.py" source_line=3}
}

%test (p.4: f32[8]) -> pred[] {
  %p.4 = f32[8]{0} parameter(0)
  ROOT %go.2 = pred[] constant(true)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %rounds = f32[8]{0} while(%x), condition=%test, body=%body, metadata={op_name="jit(counted)/while"}
}
"""


def test_ops_belong_to_the_outermost_scope():
    program = ProgramOps(PROGRAM)
    assert program.module == "jit_counted"
    for name, info in {
        "drafted": OpInfo("propose", "while"),
        "copy.1": OpInfo("propose", "copy"),  # of the loop that runs it
        "scored": OpInfo("score", "custom-call spec_jax_product"),  # not of what is named inside
        "checked": OpInfo("verify", "fusion"),  # of what it runs
        "done": OpInfo("commit", "negate"),
        "copy.2": OpInfo(None, "copy"),  # of what belongs to no part
        "padded": OpInfo("verify", "reduce-window"),  # of what uses it
        "copy.4": OpInfo(None, "copy"),  # two parts use it
        "keys": OpInfo(None, "add"),  # a scope is a whole word
        "rounds": OpInfo(None, "while"),  # it runs several parts
        "sum.0": OpInfo(None, "add"),
    }.items():
        assert program.ops[name] == info, name


def test_a_program_is_recognised_by_its_ops():
    small = """HloModule jit_counted

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %copy.2 = f32[8]{0} copy(%x), metadata={op_name="jit(counted)/prefill/copy"}
}
"""
    programs = [ProgramOps(PROGRAM), ProgramOps(small)]
    ran = [Op("jit_counted", 7, "copy.2"), Op("jit_counted", 8, "copy.2"),
           Op("jit_counted", 8, "keys"), Op("jit_counted", 9, "unknown"), Op("jit_f", 1, "keys")]  # fmt: skip
    assert describe(ran, programs) == {
        ran[0]: OpInfo("prefill", "copy"),
        ran[1]: OpInfo(None, "copy"),
        ran[2]: OpInfo(None, "add"),
    }


def event(name: str, start: float, end: float, **stats):
    return SimpleNamespace(name=name, start_ns=start, end_ns=end, stats=stats.items())


def plane(name: str, **lines):
    return SimpleNamespace(
        name=name, lines=[SimpleNamespace(name=key, events=value) for key, value in lines.items()]
    )


def test_traces_of_a_cpu_and_of_accelerators(monkeypatch):
    cpu = plane(
        "/host:CPU",
        python=[event("propose", 0, 9), event("else", 0, 9), event("end: a", 40, 41, _c=5)],
        pool=[event("a", 10, 11, hlo_op="a", hlo_module="jit_f", program_id=2, _p=5)],
    )
    gpu = plane(
        "/device:GPU:0",
        stream=[event("kernel", 1, 2, hlo_op="b.1", hlo_module="jit_f", program_id=3)],
        copies=[event("MemcpyD2H", 2, 3)],
    )
    tpu = plane(
        "/device:TPU:0",
        **{
            "XLA Modules": [event("jit_g(12)", 20, 30), event("jit_f(11)", 0, 10)],
            "XLA Ops": [event("%c.1 = f32[8]{0} copy(%x)", 1, 2), event("d", 21, 22, hlo_op="d")],
            "Steps": [event("1", 0, 30)],
        },
    )
    data = SimpleNamespace(planes=[cpu, gpu, tpu])
    monkeypatch.setattr(traces, "ProfileData", SimpleNamespace(from_file=lambda file: data))
    found = [(*each[:3], each.noted) for each in read("f", ["propose"])]
    assert Counter(found) == Counter(
        [
            (0, 9, "propose", None),
            (10, 11, Op("jit_f", 2, "a"), (41, "/host:CPU 0")),
            (1, 2, Op("jit_f", 3, "b.1"), None),
            (1, 2, Op("jit_f", 11, "c.1"), None),
            (21, 22, Op("jit_g", 12, "d"), None),
        ]
    )
