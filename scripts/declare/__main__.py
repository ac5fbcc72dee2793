"""python3 scripts/declare --json | --write FOLDER"""

from __future__ import annotations

import argparse
import json

import table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/declare", description="What follows from the operators' declarations."
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--json", action="store_true", help="print all declarations")
    action.add_argument("--write", metavar="FOLDER", help="write the headers, the entry points and the Python binding")
    given = parser.parse_args()
    operators = table.load()
    if given.json:
        print(json.dumps(table.as_json(operators), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
