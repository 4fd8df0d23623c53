"""Where inputs come from: pictures of a folder, a pattern, a list, a tar archive; pictures or texts of a table.

Each gives its entries one after another, always in the same order, and holds no more than one input.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import orjson

from layertap.models.errors import LayertapError, escape, suggest
from layertap.service.bulk.arrow import import_parquet, summarize
from layertap.service.inputs.files import FileError, read_regular_file

SUFFIXES = frozenset({".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jpeg", ".jpg", ".png", ".webp"})
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
DAMAGED = frozenset({"InvalidHeaderError", "TruncatedHeaderError"})  # what tarfile raises within itself
MAX_SUFFIXES = 8  # that are named
STRINGS = ("string", "large_string", "string_view")  # Arrow's names of types of texts
PARQUET_ROWS = 64  # read at once
HINT = (
    "name a folder, a pattern such as 'photos/*.jpg', a .txt file with a path a line, a .tar, .parquet or .jsonl file"
)


IsWanted = Callable[[int], bool]  # whether an entry's bytes are to be read, by its number from 0


@dataclass(frozen=True)
class Entry:
    """An input: its key in the source and its bytes, or why there are none."""

    key: str
    data: bytes | None = field(repr=False)
    error: str = ""

    @property
    def digest(self) -> str | None:
        """SHA-256 of the bytes, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest() if self.data is not None else None


@dataclass(frozen=True)
class Source:
    """Inputs by their keys: ``read`` gives all entries, ``count`` how many, None where nobody knows.

    ``texts``: they are texts in UTF-8, not pictures.
    """

    read: Callable[[IsWanted], Iterator[Entry]]
    count: Callable[[], int | None]
    texts: bool = False

    def iterate(self, skip: int) -> Iterator[Entry]:
        """All entries, of which the first so many are not read."""
        return self.read(lambda number: number >= skip)

    def select(self, numbers: Sequence[int]) -> Source:
        """Only the entries with some numbers, which ascend; no others are read."""
        kept = frozenset(numbers)

        def read(is_wanted: IsWanted) -> Iterator[Entry]:
            wanted = frozenset(number for place, number in enumerate(numbers) if is_wanted(place))
            return (entry for number, entry in enumerate(self.read(wanted.__contains__)) if number in kept)

        return Source(read, lambda: len(numbers), self.texts)


def open_source(text: str, limit: int, column: str | None = None) -> Source:
    """The source that a path or a pattern names; LayertapError. ``limit`` is of an input's bytes.

    ``column`` is the one of a table which holds the inputs; without it the only one of pictures.
    """
    path = Path(text)
    if column is not None and not text.lower().endswith((".parquet", ".jsonl")):
        raise LayertapError(f"{text} has no columns", hint="leave --column out: it is for .parquet and .jsonl files")
    if path.is_dir():
        return _open_paths(lambda: _walk(path, _has_suffix), limit)
    if path.is_file():
        name = path.name.lower()
        if name.endswith(ARCHIVES):
            return Source(lambda is_wanted: _read_tar(path, is_wanted, limit), lambda: None)
        if name.endswith(".parquet"):
            return _open_parquet(path, column, limit)
        if name.endswith(".jsonl"):
            return _open_lines(path, column, limit)
        if name.endswith(".txt"):
            return _open_paths(lambda: _read_list(path), limit)
        raise LayertapError(f"{text} is no source of inputs", hint=HINT)
    if glob.has_magic(text):
        return _open_paths(lambda: _match(text), limit)
    raise LayertapError(f"there is nothing at {text}", hint=HINT)


def describe_passed_over(text: str) -> str:
    """The files of a folder whose suffix is that of no picture, counted by it; nothing where there are none."""
    top = Path(text)
    if not top.is_dir():
        return ""
    found = _walk(top, lambda name: not _has_suffix(name))
    others = (path.suffix.lower() for _, path in found if not path.is_dir())
    counts = Counter(others).most_common()
    named = [f"{count} {escape(suffix) if suffix else 'without a suffix'}" for suffix, count in counts[:MAX_SUFFIXES]]
    rest = sum(count for _, count in counts[MAX_SUFFIXES:])
    return ", ".join(named + [f"{rest} others"] * bool(rest))


def _open_paths(list_paths: Callable[[], Iterator[tuple[str, Path]]], limit: int) -> Source:
    def read(is_wanted: IsWanted) -> Iterator[Entry]:
        for number, (name, path) in enumerate(list_paths()):
            key = _make_key(name)
            yield _read_file(key, path, limit) if is_wanted(number) else _skipped(key)

    return Source(read, lambda: sum(1 for _ in list_paths()))


def _read_file(key: str, path: Path, limit: int) -> Entry:
    try:
        return Entry(key, read_regular_file(path, limit))
    except FileError as error:
        return Entry(key, None, str(error))


def _skipped(key: str) -> Entry:
    """What stands for an entry that was answered before: its key is compared, its bytes are not read."""
    return Entry(key, None)


def _is_hidden(name: str) -> bool:
    """Whether a path is a dot file, or in a dot folder: macOS puts an AppleDouble file beside each picture."""
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


def _has_suffix(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES  # noqa: PTH122  (a tenth of a Path's time, for every file)


def _walk(top: Path, is_wanted: Callable[[str], bool], *, with_hidden: bool = False) -> Iterator[tuple[str, Path]]:
    """The files below a folder that are wanted, by their names from there.

    Dot files and dot folders count only ``with_hidden``.

    Those of a folder's own are before those of folders in it; links to folders are left. A folder in it that can't be
    listed is given too: reading it tells why. OSError where it is the first.
    """
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as found:
                shown = (entry for entry in found if with_hidden or not _is_hidden(entry.name))
                entries = sorted(shown, key=lambda entry: entry.name)
        except OSError:
            if folder == top:
                raise
            yield str(folder.relative_to(top)), folder
            continue
        start = "" if folder == top else f"{folder.relative_to(top)}{os.sep}"
        for entry in entries:
            name = start + entry.name
            if is_wanted(name) and not _is_folder(entry, follow_symlinks=True):
                yield name, Path(entry.path)
        waiting += [Path(entry.path) for entry in reversed(entries) if _is_folder(entry, follow_symlinks=False)]


def _is_folder(entry: os.DirEntry[str], *, follow_symlinks: bool) -> bool:
    try:
        return entry.is_dir(follow_symlinks=follow_symlinks)
    except OSError:  # a link in a circle
        return False


def _match(pattern: str) -> Iterator[tuple[str, Path]]:
    """Files that a pattern names; ``**`` stands for folders, but never for links to folders, which may be circles."""
    names = pattern.split("/")
    if "**" not in names:
        return ((name, Path(name)) for name in sorted(glob.glob(pattern)))  # noqa: PTH207  (a pattern may be absolute)
    first = names.index("**")
    tops = sorted(glob.glob("/".join([*names[:first], ""]))) if first else [""]  # noqa: PTH207
    patterns = names[first:]
    with_hidden = any(name.startswith(".") for name in patterns)

    def is_wanted(name: str) -> bool:
        return _match_names(name.split("/"), patterns)

    return (
        (f"{top}{name}", path) for top in tops for name, path in _walk(Path(top), is_wanted, with_hidden=with_hidden)
    )


def _match_names(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether the names of a path are those of a pattern; a name that begins with a dot only where its pattern does."""
    indices = _pass_any({0}, patterns)  # in the pattern: where the names so far may have led to
    for name in names:
        reached = set()
        for index in indices - {len(patterns)}:
            pattern = patterns[index]
            if name.startswith(".") and not pattern.startswith("."):
                continue
            if pattern == "**":
                reached.add(index)
            elif fnmatch.fnmatchcase(name, pattern):
                reached.add(index + 1)
        indices = _pass_any(reached, patterns)
    return len(patterns) in indices


def _pass_any(indices: Collection[int], patterns: Sequence[str]) -> set[int]:
    """Indices in a pattern, with those behind each ``**`` there, which stands for no folder too."""
    passed = set(indices)
    for index in indices:
        while index < len(patterns) and patterns[index] == "**":
            index += 1
            passed.add(index)
    return passed


def _read_list(path: Path) -> Iterator[tuple[str, Path]]:
    """A path a line, from the working directory on."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for line in lines:
            if name := line.rstrip("\r\n"):
                yield name, Path(name)


class _Member(tarfile.TarInfo):
    """A member of an archive. Where its head is damaged or cut off tarfile would take it for the archive's end."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        """As of any member; ReadError."""
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.HeaderError as error:
            if type(error).__name__ in DAMAGED:
                raise tarfile.ReadError(str(error)) from None
            raise


def _read_tar(path: Path, is_wanted: IsWanted, limit: int) -> Iterator[Entry]:
    """Pictures of an archive, which is read once from its beginning; nothing is written to disk.

    Where it can't be read any further, an entry with the archive's own name says so. LayertapError where it is none.
    """
    number = 0
    try:
        with tarfile.open(path, "r|*", tarinfo=_Member, errors="surrogateescape") as archive:
            for member in archive:
                if member.isdir() or not _has_suffix(member.name) or _is_hidden(member.name):
                    continue
                key = _make_key(member.name)
                yield _read_member(archive, member, key, limit) if is_wanted(number) else _skipped(key)
                number += 1
                vars(archive)["members"] = []  # of an archive of millions it would keep them all
    except (tarfile.TarError, EOFError, OSError) as error:
        if not number:
            raise LayertapError(f"{path} can't be read: {error}") from error
        yield Entry(_make_key(path.name), None, f"the archive can't be read any further: {error}")


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo, key: str, limit: int) -> Entry:
    file = archive.extractfile(member) if member.isfile() else None
    if file is None:
        return Entry(key, None, "is no regular file")
    if member.size > limit:
        return Entry(key, None, f"has more than {limit} bytes")
    return Entry(key, file.read())


def _open_lines(path: Path, column: str | None, limit: int) -> Source:
    """Texts in the JSON objects of a file's lines; LayertapError where no field is named."""
    if column is None:
        raise LayertapError(f"{path} holds texts", hint="--column names the field of each line that is the text")

    def read(is_wanted: IsWanted) -> Iterator[Entry]:
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
            for number, line in enumerate(lines):
                yield _read_line(line, column, number, limit) if is_wanted(number) else _skipped(str(number))

    return Source(read, lambda: sum(1 for _ in read(lambda _: False)), texts=True)


def _read_line(line: str, column: str, number: int, limit: int) -> Entry:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return Entry(str(number), None, f"is no JSON: {error}")
    return _make_entry(str(number), fields.get(column) if isinstance(fields, dict) else None, limit)


def _open_parquet(path: Path, column: str | None, limit: int) -> Source:
    parquet = import_parquet()
    from pyarrow import compute, types

    try:
        with parquet.ParquetFile(path) as file:
            schema, count = file.schema_arrow, file.metadata.num_rows
    except (OSError, ValueError) as error:
        hint = "it is damaged, cut off, or no Parquet file: have it written anew"
        raise LayertapError(f"{path} can't be read: {summarize(error)}", hint=hint) from error
    chosen = _choose_column(path, schema, column)
    kind = schema.field(chosen).type
    is_struct = types.is_struct(kind)
    has_paths = is_struct and kind.get_field_index("path") >= 0
    names = [f"{chosen}.path"] if has_paths else []

    def read(is_wanted: IsWanted) -> Iterator[Entry]:
        number = 0
        try:
            with parquet.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    rows = range(number, number + file.metadata.row_group(group).num_rows)
                    columns = [chosen] if any(map(is_wanted, rows)) else names
                    if not columns:  # keys are numbers, and no bytes are wanted
                        yield from (_skipped(str(row)) for row in rows)
                        number = rows.stop
                        continue
                    for batch in file.iter_batches(PARQUET_ROWS, [group], columns):
                        values = batch.column(0)
                        paths = compute.struct_field(values, "path") if has_paths else None
                        if is_struct and columns != names:
                            values = compute.struct_field(values, "bytes")
                        for row in range(len(values)):
                            name = paths[row].as_py() if paths is not None else None
                            key = _make_key(name) if isinstance(name, str) and name else str(number)
                            yield _make_entry(key, values[row].as_py(), limit) if is_wanted(number) else _skipped(key)
                            number += 1
        except (OSError, ValueError) as error:
            hint = "put a whole file with the same rows in its place, and the same command goes on"
            raise LayertapError(f"{path} is damaged from row {number} on: {summarize(error)}", hint=hint) from error

    return Source(read, lambda: count, str(kind) in STRINGS)


def _choose_column(path: Path, schema: Any, column: str | None) -> str:
    """The column of pictures or texts that is named, or the only one of pictures.

    Pictures are bytes, or structs with bytes as the datasets library has them.
    """
    from pyarrow import types

    def holds_pictures(kind: Any) -> bool:
        if types.is_struct(kind):
            return bool(kind.get_field_index("bytes") >= 0)
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    names = [field.name for field in schema if holds_pictures(field.type)]
    if column is None and len(names) == 1:
        return str(names[0])
    found = (
        f"{len(names)} columns of pictures" if column is None else f"no column {escape(column)} of pictures or texts"
    )
    names += [field.name for field in schema if str(field.type) in STRINGS]
    if column in names:
        return str(column)
    hint = f"--column names one of bytes or strings: {', '.join(names) or 'none'}"
    if column is not None and (near := suggest(tuple(name for name in names if name.lower() == column.lower()))):
        hint = near
    raise LayertapError(f"{path} has {found}", hint=hint)


def _make_entry(key: str, value: object, limit: int) -> Entry:
    data = value.encode() if isinstance(value, str) else value
    if not isinstance(data, bytes):
        return Entry(key, None, "has no picture or text")
    return Entry(key, data) if len(data) <= limit else Entry(key, None, f"has more than {limit} bytes")


def _make_key(name: str) -> str:
    """A name as text; bytes that are none are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace").replace(os.sep, "/")
