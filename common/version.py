"""Trireme's version, for `--version` and the HTTP endpoint of that name."""

import functools


@functools.cache
def own_version() -> str:
    """The installed version, or `unknown` when run from a folder that is not installed."""
    from importlib import metadata  # the supervisor starts faster without it

    try:
        return metadata.version("trireme")
    except metadata.PackageNotFoundError:
        return "unknown"
