"""A digest of everything that a forward can reach: what its modules hold, and the operator's code that runs in it.

Objects are described once, in the order in which they are met, by class and content; later mentions are numbers.
Attributes are read as ``copy`` reads them, but no method of the operator's is called; functions with closure, defaults
and the globals that they name; code as the text of its file. Libraries' code counts by its name.
"""

from __future__ import annotations

import copyreg
import dis
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import cache
from hashlib import sha256
from importlib.util import find_spec, resolve_name
from io import BytesIO
from pathlib import Path, PurePath
from sysconfig import get_path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, TypeGuard
from zipfile import ZipFile

import torch
from torch import Tensor, nn

from layertap.models.devices.transfer import view_bytes
from layertap.models.grammar import LIBRARIES
from layertap.models.hooks.tensor_tree import find_refused

BUDGET, OBJECT_COST = 2**33, 2**14  # the most bytes that are read; an object counts as so many
SCALARS = frozenset({type(None), bool, int, float, complex, type(...), type(NotImplemented)})
# Libraries whose versions do not count: probes find one that computes something else.
PROBED = frozenset({"layertap", "torch", "numpy", *LIBRARIES, *sys.stdlib_module_names})
# Modules of Python whose objects hold no numbers; a graph of FX holds those of the code that is beside it.
HARMLESS = ("_thread.", "threading.", "logging.", "concurrent.futures.", "_abc.", "torch._dynamo.", "torch.fx.graph.")
BY_NAME = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme, torch.finfo, torch.iinfo)
OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
STDLIB = get_path("stdlib")
OF_TORCH = frozenset(vars(nn.Module()))
LEFT_OUT = frozenset({"training", "fused_attn"})  # timm's fused_attn depends on the machine
PARTS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
METADATA = frozenset({"__name__", "__file__", "__spec__", "__loader__", "__package__", "__cached__", "__builtins__"})
COPYING = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs_ex__", "__getnewargs__")
Record = tuple[object, ...]  # of scalars and of other records: equal where ``ascii`` of it is equal


def digest_reachable(module: nn.Module, code: str) -> tuple[str, tuple[str, ...]]:
    """A digest of everything that a forward can reach, and the names of the classes of what could not be read.

    Equal for equal models on every machine: devices, locks, loggers and absolute paths do not count. ``code``: the name
    of the imported module that built the model; its package is the operator's own code even if it is installed.
    Tensors count by name if ``digest_weights`` has their values.
    """
    reader = _Reader(code)
    values = {**module.state_dict(), **dict(module.named_buffers())}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        value = values.get(name)
        if _is_dense(value) and _is_dense(tensor) and value.dtype == tensor.dtype and value.is_set_to(tensor):
            reader.numbers[id(tensor)] = name
    others = [(name, value) for name, value in sorted(values.items()) if not _is_dense(value)]
    digest = reader.digest(module, reader.read_file(code), others)
    return digest, tuple(sorted(reader.unread))


class _Reader:
    """Describes objects. ``held``: those that have a number, kept alive so that no other gets their id."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.numbers: dict[int, object] = {}
        self.held: list[object] = []
        self.unread: set[str] = set()
        self.left = BUDGET

    def digest(self, *roots: object) -> str:
        hasher = sha256(ascii([self.refer(root) for root in roots]).encode())
        for each in self.held:  # it grows
            hasher.update(ascii(self.describe(each)).encode())
        return hasher.hexdigest()

    def refer(self, value: object) -> object:
        """A scalar or a text itself, a tuple item by item, bytes as a digest; else the number of the object."""
        kind = type(value)
        if kind is str:
            return "/" if str(value).startswith("/") or value == self.code else value  # paths depend on the machine
        if kind in SCALARS:
            return value
        if isinstance(value, bytes) and kind is bytes:  # of equal constants a compiler may make one object or two
            self.left -= len(value)
            return ("bytes", sha256(value).hexdigest())
        if isinstance(value, tuple) and kind is tuple:
            return ("tuple", *map(self.refer, value))
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.numbers)
            self.held.append(value)
        return ("#", self.numbers[id(value)])

    def describe(self, value: object) -> Record:
        kind = type(value)  # ``isinstance`` might ask the object
        try:
            self.left -= OBJECT_COST
            if self.left < 0:
                raise ValueError
            return next(read(self, value) for kinds, read in READERS if issubclass(kind, kinds))
        except Exception:  # whatever third parties raise that can't be copied
            self.unread.add(kind.__qualname__)
            return ("unread", kind.__qualname__)

    def find_file(self, name: object) -> str:
        """The file of an imported module of the operator's; empty for a library's."""
        top = str(name).partition(".")[0]
        file: str = getattr(sys.modules.get(str(name)), "__file__", None) or ""
        own = top not in PROBED and (top == self.code.partition(".")[0] or not _is_installed(file))
        return file if own else ""

    def read_file(self, name: object) -> str:
        """The digest of that file, or the library's name and version."""
        if file := self.find_file(name):
            return _digest_file(file)
        top = str(name).partition(".")[0]
        version = "" if top in PROBED else str(getattr(sys.modules.get(top), "__version__", ""))
        return f"{top} {version.partition('+')[0]}"

    def read_class(self, kind: type) -> Record:
        """File, name and the operator's base classes; of a class of the operator's the attributes, too."""
        own = [each for each in (type(kind), *kind.__mro__[1:]) if self.find_file(each.__module__)]
        held = vars(kind).items() if self.find_file(kind.__module__) else ()
        attributes = [(name, self.refer(value)) for name, value in held if self.is_attribute(name, value)]
        return (self.read_file(kind.__module__), kind.__qualname__, *map(self.refer, own), *attributes)

    @staticmethod
    def is_attribute(name: str, value: object) -> bool:
        """Whether an attribute of a class is no slot, no metadata and no generated method."""
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if not (name.startswith("_") and name.endswith("_")):
            return not hasattr(type(value), "__objclass__")
        return isinstance(value, property) or (isinstance(value, FunctionType) and _is_written(value.__code__))

    def read_function(self, function: FunctionType) -> Record:
        """Where it is written and the values that it may read; of a library's function without globals."""
        code, namespace = function.__code__, function.__globals__
        name = str(namespace.get("__name__"))
        if (compiled := vars(function).get("_torchdynamo_orig_callable")) is not None:
            return ("compiled", self.refer(compiled))
        held = (function.__defaults__, function.__kwdefaults__, function.__closure__, {**vars(function)})
        record = (code.co_qualname, *map(self.refer, held))
        if name in sys.modules and not self.find_file(name):
            return (self.read_file(name), *record)
        origin = (self.read_file(name), *_find_span(code)) if _is_written(code) else self.refer(code)
        return (origin, *record, *self.list_globals(code, namespace))

    def list_globals(self, code: CodeType, namespace: Mapping[str, Any]) -> Iterator[Record]:
        """The globals that code names, with those of modules that it names or imports."""
        names = {name for each in _list_codes(code) for name in each.co_names}
        imported = set(_list_imports(code, namespace))
        self.unread |= {f"import {name}" for name in imported - sys.modules.keys() if not _is_library(name)}
        modules = {name: sys.modules[name] for name in imported if self.find_file(name)}
        return self.list_named(names | imported, {**namespace, **modules}, set())

    def list_named(self, names: set[str], namespace: Mapping[str, Any], seen: set[int]) -> Iterator[Record]:
        """The entries of a namespace with some names; modules with their entries of these names."""
        for name in sorted(names & namespace.keys() - METADATA):
            value = namespace[name]
            if not isinstance(value, ModuleType):
                yield (name, self.refer(value))
            elif id(value) not in seen:
                seen.add(id(value))
                held = vars(value) if self.find_file(value.__name__) else {}
                yield (name, self.read_file(value.__name__), *self.list_named(names, held, seen))

    def read_module(self, module: nn.Module) -> Record:
        held = vars(module)
        names = [name for name in sorted(held.keys() - OF_TORCH - LEFT_OUT) if not name.startswith("_torchdynamo_")]
        parts = [(name, value) for kind in PARTS for name, value in held[kind].items()]
        hooks = [(kind, hook) for kind in HOOKS for hook in held[kind].values()]
        parts += [(name, vars(value)) for name, value in parts if isinstance(value, Tensor) and vars(value)]
        values = (*((name, held[name]) for name in names), *parts, *hooks)
        return (self.refer(type(module)), *((name, self.refer(value)) for name, value in values))

    def read_script(self, script: torch.jit.ScriptModule) -> Record:
        """The files that it would be saved to, but for debugging information."""
        archive = ZipFile(BytesIO(script.save_to_buffer()))
        names = [name for name in sorted(archive.namelist()) if not name.endswith((".debug_pkl", "serialization_id"))]
        return tuple((name, sha256(archive.read(name)).hexdigest()) for name in names)

    def read_tensor(self, value: Tensor) -> Record:
        if value.is_quantized:
            return ("quantized", str(value.qscheme()), self.refer(value.int_repr()), self.refer(value.dequantize()))
        if not _is_dense(value):
            return self.read_object(value)
        self.left -= value.nbytes
        numbers = sha256(view_bytes(value).cpu().numpy().data).hexdigest()
        return (str(value.dtype), *value.shape, numbers, *([self.refer(vars(value))] if vars(value) else []))

    def read_set(self, value: frozenset[object]) -> Record:
        """Its items, which have no order: each is described as if it were the first."""
        texts = [str(self.refer(each)) for each in value if type(each) is str]
        others = []
        for each in (each for each in value if type(each) is not str):
            alone = copy(self)
            alone.numbers, alone.held = dict(self.numbers), []
            others.append(alone.digest(each))
            self.left = alone.left
        return (type(value).__name__, *sorted(texts), *sorted(others))

    def read_object(self, value: object) -> Record:
        """What ``copy`` would copy."""
        kind = type(value)
        if f"{kind.__module__}.".startswith(HARMLESS):
            return (kind.__qualname__,)
        methods = [vars(each).get(name) for each in kind.__mro__ for name in COPYING]
        if any(self.find_file(getattr(each, "__module__", "")) for each in methods):
            if any(each is not object and not self.find_file(each.__module__) for each in kind.__mro__):
                raise TypeError  # what a library's class holds can't be read without calling the operator's method
            return (self.refer(kind), self.refer(object.__getstate__(value)))
        reduce = copyreg.dispatch_table.get(kind)
        reduced = reduce(value) if reduce else value.__reduce_ex__(2)
        if isinstance(reduced, str):
            return (self.refer(kind), reduced, self.refer(getattr(value, "__dict__", None)))
        items = [tuple(map(self.refer, each or ())) for each in reduced[3:5]]
        return (self.refer(kind), *map(self.refer, reduced[:3]), *items)


Read = Callable[[_Reader, Any], Record]
READERS: tuple[tuple[type | tuple[type, ...], Read], ...] = (
    ((torch.jit.ScriptModule, torch.jit.ScriptFunction), _Reader.read_script),
    (nn.Module, _Reader.read_module),
    (Tensor, _Reader.read_tensor),
    (type, _Reader.read_class),
    (FunctionType, _Reader.read_function),
    (CodeType, lambda reader, code: ("code", code.co_code, code.co_names, reader.refer(code.co_consts))),
    (CellType, lambda reader, cell: (reader.refer(cell.cell_contents),)),
    (MethodType, lambda reader, method: (reader.refer(method.__func__), reader.refer(method.__self__))),
    (BuiltinFunctionType, lambda reader, each: (each.__qualname__, reader.refer(each.__self__))),
    (ModuleType, lambda reader, each: tuple(reader.list_named({"it", *vars(each)}, {"it": each}, set()))),
    ((staticmethod, classmethod), lambda reader, each: (reader.refer(each.__func__),)),
    (property, lambda reader, each: (reader.refer((each.fget, each.fset)),)),
    ((set, frozenset), _Reader.read_set),
    (MappingProxyType, lambda reader, each: (reader.refer(dict(each)),)),
    (weakref.ref, lambda reader, each: ("weak", reader.refer(each()))),
    (PurePath, lambda reader, each: ("path", reader.refer(str(each)))),
    ((*BY_NAME, *OPERATIONS), lambda reader, each: (type(each).__name__, str(each))),
    (torch.device, lambda reader, each: ("device",)),
    (object, _Reader.read_object),
)


def _is_dense(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not any(find_refused(value)) and not value.is_quantized


def _is_installed(file: str) -> bool:
    """Whether a module is of Python or installed: it has no file, or one among installed ones."""
    parts = Path(file).parts
    return not file or file.startswith(STDLIB) or "site-packages" in parts or "dist-packages" in parts


def _is_library(name: str) -> bool:
    """Whether a module that is not imported yet is of a library."""
    top = name.partition(".")[0]
    return top in PROBED or _is_installed(getattr(find_spec(top), "origin", None) or "")


def _is_written(code: CodeType) -> bool:
    """Whether code is in a file; that of dataclasses and ``exec`` is not."""
    return not code.co_filename.startswith("<")


@cache  # what was imported stays, whatever becomes of its file
def _digest_file(file: str) -> str:
    return sha256(Path(file).read_bytes()).hexdigest()


def _find_span(code: CodeType) -> Record:
    """Where code begins and ends in its file: a file may have several functions of one name."""
    spans = [(*span,) for span in code.co_positions() if span[3]]
    return (min((span[0], span[2]) for span in spans), max((span[1], span[3]) for span in spans)) if spans else ()


def _list_codes(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions and classes inside."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _list_codes(each)


def _list_imports(code: CodeType, namespace: Mapping[str, Any]) -> Iterator[str]:
    """The full names of modules that code imports when it runs."""
    for each in _list_codes(code):
        steps = list(dis.get_instructions(each))
        for index, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                yield resolve_name("." * steps[index - 2].argval + step.argval, namespace.get("__package__") or "")
