"""Tensors inside structured values."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from models.structure import call_value, leaves
from tests.nets import Card, Nested, Pair
from tests.oracle import flatten

A, B, C = torch.tensor(1.0), torch.tensor([2.0]), torch.tensor([[3]])


@dataclass
class Unfinished:
    value: Tensor
    later: Tensor = field(init=False)


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (A, [()]),
        ((A, B), [("0",), ("1",)]),
        ([A, (B, [C])], [("0",), ("1", "0"), ("1", "1", "0")]),
        ({"b": B, "a": A}, [("b",), ("a",)]),
        ({0: A, ("x", 1): B}, [("0",), ("('x', 1)",)]),
        (Pair(A, B), [("left",), ("right",)]),
        (Card(A, "text", [B, C]), [("value",), ("more", "0"), ("more", "1")]),
        (torch.max(torch.ones(2, 2), 0), [("0",), ("1",)]),
        ({"a": None, "b": 3, "c": "text", "d": [], "e": {"f": A}}, [("e", "f")]),
        (Card, []),
        (None, []),
        ("abc", []),
        ({A, B}, []),
    ],
)
def test_paths(value: object, paths: list[tuple[str, ...]]) -> None:
    """Each tensor is found once, by the keys, fields and indices that lead to it, in the value's own order."""
    assert [path for path, _ in leaves(value)] == paths


def test_the_very_tensors() -> None:
    """A leaf is the tensor itself, not a copy."""
    value = {"a": (A, Card(B, "", [C]))}
    assert [id(leaf) for _, leaf in leaves(value)] == [id(A), id(B), id(C)]


def test_agrees_with_the_oracle() -> None:
    """Every kind of container at once gives what an independent flattening gives."""
    value = Nested()(torch.randn(2, 5))
    ours, theirs = dict(leaves(value)), flatten(value)
    assert ours.keys() == theirs.keys()
    assert all(ours[path] is theirs[path] for path in ours)


def test_tensors_without_plain_memory_are_passed_over() -> None:
    """Sparse and nested tensors are no leaves: nothing here can pool or write them."""
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert list(leaves([torch.ones(2, 2).to_sparse(), nested])) == []


def test_a_field_that_was_never_set() -> None:
    """A dataclass whose later field is not there yet gives the fields that are."""
    assert [path for path, _ in leaves(Unfinished(A))] == [("value",)]


def test_a_lone_argument_stands_for_itself() -> None:
    """An argument is the value if no other holds a tensor, whether it came by position or by name."""
    assert call_value((A,), {}) is A
    assert call_value((A, None, 3), {"mask": None, "flag": True}) is A
    assert call_value((), {"query": A}) is A
    assert call_value((None, {"x": A}), {}) == {"x": A}


def test_several_arguments_by_index_and_name() -> None:
    """Arguments that hold tensors keep their index or their name; the others do not count."""
    value = call_value((A, "text", (B,)), {"mask": C, "flag": False})
    assert [path for path, _ in leaves(value)] == [("0",), ("2", "0"), ("mask",)]


def test_no_tensor_at_all() -> None:
    """A call without tensors has no leaves."""
    assert list(leaves(call_value((1, "x"), {"flag": True}))) == []
