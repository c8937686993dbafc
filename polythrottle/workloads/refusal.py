"""What a service says when it refuses, whatever form it gives that."""

import json

_LONGEST = 300


def said(body: bytes) -> str:
    """Return the error message in an answer, on one line of bounded length, whatever form the server gives it."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = body.decode(errors="replace")
    for _ in range(4):
        if isinstance(found, dict):
            found = next((found[key] for key in ("error", "message", "detail", "msg") if key in found), str(found))
        elif isinstance(found, list) and found:
            found = found[0]
    text = "".join(char for char in " ".join(str(found).split()) if char.isprintable())
    return (text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…") or "an empty answer"
