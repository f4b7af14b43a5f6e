"""Checks before training, with the compiler, whether it fits into the devices' memory."""

from collections.abc import Callable, Iterable

import jax

from spec_jax import distributed
from spec_jax.checkpoints.memory import GIB, free_memory
from spec_jax.errors import ConfigError, is_out_of_memory
from spec_jax.models.model import Model


def check_fits(
    model: Model,
    what: str,
    name: str,
    value: int,
    smaller: Iterable[int],
    bytes_needed: Callable[[int], int],
) -> None:
    """Refuses a setting that does not fit into memory, and names one that would.

    Of several processes the one with the least free memory decides for all.

    Args:
      model: the model that is already on the devices.
      what: the operation, for the message.
      name: the setting that determines the memory it takes.
      value: the value of the setting.
      smaller: other values, each of which needs less memory than the one before.
      bytes_needed: returns the further bytes that a value needs on each device. It may compile,
        and the compiler may refuse for lack of memory.

    Raises:
      ConfigError: it does not fit.
    """
    free = free_memory(jax.tree.leaves(model)[0].sharding.addressable_devices)

    def needed(value: int) -> int | float:
        try:
            here = bytes_needed(value)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            here = float("inf")
        return max(distributed.gather(here))

    size = needed(value)
    if size <= free:
        return
    fitting = next((each for each in smaller if needed(each) <= free), None)
    taken = "more" if size == float("inf") else f"{size / GIB:.2f} GiB"
    remedy = (
        "no value of it would fit; take a smaller draft or target, dtype bfloat16, or a layout "
        "of more devices"
        if fitting is None
        else f"{name} {fitting} would fit"
    )
    raise ConfigError(
        f"{name} is {value}, with which {what} takes {taken} of memory on each device, but "
        f"{free / GIB:.2f} GiB are free; {remedy}."
    )
