"""State that runs change in a module tree: found by comparison, and put back."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from layertap.models.devices.transfer import view_bytes
from layertap.models.devices.turns import has_default_dtype, restore_default_dtype
from layertap.models.hooks.tensor_tree import find_refused

StateKey = tuple[str, str]  # the name of a module in the tree, and of one of its buffers, submodules or attributes

# Parts, parameters and hooks, which are looked at apart; a forward that is resumed has a part's replaced meanwhile.
OF_TORCH = frozenset((*vars(nn.Module()), "forward")) - {"training"}
ATOMS = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType)
HARMLESS = ("_thread.", "threading.", "logging.", "concurrent.futures.")  # of the process, not of the model's answers
# What holds the same values for good; these may hold others.
FIXED: Mapping[type, Callable[[Any], Iterable[object]]] = {
    tuple: iter,
    types.FunctionType: lambda function: function.__closure__ or (),
    types.MethodType: lambda method: (method.__self__, method.__func__),
    partial: lambda each: (each.func, each.args, each.keywords),
}
MAX_COPIED_BYTES = 2**26  # of a tensor or an array; a larger one is treated like a parameter
MAX_SEEN = 100_000  # objects that are looked into
MAX_VIEWED = 1000  # entries of a container that are compared after each run, unless a run has changed it before
MAX_WATCHED_BYTES = 2**16  # of an array, of whose writes torch knows nothing; a larger one is compared once it changed
SAMPLES = 64  # numbers of a tensor that are compared if it is not copied
ABSENT = object()
END = object()
_get_flag = itemgetter("training")
_get_version = attrgetter("_version")


class ModuleState:
    """The state of a module tree when this is created; changes by runs are put back.

    State is buffers, submodules, attributes and flags, and the contents of lists, dictionaries, sets, arrays,
    generators, closures and helper objects among the attributes. Parameters are not copied: one that points to other
    memory gets its own back, but one that was overwritten is ``lost``. ``found`` names all changes so far. Only the
    thread that runs the module may call the methods.
    """

    def __init__(self, module: nn.Module, like: ModuleState | None = None) -> None:
        """``like``: the state of another tree over the same buffers, whose copies serve both."""
        self._copies: Mapping[int, Tensor] = {} if like is None else like.copies
        self._has_run = False
        self.found: dict[StateKey, None] = {}
        self.lost: dict[StateKey, None] = {}
        self.module = module
        self.take()

    @property
    def copies(self) -> dict[int, Tensor]:
        """Copies of tensors by their addresses."""
        return {memory.alias.data_ptr(): memory.copy for memory in self._memories if memory.copy is not None}

    def begin(self) -> None:
        """Before each forward: have the state as it was, also within a run of several forwards."""
        if self._has_run:
            self.restore()
        self._has_run = True
        self._had_dtype = has_default_dtype()  # else another thread's forward changes it, and sets it back

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
        """Whether the memory of a parameter was written to, within a run."""
        kept = [memory for memory in self._memories if memory.copy is None]
        return any(memory.is_noticed() or memory.is_overwritten() for memory in kept)

    def has_changed_tensors(self) -> bool:
        """Whether a tensor was written to, or has other memory now, within a run: trees over the same would see it."""
        return any(memory.is_moved() or memory.is_noticed() or memory.is_overwritten() for memory in self._memories)

    def settle(self) -> None:
        """After the first run: keep its changes if it made modules or parameters, else put them back."""
        if self._parts < self._list_parts():
            self.take()
        else:
            self.restore(thorough=True)

    def restore(self, *, thorough: bool = False) -> None:
        """Put everything back. ``thorough``: compare all memory, not only what operations of torch have written to."""
        if not self._has_run:
            return
        self._has_run = False
        if self._had_dtype:
            restore_default_dtype()
        if not thorough and self._is_untouched():
            return
        for holder in self._holders:
            if changed := holder.put_back():
                self.found |= dict.fromkeys(changed)
                if not any(view is holder.view for view in self._views):
                    self._views.insert(0, holder.view)
        for memory in self._memories:
            outcome = memory.put_back(thorough=thorough)
            if outcome != "same":
                (self.lost if outcome == "lost" else self.found)[memory.key] = None
        for key, generator, state in self._generators:
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)
                self.found[key] = None
        self._mark()

    def _is_untouched(self) -> bool:
        """A quick check after each run: every name has the same object, and no operation wrote to a tensor."""
        return (
            all(map(is_, chain.from_iterable(self._views), self._values))
            and self._read_marks() == self._marks
            and all(torch.equal(generator.get_state(), state) for _, generator, state in self._generators)
            and not any(memory.is_changed() for memory in self._untracked)
        )

    def _mark(self) -> None:
        self._values = list(chain.from_iterable(self._views))
        self._marks = self._read_marks()
        self._untracked = [memory for memory in self._memories if memory.is_untracked]

    def _read_marks(self) -> tuple[list[bool], list[int], list[int]]:
        """The flags of torch's own parts; versions and addresses of tensors."""
        flags, versions = map(_get_flag, self._plain), map(_get_version, self._tensors)
        return list(flags), list(versions), list(map(Tensor.data_ptr, self._tensors))

    def take(self) -> None:
        """Keep the state that the tree has now."""
        self._has_run = False
        self._parts = self._list_parts()
        self._holders: list[_Holder] = []
        self._memories: list[_Memory] = []
        self._generators: list[tuple[StateKey, torch.Generator, Tensor]] = []
        self._plain: list[dict[str, Any]] = []  # parts of torch's classes: others seldom change more than their flag
        self._views: list[Iterable[object]] = []
        self._seen: dict[int, object] = {}
        self._left: list[tuple[StateKey, object]] = []
        self._add_tree("", self.module)
        while self._left:  # no recursion: a list may be linked a thousand times
            self._add(*self._left.pop())
        self._views.append([END])  # nothing else is that: it shows whether there are as many values as before
        # Tensors of inference mode have no version.
        self._tensors = [memory.value for memory in self._memories if not memory.value.is_inference()]
        self._mark()

    def _list_parts(self) -> set[int]:
        """Modules and parameters that exist: not those that the first forward is to make."""
        made = {id(parameter) for parameter in self.module.parameters() if not is_lazy(parameter)}
        return made | {id(part) for part in self.module.modules()}

    def _add_tree(self, prefix: str, module: nn.Module) -> None:
        for name, part in module.named_modules(prefix=prefix):
            if id(part) in self._seen:
                continue
            self._seen[id(part)] = part
            if isinstance(part, torch.jit.ScriptModule):  # its namespaces are no dictionaries
                self._left += [((name, key), value) for key, value in part.named_buffers(recurse=False)]
                continue
            viewed = [part._buffers, part._parameters]
            if type(part).__module__.startswith("torch.nn."):
                self._plain.append(vars(part))
                viewed = [each for each in (*viewed, part._modules) if each]
            else:
                viewed += [vars(part), part._modules]
            self._views += [each.values() for each in viewed]
            for namespace in (vars(part), part._buffers, part._parameters, part._modules):
                self._holders.append(_Holder((name, ""), namespace))
                self._left += [
                    ((name, key), value)
                    for key, value in namespace.items()
                    if key not in OF_TORCH and not isinstance(value, nn.Module)
                ]

    def _add(self, key: StateKey, value: Any) -> None:
        """Note the contents of a value that runs may change."""
        if isinstance(value, (*ATOMS, *OPAQUE)) or id(value) in self._seen or len(self._seen) >= MAX_SEEN:
            return
        self._seen[id(value)] = value  # alive, so that no other object gets its id
        if isinstance(value, nn.Module):  # in a list: nothing has registered it
            self._add_tree(".".join(filter(None, key)), value)
        elif isinstance(value, torch.Generator):
            self._generators.append((key, value, value.get_state()))
        elif isinstance(value, Tensor | np.ndarray):
            tensor = _view_array(value) if isinstance(value, np.ndarray) else value
            if tensor is not None and not is_lazy(tensor) and not any(find_refused(tensor)):
                self._memories.append(_Memory(key, tensor, self._copies))
                self._memories[-1].is_untracked = tensor is not value and tensor.nbytes <= MAX_WATCHED_BYTES
        elif listed := next((FIXED[kind] for kind in FIXED if isinstance(value, kind)), None):
            self._left += [(key, each) for each in listed(value)]
        elif f"{type(value).__module__}.".startswith(HARMLESS):
            return
        elif (held := _open(value)) is not None:
            self._holders.append(_Holder(key, held))
            view = self._holders[-1].view
            values = list(view)
            if len(values) <= MAX_VIEWED:
                self._views.append(view)
            self._left += [(key, each) for each in values]


class _Variables:
    """A closure's cell, or an object with slots, as a list of the values that it holds now."""

    def __init__(self, owner: object, names: Iterable[str]) -> None:
        self._owner = owner
        self._names = names

    def __iter__(self) -> Iterator[object]:
        for name in self._names:
            try:
                yield getattr(self._owner, name)
            except (AttributeError, ValueError):  # nothing was assigned yet
                yield ABSENT

    def put(self, values: Iterable[object]) -> None:
        for name, now, value in zip(self._names, self, values, strict=True):
            if now is not value and value is not ABSENT:
                object.__setattr__(self._owner, name, value)  # past a frozen class's own


def _open(value: Any) -> Any:
    """The container of the values that an object holds; None if these can't change."""
    if isinstance(value, dict | list | deque | set):
        return value
    if isinstance(value, types.CellType):
        return _Variables(value, ["cell_contents"])
    namespace = getattr(value, "__dict__", None)
    if type(namespace) is dict:
        return namespace
    listed = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    slots = [name for each in listed for name in ([each] if isinstance(each, str) else each) if name[:2] != "__"]
    return _Variables(value, slots) if slots else None


class _Holder:
    """A namespace or another container whose values a run may replace; ``view`` has the present ones.

    ``key`` without a name: the container's names are those of a module's attributes.
    """

    def __init__(self, key: StateKey, held: Any) -> None:
        self.view: Iterable[object] = held.values() if isinstance(held, dict) else held
        self._key = key
        self._held = held
        self._left_out = frozenset[str]() if key[1] else OF_TORCH
        self._saved = self._read()

    def _read(self) -> dict[Any, object]:
        items = self._held.items() if isinstance(self._held, dict) else enumerate(self._held)
        return {name: value for name, value in items if name not in self._left_out}

    def put_back(self) -> list[StateKey]:
        """Hold the same values again; names what had changed."""
        now, saved = self._read(), self._saved
        if len(now) == len(saved) and all(value is saved.get(name, ABSENT) for name, value in now.items()):
            return []
        if isinstance(self._held, dict):
            for name in now.keys() - saved.keys():
                del self._held[name]
            self._held.update(saved)
        elif isinstance(self._held, _Variables):
            self._held.put(saved.values())
        else:
            self._held.clear()
            (self._held.update if isinstance(self._held, set) else self._held.extend)(saved.values())
        names = (name for name in now | saved if not _is_equal(now.get(name, ABSENT), saved.get(name, ABSENT)))
        return [(self._key[0], self._key[1] or str(name)) for name in names]


def _view_array(array: np.ndarray[Any, Any]) -> Tensor | None:
    """A tensor over an array's memory; None if nothing can change it, or it holds other things than numbers."""
    try:
        return torch.from_numpy(array) if array.flags.writeable else None
    except (TypeError, ValueError):
        return None


class _Memory:
    """A tensor with a copy of its numbers; of a parameter or a large tensor only of a few."""

    def __init__(self, key: StateKey, value: Tensor, copies: Mapping[int, Tensor]) -> None:
        self.key = key
        self.value = value
        self.alias = value.detach()  # of the same memory, whatever the tensor points to later
        self.is_untracked = False  # written to by what leaves the version as it was
        self.copy: Tensor | None = None
        if not isinstance(value, nn.Parameter) and value.nbytes <= MAX_COPIED_BYTES:
            shared = copies.get(value.data_ptr())  # of a view of its beginning there may be another
            is_like = shared is not None and (shared.shape, shared.dtype) == (value.shape, value.dtype)
            self.copy = shared if is_like else self.alias.clone()
        self._version = self._read_version()
        self._sample = self._read_sample().clone()

    def _read_version(self) -> int:
        return -1 if self.value.is_inference() else self.value._version

    def _read_sample(self) -> Tensor:
        return self.alias.reshape(-1)[:: 1 + self.alias.numel() // SAMPLES]

    def is_noticed(self) -> bool:
        """Whether an operation of torch has written to the tensor."""
        return self._read_version() != self._version

    def is_moved(self) -> bool:
        """Whether the tensor points to other memory."""
        value, alias = self.value, self.alias
        return (value.data_ptr(), value.shape, value.stride()) != (alias.data_ptr(), alias.shape, alias.stride())

    def is_changed(self) -> bool:
        """Whether the tensor's own memory has other numbers."""
        if self.copy is None:
            return self.is_overwritten()
        return not torch.equal(view_bytes(self.alias), view_bytes(self.copy))

    def is_overwritten(self) -> bool:
        """Whether the tensor's own memory has other numbers, as far as a few tell."""
        return not torch.equal(view_bytes(self._read_sample()), view_bytes(self._sample))

    @torch.no_grad()
    def put_back(self, *, thorough: bool) -> Literal["same", "changed", "lost"]:
        """Have the same values again, if a run has changed them."""
        value = self.value
        if is_moved := self.is_moved():
            value.data = self.alias
        if value.grad_fn is not None and not value._is_view():  # written to in a forward whose graph it would keep
            value.detach_()
        is_noticed = self.is_noticed()
        self._version = self._read_version()
        outcome: Literal["same", "changed"] = "changed" if is_moved else "same"
        if not (is_moved or thorough or self.is_untracked or is_noticed):
            return outcome
        if self.copy is None:
            return "lost" if self.is_overwritten() else outcome
        if not self.is_changed():
            return outcome
        self.is_untracked |= not is_noticed  # as batch norm writes its statistics
        self.alias.data.copy_(self.copy)  # past the version
        return "changed"


def _is_equal(one: object, other: object) -> bool:
    """Whether two objects have the same value, as a number that was computed again."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(view_bytes(one), view_bytes(other))
    if type(one) is not type(other) or not isinstance(one, ATOMS):
        return one is other
    return bool(one == other or (one != one and other != other))
