"""Calls that could run code which lies in a file, found in the syntax tree: ``python -m tests.unsafe FOLDER…``.

A name is followed through imports, assignments and ``getattr``, so that no usual spelling hides it. What has to be said
in a call (``weights_only=True``) has to be said there, as a constant.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODULES = {
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "jsonpickle",
    "joblib",
    "marshal",
    "pickle",
    "shelve",
    "torch.package",
}
CALLS = {
    *(f"builtins.{name}" for name in ("eval", "exec", "compile")),
    *(f"torch.{name}.load" for name in ("distributed.checkpoint", "export", "hub", "jit")),
    *(f"yaml.{name}" for name in ("load", "full_load", "unsafe_load", "load_all", "full_load_all", "unsafe_load_all")),
    *(f"yaml.{name}" for name in ("Loader", "CLoader", "FullLoader", "UnsafeLoader")),
    "pandas.read_pickle",
    "runpy.run_path",
}
NEEDED = {
    "torch.load": ("weights_only", True),
    "torch.serialization.load": ("weights_only", True),
    "torch.hub.load_state_dict_from_url": ("weights_only", True),
    "torch.utils.model_zoo.load_url": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "numpy.lib.format.read_array": ("allow_pickle", False),
    "numpy.lib.format.open_memmap": ("allow_pickle", False),
}
NEEDS = {name: f" otherwise than in a call with {keyword}={value}" for name, (keyword, value) in NEEDED.items()}
KEYWORDS = {"weights_only": True, "allow_pickle": False, "trust_remote_code": False}
IMPORTERS = frozenset(["importlib.import_module", "builtins.__import__"])
BUILTINS = frozenset(["eval", "exec", "compile", "__import__"])
# Where a module is named by the operator's configuration, which no request reaches, or by our own code.
MAY_IMPORT_ANY = frozenset(["models/grammar.py", "models/sources/python.py", "models/sources/build.py"])
# What our own processes say to each other: no file and no request gets there.
MAY_PICKLE = frozenset(["service/engine/execute/processes/channel.py"])


def findings(source: str, shown: str) -> list[str]:
    """What is wrong in a file, each as ``FILE:LINE: WHAT``."""
    tree = ast.parse(source)
    names = _names(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    good = {id(call.func) for call in calls if _says(call, NEEDED.get(_dotted(call.func, names)))}
    found = {(node.lineno, what) for node in calls for what in _wrong_call(node, names, shown)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(node.lineno, f"imports {module}") for module in _imported(node) if _banned(module)}
        elif isinstance(node, (ast.Name, ast.Attribute, ast.Call)) and id(node) not in good:
            meant = "" if isinstance(getattr(node, "ctx", None), ast.Store) else _dotted(node, names)
            if meant in CALLS or meant in NEEDED or _banned(meant):
                found.add((node.lineno, f"uses {meant}" + NEEDS.get(meant, "")))
    pickling = ("imports pickle", "uses pickle") if shown in MAY_PICKLE else ()
    return [f"{shown}:{line}: {what}" for line, what in sorted(found) if not (pickling and what.startswith(pickling))]


def _names(tree: ast.Module) -> dict[str, str]:
    """What names of the file stand for, as far as that is a module or something of one."""
    names = {name: f"builtins.{name}" for name in BUILTINS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                names[each.asname or each.name.split(".")[0]] = each.name if each.asname else each.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            meant = _dotted(node.value, names)
            if meant and meant.split(".")[0] in {each.split(".")[0] for each in MODULES | CALLS | NEEDED.keys()}:
                names[node.targets[0].id] = meant
    return names


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The full name of an expression, or nothing."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    owner, attribute = "", ""
    if isinstance(node, ast.Attribute):
        owner, attribute = _dotted(node.value, names), node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        owner, attribute = _dotted(node.args[0], names), str(getattr(node.args[1], "value", ""))
    elif isinstance(node, ast.Call) and _dotted(node.func, names) in IMPORTERS and node.args:
        return str(getattr(node.args[0], "value", ""))
    return f"{owner}.{attribute}" if owner and attribute else ""


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    return [f"{node.module}.{each.name}" for each in node.names]


def _says(call: ast.Call, needed: tuple[str, bool] | None) -> bool:
    """Whether a call has a keyword with a value, as a constant."""
    return needed is not None and any(
        each.arg == needed[0] and getattr(each.value, "value", None) is needed[1] for each in call.keywords
    )


def _wrong_call(node: ast.Call, names: dict[str, str], shown: str) -> Iterator[str]:
    for each in node.keywords:
        if each.arg in KEYWORDS and getattr(each.value, "value", None) is not KEYWORDS[each.arg]:
            yield f"says {each.arg} otherwise than {KEYWORDS[each.arg]}"
    if _dotted(node.func, names) in IMPORTERS and shown not in MAY_IMPORT_ANY:
        module = getattr(node.args[0], "value", None) if node.args else None
        if not isinstance(module, str):
            yield "imports a module by a name that is not a constant"
        elif _banned(module):
            yield f"imports {module}"


def _banned(module: str) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in MODULES)


def main(folders: list[str]) -> int:
    """Print what is found under the folders; how many."""
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    found = [line for path in files for line in findings(path.read_text(encoding="utf-8"), path.as_posix())]
    print(*found, sep="\n", end="\n" if found else "")  # noqa: T201
    return len(found)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
