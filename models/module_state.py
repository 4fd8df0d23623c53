"""State: what runs change of a module tree. It is found by comparison with how the tree was, and put back."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from enum import Enum
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from layertap.models.hooks.tensor_tree import find_refused, view_bytes
from layertap.models.turns import restore_default_dtype

StateKey = tuple[str, str]  # the name of a module in the tree, and of one of its buffers, submodules or attributes

# Parts, parameters and hooks, which are looked at apart; a forward that is resumed has a part's replaced meanwhile.
OF_TORCH = frozenset((*vars(nn.Module()), "forward")) - {"training"}
ATOMS = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType)
MAX_COPIED_BYTES = 2**26  # of a tensor or an array; a larger one is treated like a parameter
MAX_SEEN = 100_000  # objects that are looked into
MAX_VIEWED = 1000  # entries of a container that are compared after each run
SAMPLES = 64  # numbers that are compared of what is not copied
ABSENT = object()


class ModuleState:
    """How a module tree is when this is created; whatever runs change of it is put back.

    That is: buffers, submodules, attributes and flags, and what lists, dictionaries, sets, arrays, generators, closures
    and helper objects among the attributes hold. Parameters are not copied: one that points to other memory gets its
    own back, but one that was overwritten is ``lost``. ``found`` names everything that runs have changed so far.
    Only the thread that runs the module may call the methods.
    """

    def __init__(self, module: nn.Module, like: ModuleState | None = None) -> None:
        """``like``: the state of another tree over the same buffers, whose copies serve both."""
        self._copies: Mapping[int, Tensor] = {} if like is None else like.copies
        self._has_run = False
        self.found: dict[StateKey, None] = {}
        self.lost: dict[StateKey, None] = {}
        self._module = module
        self.take()

    @property
    def copies(self) -> dict[int, Tensor]:
        """Copies of tensors by their addresses."""
        tensors = [memory for memory in self._memories if isinstance(memory.value, Tensor)]
        return {memory.value.data_ptr(): memory.copy for memory in tensors if memory.copy is not None}

    def begin(self) -> None:
        """Before each forward: have the state as it was, also within a run of several forwards."""
        if self._has_run:
            self.restore()
        self._has_run = True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put everything back when a run ends; after an error all memory is compared too."""
        try:
            yield
        except BaseException:
            self.restore(thorough=True)
            raise
        self.restore()

    def has_overwritten(self) -> bool:
        """Whether the memory of a parameter has other numbers now, within a run."""
        return any(memory.copy is None and memory.is_overwritten() for memory in self._memories)

    def has_changed_tensors(self) -> bool:
        """Whether a tensor has other numbers or other memory now, within a run: trees over the same would see it."""
        return any(memory.is_moved() or memory.is_overwritten() for memory in self._memories)

    def settle(self) -> None:
        """After the first run: keep what it did if it made modules or parameters, else put it back."""
        if self._parts < self._list_parts():
            self.take()
        else:
            self.restore(thorough=True)

    def restore(self, *, thorough: bool = False) -> None:
        """Put everything back. ``thorough``: compare all memory, not only what operations of torch have written to."""
        if not self._has_run:
            return
        self._has_run = False
        restore_default_dtype()
        if not thorough and self._is_untouched():
            return
        for holder in self._holders:
            self.found |= dict.fromkeys(holder.put_back())
        for memory in self._memories:
            outcome = memory.put_back(thorough=thorough)
            if outcome != "same":
                (self.lost if outcome == "lost" else self.found)[memory.key] = None
        self._mark()

    def _is_untouched(self) -> bool:
        """Whether every name stands for the same object, and no operation wrote to a tensor: quick, after each run."""
        values = list(chain.from_iterable(self._views))
        return (
            len(values) == len(self._values)
            and all(map(is_, values, self._values))
            and [vars(part)["training"] for part in self._plain] == self._flags
            and [tensor._version for tensor in self._tensors] == self._versions
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
            and all(torch.equal(memory.value.get_state(), memory.copy) for memory in self._generators)
            and not any(memory.is_untracked and memory.is_overwritten() for memory in self._memories)
        )

    def take(self) -> None:
        """Keep the state that the tree has now."""
        self._has_run = False
        self._parts = self._list_parts()
        self._holders: list[_Holder] = []
        self._memories: list[_Memory] = []
        self._plain: list[nn.Module] = []  # of torch's own classes: others seldom change more of them than a flag
        self._views: list[Iterable[object]] = []
        self._seen: dict[int, object] = {}
        self._add_tree("", self._module)
        tensors = [memory.value for memory in self._memories if isinstance(memory.value, Tensor)]
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]  # others have no version
        self._generators = [memory for memory in self._memories if isinstance(memory.value, torch.Generator)]
        self._mark()

    def _mark(self) -> None:
        self._values = list(chain.from_iterable(self._views))
        self._flags = [vars(part)["training"] for part in self._plain]
        self._versions = [tensor._version for tensor in self._tensors]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def _list_parts(self) -> set[int]:
        """Modules and parameters that exist: not those that the first forward is to make."""
        made = {id(parameter) for parameter in self._module.parameters() if not is_lazy(parameter)}
        return made | {id(part) for part in self._module.modules()}

    def _add_tree(self, prefix: str, module: nn.Module) -> None:
        for name, part in module.named_modules(prefix=prefix):
            if id(part) in self._seen:
                continue
            self._seen[id(part)] = part
            is_plain = type(part).__module__.startswith("torch.nn.")
            if is_plain:
                self._plain.append(part)
            for namespace in (vars(part), part._buffers, part._parameters, part._modules):
                if not is_plain or namespace is part._buffers or namespace is part._parameters:
                    self._views.append(namespace.values())
                self._holders.append(_Names(namespace, name))
                for key, value in list(namespace.items()):
                    if key not in OF_TORCH and not isinstance(value, nn.Module):
                        self._add((name, key), value)

    def _add(self, key: StateKey, value: Any) -> None:
        """Note what a value holds that runs may change."""
        if isinstance(value, (*ATOMS, *OPAQUE)) or id(value) in self._seen or len(self._seen) >= MAX_SEEN:
            return
        self._seen[id(value)] = value  # alive, so that no other object gets its id
        if isinstance(value, nn.Module):  # in a list: nothing has registered it
            self._add_tree(".".join(filter(None, key)), value)
        elif isinstance(value, Tensor | np.ndarray | torch.Generator):
            if not isinstance(value, Tensor) or not (is_lazy(value) or any(find_refused(value))):
                self._memories.append(_Memory(key, value, self._copies))
        elif isinstance(value, tuple | types.MethodType | partial):
            for each in value if isinstance(value, tuple) else _list_bound(value):
                self._add(key, each)
        elif (holder := _open(key, value)) is not None:
            self._holders.append(holder)
            held = list(holder.view)
            if len(held) <= MAX_VIEWED:
                self._views.append(holder.view)
            for each in held:
                self._add(key, each)


class _Holder(Protocol):
    """What holds values in place of which a run may put others; ``view`` has those of now."""

    @property
    def view(self) -> Iterable[object]: ...

    def put_back(self) -> Iterable[StateKey]:
        """Hold the same values again; names what had changed."""


class _Names:
    """A namespace or a dictionary; without ``root``, its names are those of a module's attributes."""

    def __init__(self, names: dict[Any, Any], module: str, root: str = "") -> None:
        self.view = names.values()
        self._key = module, root
        self._names = names
        self._left_out = OF_TORCH if not root else frozenset[str]()
        self._saved = {name: value for name, value in names.items() if name not in self._left_out}

    def put_back(self) -> Iterable[StateKey]:
        found = [name for name in self._names if name not in self._saved and name not in self._left_out]
        for name in found:
            del self._names[name]
        for name, value in self._saved.items():
            now = self._names.get(name, ABSENT)
            if now is not value:
                self._names[name] = value
                found += [] if _is_equal(now, value) else [name]
        return [(self._key[0], self._key[1] or str(name)) for name in found]


class _Items:
    """A list, a deque, a set, or the variables of a closure or of slots."""

    def __init__(self, key: StateKey, view: Iterable[object], put: Callable[[list[Any]], None]) -> None:
        self.view = view
        self._key = key
        self._put = put
        self._saved = list(view)

    def put_back(self) -> Iterable[StateKey]:
        now = list(self.view)
        if len(now) == len(self._saved) and all(map(is_, now, self._saved)):
            return []
        self._put(self._saved)
        is_same = len(now) == len(self._saved) and all(map(_is_equal, now, self._saved))
        return [] if is_same else [self._key]


class _Variables:
    """Variables that are no entries of a dictionary: what they hold now, and how they get that again."""

    def __init__(self, getters: list[Callable[[], object]], setters: list[Callable[[Any], object]]) -> None:
        self._getters = getters
        self._setters = setters

    def __iter__(self) -> Iterator[object]:
        return map(_read, self._getters)

    def put(self, values: list[Any]) -> None:
        for now, put, value in zip(self, self._setters, values, strict=True):
            if now is not value and value is not ABSENT:
                put(value)


def _read(get: Callable[[], object]) -> object:
    try:
        return get()
    except (AttributeError, ValueError):  # nothing was assigned yet
        return ABSENT


def _open(key: StateKey, value: Any) -> _Holder | None:
    """What holds the contents of a container, a function or an object; None if it has none that can change."""
    if isinstance(value, dict):
        return _Names(value, *key)
    if isinstance(value, list | deque | set):
        return _Items(key, value, partial(_refill, value))
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        variables = _Variables(
            [partial(getattr, cell, "cell_contents") for cell in cells],
            [partial(setattr, cell, "cell_contents") for cell in cells],
        )
        return _Items(key, variables, variables.put)
    namespace = getattr(value, "__dict__", None)
    if type(namespace) is dict:
        return _Names(namespace, *key)
    slots = [name for kind in type(value).__mro__ for name in _list_slots(kind)]
    variables = _Variables(
        [partial(getattr, value, name) for name in slots], [partial(object.__setattr__, value, name) for name in slots]
    )
    return _Items(key, variables, variables.put) if slots else None


def _list_slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _list_bound(value: types.MethodType | partial[Any]) -> tuple[Any, ...]:
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    return value.func, value.args, value.keywords


def _refill(container: Any, values: list[Any]) -> None:
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(values)


@dataclass(eq=False)
class _Memory:
    """A tensor, an array or a generator with a copy of its values; of a parameter there are a few numbers only."""

    key: StateKey
    value: Any
    copies: InitVar[Mapping[int, Tensor]]

    def __post_init__(self, copies: Mapping[int, Tensor]) -> None:
        self.copy: Any = None
        self.is_untracked = False  # written to by what leaves the version as it was
        if isinstance(self.value, torch.Generator):
            self.copy = self.value.get_state()
            return
        small = not isinstance(self.value, nn.Parameter) and self.value.nbytes <= MAX_COPIED_BYTES
        if isinstance(self.value, np.ndarray):
            self.copy = self.value.copy() if small else None
            return
        with torch.no_grad():
            self._alias = self.value.detach()  # of the same memory, whatever the tensor points to later
            self._version = _get_version(self.value)
            self.copy = copies.get(self.value.data_ptr(), self.value.clone()) if small else None
            self._sample = self._alias.reshape(-1)[_choose(self._alias)].clone()

    def is_moved(self) -> bool:
        """Whether a tensor points to other memory."""
        return isinstance(self.value, Tensor) and self.value.data_ptr() != self._alias.data_ptr()

    def is_overwritten(self) -> bool:
        """Whether a tensor's own memory has other numbers, as far as a few tell."""
        if not isinstance(self.value, Tensor):
            return False
        sample = self._alias.reshape(-1)[_choose(self._alias)]
        return not torch.equal(view_bytes(sample), view_bytes(self._sample))

    def put_back(self, *, thorough: bool) -> Literal["same", "changed", "lost"]:
        """Have the same values again, if a run has changed them."""
        if isinstance(self.value, torch.Generator):
            is_same = torch.equal(self.value.get_state(), self.copy)
            self.value.set_state(self.copy)
            return "same" if is_same else "changed"
        if isinstance(self.value, np.ndarray):
            if not thorough or self.copy is None or self.value.tobytes() == self.copy.tobytes():
                return "same"
            np.copyto(self.value, self.copy)
            return "changed"
        with torch.no_grad():
            return self._put_tensor_back(thorough)

    def _put_tensor_back(self, thorough: bool) -> Literal["same", "changed", "lost"]:
        value, alias = self.value, self._alias
        is_moved = (value.data_ptr(), value.shape, value.stride()) != (alias.data_ptr(), alias.shape, alias.stride())
        if is_moved:
            value.data = alias
        if value.grad_fn is not None and not value._is_view():  # written to in a forward whose graph it would keep
            value.detach_()
        is_noticed = _get_version(value) != self._version
        if not (is_moved or thorough or self.is_untracked or is_noticed):
            return "same"
        self._version = _get_version(value)
        if self.copy is None:
            return "lost" if self.is_overwritten() else "changed" if is_moved else "same"
        if torch.equal(view_bytes(alias), view_bytes(self.copy)):
            return "changed" if is_moved else "same"
        self.is_untracked |= not is_noticed  # as batch norm writes its statistics
        alias.data.copy_(self.copy)  # past the version
        return "changed"


def _get_version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _choose(tensor: Tensor) -> slice:
    return slice(None, None, 1 + tensor.numel() // SAMPLES)


def _is_equal(one: object, other: object) -> bool:
    """Whether another object says the same: a number that was computed again."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(view_bytes(one), view_bytes(other))
    return type(one) is type(other) and isinstance(one, ATOMS) and bool(one == other or (one != one and other != other))
