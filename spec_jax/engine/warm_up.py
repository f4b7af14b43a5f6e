"""Compiles what later requests need, so that none of them waits for the compiler."""

import dataclasses

import numpy as np

from spec_jax.engine.batch_shape import SHORT_PROMPT, prompt_block
from spec_jax.engine.engine import Engine
from spec_jax.engine.prefill_queue import PrefillQueue, rows_read_together
from spec_jax.engine.requests import PADDING, Request
from spec_jax.engine.rows import DeviceRows


def compile_reading(
    engine: Engine, request: Request, num_tokens: int, before: Request | None = None
) -> None:
    """Compiles what reads prompts and moves their rows; of rounds it compiles nothing.

    Args:
      engine: whose batches have room for the rows that are reserved.
      request: the prompts are of requests like it.
      num_tokens: of the longest prompt.
      before: a request that may run in a batch which grows for `request`.
    """
    programs, shards = engine.row_programs, engine.shards
    queue = PrefillQueue(programs, shards)
    for length in lengths_of_kinds(engine.target.platform, num_tokens, engine.embed_size):
        prompt = dataclasses.replace(request, prompt_token_ids=[0] * length, max_length=length + 1)
        batch_shape = engine.plan([prompt])
        count = batch_shape.batch
        if engine.reserves_rows:
            count = rows_read_together(engine.target.platform, batch_shape, shards)
        shape = queue.shape(batch_shape, count, [prompt])
        programs.prefill([PADDING], shape)
        rows = programs.read_chunk(programs.start([PADDING], shape), shape)
        joins = engine.reserves_rows
        batch: DeviceRows = programs.empty(rows, batch_shape, shards) if joins else rows
        joining = count // shards
        if programs.copies_prefix(prompt):
            rows = programs.start([PADDING], shape)
            shapes, slots = (shape, batch_shape), np.zeros((shards, joining), np.int32)
            rows = programs.copy_prefix(rows, batch, shapes, slots, np.zeros((count,), np.int32))
        if joins and before is not None:
            smaller = engine.plan([dataclasses.replace(before, max_length=length + 1)])
            old_shape = dataclasses.replace(shape, logprobs=smaller.logprobs)
            old = programs.start([PADDING], old_shape)
            running = programs.empty(old, smaller, shards)
            none = [None] * batch_shape.batch
            programs.grow(running, none, (smaller, batch_shape), rows, shards)
        if joins:
            nowhere = np.full((shards, joining), batch_shape.batch // shards, np.int32)
            programs.insert(batch, batch_shape, nowhere, rows)


def lengths_of_kinds(platform: str, longest: int, embed_size: int) -> list[int]:
    """Lengths of prompts that, one row at a time, are read by all programs that read prompts."""
    kinds: dict[tuple[int, bool], int] = {}
    for length in range(2, longest + 1):
        kind = prompt_block(platform, length, 1, embed_size), length <= SHORT_PROMPT
        kinds.setdefault(kind, length)
    return [*kinds.values()]
