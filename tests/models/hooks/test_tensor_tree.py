"""Tensors inside structured values."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from layertap.models.errors import InputError
from layertap.models.hooks.tensor_tree import (
    find_refused,
    iterate_tensors,
    pack_arguments,
    replace_tensor,
)
from tests.nets import Card, Nested, Pair
from tests.oracle import flatten

A, B, C = torch.tensor(1.0), torch.tensor([2.0]), torch.tensor([[3]])


class Reading(Mapping[str, Any]):
    """May be read and not written to."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        self._held = dict(held)

    def __getitem__(self, key: str) -> Any:
        return self._held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class Particular(Reading):
    """Made from other things than it holds."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__({"first": first, "second": second})


class Forgetful(Reading):
    """Does not keep what it is given."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        super().__init__(dict.fromkeys(held, A))


class Pointed(tuple[Any, ...]):
    """A tuple made from something else."""

    __slots__ = ()

    def __new__(cls, x: Any, y: Any) -> Pointed:
        return super().__new__(cls, (x, y))


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
    ],
)
def test_paths(value: object, paths: list[tuple[str, ...]]) -> None:
    """Each tensor is found once, by the keys, fields and indices that lead to it, in the value's own order."""
    assert [path for path, _ in iterate_tensors(value)] == paths


def test_agrees_with_the_oracle() -> None:
    """Every kind of container at once gives what an independent flattening gives."""
    value = Nested()(torch.randn(2, 5))
    ours, theirs = dict(iterate_tensors(value)), flatten(value)
    assert ours.keys() == theirs.keys()
    assert all(ours[path] is theirs[path] for path in ours)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_tensors_without_plain_memory_are_passed_over() -> None:
    """Sparse and nested tensors are no leaves: nothing here can pool or write them."""
    value = {"a": [sparse(), A], "b": jagged(), "c": torch.ones(2, 2).to_sparse_csr()}
    assert [path for path, _ in iterate_tensors(value)] == [("a", "1")]
    assert list(find_refused(value)) == [(("a", "0"), "sparse"), (("b",), "nested"), (("c",), "sparse")]
    assert list(find_refused(sparse())) == [((), "sparse")]
    assert list(find_refused(torch.ones(2, 2).to_mkldnn())) == [((), "opaque")]
    assert list(find_refused({"a": [A, "text"], "b": None})) == []


def test_a_lone_argument_stands_for_itself() -> None:
    """An argument is the value if no other holds a tensor, whether it came by position or by name."""
    assert pack_arguments((A,), {}) is A
    assert pack_arguments((A, None, 3), {"mask": None, "flag": True}) is A
    assert pack_arguments((), {"query": A}) is A
    assert pack_arguments((None, {"x": A}), {}) == {"x": A}


def test_several_arguments_by_index_and_name() -> None:
    """Arguments that hold tensors keep their index or their name; the others do not count."""
    value = pack_arguments((A, "text", (B,)), {"mask": C, "flag": False})
    assert [path for path, _ in iterate_tensors(value)] == [("0",), ("2", "0"), ("mask",)]


def sparse() -> Tensor:
    return torch.eye(2).to_sparse()


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


NEW = torch.tensor(9.0)
KINDS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "dict": (lambda: {"a": A, "b": B}, ("b",)),
    "user's dict": (lambda: UserDict(a=A, b=B), ("b",)),
    "readable": (lambda: Reading({"a": A, "b": [B, C]}), ("b", "1")),
    "list": (lambda: [A, (B, C)], ("1", "0")),
    "tuple": (lambda: (A, B), ("0",)),
    "named": (lambda: Pair(A, B), ("right",)),
    "torch's": (lambda: torch.max(torch.ones(2, 2), 0), ("0",)),
    "dataclass": (lambda: Card(A, "text", [B, C]), ("more", "0")),
    "deep": (lambda: {"a": [MappingProxyType({"b": Pair(A, {"c": B})})]}, ("a", "0", "b", "right", "c")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_tensor_in_the_same_container(kind: str) -> None:
    """The new value is of the old one's kind, with one other tensor at its place; the old one is as it was."""
    make, path = KINDS[kind]
    value = make()
    before = flat(value)
    made = replace_tensor(value, path, NEW)
    assert type(made) is type(value)
    after = flat(made)
    assert list(after) == list(before)
    assert after[path] is NEW
    assert all(after[each] is before[each] for each in before if each != path)
    assert all(one is other for one, other in zip(flat(value).values(), before.values(), strict=True))
    if isinstance(value, Card):
        assert made.note == "text"


def flat(value: Any) -> dict[tuple[str, ...], Tensor]:
    """Tensors by path, through whatever can be read by key."""
    if isinstance(value, (Mapping, UserDict)):
        value = dict(value)
    if isinstance(value, dict):
        return {(str(key), *path): leaf for key, item in value.items() for path, leaf in flat(item).items()}
    if type(value) is list or type(value) is tuple:
        return flat(dict(enumerate(value)))
    return flatten(value) if not isinstance(value, Tensor) else {(): value}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Pointed(A, B), ("0",)),
        ({"a": [Pointed(A, B)]}, ("a", "0", "1")),
        (Particular(A, B), ("first",)),
        (Forgetful({"a": A}), ("a",)),
        ({1: A, "1": B}, ("1",)),
    ],
)
def test_what_can_not_be_made_again(value: Any, path: tuple[str, ...]) -> None:
    """A container that does not take what it holds, or takes it and holds something else, is refused."""
    with pytest.raises(InputError, match="can't be made again") as caught:
        replace_tensor(value, path, NEW)
    assert caught.value.hint
