"""The store of past outputs, against plain Python: what it keeps, for whom, and in which order."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from spec_jax.engine.suffix_index import END, SuffixIndex, suffix_order

outputs_of_few_words = st.lists(
    st.one_of(*[st.lists(st.integers(0, top), min_size=1, max_size=9) for top in (0, 1, 5)]),
    min_size=1,
    max_size=8,
)
calls = st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.lists(st.integers(0, 3))))


def sorted_places(text):
    """All places but the ends, by what stands there up to the end of the output."""
    begun = {i: text[i : text.index(END, i)] for i, token in enumerate(text) if token != END}
    return sorted(begun, key=lambda i: (begun[i], i))


def stored(index, namespace):
    """The outputs of a namespace as its arrays have them, checked for being a suffix array."""
    (tokens,), (order,), (count,) = index.arrays([namespace], 1)
    assert len(tokens) == len(order) == index.capacity
    text, outputs = tokens.tolist(), [[]]
    assert order[:count].tolist() == sorted_places(text)
    for token in text:
        if token == END:
            outputs.append([])
        else:
            outputs[-1].append(token)
    assert outputs.pop() == []  # the last output has an end, too
    return [output for output in outputs if output]


@given(outputs_of_few_words)
def test_places_are_in_the_order_of_what_they_begin(outputs):
    text = [token for output in outputs for token in [*output, END]]
    assert suffix_order(np.array(text, np.int32)).tolist() == sorted_places(text)


@given(calls)
@example([("a", [1] * 5), ("a", [2] * 5)])  # as much as there is room for
@example([("a", [1] * 5), ("a", [2] * 6)])  # a token more
def test_the_latest_whole_outputs_of_the_latest_namespaces_are_kept(calls):
    index = SuffixIndex(capacity=12, namespaces=2)
    expected: dict[str, list[list[int]]] = {}
    for namespace, output in calls:
        index.add(namespace, output)
        if not output:
            continue
        kept = [*expected.pop(namespace, []), output[-11:]]
        while sum(len(each) + 1 for each in kept) > 12:
            kept = kept[1:]
        expected[namespace] = kept  # dicts keep the order of insertion
        if len(expected) > 2:
            del expected[next(iter(expected))]
    for namespace in ("", "a", "b", "c", "never seen"):
        assert stored(index, namespace) == expected.get(namespace, [])


def test_what_was_looked_in_before_an_output_came_does_not_change():
    """The device may share memory with the arrays."""
    index = SuffixIndex(capacity=8)
    index.add("a", [1, 2])
    before = index.arrays(["a"], 1)
    copies = [each.copy() for each in before]
    index.add("a", [3])
    assert stored(index, "a") == [[1, 2], [3]]
    for each, copy in zip(before, copies, strict=True):
        np.testing.assert_array_equal(each, copy)


def test_each_row_of_a_batch_has_its_own_namespace_and_the_others_nothing():
    index = SuffixIndex(capacity=6)
    index.add("a", [7, 7])
    index.add("b", [5])
    tokens, order, counts = index.arrays(["b", "a", "b", "c"], 8)
    assert (tokens.shape, order.shape, counts.shape) == ((8, 6), (8, 6), (8,))
    assert counts.tolist() == [1, 2, 1, 0, 0, 0, 0, 0]
    assert tokens[:3, :3].tolist() == [[5, END, END], [7, 7, END], [5, END, END]]
    assert (tokens[3:] == END).all()
