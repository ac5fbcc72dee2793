"""Where a record was made, in words. Imports nothing of Hopwell: the documents read it without the compiled module."""

from typing import Any


def provenance(record: dict[str, Any]) -> str:
    """The machine, the day and the commit of a record."""
    device = record.get("device") or " and ".join(record.get("devices", [])) or "?"
    parts = [f"one {device}", f"driver {record['driver']}" if record.get("driver") else "", record["date"]]
    parts.append(f"commit {record['commit']}" if record.get("commit") else "")
    return ", ".join(part for part in parts if part)
