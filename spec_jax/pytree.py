"""Frozen dataclasses that are pytrees."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """A field that is part of the pytree's structure: hashable, and static under jit."""
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def pytree(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass whose fields, but for `static()` ones, are pytree children.

    JAX also rebuilds pytrees around placeholders that are not arrays. For that
    `jax.tree_util.register_dataclass` calls the constructor, whose annotations the tests check;
    this one does not.
    """
    data_class: Any = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(data_class)
    static_names = [field.name for field in fields if field.metadata.get("static")]
    children = [field.name for field in fields if field.name not in static_names]

    # A call of a program flattens and rebuilds dozens of them.
    def flatten(tree: Any) -> tuple[tuple, tuple]:
        fields = tree.__dict__
        return tuple([fields[name] for name in children]), tuple(
            [fields[name] for name in static_names]
        )

    def flatten_with_keys(tree: Any) -> tuple[list, tuple]:
        values, static_values = flatten(tree)
        keys = map(jax.tree_util.GetAttrKey, children)
        return [*zip(keys, values, strict=True)], static_values

    def unflatten(static_values: tuple, child_values: Any) -> Any:
        tree = object.__new__(data_class)
        tree.__dict__.update(zip(static_names, static_values, strict=True))
        tree.__dict__.update(zip(children, child_values, strict=True))
        return tree

    jax.tree_util.register_pytree_with_keys(data_class, flatten_with_keys, unflatten, flatten)
    return data_class
