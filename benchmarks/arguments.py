"""Values on the command lines of several benchmarks: an engine's options, and counts. Called by argparse."""

import argparse

_SWITCHES = {"true": True, "false": False}


def named_value(text: str) -> tuple[str, str | bool]:
    """An option of the engine's, such as `run_ahead=0` or `enforce_eager=true`."""
    name, is_given, value = text.partition("=")
    if not name or not is_given:
        raise argparse.ArgumentTypeError(f"wanted NAME=VALUE, got {text!r}")
    if name == "model":
        raise argparse.ArgumentTypeError("the model has an option of its own: --model")
    return name, _SWITCHES.get(value, value)


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number above 0, got {text!r}")
    return int(text)
