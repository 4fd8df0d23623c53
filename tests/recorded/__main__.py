"""Records a checkout's answers, or compares two recordings; status 1 where they differ."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.recorded.comparison import compare
from tests.recorded.recorder import count_kinds, record
from tests.recorded.server import Checkout


def main() -> int:
    """Status 0, or 1 where two recordings differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.recorded", description=__doc__)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", help="write down what the servers of a checkout answer")
    recording.add_argument("--checkout", type=Path, required=True, help="with its .venv")
    recording.add_argument("--out", type=Path, required=True, help="a JSON file")
    recording.set_defaults(run=_record)
    comparing = commands.add_parser("compare", help="print what differs between two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.set_defaults(run=_compare)
    options = parser.parse_args()
    status: int = options.run(options)
    return status


def _record(options: argparse.Namespace) -> int:
    recording = record(Checkout.at(options.checkout))
    options.out.write_text(json.dumps(recording, indent=1, ensure_ascii=False), "utf-8")
    for kind, statuses in count_kinds(recording).items():
        by_status = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
        _print(f"{kind:<16} {statuses.total():>4}   {by_status}")
    _print(f"{'all':<16} {len(recording['answers']):>4}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    before, after = (json.loads(file.read_text("utf-8")) for file in (options.before, options.after))
    differences = compare(before, after)
    for line in differences:
        _print(line)
    _print(f"{len(differences)} differences in {len(before['answers'])} answers")
    return 1 if differences else 0


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
