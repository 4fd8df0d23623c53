"""Sources of inputs: files in a folder, pattern, list or tar archive; pictures or texts in a table.

Each yields its entries one by one, always in the same order, and holds at most one input in memory.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
import tarfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from layertap.models.errors import LayertapError, escape
from layertap.service.bulk.arrow import import_parquet, summarize
from layertap.service.inputs.files import FileError, read_regular_file

SUFFIXES = frozenset(
    (
        *(".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"),
        *(".flac", ".mp3", ".oga", ".ogg", ".opus", ".wav"),
        *(".m4v", ".mov", ".mp4", ".webm"),
    )
)
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
STRINGS = ("string", "large_string", "string_view")  # Arrow's types of strings
BYTES = ("binary", "large_binary", "binary_view", "fixed_size_binary")
PARQUET_ROWS = 64  # read at once
HINT = (
    "name a folder, a pattern such as 'photos/*.jpg', a .txt file with a path a line, a .tar, .parquet or .jsonl file"
)
AGAIN = "have the whole file written anew with the same inputs: then the same command goes on"
Wanted = Container[int]  # numbers of entries


@dataclass(frozen=True)
class Columns:
    """What is taken of a table: the ``column`` of inputs (None: the only one of pictures), and those to ``keep``.

    ``paths``: the column holds paths of pictures, from the working directory.
    """

    column: str | None = None
    keep: tuple[str, ...] = ()
    paths: bool = False


ALL_DEFAULT = Columns()


@dataclass(frozen=True)
class Entry:
    """An input: its key in the source and its bytes, or the error of reading it.

    ``kept``: a ``pyarrow.RecordBatch`` of its row in the columns that are kept, if any are.
    """

    key: str
    data: bytes | None = field(repr=False)
    error: str = ""
    kept: Any = None

    @property
    def digest(self) -> str | None:
        """SHA-256 of the bytes, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest() if self.data is not None else None


@dataclass(frozen=True)
class Source:
    """Inputs by their keys.

    ``read(wanted, limit)`` yields all entries, with at most ``limit`` bytes for those whose numbers are in ``wanted``.
    ``texts``: UTF-8 texts, not pictures; ``countable``: their number is known without reading them; ``kept``: the
    types of the columns that are kept, by their names.
    """

    read: Callable[[Wanted, int], Iterator[Entry]]
    texts: bool = False
    countable: bool = True
    kept: Mapping[str, Any] = field(default_factory=dict)

    def iterate(self, skip: int, limit: int) -> Iterator[Entry]:
        """All entries; bytes are not read for the first ``skip``, and at most ``limit`` for each other."""
        return self.read(range(skip, sys.maxsize), limit)

    def count(self) -> int | None:
        """The number of entries, None if all would have to be read."""
        return sum(1 for _ in self.iterate(sys.maxsize, 0)) if self.countable else None


def open_source(text: str, columns: Columns = ALL_DEFAULT) -> Source:
    """The source at a path or a pattern; LayertapError."""
    path = Path(text)
    name = path.name.lower()
    if columns != ALL_DEFAULT and not name.endswith((".parquet", ".jsonl")):
        hint = "leave out --column, --keep and --paths: they are for .parquet and .jsonl files"
        raise LayertapError(f"{text} has no columns", hint=hint)
    if path.is_dir():
        return Source(partial(_read_files, partial(_walk, path), path))
    if path.is_file():
        if name.endswith(ARCHIVES):
            return Source(partial(_read_tar, path), countable=False)
        if name.endswith(".parquet"):
            return _open_parquet(path, columns)
        if name.endswith(".jsonl"):
            return _open_jsonl(path, columns)
        if name.endswith(".txt"):
            return Source(partial(_read_files, partial(_read_list, path), Path()))
        raise LayertapError(f"{text} is no source of inputs", hint=HINT)
    if glob.has_magic(text):
        return Source(partial(_read_files, partial(_match, text), Path()))
    raise LayertapError(f"there is nothing at {text}", hint=HINT)


def _read_files(list_names: Callable[[], Iterable[str]], top: Path, wanted: Wanted, limit: int) -> Iterator[Entry]:
    for number, name in enumerate(list_names()):
        key = _make_key(name)
        yield _read_file(key, top / name, limit) if number in wanted else Entry(key, None)


def _read_file(key: str, path: Path, limit: int) -> Entry:
    try:
        return Entry(key, read_regular_file(path, limit))
    except FileError as refused:
        return Entry(key, None, str(refused))


def _is_hidden(name: str) -> bool:
    """Whether a path is a dot file, or in a dot folder: macOS puts an AppleDouble file beside each picture."""
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


def _is_media(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES and not _is_hidden(name)  # noqa: PTH122  (Path is slow)


def _walk(top: Path) -> Iterator[str]:
    """The names of pictures below a folder, its own before those in subfolders.

    Links to folders and dot files are left out. Folders that can't be listed come last; reading them gives the error.
    """
    unlisted: list[str] = []
    for folder, folders, files in os.walk(top, onerror=lambda error: unlisted.append(error.filename)):
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        start = "" if folder == str(top) else f"{os.path.relpath(folder, top)}{os.sep}"
        yield from (start + name for name in sorted(files) if _is_media(name))
    yield from (os.path.relpath(name, top) for name in unlisted)


def _match(pattern: str) -> list[str]:
    """The files that match a pattern, sorted; ``**`` matches folders, but not links, which may form cycles.

    Dot files match only if the pattern names one.
    """
    anchor = Path(pattern).anchor
    found = Path(anchor).glob(pattern.removeprefix(anchor))
    names = (str(path) for path in found if not path.is_dir())
    return sorted(name for name in names if _is_hidden(pattern) or not _is_hidden(name))


def _read_list(path: Path) -> Iterator[str]:
    """One path per line, relative to the working directory."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for line in lines:
            if name := line.rstrip("\r\n"):
                yield name


def _read_tar(path: Path, wanted: Wanted, limit: int) -> Iterator[Entry]:
    """Pictures of an archive, read once from its beginning; nothing is written to disk. LayertapError."""
    try:
        with tarfile.open(path, "r|*", errors="surrogateescape") as archive:
            pictures = (member for member in archive if _is_media(member.name) and not member.isdir())
            for number, member in enumerate(pictures):
                key = _make_key(member.name)
                yield _read_member(archive, member, key, limit) if number in wanted else Entry(key, None)
                vars(archive)["members"] = []  # for an archive of millions, it would keep them all
            # tarfile takes a damaged header for the end, which is two blocks of zeros: it has read the first.
            if archive.fileobj is None or archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("it is damaged or cut off")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise LayertapError(f"{path} can't be read: {error}", hint=AGAIN) from error


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo, key: str, limit: int) -> Entry:
    file = archive.extractfile(member) if member.isfile() else None
    return _make_entry(key, file.read(limit + 1), False, limit) if file else Entry(key, None, "is no regular file")


def _open_jsonl(path: Path, columns: Columns) -> Source:
    """Texts, or paths of pictures, in the JSON objects of a file's lines; LayertapError without a column."""
    if columns.column is None:
        raise LayertapError(f"{path} holds texts", hint="--column names the field of each line that is the text")
    types: dict[str, Any] = {}
    if columns.keep:
        import_parquet()
        import pyarrow as pa

        types = dict.fromkeys(columns.keep, pa.string())
    return Source(partial(_read_jsonl, path, columns, types), texts=not columns.paths, kept=types)


def _read_jsonl(path: Path, columns: Columns, types: Mapping[str, Any], wanted: Wanted, limit: int) -> Iterator[Entry]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines):
            key = str(number)
            yield _read_line(line, columns, types, key, limit) if number in wanted else Entry(key, None)


def _read_line(line: str, columns: Columns, types: Mapping[str, Any], key: str, limit: int) -> Entry:
    """The input of a line; kept fields are text, numbers as JSON writes them."""
    fields: Any = None
    try:
        fields = json.loads(line)  # takes NaN and numbers of any size, as Python's own writer makes them
        entry = _make_entry(key, fields[str(columns.column)], columns.paths, limit)
    except (ValueError, RecursionError) as error:
        entry = Entry(key, None, f"is no JSON: {error}")
    except (KeyError, TypeError):
        entry = Entry(key, None, f"has no field {escape(str(columns.column))}")
    if not types:
        return entry
    import pyarrow as pa

    found: dict[str, Any] = fields if isinstance(fields, dict) else {}
    kept = [_write_text(found.get(name)) for name in types]
    return replace(entry, kept=pa.record_batch([pa.array([each], pa.string()) for each in kept], list(types)))


def _write_text(value: object) -> str | None:
    """A value of JSON as text: a string as it is."""
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str | None) else value
    return text.encode("utf-8", "replace").decode() if text is not None else None  # half a surrogate pair is no text


def _open_parquet(path: Path, columns: Columns) -> Source:
    """The named column of pictures or texts, or the only one of pictures; LayertapError.

    Pictures are bytes, or structs with bytes, or with a path, as in the datasets library.
    """
    try:
        schema = import_parquet().read_schema(path)
    except (OSError, ValueError) as error:
        raise LayertapError(f"{path} can't be read: {summarize(error)}", hint=AGAIN) from error
    from pyarrow import types

    # Of a dictionary (pandas: categorical) the type of its values, in which the column is kept too.
    kinds = {each.name: each.type.value_type if types.is_dictionary(each.type) else each.type for each in schema}
    texts = [name for name, kind in kinds.items() if str(kind) in STRINGS]
    pictures = [
        name
        for name, kind in kinds.items()
        if str(kind).partition("[")[0] in BYTES or (types.is_struct(kind) and kind.get_field_index("bytes") >= 0)
    ]
    column = columns.column
    if column is None and len(pictures) == 1:
        (column,) = pictures
    if column not in pictures + texts:
        found = "several columns of pictures, or none" if column is None else f"no column {escape(column)} of pictures"
        hint = f"--column names one of bytes or strings: {', '.join(pictures + texts) or 'none'}"
        raise LayertapError(f"{path} has {found}", hint=hint)
    if unknown := [name for name in columns.keep if name not in kinds]:
        raise LayertapError(f"{path} has no column {escape(unknown[0])}", hint=f"one of: {', '.join(kinds)}")
    columns = replace(columns, column=column)
    kept = {name: kinds[name] for name in columns.keep}
    return Source(partial(_read_parquet, path, columns), texts=column in texts and not columns.paths, kept=kept)


def _read_parquet(path: Path, columns: Columns, wanted: Wanted, limit: int) -> Iterator[Entry]:
    number, read = 0, list(dict.fromkeys((str(columns.column), *columns.keep)))
    try:
        with import_parquet().ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                end = number + file.metadata.row_group(group).num_rows
                if not any(row in wanted for row in range(number, end)):  # reads none of the bytes
                    yield from (Entry(str(row), None) for row in range(number, end))
                    number = end
                    continue
                for batch in file.iter_batches(PARQUET_ROWS, [group], read):
                    kept = batch.select(list(columns.keep)) if columns.keep else None
                    for row, scalar in enumerate(batch.column(str(columns.column))):
                        if number not in wanted:
                            yield Entry(str(number), None)
                        else:
                            entry = _make_entry(str(number), scalar.as_py(), columns.paths, limit)
                            yield entry if kept is None else replace(entry, kept=kept.slice(row, 1))
                        number += 1
    except (OSError, ValueError) as error:
        raise LayertapError(f"{path} is damaged from row {number} on: {summarize(error)}", hint=AGAIN) from error


def _make_entry(key: str, value: object, paths: bool, limit: int) -> Entry:
    """The entry of a table's value: bytes, a text, or a struct of the datasets library."""
    content, path = (None, value) if paths else (value, None)
    if isinstance(value, dict):
        content, path = value.get("bytes"), value.get("path")
    if isinstance(path, str) and not content:
        return _read_file(key, Path(path), limit) if paths else Entry(key, None, "has no bytes but a path: add --paths")
    try:
        data = content.encode() if isinstance(content, str) else content
    except UnicodeEncodeError:
        return Entry(key, None, "has a text that is not Unicode")
    if not isinstance(data, bytes):
        return Entry(key, None, "has no picture or text")
    return Entry(key, data) if len(data) <= limit else Entry(key, None, f"has more than {limit} bytes")


def _make_key(name: str) -> str:
    """A name as text; invalid bytes are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace").replace(os.sep, "/")
