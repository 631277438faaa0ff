"""The pooling that a model's folder asks for, if sentence-transformers wrote the folder.

`modules.json` lists what follows the model: a Pooling, whose folder has a config.json with the mode, and a Normalize.
Embeddings here always have length 1, so a Normalize changes nothing. Anything else (another mode, a Dense) would make
other vectors than ours. That is an error when an embedding is asked for, but does not keep the model from generating.
Read at start by the engine, and by the pre-flight.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, RequestError
from common.model_files import read_array, read_object

MODULES_FILE = "modules.json"
DEFAULT = "last"
MODES = {"mean": "mean", "mean_sqrt_len": "mean", "lasttoken": "last", "cls": "cls"}
"""The modes of a Pooling that are supported -> ours; mean_sqrt_len is a mean of another length, and ours is 1."""
NAME_LIMIT = 100
"""Characters of a mode's or module's name."""
SHOWN_LIMIT = 400


@dataclass(frozen=True)
class ModelPooling:
    """What a folder says of embeddings.

    Attributes:
        mode: `last`, `mean` or `cls`; DEFAULT where it says nothing.
        source: the file that says so; empty without one.
        unsupported: why its embeddings cannot be made; empty if they can.
    """

    mode: str = DEFAULT
    source: str = ""
    unsupported: str = ""

    @classmethod
    def read(cls, folder: str | Path) -> "ModelPooling":
        """From a model's folder."""
        path = Path(folder) / MODULES_FILE
        if not folder or not os.path.lexists(path):
            return cls()
        try:
            return _from_modules(path)
        except ConfigError as error:
            return cls(unsupported=_shown(str(error)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return cls(unsupported=_shown(f"{path} and the files that it names are not what they should be: {error!r}"))

    def name(self) -> str:
        """The mode, for a request that names none.

        Raises:
            RequestError: it is none that there is.
        """
        if self.unsupported:
            raise RequestError(
                f"this model's embeddings cannot be made: {self.unsupported}; the field pooling of a request, or "
                "--pooling, chooses another way",
                code="unsupported_pooling",
                param="pooling",
            )
        return self.mode


def _from_modules(path: Path) -> ModelPooling:
    mode, source = DEFAULT, ""
    for module in read_array(path):
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Pooling":
            place = Path(module["path"])
            if place.is_absolute() or ".." in place.parts:
                raise ValueError(f"{_shown(str(place), NAME_LIMIT)} is outside of the folder")
            source = str(path.parent / place / "config.json")
            modes = _modes(read_object(Path(source)))
            if len(modes) != 1 or modes[0] not in MODES:
                asked = _shown(" with ".join(modes), NAME_LIMIT) or "none"
                return ModelPooling(unsupported=f"{source} asks for the pooling {asked}; supported: {', '.join(MODES)}")
            mode = MODES[modes[0]]
        elif kind not in ("Transformer", "Normalize"):
            text = f"{path} has a module {_shown(kind, NAME_LIMIT)}; supported: Transformer, Pooling, Normalize"
            return ModelPooling(unsupported=text)
    return ModelPooling(mode, source)


def _shown(text: str, limit: int = SHOWN_LIMIT) -> str:
    """A text with names that the folder has, fit for one line of an answer."""
    return ascii(text[:limit])[1:-1]


def _modes(config: dict[str, Any]) -> list[str]:
    """The modes that are on: a switch for each, or named in one place."""
    named = config.get("pooling_mode")
    if named is None:
        named = [key.removeprefix("pooling_mode_") for key, on in config.items() if on is True and "mode" in key]
    names = [named] if isinstance(named, str) else list(named)
    return [name.removesuffix("_tokens").removesuffix("_token") for name in names]
