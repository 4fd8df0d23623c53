"""Tensors inside structured values."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from layertap.models.errors import InputError
from layertap.models.hooks.attach import ATTACH, count_hooks
from layertap.models.hooks.tensor_tree import Arguments, find_refused, iterate_tensors, replace_tensor
from layertap.models.points import SITES
from tests.nets import Card, Nested, Pair
from tests.oracle import flatten

A, B, C = torch.tensor(1.0), torch.tensor([2.0]), torch.tensor([[3]])
JAGGED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (A, [()]),
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
    value = {"a": [torch.eye(2).to_sparse(), A], "b": JAGGED, "c": torch.ones(2, 2).to_sparse_csr()}
    assert [path for path, _ in iterate_tensors(value)] == [("a", "1")]
    assert list(find_refused(value)) == [(("a", "0"), "sparse"), (("b",), "nested"), (("c",), "sparse")]
    assert list(find_refused(torch.ones(2, 2).to_mkldnn())) == [((), "opaque")]


def test_arguments() -> None:
    """A lone argument that holds tensors stands for itself; several keep their index or name, others do not count."""
    assert dict(iterate_tensors(Arguments((A, None, 3), {"mask": None, "flag": True}))) == {(): A}
    assert dict(iterate_tensors(Arguments((), {"query": A}))) == {(): A}
    assert dict(iterate_tensors(Arguments((None, {"x": A}), {}))) == {("x",): A}
    value = Arguments((A, "text", (B,)), {"mask": C, "flag": False})
    assert [path for path, _ in iterate_tensors(value)] == [("0",), ("2", "0"), ("mask",)]


@pytest.mark.parametrize(
    ("args", "kwargs", "path", "lone", "found"),
    [
        ((A, B), {}, (), "x", ("0",)),  # it was alone
        ((A,), {"mask": B}, (), "mask", ("mask",)),
        ((), {"x": A}, (), "x", ()),  # by its name now
        ((A,), {}, ("0",), "", ()),  # alone now
        ((A, B), {}, ("mask",), "", ("1",)),
        ((), {"mask": B, "x": A}, ("0",), "", ("x",)),
        (({"a": A}, B), {}, ("a",), "x", ("0", "a")),
        ((None, B), {}, (), "x", ("0",)),  # no tensor there: what is alone now is another
    ],
)
def test_find_argument(args: tuple[Any, ...], kwargs: dict[str, Any], path: Any, lone: str, found: Any) -> None:
    """An argument is found by its parameter, whether it was alone before or is now, by position or by name."""
    arguments = Arguments(args, kwargs, ("x", "mask"))
    assert arguments.find_path(path, lone) == found


KINDS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "list": (lambda: [A, (B, C)], ("1", "0")),
    "torch's": (lambda: torch.max(torch.ones(2, 2), 0), ("0",)),
    "dataclass": (lambda: Card(A, "text", [B, C]), ("more", "0")),
    "deep": (lambda: {"a": [UserDict({"b": Pair(A, {"c": B})})]}, ("a", "0", "b", "right", "c")),
    "read-only": (lambda: MappingProxyType({"a": A, "b": [B, C]}), ("b", "1")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_tensor_in_the_same_container(kind: str) -> None:
    """The new value is of the old one's kind, with one other tensor at its place; the old one is as it was."""
    make, path = KINDS[kind]
    value, new = make(), torch.tensor(9.0)
    before = dict(iterate_tensors(value))
    made = replace_tensor(value, path, new)
    assert type(made) is type(value)
    after = dict(iterate_tensors(made))
    assert list(after) == list(before)
    assert after[path] is new
    assert all(after[each] is before[each] for each in before if each != path)
    assert all(one is other for one, other in zip(dict(iterate_tensors(value)).values(), before.values(), strict=True))


class Pointed(tuple[Any, ...]):
    """A tuple made from something else."""

    __slots__ = ()

    def __new__(cls, x: Any, y: Any) -> Pointed:
        return super().__new__(cls, (x, y))


@pytest.mark.parametrize(("value", "path"), [([Pointed(A, B)], ("0", "1")), ({1: A, "1": B}, ("1",))])
def test_what_can_not_be_made_again(value: Any, path: tuple[str, ...]) -> None:
    """A container that does not take what it holds, or holds something else then, is refused."""
    with pytest.raises(InputError, match="can't be made again") as caught:
        replace_tensor(value, path, torch.tensor(9.0))
    assert caught.value.hint


def test_a_hook_for_each_site() -> None:
    """Every value that a selector can name has its kind of hook; functions and changed attention have their own."""
    assert {"function", "changed_function", "unfused"} | set(SITES.values()) == set(ATTACH)


def test_count() -> None:
    """Hooks of every kind on every part are counted."""
    inner = nn.Sequential(nn.Tanh())
    model = nn.Sequential(nn.Linear(2, 2), inner)
    model.register_forward_hook(print)
    model[0].register_forward_pre_hook(print)
    inner.register_full_backward_hook(print)
    last = inner[0].register_full_backward_pre_hook(print)
    assert count_hooks(model) == 4
    last.remove()
    assert count_hooks(model) == 3
