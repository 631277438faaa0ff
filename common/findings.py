"""What `launch.py check` finds, one line for each thing it looked at.

The rooms fill a `Findings` each, by the code that they start with; a process of its own passes it on as JSON. Knows
nothing of what is looked at. Called by `launcher.check` and the rooms' `preflight`.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.errors import ConfigError, TriremeError

OK, WARNING, PROBLEM = "ok", "warning", "problem"
MAY_BE_FETCHED = "serve fetches what the hub's cache lacks"
"""Why a problem with a hub's model is none yet."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: such as `KV cache`.
        status: OK; WARNING, `serve` starts all the same or it cannot be known; PROBLEM, it does not.
        text: what was found, and what to do where it is not as it should be.
        figures: what of it is a number, by name with its unit, for programs.
    """

    what: str
    status: str
    text: str
    figures: Mapping[str, int] = field(default_factory=dict)


class Findings:
    """Those of one check, in the order in which they are shown.

    Attributes:
        entries: the findings.
        values: what else a process tells the one that asked it.
    """

    def __init__(self) -> None:
        self.entries: list[Finding] = []
        self.values: dict[str, str] = {}

    def ok(self, what: str, text: str, **figures: int) -> None:
        """All is as it should be."""
        self.entries.append(Finding(what, OK, text, figures))

    def warn(self, what: str, text: str, **figures: int) -> None:
        """`serve` would start, but somebody should know this."""
        self.entries.append(Finding(what, WARNING, text, figures))

    def problem(self, what: str, text: str) -> None:
        """`serve` would not start."""
        self.entries.append(Finding(what, PROBLEM, text))

    @contextmanager
    def refusals(self, what: str) -> Iterator[None]:
        """An error of the block, which `serve` would end with, is a problem; the check goes on behind it."""
        try:
            yield
        except Exception as error:  # files of strangers: what `serve` does not expect either
            text = str(error) if isinstance(error, TriremeError) else f"{type(error).__name__}: {error}"
            self.problem(what, " ".join(text.split()))

    def soften(self, reason: str) -> None:
        """Make warnings of the problems: `serve` may do away with them first, as the reason says."""
        for index, entry in enumerate(self.entries):
            if entry.status == PROBLEM:
                self.entries[index] = dataclasses.replace(entry, status=WARNING, text=f"{entry.text} ({reason})")

    def has_problem(self, what: str) -> bool:
        """Whether this was found to be one."""
        return any(entry.what == what and entry.status == PROBLEM for entry in self.entries)

    def count(self, status: str) -> int:
        """Findings of a status."""
        return sum(entry.status == status for entry in self.entries)

    def extend(self, other: "Findings") -> None:
        """Put another part's findings behind these, but not one more problem with the same thing."""
        self.entries += [entry for entry in other.entries if not self.has_problem(entry.what)]
        self.values |= other.values

    def to_json(self) -> str:
        """For the process that asked."""
        return json.dumps({"entries": [dataclasses.asdict(entry) for entry in self.entries], "values": self.values})

    @classmethod
    def from_json(cls, text: str) -> "Findings":
        """From `to_json`'s output; raises ConfigError for anything else."""
        found = cls()
        try:
            read = json.loads(text)
            found.entries = [Finding(**entry) for entry in read["entries"]]
            found.values = read["values"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"no findings: {error}") from None
        return found


def size_text(count: int) -> str:
    """A number of bytes for people: `513 MiB`, `15.0 GiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
