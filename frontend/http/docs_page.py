"""The page `/docs`: an OpenAPI document as self-contained HTML that needs no script and no network."""

import json
from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
summary { cursor: pointer; padding: .4rem 0; font-family: ui-monospace, monospace }
details { border-bottom: 1px solid #ddd } details p, details pre, details table { margin: .5rem 0 .5rem 1.2rem }
pre { background: #f4f4f4; padding: .6rem; overflow: auto } td { padding: .1rem .8rem .1rem 0; vertical-align: top }
td:first-child { font-family: ui-monospace, monospace } b { display: inline-block; width: 3.5rem }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd } pre { background: #2a2a2a } }
"""


def docs_page(document: Mapping[str, Any]) -> str:
    """The page for a document that `openapi.document` made."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"]
    parts.append(f"<h1>{title}</h1><p>The same for programs: <a href='openapi.json'>openapi.json</a></p>")
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        parts += [_operation(path, verb, operation, schemas) for verb, operation in operations.items()]
    return "\n".join(parts)


def _operation(path: str, verb: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    body = operation.get("requestBody")
    text = f"<details><summary><b>{verb.upper()}</b> {escape(path)}</summary><p>{escape(operation['summary'])}</p>"
    if body:
        media = body["content"]["application/json"]
        schema = schemas[media["schema"]["$ref"].rpartition("/")[2]]
        text += f"<pre>{escape(json.dumps(media['example']))}</pre><table>{_rows(schema)}</table>"
    return text + "</details>"


def _rows(schema: Mapping[str, Any]) -> str:
    """One row for each field of a body: name, type, meaning."""
    required = schema.get("required", ())
    rows = []
    for name, field in schema["properties"].items():
        kind = _kind(field) + (", required" if name in required else "")
        rows.append(f"<tr><td>{name}<td>{escape(kind)}<td>{escape(field.get('description', ''))}")
    return "".join(rows)


def _kind(field: Mapping[str, Any]) -> str:
    """A field's type in a word or a few; null, which every optional field may be, is left out."""
    if "anyOf" in field:
        return " or ".join(_kind(choice) for choice in field["anyOf"] if choice.get("type") != "null")
    if "enum" in field:
        return " or ".join(json.dumps(value) for value in field["enum"])
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if field.get("type") == "array":
        return f"array of {_kind(field['items'])}" if field.get("items") else "array"
    return str(field.get("type", "anything"))
