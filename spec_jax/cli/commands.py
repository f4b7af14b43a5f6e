"""Runs a command: its flags are parsed and its prompts are read before JAX is imported.

JAX takes seconds to import, so everything that can be refused without it is refused first.
"""

from collections.abc import Sequence

from spec_jax.cli.arguments import parse_env, parse_model_command
from spec_jax.cli.audit_arguments import parse_audit
from spec_jax.cli.bench_arguments import parse_bench
from spec_jax.cli.compile_arguments import parse_compile
from spec_jax.cli.convert_arguments import parse_convert
from spec_jax.cli.evaluate_arguments import parse_evaluate
from spec_jax.cli.plan_arguments import parse_plan
from spec_jax.cli.profile_arguments import parse_profile
from spec_jax.cli.prompts import read_prompts
from spec_jax.cli.report_arguments import parse_report
from spec_jax.cli.train_arguments import parse_train
from spec_jax.cli.transcribe_arguments import parse_transcribe


def run(command: str, rest: Sequence[str]) -> int:
    """Runs one of `COMMANDS`; returns its exit code.

    Args:
      command: its name.
      rest: the arguments after it.
    """
    if command == "env":
        options = parse_env(rest)
        from spec_jax.cli import environment

        return environment.run(options)
    if command == "plan":
        plan_options = parse_plan(rest)
        from spec_jax.cli import plan

        return plan.run(plan_options)
    if command == "audit":
        audit_options = parse_audit(rest)
        audit_prompts = read_prompts(audit_options.sources) if audit_options.sources else None
        from spec_jax.cli import audit

        return audit.run(audit_options, audit_prompts)
    if command == "evaluate":
        evaluate_options = parse_evaluate(rest)
        from spec_jax.cli import evaluate

        return evaluate.run(evaluate_options)
    if command == "bench":
        bench_options = parse_bench(rest)
        from spec_jax.cli import bench

        return bench.run(bench_options)
    if command == "report":
        report_options = parse_report(rest)
        from spec_jax.cli import report

        return report.run(report_options)
    if command == "profile":
        profile_options = parse_profile(rest)
        profile_prompts = read_prompts(profile_options.sources)
        from spec_jax.cli import profile

        return profile.run(profile_options, profile_prompts)
    if command == "train-draft":
        train_options = parse_train(rest)
        from spec_jax.cli import train_draft

        return train_draft.run(train_options)
    if command == "transcribe":
        transcribe_options = parse_transcribe(rest)
        from spec_jax.cli import transcribe

        return transcribe.run(transcribe_options)
    if command == "convert":
        convert_options = parse_convert(rest)
        from spec_jax.cli import convert

        return convert.run(convert_options)
    if command == "compile":
        compile_options = parse_compile(rest)
        from spec_jax.cli import compile as ahead

        return ahead.run(compile_options)
    options = parse_model_command(command, rest)
    if command == "chat":
        from spec_jax.cli import chat

        return chat.run(options)
    prompts = read_prompts(options.sources)
    from spec_jax.cli import generate

    return generate.run(options, prompts)
