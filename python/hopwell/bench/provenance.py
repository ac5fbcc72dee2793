"""Describes the origin of a record. Imports nothing of Hopwell: the documents need no compiled module."""

from typing import Any


def provenance(record: dict[str, Any]) -> str:
    """Returns the machine, the day and the commit of a record as text."""
    device = record.get("device") or " and ".join(record.get("devices", [])) or "?"
    parts = [f"one {device}", f"driver {record['driver']}" if record.get("driver") else "", record["date"]]
    parts.append(f"commit {record['commit']}" if record.get("commit") else "")
    return ", ".join(part for part in parts if part)
